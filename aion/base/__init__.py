"""What all of aion stands on. Pure.

    numbers    counts that saturate, and the range of times
    time       durations and instants, as users write them
    schema     the columns of events and their types; arrow_types: which there are
    hashing    Spark's hash for shards, and our own for rows; identity: of events
    html       tables for notebooks

Called by: all of aion.
Must never know: windows, policies, the store.
"""
