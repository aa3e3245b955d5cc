"""Spark's stateful processors (``transformWithState``) on Aion's store: a tenant of a shard.

    run           a batch of a processor on a shard
    handle        what a processor gets; variables: its state variables over all restarts
    record        what a shard keeps of a key; contents: of one state variable; layout: where in the map
    types         Spark's types, a row for each; encoding, json_values, packing and rows convert by it
    keys, order   the rows of a key, and the order in which Spark iterates
    evolution     values of another schema; restore: state of another checkpoint
    reading       the state of all keys, for those who look into it

Called by: aion.spark, aion.tools.
Must never know: windows.
"""
