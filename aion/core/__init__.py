"""The core decides: it gets facts with their times and sizes, and returns what to do next. The whole folder is pure.

No module here reads a clock, starts a thread, opens a file or draws a random number; a test enforces this.
``windows`` and the folder ``query`` describe what a user asked for. The other folders decide:

- ``operator``: the life of windows; ``operator/keyed``: the same for windows that belong to single keys
- ``slicing``: edges, slices, and trees of slices
- ``lateness``: how late events are, and how long a window is kept for them
- ``trigger``: when a late window is computed again
- ``compaction``: which blocks are compacted, and when
- ``ingest``: how events become blocks
"""
