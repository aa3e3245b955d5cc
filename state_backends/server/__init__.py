"""The state server: one process for each executor host. It keeps the shards in memory between two tasks."""
