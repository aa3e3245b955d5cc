"""Decides what happens to the windows of one shard: facts come in, orders go out. Pure.

    operator      a list of definitions with one clock and one numbering of blocks
    overview      predicts from a snapshot what will happen to each window
    completeness  how complete the rows of an execution are
    unique        which events have come before
    filled_keys   which keys have rows in windows without events

Called by: aion.execute, which carries out the orders; the tools that show state.
Must never know: files, clocks, the store, Spark.
"""
