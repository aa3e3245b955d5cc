"""Stores the files of versions in a local folder, or on any file system that ``pyarrow.fs`` reaches.

    storage       the files of the versions of a shard: put once, get, list, delete
    remote        the same on a remote file system; remote_storage, requests, parallel, deletions, s3 belong to it
    local_copies  what of remote files is here; partial: one of them; kept_copies: from earlier; disk_budget: how much
    handed        files that children hand over; handed_remote: remotely; bodies: how they are read
    names         what files are called; location: where they are
    causes        sentences about what failed; faults: errors of a disk

Called by: store and versions beside it, the tasks of children.
Must never know: what is in a file.
"""
