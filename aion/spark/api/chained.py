"""Windows of windows: the panes of one :func:`aion.windowed` as the events of another, in one query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aion.base.time import format_duration
from aion.config import Policy
from aion.core.life.actions import PaneKind
from aion.core.query.pane_columns import KIND, NAME, PanesSaid, is_key, metadata_of
from aion.core.query.plan import Plan
from aion.core.query.updates import DROPPED, ORDER, RETRACTED, of_updates
from aion.errors import ConfigError, SchemaError
from aion.execute.assembly import longest_bound_us
from aion.spark.api.files import Files
from aion.spark.api.results import PaneResults, are_results
from aion.spark.api.sources import Rows, Source
from aion.spark.session.types import quoted, with_names
from aion.spark.tasks.child import DROPPED_BEFORE
from aion.spec import Spec


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


class Panes(Rows):
    """The panes of other windows as events. Raises WatermarkError or SchemaError if they cannot be used."""

    rows_first = True

    def __init__(self, df: DataFrame, caller: str) -> None:
        super().__init__(df, caller, is_lossy=True)
        self._results = PaneResults(df, caller)

    @property
    def windows(self) -> PanesSaid:
        return self._results.said

    def delay_us(self, time: str) -> None:
        return None

    @property
    def before(self) -> Sequence[str]:
        name = self.windows.name
        if self._results.is_final:
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
        self._results.check_time(plan.time)
        parts = self._results.meanings
        if self._results.is_final:
            return plan
        for name in plan.key:
            if not is_key(parts.get(name, "")) and parts.get(name) != NAME:
                raise SchemaError(
                    f"key: {name!r} is not part of the key of the windows before, so a later pane might have another "
                    f"value there than the one that it replaces; give {self.windows.name!r} this column as a key, too"
                )
        return of_updates(plan, self.schema, [self._results.meaning.columns[part] for part in self.windows.identity])

    def policy(self, spec: Spec, policy: Policy) -> Policy:
        """Returns the policy with a fixed bound that is as long as these panes may still come."""
        needed_us = self._results.kept_us(spec.time_column)
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
            return self._results.is_kind(PaneKind.RETRACTED)
        if plan.updates is not None and name == DROPPED:
            return self._results.said_of_dropped
        if plan.updates is not None and name == ORDER:
            return self._results.order
        return super()._column(name, plan)

    def _flag(self, plan: Plan) -> Column | None:
        if KIND not in self._results.meaning.columns:
            return None
        return F.when(self._results.is_kind(PaneKind.DROPPED), F.lit(DROPPED_BEFORE)).otherwise(0)


def source_of(caller: str, df: Any, spec: Spec) -> Source:
    """Returns what a call was given as its source."""
    if isinstance(df, Files):
        return df
    if are_results(df):
        return Panes(with_names(df, spec.used_columns), caller)
    return Rows(df, caller, is_lossy=spec.on_lossy_upstream == "accept")
