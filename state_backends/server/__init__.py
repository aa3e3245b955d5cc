"""The state server: one process for each executor host, which holds the shards between two tasks."""
