"""Results of an operator of Aion as the input of another one, in one query.

Spark gives each operator the watermark of the one before it, in the same batch. So a result may come in the batch whose
watermark ends what it belongs to: operators behind others take their rows before they move their watermark.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aion.core.life.actions import PaneKind
from aion.core.query.pane_columns import END, KIND, SEQ, START, PaneColumns, PanesSaid
from aion.core.query.plan import FINAL
from aion.errors import SchemaError, WatermarkError
from aion.spark.api.watermarks import WATERMARK
from aion.spark.session import upstream
from aion.spark.session.plans import Node
from aion.spark.session.types import quoted

_SAID = ("reason", "event_time", "lateness_us", "event")


def are_results(df: object) -> bool:
    """Returns whether a DataFrame has results of an operator of Aion, without a watermark of its own."""
    if not isinstance(df, DataFrame) or not df.isStreaming or any(WATERMARK in field.metadata for field in df.schema):
        return False
    return upstream.has_windows(df)


class PaneResults:
    """What is known of a DataFrame with results. Raises WatermarkError or SchemaError if they cannot be an input.

    If a later result replaces an earlier one, nothing may come between that leaves rows out, since what it leaves out
    would still count; and results must be recognised by the columns that identify them.
    """

    def __init__(self, df: DataFrame, caller: str) -> None:
        self._df, self._caller = df, caller
        meaning = PaneColumns.of((field.name, field.metadata) for field in df.schema)
        between = upstream.before_windows(df)
        if between is None:
            raise WatermarkError(
                f"{caller}: panes of aion.windowed are put together with other rows, and Spark has no watermark for "
                "both. Write the panes to a table with aion.sinks.upsert, and read them in another query"
            )
        if meaning is None:
            raise SchemaError(
                f"{caller}: no column of the windows before is left; keep the key, window_start, window_end, "
                "kind and pane_seq of the panes (an alias is fine)"
            )
        self.meaning = meaning
        self._check(between)

    @property
    def said(self) -> PanesSaid:
        return self.meaning.said

    @property
    def is_final(self) -> bool:
        """Whether no result is replaced by a later one."""
        return self.said.emit == FINAL

    @property
    def meanings(self) -> dict[str, str]:
        """Which part of a pane a column is, by its name."""
        return {column: part for part, column in self.meaning.columns.items()}

    def _check(self, between: Sequence[Node]) -> None:
        drops = any(map(upstream.leaves_out_dropped, between))
        if KIND not in self.meaning.columns and not (self.is_final and drops):
            raise SchemaError(
                f"{self._caller}: the column 'kind' of the windows before is missing. It says which results replace "
                "others and which rows are dropped events; keep it in the select"
            )
        if self.is_final:
            return
        if missing := self.meaning.missing(SEQ):
            raise SchemaError(
                f"{self._caller}: {' and '.join(missing)} of the windows before is missing. A later pane replaces the "
                "earlier one with the same key and window, so keep these columns in the select (an alias is fine); or "
                "give the windows before emit='final', so that each pane is the only one"
            )
        for node in between:
            if not upstream.keeps_each_row(node):
                raise WatermarkError(
                    f"{self._caller}: {node.name} comes between the two operators. A result that it leaves "
                    "out cannot replace the earlier one, which would count for ever. Make values null instead "
                    "(when(...)), or give the first operator emit='final', so that each result is the only one"
                )

    def check_time(self, time: str) -> None:
        """Raises SchemaError unless all versions of a result have the same value in this column."""
        part = self.meanings.get(time)
        if part not in (START, END):
            raise SchemaError(
                f"time: {time!r} is neither window_start nor window_end of the windows before; give one of these "
                "(an alias is fine), so that all panes of a window fall into the same windows"
            )
        if part == START and self.said.longest_us is None:
            raise SchemaError(
                f"time: windows of {self.said.name!r} may have any length, so those that begin in a window may end "
                "at any time after it; give their window_end as the time"
            )

    def delay_us(self, time: str) -> int:
        """Returns how long after its time a result comes that is on time: what is final comes last of all."""
        return self.kept_us(time) if self.is_final else self._length_us(time)

    def kept_us(self, time: str) -> int:
        """Returns how long after its time a result may still come."""
        return self.said.kept_us + self._length_us(time)

    def _length_us(self, time: str) -> int:
        return (self.said.longest_us or 0) if self.meanings[time] == START else 0

    @property
    def kind(self) -> Column:
        if KIND not in self.meaning.columns:
            return F.lit(PaneKind.FINAL.value)
        return self._df[quoted(self.meaning.columns[KIND])]

    def is_kind(self, kind: PaneKind) -> Column:
        return F.coalesce(self.kind == kind.value, F.lit(False))

    @property
    def order(self) -> Column:
        """Later results have larger numbers. Dropped rows have none."""
        if SEQ not in self.meaning.columns:
            return F.lit(0).cast("bigint")
        return F.coalesce(self._df[quoted(self.meaning.columns[SEQ])], F.lit(0))

    @property
    def said_of_dropped(self) -> Column:
        """What the operator before says of what it dropped, as JSON; null in other rows."""
        said = [self._df[quoted(column)] for column in _SAID if column in self._df.columns]
        return F.when(self.is_kind(PaneKind.DROPPED), F.to_json(F.struct(*said)) if said else F.lit("{}"))
