"""Stores the files of versions: in a local folder, or on any file system that ``pyarrow.fs`` reaches."""
