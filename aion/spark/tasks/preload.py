"""What Aion's tasks need, loaded before Spark's Python daemon forks workers.

The daemon forks a worker whenever Spark has none that is idle. Without this, a fork loads pandas, pyarrow and Aion by
itself, and holds a copy of its own. That is a second of a processor and 100 MiB for each worker; and Spark ends its
idle workers after a minute, so a query with fewer batches pays it in each. A fork of a daemon that has loaded them
shares the memory of it.

Spark's daemon loads nothing, because a library may start threads when it is loaded, and a fork has only the thread that
forked. OpenBLAS and Arrow's jemalloc do so. Both register handlers (``pthread_atfork``) that make a fork whole.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

LOADED = (
    "pyspark.worker",
    "pandas",
    "aion.spark.tasks.child",
    "aion.spark.tasks.file_child",
    "aion.spark.tasks.levels",
    "aion.spark.tasks.processor",
    "aion.spark.tasks.root",
    "aion.spark.tasks.stateful_child",
    "aion.spark.tasks.windows",
)


def load() -> None:
    """Load what tasks need. What cannot be loaded is left to the task that needs it, so that the user sees the error.

    Afterwards, each worker draws its own random numbers from numpy's global generator, as if it had loaded numpy
    itself. (Python's ``random`` does so anyway.) Processes that a worker forks go on from the worker's numbers, as
    usual.
    """
    with contextlib.redirect_stdout(sys.stderr):  # from its standard output, Spark reads the daemon's port
        for name in LOADED:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    import numpy as np

    daemon = os.getpid()
    os.register_at_fork(after_in_child=lambda: np.random.seed() if os.getppid() == daemon else None)
    # A worker's first task adds a folder to the path and makes all finders look again at what they found. Those of zip
    # files would each read the directory of pyspark.zip or of Spark's jar, for 18 MiB and a fifth of a second. New
    # finders take it from what has been read.
    sys.path_importer_cache.clear()
    gc.collect()
    # A look for cycles writes to each object, and a page that is written to is not shared any more.
    gc.freeze()
