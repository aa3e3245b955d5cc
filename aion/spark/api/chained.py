"""Windows of windows: the panes of one :func:`aion.windowed` as the events of another, in one query.

Spark gives each operator the watermark of the one before it, in the same batch. So a pane may come in the batch whose
watermark ends the window that it belongs to: such windows take their events before they move their watermark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aion.base.time import format_duration
from aion.config import Policy
from aion.core.life.actions import PaneKind
from aion.core.query.pane_parts import END, KIND, NAME, SEQ, START, PanesSaid, Parts, is_key, metadata_of
from aion.core.query.plan import FINAL, Plan
from aion.core.query.updates import DROPPED, ORDER, RETRACTED, of_updates
from aion.errors import ConfigError, SchemaError, WatermarkError
from aion.execute.assembly import longest_bound_us
from aion.spark.api.files import Files
from aion.spark.api.sources import Rows, Source
from aion.spark.api.watermarks import WATERMARK
from aion.spark.session import upstream
from aion.spark.session.plans import Node
from aion.spark.session.types import quoted
from aion.spark.tasks.child import DROPPED_BEFORE
from aion.spec import Spec

_SAID = ("reason", "event_time", "lateness_us", "event")


def described(result: DataFrame, plan: Plan, policy: Policy, name: str) -> DataFrame:
    """Returns a result of windows that says in the metadata of its columns what they are."""
    metadata = metadata_of(plan, name, longest_bound_us(plan, policy))
    columns = [F.col(quoted(column)) for column in result.columns]
    return result.select(
        *(
            found.alias(column, metadata=metadata[column]) if column in metadata else found
            for column, found in zip(result.columns, columns, strict=True)
        )
    )


def is_chained(df: object) -> bool:
    """Returns whether a DataFrame has panes of windows, without a watermark of its own."""
    if not isinstance(df, DataFrame) or not df.isStreaming or any(WATERMARK in field.metadata for field in df.schema):
        return False
    return upstream.has_windows(df)


class Panes(Rows):
    """The panes of other windows as events. Raises WatermarkError or SchemaError if they cannot be used.

    If a later pane replaces an earlier one, nothing may come between that leaves rows out, since what it leaves out
    would still count; and the panes must be recognised by the columns that identify them.
    """

    rows_first = True

    def __init__(self, df: DataFrame, caller: str) -> None:
        super().__init__(df, caller, is_lossy=True)
        self._caller = caller
        self._parts = Parts.of((field.name, field.metadata) for field in df.schema)
        between = upstream.before_windows(df)
        if between is None:
            raise WatermarkError(
                f"{caller}: panes of aion.windowed are put together with other rows, and Spark has no watermark for "
                "both. Write the panes to a table with aion.sinks.upsert, and read them in another query"
            )
        self._checked(between)

    @property
    def _known(self) -> Parts:
        if self._parts is None:
            raise SchemaError(
                f"{self._caller}: no column of the windows before is left; keep the key, window_start, window_end, "
                "kind and pane_seq of the panes (an alias is fine)"
            )
        return self._parts

    @property
    def windows(self) -> PanesSaid:
        return self._known.said

    @property
    def _is_final(self) -> bool:
        """Whether each pane is the only one of its window."""
        return self.windows.emit == FINAL

    def _checked(self, between: Sequence[Node]) -> None:
        drops = any(map(upstream.leaves_out_dropped, between))
        if KIND not in self._known.columns and not (self._is_final and drops):
            raise SchemaError(
                f"{self._caller}: the column 'kind' of the windows before is missing. It says which panes replace "
                "others and which rows are dropped events; keep it in the select"
            )
        if self._is_final:
            return
        if missing := self._known.missing(SEQ):
            raise SchemaError(
                f"{self._caller}: {' and '.join(missing)} of the windows before is missing. A later pane replaces the "
                "earlier one with the same key and window, so keep these columns in the select (an alias is fine); or "
                "give the windows before emit='final', so that each pane is the only one"
            )
        for node in between:
            if not upstream.keeps_each_row(node):
                raise WatermarkError(
                    f"{self._caller}: {node.name} comes between the two windows. A pane that it leaves "
                    "out cannot replace the earlier one, which would count for ever. Make values null instead "
                    "(when(...)), or give the windows before emit='final', so that each pane is the only one"
                )

    def delay_us(self, time: str) -> None:
        return None

    @property
    def before(self) -> Sequence[str]:
        name = self.windows.name
        if self._is_final:
            return [f"the final panes of {name!r} are the events."]
        return [f"the panes of {name!r} are the events. All are kept, and the newest of each key and window counts."]

    def timed(self, spec: Spec) -> Spec:
        if spec.time is None:
            raise SchemaError(
                "time: panes of windows have no watermark; give the window_start or window_end of the windows before, "
                "e.g. time='window_end'"
            )
        return spec

    def plan(self, spec: Spec) -> Plan:
        plan = replace(super().plan(spec), of_panes=True)
        if spec.name == self.windows.name:
            raise ConfigError(
                f"name: the windows before are called {spec.name!r}, too; give these another name, e.g. name='outer'"
            )
        parts = {column: part for part, column in self._known.columns.items()}
        part = parts.get(plan.time)
        if part not in (START, END):
            raise SchemaError(
                f"time: {plan.time!r} is neither window_start nor window_end of the windows before; give one of these "
                "(an alias is fine), so that all panes of a window fall into the same windows"
            )
        if part == START and self.windows.longest_us is None:
            raise SchemaError(
                f"time: windows of {self.windows.name!r} may have any length, so those that begin in a window may end "
                "at any time after it; give their window_end as the time"
            )
        if self._is_final:
            return plan
        for name in plan.key:
            if not is_key(parts.get(name, "")) and parts.get(name) != NAME:
                raise SchemaError(
                    f"key: {name!r} is not part of the key of the windows before, so a later pane might have another "
                    f"value there than the one that it replaces; give {self.windows.name!r} this column as a key, too"
                )
        return of_updates(plan, self.schema, [self._known.columns[part] for part in self.windows.identity])

    def policy(self, spec: Spec, policy: Policy) -> Policy:
        """Returns the policy with a fixed bound that is as long as these panes may still come."""
        needed_us = self.windows.kept_us
        if {column: part for part, column in self._known.columns.items()}[spec.time_column] == START:
            needed_us += self.windows.longest_us or 0
        needed = format_duration(needed_us)
        asked = [("bound", policy.lateness.initial_bound_us)] if spec.bound is not None else []
        asked += [
            (f"windows: {name!r}: bound", window.timing.bound_us)
            for name, window in spec.definitions.items()
            if window.timing.bound_us is not None
        ]
        for what, bound_us in asked:
            if bound_us < needed_us:
                raise ConfigError(
                    f"{what}: {format_duration(bound_us)} is too short: panes of {self.windows.name!r} may come "
                    f"{needed} after the end of these windows; give {needed} or more, or leave it out"
                )
        lateness = policy.lateness
        bound = {"initial_bound_us": max(lateness.initial_bound_us, needed_us), "coverage": None}
        return policy.model_copy(update={"lateness": lateness.model_copy(update=bound)})

    def _column(self, name: str, plan: Plan) -> Column:
        if plan.updates is not None and name == RETRACTED:
            return self._is(PaneKind.RETRACTED)
        if plan.updates is not None and name == DROPPED:
            said = [self._df[quoted(column)] for column in _SAID if column in self._df.columns]
            return F.when(self._is(PaneKind.DROPPED), F.to_json(F.struct(*said)) if said else F.lit("{}"))
        if plan.updates is not None and name == ORDER:
            return F.coalesce(self._df[quoted(self._known.columns[SEQ])], F.lit(0))  # dropped rows have no number
        return super()._column(name, plan)

    def _flag(self, plan: Plan) -> Column | None:
        return (
            F.when(self._is(PaneKind.DROPPED), F.lit(DROPPED_BEFORE)).otherwise(0)
            if KIND in self._known.columns
            else None
        )

    def _is(self, kind: PaneKind) -> Column:
        return F.coalesce(self._df[quoted(self._known.columns[KIND])] == kind.value, F.lit(False))


def source_of(caller: str, df: Any, spec: Spec) -> Source:
    """Returns what a call was given as its source."""
    if isinstance(df, Files):
        return df
    if is_chained(df):
        return Panes(df, caller)
    return Rows(df, caller, is_lossy=spec.on_lossy_upstream == "accept")
