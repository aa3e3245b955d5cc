"""Stores the blocks of a shard, in memory and on disk, and moves them between the two (paper section 3).

    protocol      what a store of blocks does; attempt: how a batch works with it; tiered: the paper's store
    ledger        where each block is; blocks, live_files, file_index: what is alive in them
    m_bucket      the memory side and the host's budget; p_bucket: the persistent side; sst_file: its files
    io_thread     the one thread of I/O; io_queue: whose step is next; io, waiting: what a step is
    reading       blocks of slices in order; fetching: from files; prestaging: before they are asked for
    writing       memory to disk; eviction and pressure: what leaves; trimming: what leaves the disk
    merging       files in the background; merge_choice: which; merge_turns: when
    body_files    bodies in shared memory
    map           the values of keys

Called by: versions, server, and programs that work without a server.
Must never know: versions, tasks, and what a window is.
"""
