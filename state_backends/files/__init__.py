"""Keeps the files of state: in a local folder, or on any file system that ``pyarrow.fs`` reaches."""
