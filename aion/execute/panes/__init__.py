"""Makes panes of what is in blocks.

    contents          what is in the blocks of a shard; block_compactor: puts blocks together
    combining         windows of partials of slices; applying: of events, with a function
    keyed             orders for windows of keys; keyed_panes: their panes; filling: rows of keys without events
    rows              the rows of a result; changing and updates: which of them are shown again

Called by: the executor, aion.state, aion.tools.
Must never know: what decided that a window is computed, and Spark.
"""
