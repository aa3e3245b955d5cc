"""What runs in Spark's Python workers: children, merging levels and roots, and the rows that cross between them.

| | |
| --- | --- |
| in here | the child that makes blocks, the root that has shards, their tenants, and what the driver hands them |
| who calls it | Spark; and :mod:`aion.spark.api`, which puts these functions into a query |
| never knows | the driver: queries that start, the session's listeners, the user's calls |
"""
