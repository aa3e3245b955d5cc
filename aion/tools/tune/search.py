"""Tries policies on a trace, and chooses the one that costs least and keeps what was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, differential_evolution

from aion.base.time import format_duration
from aion.config import Policy, format_bytes, load_policy, policy_to_json
from aion.execute.record.trace import Trace
from aion.tools.tune.disk import Machine
from aion.tools.tune.simulator import Outcome, simulate

MODES = ("predictive", "on_late_event", "none")
VICTIMS = ("largest", "slowest")
LEAST_BUDGET = 1 << 20
TIGHTEST = 0.2
"""The tightest bound for a trigger, as a part of the staleness asked for: events do not come as planned."""
LARGEST_BOUND = 0.99
DIMENSIONS = 7
# Points of the unit cube; the last number is the staleness.
LOOSEST = (1.0, 0.66, 0.0, 0.6, 0.0, 0.0, 1.0)
FRESHEST = (1.0, 0.66, 0.0, 0.6, 0.0, 0.0, 0.0)
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a policy has to keep: the memory for blocks, the staleness of windows, the share of late events kept."""

    memory_bytes: int
    staleness: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Tried:
    """A policy and what it would cost. ``keys``: where it differs from the policy that the search began with."""

    keys: Mapping[str, Any]
    policy: Policy
    outcome: Outcome

    @property
    def costs(self) -> tuple[float, ...]:
        """Memory, blocked time, staleness, executions, bytes written. Less is better in each."""
        o = self.outcome
        return (o.memory_bytes, o.blocked_s, o.staleness, o.all_executions, o.written_bytes)


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found.

    ``front``: the policies that no other one beats in everything, among those that keep the goal; among all if none
    does. ``chosen``: one of them. ``kept``: whether it keeps the goal. ``goal``: as asked, with a staleness that can be
    reached (:func:`within_reach`).
    """

    tried: Sequence[Tried]
    front: Sequence[Tried]
    chosen: Tried
    kept: bool
    goal: Goal


def keeps(outcome: Outcome, goal: Goal) -> bool:
    return excess(outcome, goal) == 0.0


def excess(outcome: Outcome, goal: Goal) -> float:
    """Returns how far a goal is missed: the sum of the parts by which each of its figures is. 0 if it is kept."""
    lost, may_lose = 1.0 - outcome.coverage, max(1e-9, 1.0 - goal.coverage)
    over = (
        outcome.memory_bytes / goal.memory_bytes - 1,
        outcome.staleness / goal.staleness - 1,
        lost / may_lose - 1,
    )
    return float(sum(max(0.0, x) for x in over))


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Returns whether ``a`` is nowhere worse than ``b`` and somewhere better."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def pareto(tried: Sequence[Tried]) -> list[Tried]:
    """Returns the policies that no other one dominates, by memory. One for each set of costs."""
    found: dict[tuple[float, ...], Tried] = {}
    for one in tried:
        found.setdefault(one.costs, one)
    return sorted(
        (t for costs, t in found.items() if not any(dominates(other, costs) for other in found)),
        key=lambda t: t.costs,
    )


def starting_bound_us(trace: Trace, policy: Policy) -> int:
    """Returns the bound for windows before anything is learnt: 1.5 times the greatest lateness in the trace.

    If nothing came late, the bound of the policy.
    """
    late_us, _ = trace.lateness_us()
    latest = int(late_us.max() * 1.5)
    if latest == 0:
        return policy.lateness.initial_bound_us
    unit = 1_000_000 if latest >= 10_000_000 else 1_000
    return -(-(latest + 1) // unit) * unit


class _Failed(Exception):
    """A policy cannot be replayed. The cause says why."""


def search(
    trace: Trace,
    goal: Goal,
    machine: Machine,
    *,
    policy: Policy | None = None,
    evaluations: int = 150,
    seed: int = 1,
    on_done: Callable[[int], None] = lambda done: None,
) -> Result:
    """Replays about ``evaluations`` policies, chosen by differential evolution (Storn and Price 1997).

    The same arguments give the same result. ``policy``: where the search begins; it changes only some keys.
    ``on_done``: called after each replay with the number of replays so far.
    """
    base = load_policy("standard") if policy is None else policy
    bound_us = starting_bound_us(trace, base)
    goal = within_reach(trace, goal, machine, base, bound_us)
    known: dict[str, Tried] = {}
    done = 0

    def attempt(vector: Vector) -> Tried:
        nonlocal done
        keys = keys_of(vector, goal, bound_us, base)
        name = str(keys)
        if name not in known:
            tried = load_policy(base, keys)
            known[name] = Tried(keys, tried, simulate(trace, tried, machine))
        done += 1
        on_done(done)
        return known[name]

    span = max((b.at_us for b in trace.batches), default=0) - min((b.at_us for b in trace.batches), default=0)

    def cost(vector: Vector) -> float:
        try:
            one = attempt(vector)
        except (TypeError, ValueError) as error:
            raise _Failed from error  # of these, the optimiser would say that its map is wrong
        memory, blocked, staleness, executions, written = one.costs
        # Each cost as a share of something, so that no cost drowns the others.
        return (
            100.0 * excess(one.outcome, goal)
            + blocked / max(span / 1e6, 1.0)
            + 0.3 * executions / max(1, sum(one.outcome.executions.values()) - one.outcome.executions["late"])
            + 0.2 * written / max(1, trace.bytes)
            + 0.1 * memory / goal.memory_bytes
            + 0.1 * staleness / goal.staleness
        )

    # Whole generations. The first is the start.
    people = max(5, min(15, evaluations // 4))
    generations = max(0, evaluations // people - 1)
    rng = np.random.default_rng(seed)
    first = rng.random((people, DIMENSIONS))
    # The standard policy with the memory that is allowed, and the same with the tightest staleness.
    first[0], first[1] = LOOSEST, FRESHEST
    try:
        differential_evolution(
            cost,
            Bounds(np.zeros(DIMENSIONS), np.ones(DIMENSIONS)),
            init=first,
            maxiter=generations,
            seed=seed,
            tol=0.0,
            polish=False,
            updating="immediate",
        )
    except _Failed as failed:
        assert failed.__cause__ is not None
        raise failed.__cause__ from None
    tried = list(known.values())
    good = [one for one in tried if keeps(one.outcome, goal)]
    front = pareto(good or tried)
    return Result(tried, front, choose(front, goal, span / 1e6), bool(good), goal)


def within_reach(trace: Trace, goal: Goal, machine: Machine, policy: Policy, bound_us: int) -> Goal:
    """Returns the goal, with a staleness that can be kept: if batches are far apart, no bound keeps a small one."""
    freshest = load_policy(policy, keys_of(np.array(FRESHEST), goal, bound_us, policy))
    reached = simulate(trace, freshest, machine).staleness
    return replace(goal, staleness=1.05 * reached) if reached > goal.staleness else goal


def choose(front: Sequence[Tried], goal: Goal, seconds: float) -> Tried:
    """Among those that miss the goal least: the least blocked, then the fewest executions, memory, bytes written.

    Blocked times within a thousandth of the ``seconds`` of the trace count as equal, and so do numbers of executions
    within two per cent.
    """
    least = min(excess(t.outcome, goal) for t in front)
    left = [t for t in front if excess(t.outcome, goal) == least]
    blocked_s = min(t.outcome.blocked_s for t in left)
    left = [t for t in left if t.outcome.blocked_s <= blocked_s + 0.001 * seconds]
    executions = min(t.outcome.all_executions for t in left)
    left = [t for t in left if t.outcome.all_executions <= 1.02 * executions]
    return min(left, key=lambda t: (t.outcome.memory_bytes, t.outcome.written_bytes))


def keys_of(vector: Vector, goal: Goal, bound_us: int, base: Policy) -> dict[str, Any]:
    """Returns the settings for a point of the unit cube, rounded as a person would write them.

    ``base``: the policy that they change.
    """
    # A plan of the user's own goes with one mode only.
    modes = MODES if base.prestage.class_path is None else (base.prestage.mode,)
    budget, bucket, keep, moderate, victim, mode, staleness = (float(x) for x in np.clip(vector, 0.0, 1.0))
    most = goal.memory_bytes
    least = min(most, max(LEAST_BUDGET, most // 64))
    budget_bytes = _rounded(least * (most / least) ** budget, most)
    bucket_bytes = _rounded(budget_bytes * 0.02 ** (1 - bucket), budget_bytes)
    high = round(0.5 + 0.4 * moderate, 2)
    return {
        "memory.budget": format_bytes(budget_bytes),
        "memory.bucket_limit": format_bytes(bucket_bytes),
        "memory.moderate": high,
        "memory.scarce": max(0.9, high),
        "memory.victim": VICTIMS[min(int(victim * len(VICTIMS)), len(VICTIMS) - 1)],
        "destage.keep_fraction": round(0.5 * keep, 2),
        "prestage.mode": modes[min(int(mode * len(modes)), len(modes) - 1)],
        "trigger.kind": "staleness",
        "trigger.bound": min(LARGEST_BOUND, float(f"{goal.staleness * TIGHTEST ** (1 - staleness):.2g}")),
        "lateness.coverage": goal.coverage,
        "lateness.initial_bound": format_duration(bound_us),
        # They would replace the bound.
        **({} if base.trigger.executions is None else {"trigger.executions": None}),
    }


def _rounded(size: float, most: int) -> int:
    """Rounded to about two digits, and to 1 KiB or 64 KiB. At most ``most``."""
    step = 64 << 10 if size >= 1 << 20 else 1 << 10
    return min(most, max(step, int(float(f"{size:.2g}")) // step * step))


def changed(one: Tried) -> dict[str, dict[str, Any]]:
    """Returns the settings by section, as a policy file has them."""
    whole = policy_to_json(one.policy)
    found: dict[str, dict[str, Any]] = {}
    for path in one.keys:
        section, key = path.split(".")
        found.setdefault(section, {})[key] = whole[section][key]
    return found
