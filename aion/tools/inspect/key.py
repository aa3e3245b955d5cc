"""``aion inspect --key``: what a stateful processor keeps for one key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from aion.base.hashing import ShardOfKeys
from aion.base.time import format_instant
from aion.errors import ConfigError, CorruptState, SchemaError
from aion.spark.session.types import arrow_schema
from aion.stateful.contents import ListContent, MapContent, ValueContent
from aion.stateful.json_values import JsonKey, json_text
from aion.stateful.layout import record_key
from aion.stateful.packing import unpack
from aion.stateful.record import KeyRecord
from aion.stateful.run import variables_of
from aion.stateful.variables import Variable
from aion.tools.inspect import tables
from state_backends.server.reading import held
from state_backends.versions.audit import StateFolder

VALUES = 20
_MOST_CHARACTERS = 1_000


class _Operator(NamedTuple):
    """A stateful processor in a state folder. ``place``: as in ShardFinding. ``found``: its ``operator.json``."""

    query: str
    place: str
    found: dict[str, Any]
    shards: list[str]

    @property
    def key(self) -> JsonKey:
        return JsonKey(self.found["definition"]["key"])

    def __str__(self) -> str:
        return f"operator {self.place} of query {self.query}, whose key is ({self.key})"


class _Asked(NamedTuple):
    """A key in an operator, as its bytes, and the shards in which it may be."""

    operator: _Operator
    key: bytes
    shards: list[str]


def show_key(state_dir: str, text: str, operator: str | None, most: int) -> None:
    """Prints what the operators with such a key keep for it.

    ``text``: a JSON object with the columns of the key. ``operator``: only the operator of this name. ``most``: the
    most elements to show of a list or map. Raises ConfigError if no operator has such a key.
    """
    given = _parsed(text)
    console = tables.console()
    with closing(StateFolder(state_dir)) as folder:
        for asked in _matching(list(_operators(folder, operator)), given, state_dir, operator):
            _show(console, folder, asked, json.dumps(given, ensure_ascii=False), most)


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
        json.dumps(given, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a half of a character
    except ValueError as error:
        raise ConfigError(f"--key: {text!r} is not JSON: {error}; write it like {_EXAMPLE}") from error
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"--key: {text!r} is not an object with the columns of the key; write it like {_EXAMPLE}")
    return given


_EXAMPLE = """--key '{"user": "anna"}'"""


def _operators(folder: StateFolder, name: str | None) -> Iterator[_Operator]:
    shards: dict[tuple[str, str], list[str]] = {}
    for query, place, shard in folder.shards():
        shards.setdefault((query, place), []).append(shard)
    for (query, place), names in sorted(shards.items()):
        if name in (None, place.partition("/")[0], place):
            found = folder.operator(query, place)
            if found["definition"].get("kind") == "stateful":
                yield _Operator(query, place, found, names)


def _matching(
    operators: Sequence[_Operator], given: dict[str, Any], state_dir: str, name: str | None
) -> Iterator[_Asked]:
    if not operators:
        which = "stateful processor" if name is None else f"stateful processor of the name {name!r}"
        raise ConfigError(f"{state_dir}: there is no {which} here; aion inspect without --key shows what there is")
    matching, reasons = [], []
    for operator in operators:
        try:
            matching.append(_asked(operator, given))
        except SchemaError as error:
            reasons.append(f"{operator}: {error}")
    if not matching:
        raise ConfigError("--key: no operator has such a key\n" + "\n".join(reasons))
    return iter(matching)


def _asked(operator: _Operator, given: dict[str, Any]) -> _Asked:
    """Raises SchemaError if the key has other columns or types."""
    values = operator.key.values(given)
    key = operator.key.to_bytes(values)
    arrow = arrow_schema(operator.key.schema)
    if not ShardOfKeys.covers(arrow.types):
        return _Asked(operator, key, operator.shards)
    columns = [pa.array([value], type_) for value, type_ in zip(values, arrow.types, strict=True)]
    shard = f"shard-{ShardOfKeys(operator.found['ids'])(columns, 1)[0]:05d}"
    return _Asked(operator, key, [shard] if shard in operator.shards else [])


# -- showing ----------------------------------------------------------------------------------------------


def _show(console: Console, folder: StateFolder, asked: _Asked, text: str, most: int) -> None:
    where = f"operator {asked.operator.place} of query {asked.operator.query}"
    batches = []
    for shard in asked.shards:
        finding = folder.check((asked.operator.query, asked.operator.place, shard), contents=False)
        if finding.newest is None or finding.newest.manifest is None:
            raise CorruptState(f"{where}, {shard}: no version is whole; aion inspect without --key says why")
        manifest = finding.newest.manifest
        batches.append(finding.newest.batch)
        names = asked.operator.query, *asked.operator.place.split("/"), shard
        with held(folder.location, names, manifest) as version, version.reading() as values:
            (data,) = values.get([record_key(asked.key)])
            if data is None:
                continue
            record = KeyRecord(asked.key, data, values)
            number = tables.called(shard, manifest.identity.ids)
            title = f"{text} in {where}, shard {number}, as of batch {finding.newest.batch}"
            console.print(title, soft_wrap=True)
            console.print(f"timers: {_timers(record.timers, most)}", soft_wrap=True)
            for variable in variables_of(manifest.snapshot):
                _show_variable(console, record, variable, most)
        return
    as_of = f", as of batch {max(batches)}" if batches else ""
    console.print(f"{text}: no state in {where}{as_of}", soft_wrap=True)


def _timers(times_ms: Sequence[int], most: int) -> str:
    shown = ", ".join(format_instant(ms * 1000) for ms in times_ms[:most])
    left = len(times_ms) - most
    return "none" if not times_ms else f"{shown}, and {left:,} later ones" if left > 0 else shown


def _show_variable(console: Console, record: KeyRecord, variable: Variable, most: int) -> None:
    content, pages = record.content(variable), record.pages(variable)
    count, exact = 1, True
    rows: Iterator[tuple[str, Sequence[Any]]]
    match content:
        case ValueContent():
            count = int(content.value is not None)
            rows = iter([("", (content.expires, content.value))][:count])
        case ListContent():
            count, exact = content.count(pages)
            rows = ((str(at), element) for at, element in enumerate(content.elements(pages)))
        case MapContent():
            assert variable.key_codec is not None
            count, keys = content.count, variable.key_codec.schema
            rows = ((_cut(json_text(unpack(key), keys)), element) for key, *element in content.entries(pages))
    title = f"{variable.kind.value} {variable.name}"
    if not count:
        console.print(f"{title}: empty")
        return
    shown = list(islice(rows, most + 1))
    if len(shown) > most:
        about = "" if exact else "about "
        title += f": the first {most:,} of {about}{max(count, len(shown)):,}, --values N shows more"
        shown.pop()
    console.print(title, soft_wrap=True)  # a title of the table would be as narrow as the table
    if not shown:
        return
    table = Table()
    first = {"list": "at", "map": "key"}.get(variable.kind.value)
    expires = any(element[0] for _, element in shown)
    for name in (first, "value", "expires" if expires else None):
        if name is not None:
            table.add_column(name, overflow="fold")
    for key, (expires_ms, plain, *_) in shown:
        cells = [_cut(json_text(plain, variable.codec.schema))]
        if first is not None:
            cells.insert(0, key)
        if expires:
            cells.append(format_instant(expires_ms * 1000) if expires_ms else "never")
        table.add_row(*cells)
    console.print(table)


def _cut(text: str) -> str:
    left = len(text) - _MOST_CHARACTERS
    return text if left <= 0 else f"{text[:_MOST_CHARACTERS]} and {left:,} more characters"
