"""Versions of a shard: what each consists of, how one is opened and committed, and when it is deleted.

    shard         open by token, work, commit; local_stores: what it has on its host
    manifest      what a version names; json_values: its JSON
    opening       whose state it is, and which versions are there
    publishing    files of an attempt, while it still computes
    retention     what may be deleted; lineage: whose checkpoint was copied
    audit         checks versions without opening them

Called by: server, and tools that look at state.
Must never know: Spark, and which attempt wins.
"""
