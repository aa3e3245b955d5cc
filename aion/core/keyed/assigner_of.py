"""The assigner of the windows of each kind of definition. Pure."""

from __future__ import annotations

from aion.core.keyed.assigners import Assigner, Counts, Punctuations, Records, Sessions
from aion.core.keyed.cut_sessions import CutSessions
from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session


def assigner_of(window: Definition, *, shows_open: bool = False) -> Assigner:
    """The assigner of a definition. ``shows_open``: windows that are not complete yet run, too, as early ones.

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
