"""What a user asks for: one frozen specification for ``windowed``, ``explain`` and ``LocalOperator``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

import pyarrow as pa

from aion.aggregates import Aggregate
from aion.base.html import html_of
from aion.base.time import format_early
from aion.core.query.columns import (
    check_names,
    column_name,
    key_names,
    result_schema,
    unique_names,
)
from aion.core.query.deciding import columns_of
from aion.core.query.functions import Apply
from aion.core.query.plan import CHANGES, EMITS, FINAL, ON_REMOVED, Plan, make_plan, output_fields
from aion.core.timing import DurationOrZero, not_negative_us
from aion.core.windows import EMIT, Aligned, Definition, Definitions, PerRecord, named
from aion.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from pyspark.sql import Column

    from aion.config.layers import Source

    Columns: TypeAlias = str | Column | Sequence[str | Column]

Stream = TypeVar("Stream", contravariant=True)
Answer = TypeVar("Answer", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """The fields of :class:`Spec` that have a default, as keywords."""

    time: str | Column | None
    key: Columns | None
    aggregates: Mapping[str, Aggregate] | None
    apply: Apply | None
    emit: Literal["all", "final", "changes"]
    bound: DurationOrZero | None
    trigger: str | Mapping[str, Any] | None
    policy: Source | None
    completeness: bool
    unique: Columns | None
    on_lossy_upstream: Literal["error", "accept"]
    on_removed: Literal["finish", "drop"]
    name: str


class Keywords(Options):
    """The keywords of a call without a :class:`Spec`."""

    windows: Definitions


class Changes(Options, total=False):
    """The keywords of a call with a :class:`Spec`."""

    windows: Definitions


GONE = {
    "lateness": "write bound=",
    "schema": "write apply=aion.Apply(function, schema)",
    "columns": "write apply=aion.Apply(function, schema, columns=...)",
    "blocking": "write apply=aion.Apply(function, schema, blocking=...)",
    "merge_levels": "it is of the policy: set spark.aion.distribution.merge_levels, or write "
    "policy={'distribution': {'merge_levels': ...}}",
    "fan_in": "it is of the policy: set spark.aion.distribution.fan_in, or write "
    "policy={'distribution': {'fan_in': ...}}",
    "keys_disjoint": "it is of the policy: set spark.aion.distribution.keys_disjoint, or write "
    "policy={'distribution': {'keys_disjoint': True}}",
    "record": "it is of the policy: set spark.aion.trace.folder, or write policy={'trace': {'folder': ...}}",
    "lossy_upstream": "write on_lossy_upstream='accept'",
}
"""Keywords of earlier versions, and what to write now."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A windowed aggregation: for :func:`aion.windowed`, :func:`aion.explain` and :class:`aion.LocalOperator`.

    Each of them takes a ``Spec``, its fields as keywords, or a ``Spec`` and keywords that outrank it.

    - ``windows``: one definition, several, or a mapping of names to definitions.
    - ``time``: the column of event times. On Spark, it is the column with the watermark unless you name another.
    - ``key``: one column or several; without it all events are one group. On Spark, ``key`` and ``time`` are names,
      fields of a column (``"s.x"``) or Columns.
    - Either ``aggregates``, a mapping of result columns to :mod:`aion.aggregates`, or ``apply``, an
      :class:`aion.Apply` with a function of the events.
    - ``emit``: ``"all"`` panes of a window; or ``"final"``: one pane for each window and key, when its bound has passed
      and nothing can change it any more; or ``"changes"``: what each batch changed, with the values before in ``old_``
      columns (docs/how-to/sinks.md).
    - ``bound``: how long each window is kept after its end, e.g. ``"2 hours"``. Default: the policy learns it from the
      data.
    - ``trigger``: when a window with late events runs again: a kind, e.g. ``"every_batch"``, or the keys of ``trigger``
      of the policy, e.g. ``{"kind": "interval", "interval": "5 minutes"}``. ``bound`` and ``trigger`` of a definition
      outrank these.
    - ``completeness``: with ``True``, the result also has ``completeness`` and ``completeness_low``: the estimated
      share that a row holds of the events that its key's window will have in the end, and a lower bound on it that
      holds with the policy's ``lateness.confidence`` (docs/inside/lateness.md).
    - ``unique``: columns that identify an event, together with its key and its time; an event that a source delivers
      more than once then counts once (docs/how-to/bad-data.md).
    - ``policy``: a preset, a path or a mapping; on Spark it overrides the session's.
    - ``on_lossy_upstream``, only on Spark: an operator before this one may drop late events, which is an ``"error"``,
      or you ``"accept"`` it.
    - ``on_removed``, only on Spark: when a query starts again without a definition that it had, its windows that have
      begun ``"finish"``, or they ``"drop"`` at once (docs/operate/restarts.md).
    - ``name`` identifies this operator within a query. Keep it the same over restarts.

    Raises WindowError, SchemaError, PolicyError or ConfigError for an error that depends neither on the input nor on
    the session. The policy's file is read for that.
    """

    windows: Definitions
    time: str | Column | None = None
    key: Columns | None = None
    aggregates: Mapping[str, Aggregate] | None = None
    apply: Apply | None = None
    emit: Literal["all", "final", "changes"] = "all"
    bound: DurationOrZero | None = None
    trigger: str | Mapping[str, Any] | None = None
    policy: Source | None = None
    completeness: bool = False
    unique: Columns | None = None
    on_lossy_upstream: Literal["error", "accept"] = "error"
    on_removed: Literal["finish", "drop"] = "finish"
    name: str = "windowed"

    def __post_init__(self) -> None:
        definitions = named(self.windows)
        if self.emit not in EMITS:
            raise ConfigError(f"emit: {self.emit!r} is not known; give 'all', 'final' or 'changes'")
        for name, window in definitions.items():
            if self.apply is not None and isinstance(window, Aligned) and window.fill is not None:
                raise ConfigError(
                    f"windows: {name!r} has fill={window.fill.value!r}, and a function has no result for no events; "
                    "give aggregates= in place of apply=, or leave fill and fill_for out"
                )
            if self.emit == FINAL and window.timing.early_us is not None:
                raise ConfigError(
                    f"emit='final' gives one pane for each window, when it is final, so windows: {name!r} cannot have "
                    f"early={format_early(window.timing.early_us)!r}; leave one of them out"
                )
            if self.emit == FINAL and isinstance(window, PerRecord) and window.on_arrival == EMIT:
                raise ConfigError(
                    f"emit='final' gives one pane for each window, when it is final, so windows: {name!r} cannot have "
                    f"on_arrival={window.on_arrival!r}; leave one of them out"
                )
        if self.on_removed not in ON_REMOVED:
            raise ConfigError(f"on_removed: {self.on_removed!r} is not known; give 'finish' or 'drop'")
        check_lossy(self.on_lossy_upstream)
        if not isinstance(self.completeness, bool):
            raise ConfigError(f"completeness: {self.completeness!r} is neither True nor False")
        if self.time is not None and not isinstance(self.time, str):
            object.__setattr__(self, "time", column_name(self.time, "time", "'ts'"))
        if self.bound is not None:
            not_negative_us(self.bound, "bound")
        keys = key_names(self.key)
        if self.key is not None and not isinstance(self.key, str):
            object.__setattr__(self, "key", keys)
        check_name(self.name)
        if self.unique is not None:
            object.__setattr__(self, "unique", unique_names(self.unique))
        if self.apply is not None and not isinstance(self.apply, Apply):
            raise ConfigError(
                f"apply: {self.apply!r} is no aion.Apply; write apply=aion.Apply(function, schema), e.g. "
                "apply=aion.Apply(median, 'median double')"
            )
        outputs = [field.name for field in self.unbound_outputs()]
        check_names(keys, outputs, completeness=self.completeness, changes=self.emit == CHANGES)
        self._check_execution()

    def _check_execution(self) -> None:
        """Raises PolicyError if the policy, what overrides it, or a trigger is wrong, and ConfigError for windows that
        cannot be recorded.
        """
        from aion.config import load_policy  # slow to import, and children that read a Spec do not need it
        from aion.execute.assembly import check_triggers
        from aion.execute.record.trace import recordable

        check_triggers(self.windows, self.policy_overrides.get("trigger"))
        policy = load_policy("standard" if self.policy is None else self.policy, self.policy_overrides)
        if policy.trace.folder is not None:
            recordable(self.definitions)

    def _repr_html_(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {field.name for field in fields(self) if given[field.name] != field.default}
        shown = {name: value for name, value in given.items() if name in changed and name != "windows"}
        return html_of(f"aion.Spec {self.name}", {"windows": list(self.definitions), **shown})

    @property
    def definitions(self) -> dict[str, Definition]:
        """The definitions of windows, by their names."""
        return named(self.windows)

    @property
    def time_column(self) -> str:
        """The name of the column of event times. Raises SchemaError if none is named."""
        if self.time is None:
            raise SchemaError("time: name the column of event times, e.g. time='ts'")
        return cast(str, self.time)  # a Column became its name

    @property
    def used_columns(self) -> tuple[str, ...]:
        """The names of columns in this definition, some twice. ``"*"`` may be among them."""
        return (
            *key_names(self.key),
            *(() if self.time is None else (self.time,)),
            *(self.unique or ()),
            *((self.apply and self.apply.columns) or ()),
            *(
                name
                for aggregate in (self.aggregates or {}).values()
                if isinstance(aggregate, Aggregate)
                for name in aggregate.columns
            ),
            *columns_of(self.definitions.values()),
        )

    @property
    def policy_overrides(self) -> dict[str, object]:
        """The values of this definition that override the policy's, by the policy's keys."""
        kept = None if self.bound is None else {"initial_bound": self.bound, "coverage": None}
        keywords = {
            "lateness": kept,
            "trigger": {"kind": self.trigger} if isinstance(self.trigger, str) else self.trigger,
        }
        return {name: value for name, value in keywords.items() if value is not None}

    def plan(self, input_schema: pa.Schema) -> Plan:
        """Returns the plan for an input with these columns; its timestamps are in microseconds. Raises SchemaError."""
        apply = self.apply
        return make_plan(
            input_schema,
            key=tuple(map(str, key_names(self.key))),  # a Column cannot go to a task
            time=str(self.time_column),
            windows=self.windows,
            aggregates=self.aggregates,
            apply=None if apply is None else apply.function,
            outputs=None if apply is None else apply.schema,
            columns=None if apply is None else apply.columns,
            blocking=apply is None or apply.blocking,
            emit=self.emit,
            completeness=self.completeness,
            unique=self.unique,
        )

    def unbound_outputs(self) -> list[pa.Field]:
        """Returns the result columns of the aggregates or the function; type null if it depends on the input.

        Raises ConfigError.
        """
        apply = self.apply
        if apply is None:
            return output_fields(self.aggregates, None, None)
        arrow = isinstance(apply.schema, str | pa.Schema)
        return output_fields(self.aggregates, apply.function, apply.schema if arrow else pa.schema([]))

    def unbound_result(self) -> pa.Schema:
        """Returns all columns of the result before the input is known; type null if it depends on the input."""
        key = [pa.field(name, pa.null()) for name in key_names(self.key)]
        changes = self.emit == CHANGES
        return result_schema(key, pa.null(), self.unbound_outputs(), completeness=self.completeness, changes=changes)


def check_lossy(on_lossy_upstream: str) -> None:
    """Raises ConfigError for a word that ``on_lossy_upstream=`` does not take."""
    if on_lossy_upstream not in ("error", "accept"):
        raise ConfigError(f"on_lossy_upstream: {on_lossy_upstream!r} is not known; give 'error' or 'accept'")


def check_keywords(caller: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError for a keyword that is not known, with what to write instead."""
    for name in given:
        if name in known:
            continue
        if name in GONE:
            raise TypeError(f"{caller}() has no keyword {name!r} any more; {GONE[name]}")
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


def check_name(name: str) -> None:
    """Raises ConfigError if an operator cannot have this name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", name):
        raise ConfigError(
            f"name: {name!r} becomes a folder name; use only letters, digits, '_', '-' and '.', and do not start "
            "with '.'"
        )


class OfSpec(Protocol[Stream, Answer]):
    """A function of a stream that takes a :class:`Spec`, its fields as keywords, or both."""

    __name__: str

    @overload
    def __call__(self, df: Stream, /, **definition: Unpack[Keywords]) -> Answer: ...
    @overload
    def __call__(self, df: Stream, spec: Spec, /, **changes: Unpack[Changes]) -> Answer: ...


def of_spec(function: Callable[[Stream, Spec], Answer]) -> OfSpec[Stream, Answer]:
    """Makes a function of a stream and a :class:`Spec` also take the fields as keywords, and shows them in its help."""

    @wraps(function)
    def call(df: Stream, spec: Spec | None = None, /, **definition: Any) -> Answer:
        return function(df, spec_of(function.__name__, spec, definition))

    call.__annotations__ = {**function.__annotations__, "spec": "Spec | None"}
    return shows_fields(call)


def shows_fields(function: Function) -> Function:
    """Makes ``help`` show the fields of :class:`Spec` instead of ``**definition``."""
    shown = signature(function, follow_wrapped=False)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    for field in fields(Spec):
        default = Parameter.empty if field.default is MISSING else field.default
        own.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type))
    function.__signature__ = shown.replace(parameters=own)  # type: ignore[attr-defined]
    return function


def spec_of(caller: str, spec: Spec | None, keywords: Mapping[str, Any]) -> Spec:
    """Returns the specification of a call that was given one, keywords, or both. Raises TypeError for a wrong
    keyword.
    """
    check_keywords(caller, keywords, [field.name for field in fields(Spec)])
    if spec is not None:
        if not isinstance(spec, Spec):
            raise TypeError(f"{caller}() takes an aion.Spec or keywords, not {spec!r}")
        return replace(spec, **keywords)
    if "windows" not in keywords:
        raise TypeError(f"{caller}() needs the keyword argument 'windows'")
    return Spec(**keywords)
