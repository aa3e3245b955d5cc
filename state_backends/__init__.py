"""Where the state of a window is. Never imports pyspark."""
