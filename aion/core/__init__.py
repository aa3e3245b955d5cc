"""What decides: given facts with their times and sizes, what happens next. Pure by folder.

No module in here reads a clock, starts a thread, opens a file or draws a random number; a test sees to it.
``windows``, ``schema`` and ``plan`` say what a user asked for; the folders say what follows from it:

- ``operator``: the life of windows; ``operator/keyed``: of windows that belong to single keys
- ``slicing``: edges, slices, and trees of slices
- ``lateness``: how late events are, and how long a window is kept for them
- ``trigger``: when a late window is computed again
- ``compaction``: which blocks and files are merged, and when
- ``ingest``: events to blocks
"""
