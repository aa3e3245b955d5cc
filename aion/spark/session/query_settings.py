"""The settings of a query's own session by which the driver tells the query's tasks and sinks what it found."""

from __future__ import annotations

CHECKPOINT = "spark.sql.streaming.aion.checkpoint"
"""The location of the checkpoint."""
TEMPORARY = "temporary"
"""What stands there for a folder that Spark makes for this run. A client of Spark Connect cannot know its name."""
RUNNING = "spark.sql.streaming.aion.running"
"""The query, the run and the batch, as JSON, for what a function for foreachBatch does with Spark Connect."""
REFUSED = "spark.sql.streaming.aion.refused"
"""Why the query cannot run: the name of an error, and its text."""
RESCALED = "spark.sql.streaming.aion.rescaled"
"""The first and the last batch before the query's first one that only changed the number of partitions. No sink has
seen these.
"""
ENDS = "spark.sql.streaming.aion.ends"
"""Which batches of the run show all late windows (:mod:`aion.spark.start.run_ends`), as JSON. ``from``: the first one,
or null. ``again``: what holds instead for a batch that an earlier run has begun. Unset: no batch does.
"""
BEGINS = "spark.sql.streaming.aion.begins"
"""The number of the run's first batch. Unset: the query is new."""
CHAINED = "spark.sql.streaming.aion.chained"
"""Set if an operator has the results of another one. Then no execution waits: the windows behind close meanwhile."""
QUIET = "spark.sql.streaming.aion.quiet"
"""The first and the last number of the batches in which no task asks all shards
(:class:`aion.spark.tasks.blocks.BlockRows`).
"""
EVERY = "spark.sql.streaming.aion.every"
"""The milliseconds between the times at which the query's trigger starts batches. Unset: as soon as there are rows."""
PAST = "spark.sql.streaming.aion.past."
"""What the definition of an operator has been before, as JSON, if it was another one. The name of the operator follows.
"""
STORED = "spark.sql.streaming.aion.shards."
"""The number of shards that an operator's state has, if it is another number than that of the session. The name of the
operator follows.
"""
