"""The map of a shard: values that are put and deleted by key.

    store         what an attempt has put, values in memory, and runs on disk
    overlay       what an attempt has put; cache: what is in memory; run_files: what is on disk
    merging       runs in the background

Called by: store above it.
Must never know: who keeps what in it.
"""
