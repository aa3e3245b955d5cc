"""The search: the front is one, the same search finds the same, and what it writes is a policy."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.cli import app
from aion.config import Policy, load_policy
from aion.errors import ConfigError, PolicyError
from aion.execute.record.trace import Trace, read_trace
from aion.tools.tune.calibrate import calibrate
from aion.tools.tune.command import machine_of
from aion.tools.tune.disk import Machine
from aion.tools.tune.search import Goal, Tried, dominates, excess, keys_of, pareto, search
from aion.tools.tune.simulator import Outcome, simulate
from experiments.tune_check.traces import trace_of

SLOW = Machine(50e6, 1e-4, 30e6, 2e-3, 400e6)
NOTHING = Outcome(0, 0.0, 0.0, 0.0, {"early": 0, "on_time": 0, "late": 0, "final": 0}, 0, 0, 0, 0, 0, 1.0, 0)
GOAL = Goal(2 << 20, 0.05, 0.99)
MINUTE_US = 60_000_000


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of("average", scale=0.02, batches=12, past_windows=3, seed=1)


def tried(costs: tuple[int, int, int, int, int]) -> Tried:
    memory, blocked, stale, executions, written = costs
    outcome = replace(
        NOTHING,
        memory_bytes=memory,
        blocked_s=float(blocked),
        staleness=float(stale),
        executions={"early": 0, "on_time": executions, "late": 0, "final": 0},
        written_bytes=written,
    )
    return Tried({}, Policy(), outcome)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 5), min_size=1, max_size=25))
def test_the_front_is_all_that_nothing_dominates(costs: list[Any]) -> None:
    everything = [tried(c) for c in costs]
    front = [t.costs for t in pareto(everything)]
    assert len(set(front)) == len(front)
    for one in everything:
        assert (one.costs in front) == (not any(dominates(other.costs, one.costs) for other in everything))


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7), st.integers(2 << 20, 1 << 40), st.floats(0.001, 0.9))
def test_every_point_is_a_policy_within_the_goal(point: list[float], memory: int, staleness: float) -> None:
    import numpy as np

    keys = keys_of(np.array(point), Goal(memory, staleness, 0.9), 5_000_000, Policy())
    policy = load_policy("standard", keys)
    assert policy.memory.budget_bytes <= memory
    assert policy.trigger.bound <= staleness * 1.05


@pytest.mark.slow
def test_a_search_keeps_its_goal_and_finds_the_same_again(trace: Trace) -> None:
    done: list[int] = []
    one = search(trace, GOAL, SLOW, evaluations=16, seed=3, on_done=done.append)
    two = search(trace, GOAL, SLOW, evaluations=16, seed=3)
    assert [t.keys for t in one.tried] == [t.keys for t in two.tried]
    assert [t.outcome for t in one.tried] == [t.outcome for t in two.tried]
    assert one.chosen.keys == two.chosen.keys
    assert one.kept and excess(one.chosen.outcome, one.goal) == 0
    assert one.goal.memory_bytes == GOAL.memory_bytes >= one.chosen.outcome.memory_bytes
    assert one.chosen in one.front
    assert done == list(range(1, len(done) + 1))
    assert [t.costs for t in pareto(one.front)] == [t.costs for t in one.front]


def test_what_cannot_be_kept_is_said(trace: Trace) -> None:
    assert not search(trace, Goal(100 << 10, 0.05, 0.99), SLOW, evaluations=8, seed=1).kept


@pytest.mark.parametrize("workload", ["bigrams", "stock", "linear-road"])
def test_workloads_have_traces(workload: str) -> None:
    trace = trace_of(workload, scale=0.02, batches=4, past_windows=2, seed=1)
    assert len(trace.batches) == 5 and trace.events > 0
    assert trace.lateness_us()[1].sum() > 0


def test_the_command_writes_a_policy_that_says_what_its_keys_mean(trace: Trace, tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.parquet")
    (tmp_path / "machine.json").write_text(json.dumps({name: getattr(SLOW, name) for name in SLOW.__slots__}))
    out = tmp_path / "tuned.yaml"
    asked = ["tune", "--trace", str(tmp_path / "trace.parquet"), "--memory", "2MiB", "--evaluations", "8"]
    done = CliRunner().invoke(app, [*asked, "--machine", str(tmp_path / "machine.json"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "chosen" in done.output and "tuned.yaml" in done.output
    checked = CliRunner().invoke(app, ["policy", "check", str(out)])
    assert checked.exit_code == 0, checked.output
    text = out.read_text()
    found = yaml.safe_load(text)
    assert load_policy(out).memory.budget_bytes <= 2 << 20
    assert found["lateness"]["coverage"] == 0.99
    assert (
        "# Predicted: " in text
        and "  # The most memory that all m-buckets (blocks of windows in memory) of a host may use" in text
    )
    refused = CliRunner().invoke(app, ["tune"])
    assert refused.exit_code == 2


def test_a_machine_is_measured(tmp_path: Path) -> None:
    machine = calibrate(tmp_path, size_bytes=2 << 20, rounds=1)
    assert all(getattr(machine, name) > 0 for name in machine.__slots__)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"read_bytes_per_s": "fast"}, "read_bytes_per_s: 'fast' is not a number above 0"),
        ({"write_bytes_per_s": 0}, "write_bytes_per_s: 0 is not a number above 0"),
        ({"staging_s": -1}, "staging_s: -1 is not a number of 0 or more"),
        ({"execution_s": float("nan")}, "execution_s: nan"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_machine_that_cannot_be(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**asdict(SLOW), **wrong}))
    with pytest.raises(ConfigError, match=re.escape(words)):
        machine_of(file, Console(), durable=False)


def recorded(folder: Path, windows: aion.Tumbling | aion.Calendar, without_time: float) -> Trace:
    """A trace of events that come up to two minutes late. A share of them, ``without_time``, has no event time."""
    rng = random.Random(3)
    policy = {"lateness": {"coverage": None, "initial_bound": "1 hour"}, "trace": {"folder": folder}}
    with aion.LocalOperator(
        windows=windows, time="ts", key="k", aggregates={"n": A.count()}, policy=policy
    ) as operator:
        for begin in range(1_700_000_000_000_000, 1_700_000_000_000_000 + 8 * MINUTE_US, MINUTE_US):
            times = [begin - rng.randrange(2 * MINUTE_US) if rng.random() >= without_time else None for _ in range(100)]
            events = pa.table({"k": [1] * len(times), "ts": pa.array(times, pa.timestamp("us", "UTC"))})
            operator.process(events, begin - MINUTE_US // 3)
        assert operator.counters["dropped"] == 0 or without_time
    return read_trace(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("windows", [aion.Tumbling("1 minute"), aion.Calendar("1 day", zone="Europe/Berlin")])
def test_events_without_a_time_are_not_late(tmp_path: Path, windows: Any) -> None:
    trace = recorded(tmp_path, windows, 0.6)
    assert trace.lateness_us()[0].max() < 4 * MINUTE_US
    keeps_all = load_policy("standard", {"lateness.coverage": None, "lateness.initial_bound": "1 hour"})
    outcome = simulate(trace, keeps_all, SLOW)
    assert (outcome.dropped, outcome.coverage) == (0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "keys"),
    [
        ("low_latency", {}),
        ("demo", {}),
        ("standard", {"trigger.kind": "interval", "trigger.interval": "1 day"}),
        ("standard", {"trigger.kind": "count", "trigger.count": 100_000}),
        ("standard", {"trigger.executions": 2}),
        ("standard", {"prestage.class": "policies.prestage:JustInTimePrestage"}),
    ],
)
def test_a_search_may_begin_with_any_policy(tmp_path: Path, base: str, keys: dict[str, Any]) -> None:
    """What it cannot vary it replaces, also where it looks for the staleness that can be reached."""
    trace = recorded(tmp_path, aion.Tumbling("1 minute"), 0.0)
    goal = Goal(64 << 20, 0.05, 0.99)
    found = search(trace, goal, SLOW, policy=load_policy(base, keys), evaluations=8, seed=1)
    assert found.kept
    assert found.goal.staleness == pytest.approx(search(trace, goal, SLOW, evaluations=8, seed=1).goal.staleness)
    assert found.chosen.policy.trigger.executions is None
    assert len({one.keys["trigger.bound"] for one in found.tried}) > 1


@pytest.mark.slow
def test_a_staleness_of_nearly_one_can_be_asked_for(trace: Trace) -> None:
    assert search(trace, Goal(2 << 20, 0.999, 0.99), SLOW, evaluations=8, seed=1).kept


def test_a_policy_that_cannot_be_replayed_is_named(trace: Trace) -> None:
    policy = load_policy("standard", {"destage.class": "nowhere.to:Find"})
    with pytest.raises(PolicyError, match=r"nowhere\.to:Find cannot be imported"):
        search(trace, GOAL, SLOW, policy=policy, evaluations=8, seed=1)
