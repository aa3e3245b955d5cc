"""A slow disk, for the state server of an experiment: each read of blocks takes its time (a seek)."""

from __future__ import annotations

import os
import time
from typing import Any

from policies.destage import StandardDestage
from state_backends.format.block import Block
from state_backends.store import body_files, fetching
from state_backends.store.io import Steps
from state_backends.store.p_bucket import PBucket


class SlowDisk(StandardDestage):
    """The standard policy. A policy file names it as ``destage.class``, and so the state server imports it.

    ``reads_per_s``: how many reads the disk does in a second, of rows and of bodies, also if the system has them in
    memory. ``together``: neighbours in a file are read with one of them. The rest of the arguments are those of
    StandardDestage.
    """

    def __init__(self, reads_per_s: int, together: bool = True, **others: Any) -> None:
        super().__init__(**others)
        _slow_down(1 / reads_per_s)
        if not together:
            for module in (fetching, body_files):
                vars(module)["MOST_TOGETHER_BYTES"] = 0


def _slow_down(seek_s: float) -> None:
    fetch, preadv = PBucket.fetch, os.preadv

    def slow_fetch(self: PBucket, *where: Any) -> Steps[list[Block]]:
        time.sleep(seek_s)
        return (yield from fetch(self, *where))

    def slow_preadv(*where: Any) -> int:
        time.sleep(seek_s)
        return preadv(*where)

    PBucket.fetch = slow_fetch  # type: ignore[assignment,method-assign]
    os.preadv = slow_preadv
