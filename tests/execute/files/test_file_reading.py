"""Files as events: what of a file is read, how its columns become the declared ones, and what is said of a bad file."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.ingest.conforming import Conforming, fits
from aion.core.ingest.file_splits import Split, folder_values
from aion.errors import BadFile, SchemaError, StorageError, TransformError
from aion.execute.files.formats import Format, row_bytes, row_group_middles
from aion.execute.files.places import place_of
from aion.execute.files.reading import FileReader
from aion.execute.files.skipped import Records
from tests.object_store import ObjectStore, serving

TS = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.string()), ("ts", TS), ("v", pa.float64())])
AT = dt.datetime(2024, 1, 31, 12, 30, 0, 123456, dt.UTC)


def table(rows: int = 4) -> pa.Table:
    columns = [["a", None, "", "d"], [AT, None, AT, AT], [1.5, 2.0, None, -1.0]]
    return pa.table([(column * rows)[:rows] for column in columns], schema=SCHEMA)


def reader(name: str = "parquet", schema: pa.Schema = SCHEMA, **more: Any) -> FileReader:
    where = more.pop("where", None)
    used = more.pop("used", ("v",)) if where is not None else ()
    declared = more.pop("declared", schema)
    return FileReader(
        Format(name), declared, schema, where, used,
        **{"base": "/", "zone": "UTC", "case_sensitive": False, **more},
    )  # fmt: skip


def whole(path: Path) -> Split:
    return Split(f"file:{path}", path.stat().st_size)


def read(path: Path, name: str = "parquet", **more: Any) -> pa.Table:
    made = reader(name, **more)
    return pa.Table.from_batches(made.read(whole(path)), made.schema)


WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "parquet": pq.write_table,
    "arrow": lambda events, path: pyarrow.feather.write_feather(events, str(path)),
    "orc": pyarrow.orc.write_table,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_events(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a b%20ü.file"  # as it is: Spark does not escape paths
    events = table()
    WRITERS[name](events, path)
    assert read(path, name).equals(events)
    few = pa.schema([SCHEMA.field("ts"), SCHEMA.field("v")])
    assert read(path, name, schema=few, declared=SCHEMA, where=pc.field("v") > 0).equals(
        events.filter(pc.field("v") > 0).select(["ts", "v"])
    )


@pytest.mark.parametrize("name", WRITERS)
def test_none_of_the_columns_is_needed(tmp_path: Path, name: str) -> None:
    """Only those that folders give."""
    path = tmp_path / "day=3" / "x.file"
    path.parent.mkdir()
    WRITERS[name](table(), path)
    day = pa.field("day", pa.int32())
    got = read(path, name, schema=pa.schema([day]), declared=SCHEMA.append(day), base=f"file:{tmp_path}/")
    assert got.column("day").to_pylist() == [3] * 4


# -- parts of files ------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.integers(1, 30),
)
def test_each_row_group_is_in_exactly_one_part(sizes: list[int], of: int) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    middles = [end - size // 2 for end, size in zip(ends, sizes, strict=True)]
    length = ends[-1] + 3
    parts = [Split("", length, number, of).units(middles) for number in range(of)]
    assert sorted(unit for part in parts for unit in part) == [*range(len(sizes))]
    assert Split("", length).units(middles) == [*range(len(sizes))]


def test_parts_of_a_file_hold_all_its_events_once(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    numbers = pa.table({"n": pa.array(range(10_000), pa.int64()), "s": [f"{n:x}" for n in range(10_000)]})
    pq.write_table(numbers, path, row_group_size=700)
    made = reader(schema=pa.schema([("n", pa.int64())]))
    size = path.stat().st_size
    parts = [pa.Table.from_batches(made.read(Split(str(path), size, i, 4)), made.schema) for i in range(4)]
    assert pa.concat_tables(parts).column("n").to_pylist() == [*range(10_000)]
    assert all(1_500 < part.num_rows < 3_500 for part in parts)
    middles = row_group_middles(pq.read_metadata(path))
    assert middles == sorted(middles) and middles[0] > 0 and middles[-1] < size


def test_bytes_of_a_row(tmp_path: Path) -> None:
    """Of columns whose names have dots, too, and of parts of columns."""
    path = tmp_path / "x.parquet"
    wide = [f"{n:01000}" for n in range(50)]
    pq.write_table(pa.table({"x.y": wide, "a": [{"b": text, "c": 1} for text in wide], "n": range(50)}), path)
    metadata = pq.read_metadata(path)
    sizes = [row_bytes(metadata, [0], [name]) for name in ("x.y", "a", "n")]
    assert 1_000 < sizes[0] < sizes[1] < 1_100 and sizes[2] < 20
    pq.write_table(pa.table({}), path)
    assert read(path, schema=pa.schema([("n", pa.int64())])).num_rows == 0


def test_row_groups_that_where_excludes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": pa.array(range(1_000), pa.int64())}), path, row_group_size=100)
    data = bytearray(path.read_bytes())
    data[10:200] = bytes(190)  # in the first row group
    path.write_bytes(data)
    schema = pa.schema([("n", pa.int64())])
    found = read(path, schema=schema, where=pc.field("n") >= 950, used=("n",))
    assert found.column("n").to_pylist() == [*range(950, 1_000)]
    with pytest.raises(BadFile, match=r"x\.parquet cannot be read as parquet: "):
        read(path, schema=schema)


NAN_KEPT = {
    "other than": pc.field("v") != 3,
    "not above": ~(pc.field("v") > 0),
    "is nan": pc.is_nan(pc.field("v")),
    "null or nan": pc.field("v").is_null(nan_is_null=True),
    "of two columns": (pc.field("v") != 3) & (pc.field("n") > 0),
}
NAN_LEFT_OUT = {"above": pc.field("v") > 100, "equal": pc.field("v") == 7}


@pytest.mark.parametrize("which", [*NAN_KEPT, *NAN_LEFT_OUT])
def test_statistics_of_row_groups_do_not_hide_nan(tmp_path: Path, which: str) -> None:
    """A row group of 3.0 and NaN has the least and the largest value 3.0."""
    path = tmp_path / "x.parquet"
    events = pa.table({"v": [3.0, math.nan, 3.0, 200.0], "n": [1, 1, 1, 1]})
    pq.write_table(events, path, row_group_size=2)
    where = {**NAN_KEPT, **NAN_LEFT_OUT}[which]
    used = ("v", "n") if which == "of two columns" else ("v",)
    found = read(path, schema=events.schema, where=where, used=used)
    assert str(found.to_pylist()) == str(events.filter(where).to_pylist())
    assert reader(schema=events.schema, where=where, used=used)._keeps_nan() == (which in NAN_KEPT)


def test_where_that_fails_makes_no_bad_file(tmp_path: Path) -> None:
    """It would be skipped, with all its events."""
    path, schema = tmp_path / "x.file", pa.schema([("n", pa.int64())])
    pq.write_table(pa.table({"n": [7, 20_000_001]}), path)
    for where in (pc.scalar(100) / (pc.field("n") - 7) >= 0, pc.field("n") > 0.5):
        how: dict[str, Any] = {"schema": schema, "where": where, "used": ("n",)}
        for call in (lambda: read(path, **how), lambda: reader(**how).trouble(whole(path))):  # noqa: B023
            with pytest.raises(TransformError, match=r"x\.file: where fails on an event: "):
                call()


# -- columns -----------------------------------------------------------------------------------------------


def test_columns_are_found_by_name_and_widened(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    found = pa.table(
        {
            "V": pa.array([1, 2], pa.int32()),
            "k": pa.array(["x", None]).dictionary_encode(),
            "other": [1, 2],
            "ts": pa.array([0, 1_500], pa.int64()).cast(pa.timestamp("ns")),
        }
    )
    pq.write_table(found, path)
    schema = SCHEMA.append(pa.field("gone", pa.int32()))
    expected = pa.table([["x", None], pa.array([0, 1], pa.int64()).cast(TS), [1.0, 2.0], [None, None]], schema=schema)
    assert read(path, schema=schema).equals(expected)
    # The expression is over the declared columns, so it cannot be left to the file.
    assert read(path, schema=schema, where=pc.field("v") > 1.5).equals(expected.slice(1))
    exact = read(path, schema=schema, case_sensitive=True)
    assert exact.column("v").null_count == 2


def test_only_columns_that_a_file_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2, 3]}), path)
    assert read(path, schema=pa.schema([("b", pa.int64())])).to_pydict() == {"b": [None] * 3}


@pytest.mark.parametrize("name", ["parquet", "arrow", "orc"])
def test_nanoseconds_are_floored_before_where_looks(tmp_path: Path, name: str) -> None:
    """A time before 1970 is in the microsecond that has begun, and statistics of the file say nothing else."""
    path, at = tmp_path / "x.file", pa.field("ts", TS)
    nanos = pa.array([-2_001, None, -1_000, -1, 0, 999], pa.timestamp("ns"))
    WRITERS[name](pa.table({"ts": nanos}), path)
    before = pc.field("ts") < pa.scalar(0, TS)
    got = read(path, name, schema=pa.schema([at]), where=before, used=("ts",))
    assert got.column("ts").cast(pa.int64()).to_pylist() == [-3, -1, -1]
    assert read(path, name, schema=pa.schema([at])).slice(1).column("ts").cast(pa.int64()).to_pylist() == [
        None, -1, -1, 0, 0,
    ]  # fmt: skip


def test_columns_that_differ_only_in_case(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"A": [1], "a": [2]}), path)
    assert read(path, schema=pa.schema([("a", pa.int64())])).to_pydict() == {"a": [2]}
    pq.write_table(pa.table({"Ab": [1], "aB": [2]}), path)
    with pytest.raises(BadFile, match="the columns 'Ab', 'aB' differ only in case; which of them is 'ab'"):
        read(path, schema=pa.schema([("ab", pa.int64())]))
    pq.write_table(pa.table([[1], [2], [3]], names=["a", "a", "b"]), path)
    assert read(path, schema=pa.schema([("b", pa.int64())])).to_pydict() == {"b": [3]}
    with pytest.raises(BadFile, match=r"x\.parquet: there are 2 columns 'a'"):
        read(path, schema=pa.schema([("a", pa.int64())]))


def test_old_times_of_parquet(tmp_path: Path) -> None:
    """With 96 bits: nanoseconds of Arrow have no such years."""
    path = tmp_path / "x.parquet"
    times = [dt.datetime(9999, 12, 31, tzinfo=dt.UTC), dt.datetime(1, 1, 1, tzinfo=dt.UTC), AT]
    pq.write_table(pa.table({"t": pa.array(times, TS)}), path, use_deprecated_int96_timestamps=True)
    assert read(path, schema=pa.schema([("t", TS)])).column("t").to_pylist() == times


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (pa.int64(), pa.int32()), (pa.int64(), pa.float64()), (pa.uint64(), pa.int64()), (pa.float64(), pa.float32()),
        (pa.string(), pa.int64()), (pa.string(), TS), (pa.int64(), TS), (pa.date32(), TS), (TS, pa.int64()),
        (pa.decimal128(10, 2), pa.decimal128(9, 2)), (pa.int32(), pa.decimal128(9)), (pa.bool_(), pa.int32()),
        (pa.int64(), pa.string()), (pa.list_(pa.int64()), pa.list_(pa.int32())),
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.int32())])), (pa.int32(), pa.list_(pa.int32())),
        (pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int32())])), (pa.list_(pa.string()), pa.list_(TS)),
    ],
    ids=str,
)  # fmt: skip
def test_types_that_could_change_a_value_are_refused(found: pa.DataType, wanted: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=r"column 'x' is of type .* which does not fit the schema's"):
        Conforming(pa.schema([("x", found)]), pa.schema([("x", wanted)]))


@pytest.mark.parametrize(
    ("values", "wanted", "expected"),
    [
        (pa.array([200], pa.uint8()), pa.int16(), 200),
        (pa.array([2**32 - 1], pa.uint32()), pa.int64(), 2**32 - 1),
        (pa.array([7], pa.int64()), pa.decimal128(20, 1), Decimal("7.0")),
        (pa.array([Decimal("1.5")], pa.decimal128(5, 1)), pa.decimal128(9, 3), Decimal("1.500")),
        (pa.array([1.5], pa.float32()), pa.float64(), 1.5),
        (pa.array(["x"], pa.large_string()), pa.string(), "x"),
        (pa.array([b"xy"], pa.binary(2)), pa.binary(), b"xy"),
        (pa.array([None], pa.null()), pa.float64(), None),
        (pa.array([AT], TS).cast(pa.timestamp("us", "America/New_York")), pa.timestamp("us"), AT.replace(tzinfo=None)),
        (pa.array([AT.replace(tzinfo=None)], pa.timestamp("us")), TS, AT),
        (pa.array([[1]], pa.large_list(pa.int16())), pa.list_(pa.int64()), [1]),
        (pa.array([{"a": 1}], pa.struct([("a", pa.int8())])), pa.struct([("a", pa.int64())]), {"a": 1}),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), pa.map_(pa.string(), pa.int64()), [("a", 1)]),
        (pa.array([1_500], pa.timestamp("ns")), pa.timestamp("us"), dt.datetime(1970, 1, 1, 0, 0, 0, 1)),
        (pa.array([{"t": 1_500}], pa.struct([("t", pa.timestamp("ns"))])), pa.struct([("t", pa.timestamp("us"))]),
         {"t": dt.datetime(1970, 1, 1, 0, 0, 0, 1)}),
        (pa.array([-1], pa.timestamp("ns")), pa.timestamp("us"), dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
        (pa.array([-1_001], pa.timestamp("ns", "UTC")), TS, dt.datetime(1969, 12, 31, 23, 59, 59, 999998, dt.UTC)),
        (pa.array([-1_000], pa.timestamp("ns", "Asia/Tokyo")), pa.timestamp("us"),
         dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
        (pa.array([None], pa.timestamp("ns")), TS, None),
        (pa.array([-1], pa.timestamp("ns")).dictionary_encode(), TS,
         dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.UTC)),
        (pa.array([[-(2**63) + 1, None]], pa.list_(pa.timestamp("ns"))), pa.list_(pa.timestamp("us")),
         [dt.datetime(1677, 9, 21, 0, 12, 43, 145224), None]),
        (pa.array([-1], pa.int64()).view(pa.date64()), pa.date32(), dt.date(1969, 12, 31)),
        (pa.array([[1, 2]], pa.list_(pa.int16(), 2)), pa.list_(pa.int64()), [1, 2]),
        (pa.array([{"z": 0, "B": 1, "a": 2}]), pa.struct([("a", pa.int64()), ("b", pa.int64()), ("c", pa.string())]),
         {"a": 2, "b": 1, "c": None}),
    ],
)  # fmt: skip
def test_types_that_hold_every_value_are_cast(values: pa.Array, wanted: pa.DataType, expected: Any) -> None:
    assert fits(values.type, wanted)
    batch = pa.record_batch({"x": values})
    (got,) = Conforming(batch.schema, pa.schema([("x", wanted)]))(batch).columns
    assert got.type == wanted and got.to_pylist() == [expected]


def test_slices_of_nested_columns_with_nulls() -> None:
    deep = [[{"m": [("k", {"a": i})], "l": [i, None]}, None] if i % 3 else None for i in range(9)]
    narrow = pa.struct([("m", pa.map_(pa.string(), pa.struct([("a", pa.int8())]))), ("l", pa.large_list(pa.int16()))])
    wide = pa.struct([("l", pa.list_(pa.int64())), ("m", pa.map_(pa.string(), pa.struct([("a", pa.int64())])))])
    batch = pa.record_batch({"x": pa.array(deep, pa.list_(narrow))})
    conforming = Conforming(batch.schema, pa.schema([("x", pa.list_(wide))]))
    for offset, length in ((0, 9), (2, 5), (3, 0), (8, 1)):
        (got,) = conforming(batch.slice(offset, length)).columns
        got.validate(full=True)
        assert got.to_pylist() == pa.array(deep[offset : offset + length], pa.list_(wide)).to_pylist()


def test_a_time_that_does_not_fit_is_an_error() -> None:
    batch = pa.record_batch({"x": pa.array([2**60], pa.timestamp("s"))})
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        Conforming(batch.schema, pa.schema([("x", TS)]))(batch)


def test_values_in_the_names_of_folders(tmp_path: Path) -> None:
    base = "file:/data/"
    assert folder_values("file:/data/day=2024-01-31/x%3Dy=a%2Fb/n=__HIVE_DEFAULT_PARTITION__/k=1.parquet", base) == {
        "day": "2024-01-31", "x=y": "a/b", "n": None,
    }  # fmt: skip
    assert folder_values("file:/elsewhere/day=1/x", base) == {}
    assert folder_values("file:/data/day=1/x", None) == {}
    folder = tmp_path / "Day=2024-01-31" / "hour=2024-01-31 12:00:00" / "v=9"
    folder.mkdir(parents=True)
    pq.write_table(table(), folder / "x.parquet")
    schema = pa.schema([("day", pa.date32()), ("hour", TS), ("v", pa.int32()), ("k", pa.string())])
    got = read(
        folder / "x.parquet", schema=schema, base=f"file:{tmp_path}/", where=pc.field("v") == 9, zone="Asia/Tokyo"
    )
    assert got.slice(0, 1).to_pylist() == [
        {"day": AT.date(), "hour": AT.replace(hour=3, minute=0, microsecond=0), "v": 9, "k": "a"}
    ]
    assert got.num_rows == 4
    with pytest.raises(BadFile, match=r"x\.parquet: the folder or partition v=9 is not of the schema's type date"):
        read(folder / "x.parquet", schema=pa.schema([("v", pa.date32())]), base=f"file:{tmp_path}/")


# -- bad files, and places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.file"
    path.write_bytes(b'{"ts": "2024-01-31", "v": "text"}\n"')
    with pytest.raises(BadFile, match=r"x\.file cannot be read as"):
        read(path, name)
    assert "x.file" in (reader(name).trouble(whole(path)) or "")


def test_a_file_that_is_not_there_is_no_bad_file(tmp_path: Path) -> None:
    """Nor may it be skipped: it may be there again later."""
    for missing in (Split(f"file:{tmp_path}/gone.parquet", 10), Split(f"{tmp_path}/gone.parquet", 10)):
        with pytest.raises(StorageError, match=r"gone\.parquet"):
            reader().trouble(missing)


def test_damage_that_only_checksums_show(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    numbers = pa.table({"n": pa.array(range(10_000), pa.int64())})
    pq.write_table(numbers, path, use_dictionary=False, compression="none", write_page_checksum=True)
    schema = pa.schema([("n", pa.int64())])
    assert read(path, schema=schema).equals(numbers)
    data = bytearray(path.read_bytes())
    data[40_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadFile, match=r"x\.parquet cannot be read as parquet: .*checksum"):
        read(path, schema=schema)


def test_what_goes_wrong_once_does_not_make_a_bad_file(tmp_path: Path) -> None:
    """It may have been the network. Nobody looks at a skipped file again."""
    path = tmp_path / "x.parquet"
    pq.write_table(table(), path)
    tries = []

    class Shaky(FileReader):
        def _read(self, part: Split) -> Iterator[pa.RecordBatch]:
            yield from super()._read(part)
            tries.append(part)
            if len(tries) == 1:
                raise OSError("the connection was reset")

    made = reader()
    shaky = Shaky(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
    assert shaky.trouble(whole(path)) is None and len(tries) == 2


@pytest.mark.slow
def test_files_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as port:
        bucket = ObjectStore(port)
        sink = pa.BufferOutputStream()
        pq.write_table(table(), sink)
        data = sink.getvalue().to_pybytes()
        bucket.put("in/day=1/a b.parquet", data)
        bucket.put("in/bad.parquet", data[:-20])
        # pyarrow looks for the endpoint there, as for the credentials.
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        place = f"s3a://{bucket.bucket}/in/"
        schema = SCHEMA.append(pa.field("day", pa.int32()))
        made = reader(schema=schema, base=place)
        got = pa.Table.from_batches(made.read(Split(f"{place}day=1/a b.parquet", len(data))), schema)
        assert got.drop_columns(["day"]).equals(table()) and got.column("day").to_pylist() == [1] * 4
        assert "bad.parquet cannot be read" in (made.trouble(Split(f"{place}bad.parquet", len(data) - 20)) or "")
        with pytest.raises(StorageError, match=r"gone\.parquet"):
            made.trouble(Split(f"{place}gone.parquet", 10))
        check_records(f"s3a://{bucket.bucket}/checkpoint")


def test_paths_are_no_uris(tmp_path: Path) -> None:
    assert [place_of(path)[1] for path in ("file:/a%20b#c", "file:///a", "/a:b/c")] == ["/a%20b#c", "/a", "/a:b/c"]


# -- what was skipped ----------------------------------------------------------------------------------------


def test_decisions_about_files_are_made_once(tmp_path: Path) -> None:
    check_records(f"file:{tmp_path}/checkpoint")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def check_records(checkpoint: str) -> None:
    def task(number: int = 0, of: int = 2, *, batch: int = 7, attempt: int = 1) -> Records:
        return Records(checkpoint, "name", batch, (number, of), attempt)

    assert task().known() == {}
    assert task().decide({"a": "bad", "b": None}) == {"a": "bad", "b": None}
    # Another attempt finds another state of the files, and follows the first.
    assert task(attempt=2).decide({"a": None, "b": "bad"}) == {"a": "bad", "b": None}
    assert task(attempt=3).known() == {"a": "bad", "b": None}
    task(1).decide({"c": "bad"})
    assert task(0).known() == {"a": "bad", "b": None}
    assert task(0, of=3).known() == {"a": "bad", "b": None, "c": "bad"}, "restarted with another number of tasks"
    assert task(batch=8).known() == {}
    task(batch=8).decide({"d": None})
    task(batch=17).forget(9)
    assert (task(batch=7).known(), task(batch=8).known()) == ({}, {"d": None})


def test_a_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("not a folder")
    with pytest.raises(StorageError, match="checkpoint"):
        Records(f"file:{tmp_path}/checkpoint", "name", 0, (0, 1), 1).decide({"a": None})
    assert os.listdir(tmp_path) == ["checkpoint"]  # noqa: PTH208
