"""Joins of two sides by key and time, which take late rows. Pure.

    plan       the sides, which rows match, and the columns of the result
    join       which rows come out, are taken back, and are kept
    results    makes the rows of the result
    rows       the rows of a side, and the map that has them
    matching   which rows of two tables match
    evolution  how a join goes on with other columns

Called by: aion.execute.joining, for a shard; aion.spark.api.join, for the plan.
Must never know: the store behind the map, and Spark.
"""
