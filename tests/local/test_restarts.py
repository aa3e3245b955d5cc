"""An operator that starts again from its snapshot says the same, whatever definitions it has together."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

import aion
from aion.execute.assembly import make_contents
from aion.execute.windows import Windows
from tests.core.keyed.test_keyed_windows import KINDS, Step, policy, steps, table
from tests.durations import us
from tests.examples import some

WINDOWS: dict[str, list[Any]] = {
    "sessions": [
        aion.Session(us(5), early=us(3)),
        aion.Session(gap_column="gap"),
        aion.Session(us(4), max_duration=us(9)),
    ],
    "keyed": [
        aion.Count(3, 2, early=us(4)),
        aion.PerRecord(us(4), on_arrival="emit"),
        aion.Punctuated("mark"),
        aion.Session(us(7)),
    ],
    "all": [
        aion.Tumbling(us(10), early=us(3)),
        aion.Session(us(5)),
        aion.Session(gap_column="gap", early=us(7)),
        aion.Count(2),
    ],
}


def restart(operator: aion.LocalOperator) -> None:
    """Starts again from the snapshot, on the same store."""
    before = operator._windows
    if before is None:
        return
    attempt = operator._attempt
    attempt.begin(before.operator.next_seq)
    before.save()
    attempt.end()
    snapshot = json.loads(json.dumps(before.operator.snapshot()))
    contents = make_contents(before.plan, operator._codec, operator.policy)
    operator._windows = Windows(before.plan, operator.policy, attempt, snapshot, contents)


def panes(windows: list[Any], kind: str, script: list[Step], *, restarts: bool) -> list[list[str]]:
    with aion.LocalOperator(windows=windows, key="key", time="t", policy=policy(20), **KINDS[kind]) as operator:
        found: list[pa.Table] = []
        for step in script:
            found.append(operator.advance(step) if isinstance(step, int) else operator.process(table(step)))
            if restarts:
                restart(operator)
        found.append(operator.close())
    return [sorted(map(repr, rows.to_pylist())) for rows in found]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@some(1 / 4)
@given(script=steps)
def test_a_restart_after_each_call_changes_no_pane(windows: list[Any], kind: str, script: list[Step]) -> None:
    assert panes(windows, kind, script, restarts=True) == panes(windows, kind, script, restarts=False)
