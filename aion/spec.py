"""What a user asks for: one frozen specification for ``windowed``, ``explain`` and ``LocalOperator``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

import pyarrow as pa

from aion.aggregates import Aggregate
from aion.base.html import html_of
from aion.base.time import format_early
from aion.core.query.columns import check_names, column_names, key_names, result_schema, unique_names
from aion.core.query.deciding import columns_of
from aion.core.query.plan import CHANGES, EMITS, FINAL, ON_REMOVED, ApplyFunction, Plan, make_plan, output_fields
from aion.core.timing import DurationOrZero
from aion.core.windows import Definition, Definitions, PerRecord, named
from aion.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql.types import StructType

    from aion.config.layers import Source

Stream = TypeVar("Stream", contravariant=True)
Answer = TypeVar("Answer", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """The fields of :class:`Spec` that have a default, as keywords."""

    key: str | Sequence[str] | None
    aggregates: Mapping[str, Aggregate] | None
    apply: ApplyFunction | None
    schema: str | pa.Schema | StructType | None
    columns: str | Sequence[str] | None
    blocking: bool
    emit: Literal["all", "final", "changes"]
    lateness: DurationOrZero | None
    trigger: str | Mapping[str, Any] | None
    policy: Source | None
    merge_levels: int | None
    fan_in: int | None
    keys_disjoint: bool
    completeness: bool
    unique: str | Sequence[str] | None
    lossy_upstream: bool
    on_removed: Literal["finish", "drop"]
    name: str
    record: str | Path | None


class Keywords(Options):
    """The keywords of a call without a :class:`Spec`."""

    windows: Definitions
    time: str


class Changes(Options, total=False):
    """The keywords of a call with a :class:`Spec`."""

    windows: Definitions
    time: str


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A windowed aggregation: for :func:`aion.windowed`, :func:`aion.explain` and :class:`aion.LocalOperator`.

    Each of them takes a ``Spec``, its fields as keywords, or a ``Spec`` and keywords that outrank it.

    ``windows``: one definition, several, or a mapping of names to definitions. ``time``: the column of event times.
    ``key``: one column or several; without it all events are one group. Give either ``aggregates`` (result column ->
    :mod:`aion.aggregates`) or ``apply``, a function of (key, window, events), with the ``schema`` of its result.
    ``events``: record batches with the key, the time, and the ``columns`` of the input, in the input's order; also
    those that windows and ``unique`` need. Default: all columns, but on Spark not one that has the watermark and is not
    the time. ``blocking=False``: the function reads event by event. Then a window may be larger than memory, and the
    function starts before the whole window is staged. ``emit``: ``"all"`` panes of a window, or ``"final"``: one pane
    for each window and key, when its bound has passed and nothing can change it any more; or ``"changes"``: what each
    batch changed, with the values before in ``old_`` columns (docs/how-to/sinks.md). ``lateness``: how long each window
    is kept after its end, e.g. ``"2 hours"``; without it, the policy learns that from the data. ``trigger``: when a
    window with late events runs again: a kind, e.g. ``"every_batch"``, or the keys of ``trigger`` of the policy, e.g.
    ``{"kind": "interval", "interval": "5 minutes"}``. A definition's own outrank both. ``completeness=True`` adds
    ``completeness`` and ``completeness_low`` to the result: the estimated share that a row holds of the events that its
    key's window will have in the end, and a lower bound on it that holds with the policy's ``lateness.confidence``
    (docs/inside/lateness.md). ``unique``: columns that identify an event, together with its key and its time; an event
    that a source delivers more than once then counts once (docs/how-to/bad-data.md). ``policy``: a preset, a path or a
    mapping; on Spark it overrides the session's. ``record``: a folder for a trace of arrivals, without payload, for
    ``aion tune`` (docs/operate/tuning.md). On Spark it is a folder on each executor's host.

    The other fields only matter on Spark. ``merge_levels`` and ``fan_in`` override ``distribution`` of the policy: the
    levels between source partitions and shards that merge blocks. ``keys_disjoint=True`` declares that all events of a
    key come from one source partition, so nothing has to be merged before the shards. If that is wrong, the panes are
    still right. ``lossy_upstream=True``: an operator before this one may drop late events, which is an error otherwise.
    ``on_removed``: when a query starts again without a definition that it had, its windows that have begun finish, or
    with ``"drop"``, they go at once (docs/operate/restarts.md). ``name`` identifies this operator within a query. Keep
    it the same over restarts.

    Raises WindowError, SchemaError, PolicyError or ConfigError for an error that depends neither on the input nor on
    the session. The policy's file is read for that.
    """

    windows: Definitions
    time: str
    key: str | Sequence[str] | None = None
    aggregates: Mapping[str, Aggregate] | None = None
    apply: ApplyFunction | None = None
    schema: str | pa.Schema | StructType | None = None
    columns: str | Sequence[str] | None = None
    blocking: bool = True
    emit: Literal["all", "final", "changes"] = "all"
    lateness: DurationOrZero | None = None
    trigger: str | Mapping[str, Any] | None = None
    policy: Source | None = None
    merge_levels: int | None = None
    fan_in: int | None = None
    keys_disjoint: bool = False
    completeness: bool = False
    unique: str | Sequence[str] | None = None
    lossy_upstream: bool = False
    on_removed: Literal["finish", "drop"] = "finish"
    name: str = "windowed"
    record: str | Path | None = None

    def __post_init__(self) -> None:
        definitions = named(self.windows)
        if self.emit not in EMITS:
            raise ConfigError(f"emit: {self.emit!r} is not known; give 'all', 'final' or 'changes'")
        for name, window in definitions.items():
            if self.emit == FINAL and window.timing.early_us is not None:
                raise ConfigError(
                    f"emit='final' gives one pane for each window, when it is final, so windows: {name!r} cannot have "
                    f"early={format_early(window.timing.early_us)!r}; leave one of them out"
                )
            if self.emit == FINAL and isinstance(window, PerRecord) and window.emit_on != "watermark":
                raise ConfigError(
                    f"emit='final' gives one pane for each window, when it is final, so windows: {name!r} cannot have "
                    f"emit_on={window.emit_on!r}; leave one of them out"
                )
        if self.on_removed not in ON_REMOVED:
            raise ConfigError(f"on_removed: {self.on_removed!r} is not known; give 'finish' or 'drop'")
        for name in ("blocking", "keys_disjoint", "completeness", "lossy_upstream"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}: {value!r} is neither True nor False")
        is_path = isinstance(self.record, str) or hasattr(self.record, "__fspath__")
        if self.record is not None and (not is_path or not str(self.record).strip() or "\0" in str(self.record)):
            raise ConfigError(f"record: {self.record!r} is not the path of a folder")
        if not isinstance(self.time, str):
            raise SchemaError(f"time: {self.time!r} is not the name of a column; give e.g. time='ts'")
        keys = key_names(self.key)
        check_name(self.name)
        if self.unique is not None:
            unique_names(self.unique)
        if self.keys_disjoint and not keys:
            raise ConfigError(
                "keys_disjoint: it requires a key; it means that each key is in one source partition only"
            )
        if self.columns is not None:
            column_names(self.columns, "columns", "'speed'")
            if self.apply is None:
                raise ConfigError("columns= belongs to apply=; aggregates read the columns that they name")
        outputs = [field.name for field in self.unbound_outputs()]
        check_names(keys, outputs, completeness=self.completeness, changes=self.emit == CHANGES)
        self._check_execution()

    def _check_execution(self) -> None:
        """Raises PolicyError if the policy, what overrides it, or a trigger is wrong, and ConfigError for windows that
        cannot be recorded.
        """
        from aion.config import load_policy  # slow to import, and children that read a Spec do not need it
        from aion.execute.assembly import check_triggers
        from aion.execute.trace import recordable

        if self.record is not None:
            recordable(self.definitions)
        check_triggers(self.windows, self.policy_overrides.get("trigger"))
        load_policy("standard" if self.policy is None else self.policy, self.policy_overrides)

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
    def used_columns(self) -> tuple[str, ...]:
        """The names of columns in this definition, some twice. ``"*"`` may be among them."""
        named_by = [value for value in (self.unique, self.columns) if value is not None]
        return (
            *key_names(self.key),
            self.time,
            *(name for value in named_by for name in column_names(value, "columns", "'speed'")),
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
        kept = None if self.lateness is None else {"initial_bound": self.lateness, "coverage": None}
        keywords = {
            "distribution_merge_levels": self.merge_levels,
            "distribution_fan_in": self.fan_in,
            "lateness": kept,
            "trigger": {"kind": self.trigger} if isinstance(self.trigger, str) else self.trigger,
        }
        return {name: value for name, value in keywords.items() if value is not None}

    def plan(self, input_schema: pa.Schema) -> Plan:
        """Returns the plan for an input with these columns; its timestamps are in microseconds. Raises SchemaError."""
        return make_plan(
            input_schema,
            key=self.key,
            time=self.time,
            windows=self.windows,
            aggregates=self.aggregates,
            apply=self.apply,
            outputs=self.schema,
            columns=self.columns,
            blocking=self.blocking,
            emit=self.emit,
            completeness=self.completeness,
            unique=self.unique,
        )

    def unbound_outputs(self) -> list[pa.Field]:
        """Returns the result columns of the aggregates or the function; type null if it depends on the input.

        Raises ConfigError.
        """
        arrow = self.schema is None or isinstance(self.schema, str | pa.Schema)
        return output_fields(self.aggregates, self.apply, self.schema if arrow else pa.schema([]))

    def unbound_result(self) -> pa.Schema:
        """Returns all columns of the result before the input is known; type null if it depends on the input."""
        key = [pa.field(name, pa.null()) for name in key_names(self.key)]
        changes = self.emit == CHANGES
        return result_schema(key, pa.null(), self.unbound_outputs(), completeness=self.completeness, changes=changes)


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
    known = [field.name for field in fields(Spec)]
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    if spec is not None:
        if not isinstance(spec, Spec):
            raise TypeError(f"{caller}() takes an aion.Spec or keywords, not {spec!r}")
        return replace(spec, **keywords)
    missing = [name for name in ("windows", "time") if name not in keywords]
    if missing:
        raise TypeError(f"{caller}() needs the keyword argument {missing[0]!r}")
    return Spec(**keywords)
