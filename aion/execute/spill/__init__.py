"""Rows that are put in another order than the one in which they were read, in memory as far as they fit.

    grouping      rows of a key side by side; held_rows: rows that all fit
    spilling      rows that do not, in a file by the hash of their key
    waiting       orders for windows of keys, until the blocks are read that they share

Called by: aion.execute.
Must never know: state, and Spark.
"""
