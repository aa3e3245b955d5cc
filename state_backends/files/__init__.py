"""Where files of state lie: a local folder, or any file system that ``pyarrow.fs`` reaches."""
