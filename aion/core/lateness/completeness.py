"""How complete a result row is: the share it holds of the events that its key's window will have in the end. Pure.

This is nowcasting of right-truncated counts (Lawless: "Adjustments for reporting delays and the prediction of occurred
but not reported events", Canadian Journal of Statistics 1994; Hoehle, an der Heiden: "Bayesian nowcasting during the
STEC O104:H4 outbreak in Germany", Biometrics 2014, doi 10.1111/biom.12194). They model the delays. Rows of a stream
differ more than a model of delays says: keys differ, storms come, and a late row exists only because an event was late.
So the estimate is learnt from rows whose windows have closed. For those, the share is known exactly.

**What is kept.** A sample of rows (key and window): of each window, those whose keys have the smallest hashes. For each
of their panes: the lateness, the events, the late events, and the late share of the windows before. When the window
closes, each pane becomes an example: its events over the row's events in the end. A sample of a window with many keys
counts for all of its rows. Of panes at nearly the same lateness, the first counts for all of them.

**The estimate.** Examples are split by lateness. In each part the share is predicted linearly from the late share of
the row so far, that of the windows before it, and the lateness, and the examples are split again by that. Such a
cell is a set of rows that looked alike. ``completeness`` is the prediction plus the mean error of the cell. On average
it is right whatever the distribution is. ``completeness_low`` adds the error that a further row of the cell undercuts
with at most the given probability (split conformal prediction of residuals: Lei, G'Sell, Rinaldo, Tibshirani,
Wasserman, "Distribution-free predictive inference for regression", 2018, arXiv 1604.04173).

**Storms.** In the first storm, more events of the windows before are late than ever. How many more is a variable of its
own. Until examples tell what it means, each such event is taken to be missing in this window, too.

**Drift.** Old examples fade. Each ``completeness_low`` is compared with the truth when its window closes. The
probability above then moves against the error (adaptive conformal inference: Gibbs, Candes, arXiv 2106.00170). So
the share of rows at or above it follows what was asked, whether or not the future looks like the past.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aion.base.hashing import mixed
from aion.core.packing import table, untable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MOST_OPEN = 2048
"""The most panes that wait for their windows to close."""
MOST_EXAMPLES = 2048
ROWS_PER_WINDOW = 4
ALIKE = 2
"""The rows of one window are worth at most this many independent ones: a storm comes to all of them."""
FEW_EVENTS = 50
"""Rows with fewer events in the end are examples only while there are too few others."""
FEWEST_EXAMPLES = 60
FEWEST_WINDOWS = 8
HALF_LIFE = 1024
"""An example counts half when this many newer ones of its definition are known."""
FARTHER = 9 / 8
"""A pane is kept if it is later than the row's pane before by this factor. Otherwise that one counts for it, too."""
CELL = 60
LATENESS_PARTS = 8
CELLS_PER_PART = 5
CAUTION = 0.8
"""The wanted probability of a miss is this part of what the user allows, for the errors of estimates from few."""
STEP = 0.005
"""How far the probability moves for each window that closes (gamma of Gibbs and Candes)."""

LEAST_MISS, MOST_MISS = 0.1, 3.0
"""The limits of the probability, as multiples of what the user allows."""
USUAL = 0.9
"""The late share of the windows before is usual up to this quantile of the examples. What is above counts apart."""
UNUSUAL_LOSS = -1.0
"""What the share is expected to lose for each unit above the usual, before examples show it."""
UNUSUAL_TRUST = 0.3
"""That expectation weighs as much as an example of weight one whose squared excess above the usual is this."""
ON_TIME = -1
FEWEST_IN_PART = 20

_UNIT = 1_000_000
_WEIGHT = 16
_CLOSED = ("definition", "end_us", "lateness_us", "events", "late_events", "recent", "weight", "total")
_OPEN = (*_CLOSED, "id", "low", "stands")
_TINY = 1e-9


class Panes(NamedTuple):
    """Rows of panes as columns, (N,). The panes of one call are of one watermark.

    ``key``: a hash of the key, from 0 to 2**63 - 1. ``lateness_us``: the watermark minus the window's end; for the
    on-time execution, -1 minus that. ``recent``: the late share, so far, of the windows before.
    """

    key: Ints
    definition: Ints
    end_us: Ints
    lateness_us: Ints
    events: Ints
    late_events: Ints
    recent: Floats

    def some(self, which: npt.NDArray[Any]) -> Panes:
        """Returns some of the rows, by a mask or by their numbers."""
        return Panes(*(column[which] for column in self))


class Completeness:
    """Learns from panes how complete rows are. ``confidence``: of ``completeness_low``, above 0 and below 1."""

    def __init__(self, confidence: float, snapshot: Mapping[str, Any] | None = None) -> None:
        self.confidence = confidence
        self.rows = self.missed = 0.0
        """The weights of the rows, and of those below their ``completeness_low``, whose windows have closed."""
        self._miss = CAUTION * (1.0 - confidence)
        self._open: dict[str, Ints] = {name: np.empty(0, np.int64) for name in _OPEN}
        self._closed: dict[str, Ints] = {name: np.empty(0, np.int64) for name in _CLOSED}
        self._fitted: _Fit | None = None
        if snapshot is not None:
            self.rows, self.missed = snapshot["rows"], snapshot["missed"]
            if snapshot["confidence"] == confidence:
                self._miss = snapshot["miss"]
            self._open = _columns(snapshot["open"], _OPEN)
            self._closed = _columns(snapshot["closed"], _CLOSED)

    def estimate(self, panes: Panes) -> tuple[Floats, Floats]:
        """``completeness`` and ``completeness_low`` of these rows. NaN while too little is known. Also learns them."""
        if self._fitted is None:
            self._fitted = _Fit(self._closed, self._miss)
        share, low = self._fitted.of(panes)
        self._remember(panes, low)
        return share, low

    def update(self, panes: Panes) -> None:
        """Learns the events of the rows of these panes, which are the last ones of their windows."""
        self._total(_ids(panes), panes.events)

    def close(self, is_open: Callable[[Ints, Ints], Flags]) -> None:
        """Makes examples of the panes of windows that have closed.

        ``is_open``: a mask of the windows (definition, end) that are still kept. Call it when all panes that closed
        windows had are known: before the watermark moves on.
        """
        if not len(self._open["id"]):
            return
        kept = is_open(self._open["definition"], self._open["end_us"])
        if kept.all():
            return
        order = np.flatnonzero(~kept)
        order = order[np.argsort(self._open["end_us"][order], kind="stable")]
        gone = {name: column[order] for name, column in self._open.items()}
        self._open = {name: column[kept] for name, column in self._open.items()}
        self._closed = {name: np.concatenate((column, gone[name])) for name, column in self._closed.items()}
        self._closed = _latest(self._closed)
        self._adapt(gone)
        self._fitted = None

    def to_json(self) -> dict[str, Any]:
        return {
            "confidence": self.confidence,
            "miss": self._miss,
            "rows": self.rows,
            "missed": self.missed,
            "open": table({name: column.tolist() for name, column in self._open.items()}),
            "closed": table({name: column.tolist() for name, column in self._closed.items()}),
        }

    # -- keeping panes ------------------------------------------------------------------------------------

    def _remember(self, panes: Panes, low: Floats) -> None:
        # A function may return several rows for a key and window.
        ids, first = np.unique(_ids(panes), return_index=True)
        panes, low = panes.some(first), low[first]
        self._total(ids, panes.events)
        stands = self._stand_for(panes)
        drawn = ids / 2.0**32 * stands < 1.0
        ids, panes, low, stands = ids[drawn], panes.some(drawn), low[drawn], stands[drawn]
        weights = np.rint(np.minimum(stands, 1e9) * _WEIGHT).astype(np.int64)
        at = self._last(ids)
        again = at >= 0
        again[again] = panes.lateness_us[again] < self._open["lateness_us"][at[again]] * FARTHER
        self._open["weight"][at[again]] += weights[again]
        new = {
            **panes._asdict(),
            "id": ids,
            "recent": np.rint(panes.recent * _UNIT).astype(np.int64),
            "low": np.floor(np.nan_to_num(low, nan=-1.0) * _UNIT).astype(np.int64),
            "stands": weights,
            "weight": weights,
            "total": panes.events,
        }
        self._open = {name: np.concatenate((column, new[name][~again])) for name, column in self._open.items()}

    def _stand_for(self, panes: Panes) -> Floats:
        """Returns how many rows of its window each row stands for, if it is drawn."""
        codes = _codes(panes.definition, panes.end_us)
        windows, of, count = np.unique(codes, return_inverse=True, return_counts=True)
        # The more panes wait, the fewer are drawn. So their number settles below its limit.
        room = ROWS_PER_WINDOW * max(0.0, 1.0 - len(self._open["id"]) / MOST_OPEN)
        stands = np.maximum(1.0, count / max(room, _TINY))
        if len(self._open["id"]):
            # From one window all rows are drawn with the same probability, so that none is drawn only in the middle.
            known, first = np.unique(_codes(self._open["definition"], self._open["end_us"]), return_index=True)
            at = np.minimum(np.searchsorted(known, windows), len(known) - 1)
            same = known[at] == windows
            stands[same] = self._open["stands"][first[at[same]]] / _WEIGHT
        return np.asarray(stands[of])

    def _last(self, ids: Ints) -> Ints:
        """Returns the last pane that is kept of each of these rows. -1: there is none."""
        known = self._open["id"]
        if not len(known):
            return np.full(len(ids), -1)
        order = np.argsort(known, kind="stable")
        at = np.searchsorted(known[order], ids, side="right") - 1
        return np.where((at >= 0) & (known[order[at]] == ids), order[at], -1)

    def _total(self, ids: Ints, events: Ints) -> None:
        """Notes how many events these rows have by now."""
        if not len(ids) or not len(self._open["id"]):
            return
        order = np.argsort(ids, kind="stable")
        at = np.minimum(np.searchsorted(ids[order], self._open["id"]), len(ids) - 1)
        same = ids[order[at]] == self._open["id"]
        self._open["total"][same] = events[order[at[same]]]

    # -- examples -----------------------------------------------------------------------------------------

    def _adapt(self, gone: Mapping[str, Ints]) -> None:
        """Moves the probability of a miss by what was said of the rows that are known now."""
        judged = (gone["low"] >= 0) & (gone["total"] >= FEW_EVENTS)
        if not judged.any():
            judged = gone["low"] >= 0
        if not judged.any():
            return
        weights = gone["weight"][judged] / _WEIGHT
        share = gone["events"][judged] / np.maximum(gone["total"][judged], 1)
        missed = weights * (share * _UNIT < gone["low"][judged] - 1)
        _, of = np.unique(_codes(gone["definition"][judged], gone["end_us"][judged]), return_inverse=True)
        errors = np.bincount(of, missed) / np.bincount(of, weights)
        allowed = 1.0 - self.confidence
        moved = self._miss + STEP * (CAUTION * allowed - errors).sum()
        self._miss = float(np.clip(moved, LEAST_MISS * allowed, min(0.5, MOST_MISS * allowed)))
        self.rows += float(weights.sum())
        self.missed += float(missed.sum())


class _Calibration(NamedTuple):
    """Examples that were predicted alike. Cell i has predictions from ``edges[i - 1]`` to ``edges[i]``.

    ``usual``: the late share of the windows before, as far as it is usual. ``share`` and ``low``: what is added to the
    prediction, by cell.
    """

    usual: float
    coefficients: Floats
    edges: Floats
    share: Floats
    low: Floats


class _Fit:
    """The estimate that some examples support. ``miss``: the probability that a row is below ``low``."""

    def __init__(self, closed: Mapping[str, Ints], miss: float) -> None:
        # By definition: the largest lateness of each part but the last, and the parts. The on-time part is the first.
        self._fitted: dict[int, tuple[Ints, list[_Calibration | None]]] = {}
        self._miss = miss
        for definition in np.unique(closed["definition"]).tolist():
            own = closed["definition"] == definition
            large = own & (closed["total"] >= FEW_EVENTS)
            chosen = large if large.sum() >= FEWEST_EXAMPLES else own
            examples: dict[str, Any] = {name: column[chosen] for name, column in closed.items()}
            newer = np.arange(len(examples["total"]))[::-1]
            examples["weight"] = examples["weight"] / _WEIGHT * np.exp2(-newer / HALF_LIFE)
            if len(examples["total"]) >= FEWEST_EXAMPLES and len(np.unique(examples["end_us"])) >= FEWEST_WINDOWS:
                self._fitted[definition] = self._split(examples)

    def of(self, panes: Panes) -> tuple[Floats, Floats]:
        share, low = np.full(len(panes.events), np.nan), np.full(len(panes.events), np.nan)
        for definition, (cuts, parts) in self._fitted.items():
            part_of = np.searchsorted(cuts, panes.lateness_us)
            for number, cells in enumerate(parts):
                rows = np.flatnonzero((panes.definition == definition) & (part_of == number))
                if cells is None or not len(rows):
                    continue
                some = panes.some(rows)
                x = _features(some.lateness_us, some.events, some.late_events, some.recent, cells.usual)
                predicted = _predicted(x, cells.coefficients)
                at = np.searchsorted(cells.edges, predicted, side="right")
                share[rows] = np.clip(predicted + cells.share[at], 0.0, 1.0)
                low[rows] = np.clip(predicted + cells.low[at], 0.0, 1.0)
        return share, low

    def _split(self, examples: Mapping[str, Any]) -> tuple[Ints, list[_Calibration | None]]:
        late = examples["lateness_us"][examples["lateness_us"] >= 0]
        parts = max(1, min(LATENESS_PARTS, len(late) // (2 * CELL)))
        quantiles = np.sort(late)[np.arange(1, parts) * len(late) // parts] if parts > 1 else late[:0]
        cuts = np.unique(np.concatenate((np.array([ON_TIME]), quantiles)))
        part_of = np.searchsorted(cuts, examples["lateness_us"])
        return cuts, [self._calibrated(examples, np.flatnonzero(part_of == number)) for number in range(len(cuts) + 1)]

    def _calibrated(self, examples: Mapping[str, Any], rows: Ints) -> _Calibration | None:
        """Returns None if there are too few to know."""
        if len(rows) < FEWEST_IN_PART:
            return None
        e = {name: column[rows] for name, column in examples.items()}
        weights = e["weight"]
        shares = e["events"] / np.maximum(e["total"], 1)
        recent = e["recent"] / _UNIT
        usual = float(np.quantile(recent, USUAL))
        x = _features(e["lateness_us"], e["events"], e["late_events"], recent, usual)
        coefficients = _least_squares(x, shares, weights)
        predicted = _predicted(x, coefficients)
        least = max(CELL, int(3.0 / self._miss))
        cells = max(1, min(CELLS_PER_PART, len(rows) // least))
        edges = np.unique(np.sort(predicted)[np.arange(1, cells) * len(rows) // cells])
        cell_of = np.searchsorted(edges, predicted, side="right")
        cells_rows = [np.flatnonzero(cell_of == cell) for cell in range(len(edges) + 1)]
        errors = shares - predicted
        found = [_known(errors[c], weights[c], len(np.unique(e["end_us"][c])), self._miss) for c in cells_rows]
        return _Calibration(usual, coefficients, edges, *(np.array(column) for column in zip(*found, strict=True)))


def _known(errors: Floats, weights: Floats, windows: int, miss: float) -> tuple[float, float]:
    """Returns the mean error of a cell, and the one that a further row is below with at most this probability."""
    if not len(errors):
        return np.nan, np.nan
    order = np.argsort(errors, kind="stable")
    errors, weights = errors[order], weights[order]
    whole = float(weights.sum())
    mean = float((errors * weights).sum() / whole)
    # How many equal and independent examples these are worth (Kish). Rows of one window are alike.
    worth = min(whole**2 / float((weights**2).sum()), ALIKE * windows)
    # Of n examples, a further one undercuts the k-th smallest, below which k - 1 are, with probability k / (n + 1).
    below = max(0.0, miss - (1.0 - miss) / worth) * whole
    at = min(int(np.searchsorted(np.cumsum(weights), below, side="right")), len(errors) - 1)
    return mean, min(mean, float(errors[at]))


def _features(lateness_us: Ints, events: Ints, late_events: Ints, recent: Floats, usual: float) -> Floats:
    """Returns what the share of a row is predicted from, (N, 5)."""
    late = late_events / np.maximum(events, 1)
    lateness = np.log1p(np.maximum(lateness_us, -1 - lateness_us) / _UNIT)
    return np.stack([np.ones(len(late)), late, recent, lateness, np.maximum(0.0, recent - usual)], axis=1)


def _least_squares(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Returns the coefficients, slightly shrunk, so that columns may be constant or equal. Rounded: all machines agree.

    The first column is constant, and its coefficient is not shrunk. That of the last one is shrunk towards what is
    expected of it.
    """
    xw = x * weights[:, None]
    gram = xw.T @ x
    trust, expected = np.full(x.shape[1], 1e-6 * np.trace(gram)), np.zeros(x.shape[1])
    trust[0], trust[-1], expected[-1] = 0.0, UNUSUAL_TRUST, UNUSUAL_LOSS
    return np.asarray(np.round(np.linalg.solve(gram + np.diag(trust), xw.T @ y + trust * expected), 6))


def _predicted(x: Floats, coefficients: Floats) -> Floats:
    return np.asarray(np.round((x * coefficients).sum(axis=1), 6))


def _codes(definition: Ints, end_us: Ints) -> Ints:
    """Returns a number for each window."""
    return np.asarray(mixed(end_us.astype(np.uint64) ^ mixed(definition.astype(np.uint64))).astype(np.int64))


def _ids(panes: Panes) -> Ints:
    """Returns a number of 32 bits for each row: a hash of its key and window. Two rows rarely have the same."""
    words = mixed(_codes(panes.definition, panes.end_us).astype(np.uint64) ^ panes.key.astype(np.uint64))
    return np.asarray((words >> np.uint64(32)).astype(np.int64))


def _latest(closed: Mapping[str, Ints]) -> dict[str, Ints]:
    """Returns the latest examples, as many of each definition."""
    definitions, counts = np.unique(closed["definition"], return_counts=True)
    kept = np.ones(len(closed["definition"]), np.bool_)
    most = MOST_EXAMPLES // max(1, len(definitions))
    for definition, count in zip(definitions.tolist(), counts.tolist(), strict=True):
        kept[np.flatnonzero(closed["definition"] == definition)[: max(0, count - most)]] = False
    return {name: column[kept] for name, column in closed.items()}


def _columns(value: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Ints]:
    columns = untable(value)
    return {name: np.array(columns[name], np.int64) for name in names}
