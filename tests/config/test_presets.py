"""What a policy keeps where is nobody's business but its own: with each preset and store, row by row the same panes."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import aion
from aion.config import Policy, TriggerPolicy, load_policy, presets
from state_backends.backends import STORES
from tests.durations import us
from tests.local.scenarios import (
    AGGREGATES,
    COLLECTED,
    FOREVER,
    Scenario,
    aggregated,
    collected,
    collecting,
    drops_of,
    expected_drops,
    expected_panes,
    panes_of,
    plain,
    rows_of,
    table,
    truth,
    validate,
)
from tests.oracle import Definition

BOUND = 3_000
TRIGGERS = get_args(TriggerPolicy.model_fields["kind"].annotation)
DEFINITIONS: dict[str, dict[str, Any]] = {
    "partials": {"aggregates": AGGREGATES},
    "apply": {"apply": aion.Apply(collected, COLLECTED)},
    "apply, event by event": {"apply": aion.Apply(collected, COLLECTED, blocking=False)},
}
# Far less than the scenario has: most blocks leave memory at once, and those that stay are hard to choose.
TINY = {"memory.budget": "4KiB", "memory.bucket_limit": "2KiB", "blocks.target": "512B"}
# And such that a little time and little use are enough for every policy to do something.
EAGER = {
    **TINY,
    "memory.moderate": 0.2,
    "memory.scarce": 0.6,
    "destage.keep_fraction": 0.3,
    "destage.idle_after": "1us",
    "state.compression": "zstd",
    "prestage.mode": "on_late_event",
}


def policies(trigger: str) -> Iterator[tuple[str, Policy]]:
    """What differs, and what must not: how long windows live, and when they are executed, is the same for all."""
    standard = load_policy("standard", {"lateness.initial_bound": us(BOUND), "trigger.kind": trigger})
    same = {"lateness": standard.lateness, "trigger": standard.trigger}
    for preset in presets():
        for size, changes in {"as it is": {}, "tiny": TINY}.items():
            yield f"{preset}, {size}", load_policy(preset, changes).model_copy(update=same)
    for backend in STORES:
        changes = {"state.backend": backend, **EAGER}
        yield f"{backend}, eager", load_policy("standard", changes).model_copy(update=same)


@functools.cache
def scenario() -> Scenario:
    """Eight batches; of the events every third is late, some of them too late, and some have no time."""
    random = np.random.default_rng(11)
    steps: list[Any] = []
    number = 0
    for batch in range(8):
        events = []
        for _ in range(50):
            late = random.choice([0, 0, 0, 0, 0, 0, 500, 1_500, 2_500, 9_000])
            at = None if random.random() < 0.02 else int(batch * 1_000 + random.integers(1_000) - late)
            events.append(
                {
                    "id": number,
                    "ts": at,
                    "k": str(random.choice(["a", "b", "c" * 40])),
                    "g": int(random.integers(2)),
                    "v": None if random.random() < 0.1 else int(random.integers(-100, 100)),
                    "f": float(random.choice([0.5, -1.5, np.nan, np.inf])),
                }
            )
            number += 1
        steps += [events, (batch + 1) * 1_000]
    # The last windows end, and are purged one after the other.
    steps += [10_000, [], 12_000, FOREVER]
    return Scenario((Definition(1_000, 1_000), Definition(2_000, 500)), BOUND, ("k",), tuple(steps))


@dataclass
class Run:
    """The rows of each call, in the order in which they came."""

    calls: list[list[dict[str, Any]]] = field(default_factory=list)
    peak_bytes: int = 0
    most_on_disk_bytes: int = 0
    counters: dict[str, Any] = field(default_factory=dict)


def run(policy: Policy, **definition: Any) -> Run:
    done = Run()
    with aion.LocalOperator(
        windows=scenario().windows(), key=scenario().key, time="ts", policy=policy, **definition
    ) as operator:
        for step in scenario().steps:
            found = operator.process(table(step)) if isinstance(step, list) else operator.advance(step)
            done.calls.append([plain(row) for row in rows_of(found)])
            validate(operator)
            stats = operator.store.stats()
            done.peak_bytes = max(done.peak_bytes, stats.m_bucket_bytes)
            done.most_on_disk_bytes = max(done.most_on_disk_bytes, stats.disk_only_bytes)
        assert operator.store.stats().blocks == 0, "every window was purged"
        done.counters = operator.counters
        done.calls.append([plain(row) for row in rows_of(operator.close())])
    return done


@functools.cache
def reference(which: str, trigger: str) -> Run:
    policy = load_policy(
        "memory_only", {"lateness.initial_bound": us(BOUND), "trigger.kind": trigger, "memory.budget": "1GiB"}
    )
    return run(policy, **DEFINITIONS[which])


@pytest.mark.parametrize("which", ["partials", "apply"])
def test_the_reference_is_what_the_oracle_says(which: str) -> None:
    found = reference(which, "every_batch")
    outputs = list(AGGREGATES) if which == "partials" else ["ids", "total"]
    result = aggregated if which == "partials" else collecting(scenario())
    kinds = set()
    for rows, (panes, dropped) in zip(found.calls, truth(scenario(), result), strict=True):
        assert panes_of(rows, scenario(), outputs) == expected_panes(panes)
        assert drops_of(rows, scenario()) == expected_drops(dropped)
        kinds |= {row["kind"] for row in rows}
    assert {"on_time", "late", "dropped"} <= kinds
    assert found.counters["purged_windows"] > 20
    assert found.most_on_disk_bytes == 0


def each_at_least_once() -> Iterator[Any]:
    """Every definition with every trigger. Each of them at least once is quick; the rest is for ``make proof``."""
    quick = {(which, TRIGGERS[i]) for i, which in enumerate([*DEFINITIONS, "partials"])}
    for pair in itertools.product(DEFINITIONS, TRIGGERS):
        yield pytest.param(*pair, marks=[] if pair in quick else pytest.mark.proof)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "trigger"), list(each_at_least_once()))
def test_every_policy_gives_the_same_panes_row_by_row(
    which: str, trigger: str, quick_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(quick_folder))
    wanted = reference(which.partition(",")[0], trigger)
    for name, policy in policies(trigger):
        if which == "apply, event by event" and name.endswith("as it is"):
            continue  # all of it is in memory, so there is nothing to stage
        found = run(policy, **DEFINITIONS[which])
        for step, (rows, expected) in enumerate(zip(found.calls, wanted.calls, strict=True)):
            assert rows == expected, f"{name}, step {step}"
        assert found.counters == wanted.counters, name
        budget = policy.memory.budget
        if policy.state.backend == "memory":
            assert found.most_on_disk_bytes == 0, name
        elif not name.endswith("as it is"):
            assert isinstance(budget, int)
            enough = 0 if which == "partials" else budget
            assert found.most_on_disk_bytes > enough, f"{name}: the disk was needed"
            assert found.peak_bytes <= budget + 4_096, f"{name}: the budget, and one block"
