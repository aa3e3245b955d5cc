"""Whether lateness has changed: a statistical test of the latest epochs against the earlier ones. Pure.

The epochs are the replicates. Lateness is cut into cells at the values that half, a quarter, an eighth, ... of the late
events exceed. For each cell and each epoch that is old enough, take the share of the events up to the end of the cell
that lie in the cell (for the first cell: the share of events that are late at all). The shares are compared as angles,
``asin(sqrt(share))``, so that their variance does not depend on the share.

Lateness has changed if the three latest epochs *all* lie outside the prediction interval of the older three quarters,
on the same side, and all by a factor of at least 1.5 in the odds. The interval uses Student's t at a level of 1 %,
divided by the number of cells; the more neighbouring epochs correlate, the fewer degrees of freedom it has. This means:
a burst in a single epoch is not a change; bursts in the past widen the interval; and where epochs depend on each other,
as nights follow days, it takes a long history to find a change.

Why not Kolmogorov-Smirnov: it assumes independent events, so every burst would be a change; and it is most sensitive in
the middle of a distribution, while a bound lies in the tail.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from aion.core.lateness.estimate import LateArrivals
from aion.core.lateness.observe import Cohorts, Floats
from policies.durations import short_duration

LEVEL = 0.01
FEWEST_EPOCHS = 8
LATEST = 3
ODDS = 1.5
FEW_EVENTS = 5
CUTS = 8


def change(cohorts: Cohorts, known: LateArrivals) -> str | None:
    """Returns what has changed, in words; None if nothing has. ``known``: the estimate from the same epochs, of all
    events.
    """
    cells = _cells(known)
    found = [_tested(cohorts, low, high, LEVEL / len(cells)) for low, high in cells]
    return next((words for words in found if words is not None), None)


def _cells(known: LateArrivals) -> list[tuple[int, int]]:
    """Returns pairs ``(low_us, high_us]``, from "late at all" to the tail."""
    wanted = known.later[0] * 0.5 ** np.arange(1, CUTS + 1)
    wanted = wanted[wanted > known.unseen]
    at = np.unique(np.searchsorted(-known.later, -wanted))
    cuts = [-1, *(int(us) for us in known.edges_us[at[at < len(known.edges_us)]] if us >= 0)]
    return list(pairwise(cuts))


def _tested(cohorts: Cohorts, low_us: int, high_us: int, level: float) -> str | None:
    from scipy.special import stdtrit

    old_enough = cohorts.ages_us >= high_us
    late = cohorts.late[old_enough]
    upto = cohorts.on_time[old_enough] + late[:, cohorts.edges_us <= high_us].sum(axis=1)
    inside = late[:, (cohorts.edges_us > low_us) & (cohorts.edges_us <= high_us)].sum(axis=1)
    some = upto > 0
    inside, upto = inside[some], upto[some]
    before = min(len(upto) - LATEST, len(upto) * 3 // 4)
    if before < FEWEST_EPOCHS:
        return None
    # A change that was missed at first can still be found until it is older than the last quarter.
    parts = [slice(0, before), slice(len(upto) - LATEST, None)]
    (was, was_upto), (now, now_upto) = ((inside[part], upto[part]) for part in parts)
    usual = was.sum() / was_upto.sum()
    if (usual * now_upto).min() < FEW_EVENTS and now.min() < FEW_EVENTS:
        return None
    angles, latest = (np.arcsin(np.sqrt((k + 0.375) / (n + 0.75))) for k, n in ((was, was_upto), (now, now_upto)))
    degrees = _independent(angles) - 1
    if degrees < 1:
        return None
    spread = np.maximum(angles.std(ddof=1), 0.5 / np.sqrt(upto.min()))
    t = (latest - angles.mean()) / (spread * np.sqrt(1 + 1 / before))
    shares = (now + 0.375) / (now_upto + 0.75)
    odds = np.log(shares / (1 - shares)) - np.log((usual + 1e-12) / (1 - usual + 1e-12))
    limit, far = stdtrit(degrees, 1 - level / 2), np.log(ODDS)
    if not any((side * t > limit).all() and (side * odds > far).all() for side in (-1, 1)):
        return None
    than = "were late" if low_us < 0 else f"were later than {short_duration(low_us)}"
    return (
        f"of the events up to {short_duration(high_us)} late {shares.min():.2%} to {shares.max():.2%} {than}, "
        f"where {usual:.2%} were usual"
    )


def _independent(values: Floats) -> float:
    """Returns how many independent values these are worth, from the correlation of each with the next."""
    off = values - values.mean()
    whole = float(off @ off)
    common = float(off[1:] @ off[:-1]) / whole if whole > 0 else 0.0
    common = min(0.95, max(0.0, common))
    return len(values) * (1 - common) / (1 + common)
