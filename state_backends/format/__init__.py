"""What the bytes of stored state are. Pure.

    block         the events or partials of one slice of a batch
    ordered_map   the map of a shard: one protocol for all that use or serve it
    sst_table     where the blocks of data are in a file of RocksDB's
    checksum      of everything that is stored
    plain_names   names that come from elsewhere
    definitions   how definitions of state are compared
    errors        the errors of a store

Called by: everything else.
Must never know: files, threads, and what a window is.
"""
