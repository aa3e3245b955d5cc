"""``python -m aion.run JOB.py ARGUMENTS...``: runs a job with ``aion.spark.api.patch``, which the job does not mention.

The job's ``transformWithState*`` runs on Aion if its session has ``spark.aion.stateful.enabled=true``.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs the script that the first argument names, as ``python JOB.py`` would."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m aion.run JOB.py [ARGUMENTS...]")
    job = sys.argv[1]
    if not Path(job).is_file():
        raise SystemExit(f"there is no file {job}")
    from aion.spark.api.patch import install

    logging.basicConfig(format="%(name)s: %(message)s")
    install()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers need the packages that this process has
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(job).resolve().parent)
    runpy.run_path(job, run_name="__main__")


if __name__ == "__main__":
    main()
