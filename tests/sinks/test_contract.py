"""Tables of the user's own making: what every sink does with every kind of table that its store has.

A test compares the table with a dictionary after each batch. So it sees a row that is lost as one that stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aion.errors import SchemaError
from aion.sinks.marks import Goal
from tests.sinks.databases import KINDS, Place
from tests.sinks.lakes import LAKES, Lake
from tests.sinks.rig import QUERY, at, panes
from tests.sinks.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
DAY = 24 * 60
KEYS = [
    "a",
    "b",
    None,
    "",
    " ",
    "A",
    "'",
    '"',
    "x=y/%z",
    "ä",
    "null",
    "NULL",
    "__HIVE_DEFAULT_PARTITION__",
    "\\",
    "a\nb",
]


def made(table: Table) -> pa.Schema:
    """The columns of a table that the sink makes, by making one."""
    table.sink("pattern").write(panes([{"k": "a", "n": 1}]), at(0))
    if isinstance(table.at, Lake):
        return table.at.content("pattern").schema
    return pa.schema([])


# -- how users make their tables ----------------------------------------------------------------------------------


def in_sql(columns: str = "", after: str = "", parts: tuple[str, ...] = (), n: str = "") -> Callable[[Table], None]:
    """A table with the columns that the sink makes, and more. ``n``: what is said of the column n."""

    def make(table: Table) -> None:
        assert isinstance(table.at, Place)
        text, number, time = "text", "bigint", "timestamp with time zone"
        if table.kind == "sqlite":
            number, time = "INTEGER", "TEXT"
        kinds = {"k": text, '"window"': text, "window_start": time, "window_end": time, "n": f"{number} {n}"}
        kinds |= {"pane": number, "kind": text, "events": number, "late_events": number, "closes_at": time}
        if table.kind == "duckdb":
            kinds = {name: kind.replace("text", "varchar") for name, kind in kinds.items()}
        names = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        table.at.run(f"CREATE TABLE minutes ({names}{columns}) {after}")
        for part in parts:
            table.at.run(f"CREATE TABLE {part}")

    return make


def in_delta(
    *fields: dict[str, Any],
    partitions: tuple[str, ...] = (),
    settings: dict[str, str] | None = None,
    protocol: tuple[int, int] = (1, 2),
    features: tuple[str, ...] = (),
    mapped: bool = False,
    of_n: dict[str, Any] | None = None,
) -> Callable[[Table], None]:
    """A table whose log says what Spark writes there. ``of_n``: what is said of the column n."""

    def make(table: Table) -> None:
        assert isinstance(table.at, Lake)
        types = {pa.string(): "string", pa.int64(): "long", pa.int32(): "integer"}
        columns: list[dict[str, Any]] = [
            {"name": field.name, "type": types.get(field.type, "timestamp"), "nullable": True, "metadata": {}}
            for field in made(table)
        ]
        columns += [{"nullable": True, "metadata": {}} | field for field in fields]
        for number, column in enumerate(columns):
            if column["name"] == "n":
                column |= of_n or {}
            if mapped:
                name = {"delta.columnMapping.id": number + 1, "delta.columnMapping.physicalName": f"col-{number}"}
                column["metadata"] = column["metadata"] | name
        said = {"minReaderVersion": protocol[0], "minWriterVersion": protocol[1]}
        said |= {"writerFeatures": list(features)} if protocol[1] == 7 else {}
        said |= {"readerFeatures": [f for f in features if f in OF_READERS]} if protocol[0] == 3 else {}
        schema = json.dumps({"type": "struct", "fields": columns})
        meta = {"id": "made", "format": {"provider": "parquet", "options": {}}, "schemaString": schema}
        meta |= {"partitionColumns": list(partitions), "configuration": settings or {}, "createdTime": 0}
        log = Path(table.at.name("minutes")) / "_delta_log"
        log.mkdir(parents=True)
        (log / f"{0:020}.json").write_text(
            "\n".join(json.dumps(line) for line in ({"protocol": said}, {"metaData": meta}))
        )

    return make


OF_READERS = ("columnMapping", "deletionVectors", "v2Checkpoint")
MAPPING = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "20"}
OF_DAY = {"name": "day", "type": "date", "metadata": {"delta.generationExpression": "CAST(window_start AS DATE)"}}
TWICE = {"name": "twice", "type": "long", "metadata": {"delta.generationExpression": "n * 2"}}


def in_iceberg(
    column: str | None = None,
    transform: str = "",
    required: tuple[str, ...] = (),
    version: str = "2",
    more: bool = False,
) -> Callable[[Table], None]:
    """A table of the catalog, partitioned by a transform of a column."""

    def make(table: Table) -> None:
        from pyiceberg.transforms import parse_transform

        assert isinstance(table.at, Lake)
        fields = [pa.field(f.name, f.type, nullable=f.name not in required) for f in made(table)]
        fields += [pa.field("remark", pa.string())] if more else []
        with table.at.catalog() as catalog:
            found = catalog.create_table("tests.minutes", pa.schema(fields), properties={"format-version": version})
            if column is not None:
                with found.update_spec() as spec:
                    spec.add_field(column, parse_transform(transform), "part")

    return make


def of_version_3(table: Table) -> None:
    """A table that Spark has made. pyiceberg can read its metadata, and no more."""
    assert isinstance(table.at, Lake)
    made(table)
    with table.at.catalog() as catalog:
        found = catalog.load_table("tests.pattern")
        location = found.metadata_location.removeprefix("file://").replace(".metadata.json", "-3.metadata.json")
        newer = json.loads(found.metadata.model_dump_json()) | {"format-version": 3, "next-row-id": 0}
        newer |= {"snapshots": [], "current-snapshot-id": -1, "refs": {}, "snapshot-log": []}
        Path(location).write_text(json.dumps(newer))
        catalog.register_table("tests.minutes", f"file://{location}")


def by_the_sink(table: Table) -> None:
    """There is no table before the first batch."""


TABLES: dict[str, dict[str, Callable[[Table], None]]] = {
    kind: {
        "made by the sink": by_the_sink,
        "without an index": in_sql(),
        "with more columns": in_sql(", remark varchar(20) DEFAULT 'none'"),
        "constrained": in_sql(", CHECK (n >= 0)", n="NOT NULL"),
    }
    for kind in KINDS
}
STORED = ", twice bigint GENERATED ALWAYS AS (n * 2) STORED"
UNIQUE = ', UNIQUE (k, "window", window_start, window_end)'
TABLES["sqlite"] |= {
    "with a generated column": in_sql(STORED),
    "with a unique key": in_sql(UNIQUE),
    "strict": in_sql(after="STRICT"),
}
TABLES["postgresql"] |= {
    "with a generated column": in_sql(STORED),
    "with a unique key": in_sql(UNIQUE),
    "partitioned by range": in_sql(
        after="PARTITION BY RANGE (window_start)",
        parts=(
            "first PARTITION OF minutes FOR VALUES FROM (MINVALUE) TO ('1970-01-02Z')",
            "rest PARTITION OF minutes DEFAULT",
        ),
    ),
    "partitioned by list": in_sql(
        after="PARTITION BY LIST (k)",
        parts=("first PARTITION OF minutes FOR VALUES IN ('a', NULL)", "rest PARTITION OF minutes DEFAULT"),
    ),
    "partitioned by hash": in_sql(
        after="PARTITION BY HASH (k)",
        parts=tuple(f"p{n} PARTITION OF minutes FOR VALUES WITH (MODULUS 2, REMAINDER {n})" for n in range(2)),
    ),
}
TABLES["duckdb"] |= {"with a generated column": in_sql(", twice bigint GENERATED ALWAYS AS (n * 2)")}
TABLES["delta"] = {
    "made by the sink": by_the_sink,
    "plain": in_delta(),
    "with more columns": in_delta({"name": "remark", "type": "string"}),
    "constrained": in_delta(settings={"delta.constraints.few": "n >= 0"}, protocol=(1, 3)),
    "with an invariant": in_delta(of_n={"nullable": False}),
    "with a generated column": in_delta(TWICE, protocol=(1, 4)),
    "partitioned by a generated day": in_delta(OF_DAY, partitions=("day",), protocol=(1, 4)),
    "partitioned by window_start": in_delta(partitions=("window_start",)),
    "mapped by name": in_delta(settings=MAPPING, protocol=(2, 5), mapped=True),
    "mapped by id": in_delta(settings=MAPPING | {"delta.columnMapping.mode": "id"}, protocol=(2, 5), mapped=True),
    "mapped, with features": in_delta(settings=MAPPING, protocol=(3, 7), features=("columnMapping",), mapped=True),
    "mapped and partitioned": in_delta(
        OF_DAY, settings=MAPPING, partitions=("day",), protocol=(3, 7), mapped=True,
        features=("columnMapping", "generatedColumns"),
    ),
    "with a change data feed": in_delta(settings={"delta.enableChangeDataFeed": "true"}, protocol=(1, 4)),
    "with new checkpoints": in_delta(
        settings={"delta.checkpointPolicy": "v2"}, protocol=(3, 7), features=("v2Checkpoint",)
    ),
}  # fmt: skip
TABLES["iceberg"] = {
    "made by the sink": by_the_sink,
    "plain": in_iceberg(),
    "of version 1": in_iceberg(version="1"),
    "with more columns": in_iceberg(more=True),
    "with columns that are required": in_iceberg(required=("window_start", "n")),
    **{
        f"partitioned by {transform} of {column}": in_iceberg(column, transform)
        for column, transform in [
            ("window_start", "year"), ("window_start", "month"), ("window_start", "day"), ("window_start", "hour"),
            ("window_start", "identity"), ("k", "bucket[4]"), ("k", "truncate[2]"), ("k", "identity"), ("n", "void"),
        ]
    },
}  # fmt: skip
ALL = [(kind, name) for kind, tables in TABLES.items() for name in tables]

SLOW = {
    "without an index", "with a unique key", "partitioned by list", "partitioned by hash", "of version 1",
    "mapped by id", "with a change data feed", "with an invariant", "partitioned by window_start",
    "partitioned by void of n", "partitioned by truncate[2] of k",
    *(f"partitioned by {of} of window_start" for of in ("year", "month", "identity")),
}  # fmt: skip
"""These differ little from others, and run with the long tests."""


@pytest.fixture
def theirs(table: Table, request: pytest.FixtureRequest) -> Iterator[Table]:
    """A place with the table of the user."""
    TABLES[table.kind][request.param](table)
    yield table


def with_tables(*parts: str) -> Any:
    """Runs a test once for each kind of table whose name has one of some words."""
    found = [
        pytest.param(kind, name, id=f"{kind}: {name}", marks=[pytest.mark.proof] if name in SLOW else [])
        for kind, name in ALL
        if any(part in name for part in parts)
    ]
    return pytest.mark.parametrize(("table", "theirs"), found, indirect=True)


# -- what every sink does with each of them -----------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
@with_tables("")
def test_the_table_has_the_newest_rows_and_no_others(theirs: Table) -> None:
    wanted = dict[tuple[str | None, int], int]()

    def batch(number: int, rows: list[tuple[str | None, int, int | None]]) -> None:
        """``rows``: key, minute, and n; without n, the window is retracted."""
        found = panes([
            {"k": k, "minute": minute, "n": 0 if n is None else n, "kind": "late" if n is not None else "retracted"}
            for k, minute, n in rows
        ])  # fmt: skip
        for _ in range(2):  # and once more, after a crash
            theirs.sink().write(found, at(number))
        for k, minute, n in rows:
            wanted.pop((k, minute), None)
            if n is not None:
                wanted[k, minute] = n
        assert theirs.rows("k", "n") == sorted(((k, str(n)) for (k, _), n in wanted.items()), key=repr)

    minutes = [0, 1, 60, DAY, 40 * DAY, 400 * DAY, -1]
    batch(0, [(k, minute, 1) for k in KEYS for minute in minutes])
    batch(1, [("a", 0, 2)])  # one late pane, and nothing else goes
    batch(2, [(None, DAY, 3), ("", 0, 4), ("ä", -1, None), ("nobody", 0, None), ("new", 0, 5)])
    batch(3, [])
    batch(4, [(k, 0, None) for k in [*KEYS, "new"]])
    batch(5, [(k, minute, 6) for k in KEYS for minute in (0, 400 * DAY)])


@pytest.mark.slow(but_first=True)
@with_tables("")
def test_the_table_goes_back_and_on(theirs: Table) -> None:
    more: dict[str, Any] = {} if theirs.kind in LAKES else {"undo": "9 batches"}
    to_write, minutes = theirs.sink(**more), [0, DAY, 40 * DAY]
    for batch in (1, 2, 3):
        rows = [(k, minute) for k in KEYS[: 4 - batch] for minute in minutes]
        to_write.write(panes([{"k": k, "minute": minute, "n": batch} for k, minute in rows]), at(batch))
        if batch == 2:
            middle = theirs.rows("k", "window_start", "n")
    assert to_write.go_back(QUERY, Goal(2, "2" * 12))
    assert theirs.rows("k", "window_start", "n") == middle
    to_write.write(panes([{"k": "new", "minute": DAY, "n": 7}]), replace(at(3), goal=Goal(2, "2" * 12)))
    assert len(theirs.rows("k")) == len(middle) + 1
    assert to_write.go_back(QUERY, Goal(0, "3" * 12))  # the table had no rows then
    assert theirs.rows("k") == []
    to_write.write(panes([{"k": "a", "n": 4}]), replace(at(1), goal=Goal(0, "3" * 12)))
    assert theirs.rows("k", "n") == [("a", "4")]


@pytest.mark.slow(but_first=True)
@with_tables("generated", "more columns", "mapped and")
def test_columns_that_the_store_fills_are_filled(theirs: Table, request: pytest.FixtureRequest) -> None:
    theirs.sink().write(panes([{"k": "a", "n": 2, "minute": DAY}, {"k": "b", "n": 3}]), at(0))
    theirs.sink().write(panes([{"k": "a", "n": 4, "minute": DAY}]), at(1))
    name = request.node.callspec.params["theirs"]
    if name == "with a generated column":
        assert theirs.rows("k", "twice") == [("a", "8"), ("b", "6")]
    if "generated day" in name or name == "mapped and partitioned":
        assert theirs.rows("k", "day") == [("a", "1970-01-02"), ("b", "1970-01-01")]
    if name == "with more columns":
        default = None if theirs.kind in LAKES else "none"
        assert theirs.rows("k", "remark") == [("a", default), ("b", default)]


@with_tables("constrained")
def test_a_row_that_a_constraint_forbids_writes_nothing(theirs: Table) -> None:
    theirs.sink().write(panes([{"k": "a", "n": 1}]), at(0))
    with pytest.raises(Exception, match=r"(?i)check|constraint|invariant"):
        theirs.sink().write(panes([{"k": "a", "n": 2}, {"k": "b", "n": -1}]), at(1))
    assert theirs.rows("k", "n") == [("a", "1")]
    theirs.sink().write(panes([{"k": "a", "n": 2}]), at(1))
    assert theirs.rows("k", "n") == [("a", "2")]


# -- what cannot be written is refused before anything is ------------------------------------------------------------

REFUSED = {
    "deletionVectors": in_delta(
        settings={"delta.enableDeletionVectors": "true"}, protocol=(3, 7), features=("deletionVectors",)
    ),
    "identityColumns": in_delta(protocol=(1, 6)),
    "clustering": in_delta(protocol=(1, 7), features=("clustering", "domainMetadata")),
    "appendOnly=true": in_delta(settings={"delta.appendOnly": "true"}),
    "version 3": of_version_3,
}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(
    ("table", "said"), [("iceberg" if "version" in said else "delta", said) for said in REFUSED], indirect=["table"]
)
def test_a_table_that_cannot_be_written_is_refused_in_the_first_line(table: Table, said: str) -> None:
    REFUSED[said](table)
    with pytest.raises(SchemaError) as error:
        table.sink().write(panes([{"k": "a", "n": 1}]), at(0))
    assert said in str(error.value).splitlines()[0]
    assert isinstance(table.at, Lake) and table.rows("k") == []


# -- somebody else works on the table, too ---------------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("what", ["compacts", "adds a row", "changes a setting"])
@pytest.mark.parametrize("table", LAKES, indirect=True)
def test_a_commit_in_between_is_read_and_merged_once_more(table: Table, what: str) -> None:
    place = table.at
    assert isinstance(place, Lake)
    write = place.sink().write
    for batch, n in enumerate((1, 2, 3)):
        write(panes([{"k": k, "n": n} for k in ("a", "b", str(n))]), at(batch))
    sink = place.sink()
    others = [what]

    class Watched(sink.kind()):  # type: ignore[misc]
        """The real one. Somebody else commits between its reading and its writing, once."""

        def read(self, places: Any) -> pa.Table:
            found = super().read(places)
            if others:
                meanwhile(place, others.pop())
            return found

    object.__setattr__(sink, "kind", lambda: Watched)
    sink.write(panes([{"k": "a", "n": 4}]), at(3))
    stranger = [("c", 9)] if what == "adds a row" else []
    assert place.rows("k", "n") == sorted([("1", 1), ("2", 2), ("3", 3), ("a", 4), ("b", 3), *stranger])
    assert not others


def meanwhile(place: Lake, what: str) -> None:
    if what == "adds a row":
        place.append(panes([{"k": "c", "n": 9}]).select(place.content().column_names))
    elif what == "changes a setting":
        place.set({"delta.logRetentionDuration": "interval 3 days"})
    elif place.kind == "delta":
        place.table().optimize.compact()
    else:  # what Spark's rewrite_data_files does: the same rows in other files
        place.table().overwrite(place.content())


def test_a_window_may_have_another_name(table: Table) -> None:
    """A lake finds rows by the beginning of the window, whatever that column is called."""
    rows = panes([{"k": "a", "n": 1}, {"k": "b", "n": 1, "minute": 1}])
    names = ["since" if name == "window_start" else name for name in rows.column_names]
    table.sink().write(rows.rename_columns(names), at(0))
    table.sink().write(panes([{"k": "a", "n": 2}]).rename_columns(names), at(1))
    assert table.rows("k", "n") == [("a", "2"), ("b", "1")]
