"""The shape of the windows of each kind of definition. Pure."""

from __future__ import annotations

from aion.core.keyed.cut_sessions import CutSessions
from aion.core.keyed.shapes import Counts, Punctuations, Records, Sessions, Shape
from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session


def shape_of(window: Definition, *, shows_open: bool = False) -> Shape:
    """The shape of a definition. ``shows_open``: windows that are not complete yet run, too, as early ones.

    Without it, windows of a number of events only exist once they are complete.
    """
    match window:
        case Session():
            return CutSessions(window) if window.by_event else Sessions(window.gap_us)
        case Count():
            return Counts(window, shows_open=shows_open)
        case PerRecord():
            return Records(window.size_us)
        case Punctuated():
            return Punctuations(shows_open=shows_open)
    raise AssertionError(f"{window} is the same for all keys")
