"""What happens on the driver when a query starts, goes on and ends.

| | |
| --- | --- |
| in here | listeners of classic sessions and of Spark Connect, checks of the state that is there, progress |
| who calls it | Spark, before a query's first batch and after each batch; :mod:`aion.spark.api` installs it |
| never knows | the user's calls that made the query |
"""
