"""The paper's own way to place executions (section 3.4): gradient descent. `aion experiment staleness` compares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aion.core.trigger.distribution import LateDistribution
from aion.core.trigger.planner import TriggerPlan


@dataclass(frozen=True, slots=True)
class Descent:
    """Where gradient descent ended. ``converged``: whether all intervals are equally stale, within the tolerance."""

    plan: TriggerPlan
    iterations: int
    converged: bool


def descent(
    late: LateDistribution,
    executions: int,
    *,
    after: float | None = None,
    rate: float = 1.0,
    iterations: int = 1000,
    tolerance: float = 1e-6,
) -> Descent:
    """``executions`` executions, balanced as the paper describes it (section 3.4), for comparison.

    They start at the quantiles of the distribution. Then each one, in order of time, moves against the gradient of the
    difference in staleness between the two intervals next to it. With ``rate`` 1 it moves as far as would make them
    equal if the gradient did not change. It stops when the standard deviation of the staleness is below ``tolerance``
    times the mean, or after ``iterations`` rounds. The paper gives no values for rate, tolerance and iterations.
    """
    last, already = late.seen(after)
    if already == 1.0:
        return Descent(_placed(late, after, [], []), 0, True)
    wanted = already + (1.0 - already) * np.arange(1, executions) / executions
    t = [last, *(max(late.quantile(w), last) for w in wanted.tolist()), late.end]
    done = 0
    for done in range(iterations + 1):
        f = [already, *(late.at(x) for x in t[1:-1]), 1.0]
        staleness = np.diff(t) * np.diff(f)
        if staleness.std() <= tolerance * staleness.mean() or done == iterations:
            break
        for i in range(1, executions):
            x = t[i]
            share, density = late.at(x), late.density(x)
            left = (x - t[i - 1]) * (share - f[i - 1])
            right = (t[i + 1] - x) * (f[i + 1] - share)
            gradient = f[i + 1] - f[i - 1] + density * (t[i + 1] - t[i - 1])
            if gradient > 0:
                t[i] = min(max(x - rate * (left - right) / gradient, t[i - 1]), t[i + 1])
                f[i] = late.at(t[i])
    converged = bool(staleness.std() <= tolerance * staleness.mean())
    return Descent(_placed(late, after, t[1:], f[1:]), done, converged)


def _placed(
    late: LateDistribution, after: float | None, times: Sequence[float], shares: Sequence[float]
) -> TriggerPlan:
    return TriggerPlan(np.array(times, np.float64), np.array(shares, np.float64), *late.seen(after))
