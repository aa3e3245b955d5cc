"""How complete rows are: the estimate and its lower bound against the truth, on simulated delays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from aion.core.lateness.completeness import Completeness
from aion.core.life.actions import PaneKind
from aion.core.life.window_table import WindowTable
from aion.core.operator.completeness import PaneFacts, rate

Floats = npt.NDArray[np.float64]
Delays = Callable[[np.random.Generator, int, int], Floats]
"""(generator, windows, keys) -> the scale of the delays of each window and key, in windows."""

SIZE_US, BOUND, WINDOWS, KEYS, EVENTS = 60_000_000, 20, 360, 4, 80
WARM_UP = 120


@dataclass(frozen=True)
class Said:
    """Panes of the windows after the warm-up: what was said of them, and the truth."""

    share: Floats
    low: Floats
    truth: Floats


def simulated(
    scale: Delays,
    *,
    windows: int = WINDOWS,
    seed: int = 7,
    confidence: float = 0.95,
    restarts: bool = False,
    warm_up: int = WARM_UP,
) -> Said:
    """Each window has ``EVENTS`` events of each key. The watermark moves by half a window."""
    rng = np.random.default_rng(seed)
    scales = scale(rng, windows, KEYS)
    delay = scales[:, :, None] * np.exp(rng.standard_normal((windows, KEYS, EVENTS)))
    age = np.ceil(np.maximum(rng.random(delay.shape) + delay - 1.0, 0.0) * 2).astype(int)  # in halves; 0: in time
    came = np.stack([(age <= a).sum(axis=2) for a in range(2 * BOUND)], axis=2)  # by window, key, age
    truth = came[:, :, -1]
    completeness = Completeness(confidence)
    said: list[tuple[Floats, Floats, Floats]] = []
    keys = rng.integers(0, 2**63 - 1, KEYS)
    for half in range(2, 2 * windows + 1):
        watermark_us = half * SIZE_US // 2
        last = half // 2 - 1
        open_ = np.arange(max(0, (half - 2 * BOUND) // 2), last + 1)
        ages = half - 2 * (open_ + 1)
        open_, ages = open_[ages < 2 * BOUND], ages[ages < 2 * BOUND]
        table = WindowTable(1)
        now, on_time = came[open_, :, ages], came[open_, :, 0]
        table.add(
            definition=np.zeros(len(open_), np.int64), start_us=open_ * SIZE_US, end_us=(open_ + 1) * SIZE_US,
            events=now.sum(axis=1), late_events=(now - on_time).sum(axis=1),
        )  # fmt: skip
        completeness.close(lambda definition, end_us, table=table: table.find(definition, end_us) >= 0)
        news = now > came[open_, :, np.maximum(ages - 1, 0)]
        for kind, mask in ((PaneKind.ON_TIME, (ages == 0)[:, None] & (now > 0)), (PaneKind.LATE, news)):
            row, key = np.nonzero(mask)
            if not len(row):
                continue
            facts = PaneFacts(
                keys[key], np.zeros(len(row), np.int64), open_[row] * SIZE_US, (open_[row] + 1) * SIZE_US,
                now[row, key], now[row, key] - on_time[row, key],
            )  # fmt: skip
            share, low = rate(completeness, table, watermark_us, kind, facts)
            if last >= warm_up:
                said.append((share, low, now[row, key] / truth[open_[row], key]))
        if restarts:
            completeness = Completeness(confidence, json.loads(json.dumps(completeness.to_json())))
    return Said(*(np.concatenate(column) for column in zip(*said, strict=True)))


def steady(rng: np.random.Generator, windows: int, keys: int) -> Floats:
    return np.full((windows, keys), 0.4)


def keys_differ(rng: np.random.Generator, windows: int, keys: int) -> Floats:
    return np.broadcast_to(np.linspace(0.15, 0.6, keys), (windows, keys))


def drifting(rng: np.random.Generator, windows: int, keys: int) -> Floats:
    return np.broadcast_to(np.geomspace(0.2, 0.5, windows)[:, None], (windows, keys))


def storms(rng: np.random.Generator, windows: int, keys: int) -> Floats:
    """One window in ten is in a storm, and storms last five windows."""
    stormy = np.repeat(rng.random(windows // 5 + 1) < 0.1, 5)[:windows]
    return np.broadcast_to(np.where(stormy, 1.0, 0.2)[:, None], (windows, keys))


def first_storm(rng: np.random.Generator, windows: int, keys: int) -> Floats:
    """It begins with window 200 and does not end."""
    return np.broadcast_to(np.where(np.arange(windows) < 200, 0.2, 1.0)[:, None], (windows, keys))


@pytest.mark.slow
@pytest.mark.parametrize(
    "delays",
    [
        storms,
        pytest.param(keys_differ, marks=pytest.mark.proof),
        pytest.param(steady, marks=pytest.mark.proof),
        pytest.param(drifting, marks=pytest.mark.proof),
    ],
)
def test_it_holds_what_it_promises(delays: Delays) -> None:
    said = simulated(delays)
    known = ~np.isnan(said.share)
    assert known.mean() >= 0.8
    truth, low, share = said.truth[known], said.low[known], said.share[known]
    assert (truth >= low).mean() >= 0.95
    assert abs((share - truth).mean()) <= 0.02
    assert (truth - low).mean() < 0.15, "and it is still of use"
    assert (low <= share).all() and (low >= 0).all() and (share <= 1).all()


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_first_storm_is_noticed_by_the_windows_before(seed: int) -> None:
    """No window of it has closed, so no example has seen one: its first bound lasts until window 220."""
    said = simulated(first_storm, windows=220, warm_up=203, seed=seed)
    assert (said.truth >= said.low).mean() >= 0.7
    assert np.mean(said.share) < np.mean(said.truth) + 0.05


@pytest.mark.proof
def test_a_higher_confidence_says_less() -> None:
    usual, careful = simulated(keys_differ), simulated(keys_differ, confidence=0.99)
    assert (careful.truth >= careful.low).mean() >= 0.99
    assert np.nanmean(careful.low) < np.nanmean(usual.low)


@pytest.mark.slow
def test_a_restart_changes_nothing() -> None:
    said, after = (simulated(storms, windows=150, restarts=restarts) for restarts in (False, True))
    assert not np.isnan(said.low).all()
    np.testing.assert_array_equal(said.share, after.share)
    np.testing.assert_array_equal(said.low, after.low)


def test_nothing_is_said_before_enough_is_known() -> None:
    completeness, table = Completeness(0.95), WindowTable(1)
    zeros = np.zeros(3, np.int64)
    table.add(definition=zeros[:1], start_us=zeros[:1], end_us=np.array([10]), events=np.array([300]))
    facts = PaneFacts(np.arange(3), zeros, zeros, np.full(3, 10), np.full(3, 100), zeros)
    share, low = rate(completeness, table, 10, PaneKind.ON_TIME, facts)
    assert np.isnan(share).all() and np.isnan(low).all()
    share, low = rate(completeness, WindowTable(1), 100, PaneKind.FINAL, facts)
    assert (share == 1).all() and (low == 1).all(), "the window is over"
