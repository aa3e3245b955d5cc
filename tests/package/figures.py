"""Figures of the house: how much of it somebody has to keep in mind. ``python -m tests.package.figures`` prints them.

A module is *used once* if exactly one other names it. A file is *touched* by an event if a function of it runs between
the call and its result, in a :class:`aion.LocalOperator` that has seen events before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa

import aion
from aion import aggregates as A
from tests.package.test_architecture import FILES, ROOT, named

MINUTE = 60_000_000
PRODUCT = tuple(f"{ROOT / name}/" for name in ("aion", "policies", "state_backends"))


def product() -> dict[str, Path]:
    """The modules that a wheel has."""
    return {module: path for module, path in FILES.items() if not module.startswith("experiments")}


def used_once() -> dict[str, str]:
    """The modules of the product that exactly one other names, with the one that does."""
    users: dict[str, set[str]] = {module: set() for module in FILES}
    for module in FILES:
        for other in named(module) - {module}:
            users[other].add(module)
    return {module: next(iter(users[module])) for module in product() if len(users[module]) == 1}


def lines() -> int:
    """The lines of the product."""
    return sum(len(path.read_text().splitlines()) for path in product().values())


def files_of(act: Callable[[], Any]) -> set[str]:
    """The files of the product in which a function runs, in this thread."""
    touched: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PRODUCT):
            touched.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return {str(Path(file).relative_to(ROOT)) for file in touched}


def _events(*minutes: float) -> pa.Table:
    ts = pa.array([int(m * MINUTE) for m in minutes], pa.timestamp("us", "UTC"))
    return pa.table({"ts": ts, "k": ["a"] * len(minutes)})


def _operator(windows: Any) -> aion.LocalOperator:
    policy = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}
    return aion.LocalOperator(windows=windows, time="ts", key="k", aggregates={"n": A.count()}, policy=policy)


def always(files: Callable[[], set[str]]) -> Callable[[], set[str]]:
    """The same files but for those that only some of three runs touch.

    Garbage is collected and the machine's memory is asked for by the clock, and not by the event.
    """
    return lambda: set.intersection(*(files() for _ in range(3)))


@always
def touched_by_an_event() -> set[str]:
    """The files that one event touches that is on time and makes no pane."""
    with _operator(aion.Tumbling("1 minute")) as operator:
        operator.process(_events(0.1, 0.2), 0)
        operator.process(_events(0.3), 0)
        return files_of(lambda: operator.process(_events(0.4), 0))


@always
def touched_by_a_late_session() -> set[str]:
    """The files that a late event touches that makes a pane of its session come again."""
    with _operator(aion.Session("1 minute")) as operator:
        operator.process(_events(0.1, 0.2), 0)
        operator.process(_events(10), 9 * MINUTE)
        panes: list[int] = []
        files = files_of(lambda: panes.append(operator.process(_events(0.15), 9 * MINUTE).num_rows))
        assert panes == [1], "one late pane"
        return files


if __name__ == "__main__":
    print(f"{len(used_once())} of {len(product())} modules are used by one other; the product has {lines()} lines")
    print(f"{len(touched_by_an_event())} files are touched by an event")
    print(f"{len(touched_by_a_late_session())} files are touched by a late pane of a session")
