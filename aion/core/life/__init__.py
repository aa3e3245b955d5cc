"""What every kind of windows goes by. Pure.

    actions       the facts that an operator gets, and the orders that it gives
    definition    the protocol of a definition in a shard: arrive, advance, end of batch, what is due, snapshot
    arrival       which slices of an arrival are taken, late or too late; counts of a batch
    lifecycle     the states of a window, the watermark, counters
    rules         what each definition decides for itself: bound, trigger, early panes
    late_work     how much late work a batch does
    segments      the segments that hold blocks, and who needs them
    window_table  windows as columns

Called by: timed, keyed and operator beside it; the shell carries out its orders.
Must never know: which kinds of windows there are, and where blocks lie.
"""
