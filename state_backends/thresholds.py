"""Sizes at which the code takes another way, and how a test makes all of them tiny.

A small test never sees what happens after 65,536 rows or 1,024 versions. So each such size is written as
``threshold(65_536)``. In a process with the environment variable ``AION_THRESHOLDS=tiny``, all of them are tiny, and a
few events cross every one. Spark's workers and the state server inherit the variable. It is for tests: results are the
same (but for the last digits of variances), and everything is slow.
"""

from __future__ import annotations

import os

VARIABLE = "AION_THRESHOLDS"


def _are_tiny() -> bool:
    chosen = os.environ.get(VARIABLE, "usual")
    if chosen not in ("usual", "tiny"):
        raise ValueError(f"{VARIABLE}={chosen!r} is not known; give 'usual' or 'tiny', or unset it")
    return chosen == "tiny"


TINY = _are_tiny()


def threshold(usual: int, tiny: int = 4) -> int:
    """``usual``, or ``tiny`` in a process whose thresholds are tiny."""
    return tiny if TINY else usual
