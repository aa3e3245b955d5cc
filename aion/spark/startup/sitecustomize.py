"""Python imports this module when a process of Spark for functions of Aion begins: see
:mod:`aion.spark.session.workers`.
"""

from __future__ import annotations

import os
import sys

if sys.orig_argv[-2:] == ["-m", "pyspark.sql.streaming.transform_with_state_driver_worker"]:
    # This module reports each of its steps, with the whole schema of the result. Nothing else uses its name `print`:
    # what a user's code prints still shows, and errors go another way.
    import __main__

    __main__.print = lambda *_: None

# Python imports the first module of this name only. So the next one, which may be the user's, is imported here.
sys.path[:] = [folder for folder in sys.path if folder + os.sep != __file__.removesuffix("sitecustomize.py")]
_own = sys.modules.pop(__name__)
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules[__name__] = _own

if "AION_LOADS" in os.environ and sys.orig_argv[-3:-1] == ["-m", "pyspark.daemon"]:
    from aion.spark.tasks.preload import load

    load()
