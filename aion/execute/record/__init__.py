"""A trace: what came and what was done, without payload, for ``aion tune`` and ``aion replay``.

    trace         its file
    recorder      writes it while a query runs

Called by: aion.execute, aion.spark, aion.local, aion.tools.
Must never know: rows, and Spark.
"""
