"""What Aion has changed in sessions and in pyspark, so that :func:`unconfigure` can undo it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from weakref import WeakKeyDictionary

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

_settings: WeakKeyDictionary[SparkSession, dict[str, tuple[str, str | None]]] = WeakKeyDictionary()
"""For each session and key what Aion has set, and what was there before."""
_undo: dict[str, Callable[[], None]] = {}
"""How other changes are undone, by what they are."""


def note(session: SparkSession, own: Mapping[str, str], had: Mapping[str, str]) -> None:
    """Notes that a session has settings of Aion now. ``had``: what it had before."""
    known = _settings.setdefault(session, {})
    for key, value in own.items():
        _, before = known.get(key, (value, had.get(key)))
        known[key] = value, before


def note_change(what: str, undo: Callable[[], None]) -> None:
    """Notes how a change is undone. The first of equal name counts, as it knows what was there before."""
    _undo.setdefault(what, undo)


def unconfigure() -> None:
    """Undoes what :func:`aion.configure` and calls of Aion have changed in sessions, in Spark's log and in pyspark.

    For example::

        aion.unconfigure()

    A setting that has another value by now stays, and so do those with which :func:`aion.configure` has made a session:
    it never had others. Queries that run go on. Another session in which a query of Aion starts afterwards must be
    configured again.
    """
    for session, keys in list(_settings.items()):
        for key, (value, before) in keys.items():
            with suppress(PySparkException):  # the session was stopped
                if session.conf.get(key, None) != value:
                    continue
                if before is None:
                    session.conf.unset(key)
                else:
                    session.conf.set(key, before)
    _settings.clear()
    while _undo:
        _undo.popitem()[1]()
