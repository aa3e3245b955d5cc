"""Reads events from files with pyarrow, without Spark's rows.

    reading       events of files and of parts of them; formats: of each type
    places        where a file is; skipped: files that could not be read, as notes beside the checkpoint
    lakes         the versions of a table; delta_log and iceberg_log: which files each of them adds
    zone_rules    the rules of time zones that a query has used, as notes beside the checkpoint

Called by: aion.spark.
Must never know: windows, state, and Spark.
"""
