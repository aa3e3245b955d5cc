"""Turns events into blocks. Pure.

    builder       the blocks of a task: slices, partials, sorting, sizes
    grouped       events that Spark's own functions have grouped
    levels        blocks of several tasks as fewer
    encoding      rows as a block; json_codec: as text
    fragments     large blocks in several rows of a shuffle
    key_ranges    the hash by which the rows of a block are sorted; sorting: how
    conforming    the columns of a file as a schema declares them; file_splits: what its path says
    lake_versions which files a version of a table adds

Called by: aion.execute and the tasks in aion.spark.
Must never know: which windows are open, and how rows come and go.
"""
