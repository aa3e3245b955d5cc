"""What holds for the windows of each definition: their bound, their trigger, and when they run early. Pure.

The policy decides for all definitions. A definition may decide for itself (:class:`aion.core.timing.Timing`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.base.time import EACH_BATCH_US
from aion.core.lateness.observe import Lateness, NewBounds
from aion.core.life.window_table import WindowTable
from aion.core.trigger.triggers import Trigger
from policies.cleanup import Reason

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Overrides(NamedTuple):
    """What a definition decides for itself. The policy decides what is None, but without ``early_us`` nothing runs
    early.

    ``early_us``: how far the watermark moves between two early panes, or EACH_BATCH_US. ``bound_us``: a fixed bound.
    ``staleness_bound``: of its own trigger, if that has one. ``patience``: see :meth:`Rules.patience`.
    """

    early_us: int | None = None
    bound_us: int | None = None
    trigger: Trigger | None = None
    staleness_bound: float | None = None
    patience: int | None = None


class FixedBound:
    """A fixed bound for the windows of one definition. What is observed still goes to the ``shared`` bound."""

    def __init__(self, bound_us: int, shared: NewBounds) -> None:
        self._bound_us = bound_us
        self._shared = shared

    @property
    def lateness(self) -> Lateness:
        return self._shared.lateness

    def bound_for_new_window(self) -> int:
        return self._bound_us

    def reason_for_new_window(self) -> int:
        return Reason.OWN.code

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        self._shared.observe(end_us, at_us, events)

    def observe_on_time(self, end_us: int, events: int) -> None:
        self._shared.observe_on_time(end_us, events)

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        self._shared.observe_all_on_time(ends_us, events)

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        self._shared.observe_state(slice_us, at_us, size_bytes)

    def advance(self, from_us: int | None, to_us: int) -> None:
        self._shared.advance(from_us, to_us)

    def to_json(self) -> dict[str, Any]:
        return self._shared.to_json()


class EarlyClock:
    """Says when windows run early: at most once each time the watermark has moved by ``every_us``, or in each batch.

    All open windows of a definition run at the same watermarks, so a sink sees results of one instant. ``last_us``: the
    watermark of the last time, from the snapshot, or None if there was none.
    """

    def __init__(self, every_us: int, last_us: int | None = None) -> None:
        self.every_us = every_us
        self.last_us = last_us
        self._strikes = False

    @property
    def next_us(self) -> int:
        """The watermark from which on windows with news run."""
        return -NEVER if self.last_us is None else self.last_us + max(self.every_us, 1)

    @property
    def each_batch(self) -> bool:
        """Whether windows with news run at the end of each batch, even if the watermark stands still."""
        return self.every_us == EACH_BATCH_US

    @property
    def is_due(self) -> bool:
        """Whether windows with news run early at the end of this batch."""
        return self._strikes or self.each_batch

    def advance(self, to_us: int) -> None:
        """Moves the watermark."""
        if to_us >= self.next_us:
            self.last_us, self._strikes = to_us, True

    def end_batch(self) -> None:
        self._strikes = False


class OfDefinition(NamedTuple):
    """These rules hold for the windows of one definition.

    ``early`` says when open windows run early; it is None if they never do. ``staleness_bound`` belongs to the trigger,
    if that has one. With ``final_only``, windows run once, when they are closed.
    """

    bound: NewBounds
    trigger: Trigger
    staleness_bound: float | None = None
    early: EarlyClock | None = None
    final_only: bool = False


class PolicyRules(NamedTuple):
    """What the policy decides for the definitions that do not decide for themselves.

    ``staleness_bound``: of the trigger, if that has one. ``patience``: for how many batches at most a late window waits
    until its blocks are in memory. ``stages_late``: late events announce an execution, whose blocks are staged.
    ``stages_due``: the blocks of later executions are staged, too, because they are predicted.
    """

    bound: NewBounds
    trigger: Trigger
    staleness_bound: float | None = None
    patience: int = 0
    stages_late: bool = True
    stages_due: bool = False


class Rules:
    """The rules of all definitions of one shard. ``definitions``: how many there are.

    ``overrides``: of the definitions that decide for themselves, by their numbers. ``final_only``: windows run only
    once, when their bound has passed (``emit="final"``). ``early``: the watermarks of the last early executions, by
    number. ``lengthens``: if new windows have a longer bound after a restart, those that live get it, too.
    """

    def __init__(
        self,
        shared: PolicyRules,
        overrides: Mapping[int, Overrides],
        definitions: int,
        *,
        final_only: bool = False,
        early: Mapping[int, int] | None = None,
        lengthens: bool = False,
    ) -> None:
        self.shared = shared
        self.final_only = final_only
        self.lengthens = lengthens
        self._overrides = overrides
        self._fixed_us = np.full(definitions, -1, np.int64)
        self._patience = np.full(definitions, shared.patience, np.int64)
        for number, rules in overrides.items():
            if rules.patience is not None:
                self._patience[number] = rules.patience
            if rules.bound_us is not None:
                self._fixed_us[number] = rules.bound_us
        self._has_fixed = bool((self._fixed_us >= 0).any())
        self._with_triggers = {
            number: rules.trigger for number, rules in overrides.items() if rules.trigger is not None
        }
        last = early or {}
        self._clocks = {
            number: EarlyClock(rules.early_us, last.get(number))
            for number, rules in overrides.items()
            if rules.early_us is not None and not final_only
        }

    # -- of one definition --------------------------------------------------------------------------------

    def of(self, definition: int) -> OfDefinition:
        fixed_us = int(self._fixed_us[definition])
        return OfDefinition(
            self.shared.bound if fixed_us < 0 else FixedBound(fixed_us, self.shared.bound),
            self._with_triggers.get(definition, self.shared.trigger),
            self.staleness_bound(definition),
            self._clocks.get(definition),
            self.final_only,
        )

    def staleness_bound(self, definition: int) -> float | None:
        """The bound of the definition's trigger, or None if it has none, or windows run only once."""
        if self.final_only:
            return None
        own = self._overrides.get(definition)
        return self.shared.staleness_bound if own is None or own.trigger is None else own.staleness_bound

    # -- of many windows ----------------------------------------------------------------------------------

    def bounds_us(self, definitions: Ints) -> Ints:
        """The bound of a new window of each of these definitions, in microseconds."""
        shared_us = self.shared.bound.bound_for_new_window()
        if not self._has_fixed:
            return np.full(len(definitions), shared_us)
        fixed_us = self._fixed_us[definitions]
        return np.where(fixed_us >= 0, fixed_us, shared_us)

    def reasons(self, definitions: Ints) -> Ints:
        """Why they are that: the code of a :class:`policies.cleanup.Reason`."""
        shared = self.shared.bound.reason_for_new_window()
        if not self._has_fixed:
            return np.full(len(definitions), shared)
        return np.where(self._fixed_us[definitions] >= 0, Reason.OWN.code, shared)

    def patience(self, definitions: Ints) -> Ints:
        """For how many batches at most a late window of each of these definitions waits for its blocks."""
        return np.asarray(self._patience[definitions])

    def due(self, windows: WindowTable, rows: Ints, now_us: int, step_us: int) -> Flags:
        """A mask of the late windows that run now."""
        due = np.zeros(len(rows), np.bool_)
        for trigger, some in self._by_trigger(windows, rows):
            due[some] = trigger.due(windows.late(rows[some], now_us, step_us))
        return due

    def dues_us(self, windows: WindowTable, rows: Ints, now_us: int, step_us: int) -> Ints:
        """The watermarks at which their triggers check late windows again even if no event comes. NEVER: none."""
        dues = np.full(len(rows), NEVER)
        for trigger, some in self._by_trigger(windows, rows):
            dues[some] = windows.dues_us(rows[some], trigger, now_us, step_us)
        return dues

    def advance(self, to_us: int) -> None:
        """Moves the watermark, and with it the clocks of early executions."""
        for clock in self._clocks.values():
            clock.advance(to_us)

    def end_batch(self) -> None:
        """Early executions of the batch were ordered."""
        for clock in self._clocks.values():
            clock.end_batch()

    def early(self, windows: WindowTable, late: int) -> Ints:
        """The rows of the open windows with news that run early in this batch. ``late``: the number of late rows."""
        return self._open_with_news(windows, late, [n for n, clock in self._clocks.items() if clock.is_due])

    def early_by(self, windows: WindowTable, late: int, to_us: int) -> Ints:
        """The same, if the watermark gets there and nothing arrives."""
        return self._open_with_news(windows, late, [n for n, clock in self._clocks.items() if to_us >= clock.next_us])

    def _open_with_news(self, windows: WindowTable, late: int, definitions: list[int]) -> Ints:
        if not definitions:
            return np.empty(0, np.int64)
        news = windows["pending"][late:] > 0
        return np.asarray(late + np.flatnonzero(news & np.isin(windows["definition"][late:], definitions)))

    def next_early_us(self, windows: WindowTable, late: int) -> int:
        """The next watermark at which an open window with news runs early: -NEVER for any one, and NEVER for none."""
        news = windows["definition"][late:][windows["pending"][late:] > 0]
        return min((clock.next_us for number, clock in self._clocks.items() if (news == number).any()), default=NEVER)

    def _by_trigger(self, windows: WindowTable, rows: Ints) -> Iterator[tuple[Trigger, Any]]:
        """The rows of each trigger, as numbers into ``rows``."""
        if not self._with_triggers:
            yield self.shared.trigger, slice(None)
            return
        definitions = windows["definition"][rows]
        own = np.isin(definitions, list(self._with_triggers))
        if not own.all():
            yield self.shared.trigger, np.flatnonzero(~own)
        for number in np.unique(definitions[own]).tolist():
            yield self._with_triggers[number], np.flatnonzero(definitions == number)

    # -- snapshot -----------------------------------------------------------------------------------------

    def to_json(self, shared: Container[int]) -> dict[str, Any]:
        """Their part of the operator's snapshot.

        ``shared``: the definitions whose windows are the same for all keys. The others keep their clocks themselves.
        """
        return {
            "trigger": self.shared.trigger.to_json(),
            "triggers": {str(number): trigger.to_json() for number, trigger in self._with_triggers.items()},
            "own_bounds_us": {
                str(number): rules.bound_us for number, rules in self._overrides.items() if rules.bound_us is not None
            },
            "early_every_us": {
                str(number): rules.early_us for number, rules in self._overrides.items() if rules.early_us is not None
            },
            "early": {
                str(number): clock.last_us
                for number, clock in self._clocks.items()
                if clock.last_us is not None and number in shared
            },
        }
