"""Carries out what the operator orders: reads blocks, computes windows, and makes rows of panes.

    tenant        the protocol of what keeps state in a shard; windows and joining are two
    assembly      makes the objects that a policy describes
    executor      the orders of one shard
    panes         what is in blocks, and the panes that are made of it
    spill         rows in another order, and those that do not fit into memory
    files         events from files
    record        what came, without payload
    evolving      definitions that change between two starts

Called by: aion.local, aion.spark, aion.stateful (the protocol), aion.state, aion.tools.
Must never know: Spark, and which process it is in.
"""
