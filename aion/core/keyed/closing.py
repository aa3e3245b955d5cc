"""Says from when on a window of a single key cannot change. Pure.

A definition is closed up to an instant: windows that end by then are gone. The instant is the watermark minus the
bound, and never goes back. Bounds get shorter and longer while lateness is learnt. A pane says when its window closes
(``closes_at``), and that has to stay true if the bound becomes longer afterwards. So what a pane promised is remembered
until it has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aion.base.numbers import NEVER
from aion.core.keyed.table import Ints

BEFORE_ALL = -(2**62)


class Closing:
    """``closed_us``: all windows that end by then are gone. ``promised``: pairs of a bound and an instant.

    A pair promises that windows that end by the instant are kept no longer than the bound. Both ascend.
    """

    def __init__(self, closed_us: int = BEFORE_ALL, promised: Sequence[Sequence[int]] = ()) -> None:
        self.closed_us = closed_us
        self._promised = [(bound_us, until_us) for bound_us, until_us in promised]

    def advance(self, to_us: int, bound_us: int) -> None:
        """The watermark moves. ``bound_us``: of new windows.

        Promises that come true now are remembered until the next time: the last panes of their windows follow.
        """
        self._promised = [promise for promise in self._promised if promise[1] > self.closed_us]
        self.closed_us = self.closed_at(to_us, bound_us)

    def closed_at(self, to_us: int, bound_us: int) -> int:
        """``closed_us`` when the watermark gets there."""
        kept = [min(to_us - bound, until_us) for bound, until_us in self._promised]
        return max(self.closed_us, to_us - bound_us, *kept)

    def closes(self, ends_us: Ints, bound_us: int) -> Ints:
        """The watermarks at which windows with these ends will be closed, if bounds do not become shorter.

        NEVER for a window that is not complete: its end is NEVER.
        """
        closes = np.where(ends_us < NEVER, np.minimum(ends_us, NEVER - bound_us - 1) + bound_us, NEVER)
        for bound, until_us in self._promised:
            if bound < bound_us:
                closes = np.where(ends_us <= until_us, np.minimum(closes, ends_us + bound), closes)
        return closes

    def promise(self, ends_us: Ints, bound_us: int) -> Ints:
        """:meth:`closes`, and from now on it holds even if bounds become longer."""
        closes, known = self.closes(ends_us, bound_us), ends_us < NEVER
        if known.any():
            self._remember(bound_us, int(ends_us[known].max()))
        return closes

    def _remember(self, bound_us: int, until_us: int) -> None:
        """Adds a promise. Leaves out promises that follow from one with the same or a shorter bound."""
        kept: list[tuple[int, int]] = []
        for bound, until in sorted([*self._promised, (bound_us, until_us)], key=lambda pair: (pair[0], -pair[1])):
            if not kept or until > kept[-1][1]:
                kept.append((bound, until))
        self._promised = kept

    def to_json(self) -> list[list[int]]:
        """The promises, for the snapshot."""
        return [list(promise) for promise in self._promised]
