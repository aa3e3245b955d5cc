"""CSV and JSON as events: their columns, their times, and what of it is said to be bad."""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from aion.core.ingest.text_times import instants_of
from aion.errors import BadFile, ConfigError, SchemaError
from aion.execute.file_formats import Format
from tests.test_file_reading import AT, SCHEMA, TS, read


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress)])
@pytest.mark.parametrize("name", ["csv", "json"])
def test_compressed_text(tmp_path: Path, name: str, ending: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"x.{name}.{ending}"
    plain = (
        b"a,2024-01-31T12:30:00.123456Z,1\n" if name == "csv" else b'{"v":1,"k":"a","ts":"2024-01-31T12:30:00.123456Z"}'
    )
    path.write_bytes(compress(plain))
    assert read(path, name).to_pylist() == [{"k": "a", "ts": AT, "v": 1.0}]
    path.write_bytes(compress(plain)[:-5])
    with pytest.raises(BadFile, match="cannot be read as"):  # and not StorageError: the bytes are there
        read(path, name)


@pytest.mark.parametrize("text", ["", "\n\r\n\n"])
@pytest.mark.parametrize("name", ["csv", "json"])
def test_a_text_without_rows(tmp_path: Path, name: str, text: str) -> None:
    """Its file may still have some bytes: Spark does not list empty ones."""
    path = tmp_path / f"x.{name}.gz"
    path.write_bytes(gzip.compress(text.encode()))
    options = {"header": "true"} if name == "csv" else {}
    assert read(path, name).num_rows == read(path, name, options=options).num_rows == 0


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_header_alone(tmp_path: Path, end: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"k,ts,v{end}")
    assert read(path, "csv", options={"header": "true"}).num_rows == 0


def test_names_in_a_header_are_found_without_regard_to_case(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("\n\ufeffTS,V,other,K\n2024-01-31 12:30:00.123456,1,not read,7\n".lstrip("\n"))
    options = {"header": "true"}
    assert read(path, "csv", options=options).to_pylist() == [{"k": "7", "ts": AT, "v": 1.0}]
    with pytest.raises(BadFile, match="the header does not name the column"):
        read(path, "csv", options=options, case_sensitive=True)
    path.write_text("k,k,ts,v\n")
    with pytest.raises(BadFile, match="there are 2 columns 'k'"):
        read(path, "csv", options=options)


def test_json_is_read_as_the_schema_says(tmp_path: Path) -> None:
    """And not as its first rows look like. What is not in the schema may be anything."""
    path = tmp_path / "x.json"
    schema = pa.schema(
        [
            ("i", pa.int32()), ("d", pa.float64()), ("s", pa.string()), ("day", pa.date32()),
            ("money", pa.decimal128(10, 2)), ("in", pa.struct([("at", TS), ("n", pa.int16()), ("none", pa.int8())])),
            ("list", pa.list_(pa.struct([("at", TS)]))), ("K", pa.string()),
        ]
    )  # fmt: skip
    first = (
        '{"i":1,"d":2,"s":"2024-01-31","day":"2024-01-31","money":1.5,"more":1,"k":"another key",'
        '"in":{"n":3,"at":"2024-01-31 12:30:00.123456"},"list":[{"at":"2024-01-31T13:30:00.123456+01:00"},null]}'
    )
    path.write_text(f'{first}\n\nnull\n{{"more":{{"x":[]}},"list":[]}}\n')
    whole_row = {
        "i": 1, "d": 2.0, "s": "2024-01-31", "day": AT.date(), "money": Decimal("1.50"),
        "in": {"at": AT, "n": 3, "none": None}, "list": [{"at": AT}, None], "K": None,
    }  # fmt: skip
    nothing = dict.fromkeys(schema.names)
    assert read(path, "json", schema=schema).to_pylist() == [whole_row, nothing, {**nothing, "list": []}]
    for line in ("null", "[1]", '{"i": 1.5}', '{"i": "1"}', '{"day": "31.1.2024"}', '{"i": 1, "i": 2}'):
        path.write_text(f"{line}\n")
        with pytest.raises(BadFile, match=r"x\.json cannot be read as json"):
            read(path, "json", schema=schema)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["none", "bom"])
@pytest.mark.parametrize("format", ["json", "csv"])
def test_a_mark_of_utf8_is_no_part_of_the_data(format: str, bom: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"x.{format}"
    path.write_bytes(bom + (b'{"n": 1}\n{"n": 2}\n' if format == "json" else b"1\n2\n"))
    assert read(path, format, schema=pa.schema([("n", pa.int64())])).column("n").to_pylist() == [1, 2]


@pytest.mark.parametrize("first", ["null", " null \r", "\n\nnull"])
def test_json_may_begin_with_null(first: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'{first}\n{{"n": 1}}\n', newline="")
    assert read(path, "json", schema=pa.schema([("n", pa.int64())])).column("n").to_pylist() == [None, 1]


@pytest.mark.parametrize("first", ['null {"n": 2}', "nullx", "null null", "null,"])
def test_json_that_begins_with_null_and_more_is_a_bad_file(first: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'{first}\n{{"n": 1}}\n')
    with pytest.raises(BadFile, match="not an object"):
        read(path, "json", schema=pa.schema([("n", pa.int64())]))


def test_blocks_of_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    lines = [f'{{"n": {n}, "pad": "{"x" * 2000}"}}\n' for n in range(20_000)]
    path.write_text("".join(lines))  # more than is parsed at once
    assert read(path, "json", schema=pa.schema([("n", pa.int64())])).column("n").to_pylist() == [*range(20_000)]


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("csv", pa.list_(pa.int32())), ("csv", pa.struct([("a", pa.int32())])), ("csv", pa.duration("us")),
        ("json", pa.map_(pa.string(), pa.int32())), ("json", pa.binary()), ("json", pa.list_(pa.binary())),
        ("json", pa.struct([("a", pa.list_(pa.duration("us")))])),
    ],
    ids=str,
)  # fmt: skip
def test_what_text_cannot_hold_is_refused_at_once(name: str, type_: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=f"column 'x' is of type .* that cannot be read from {name.upper()} files"):
        Format(name).check(pa.schema([("x", type_)]))
    Format("parquet").check(pa.schema([("x", type_)]))


@pytest.mark.parametrize("options", [{"sep": "||"}, {"quote": ""}, {"escape": "ü"}, {"header": "yes"}])
def test_wrong_options_of_csv(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Format("csv", options)


def test_quotes_may_be_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('"a \\"b\\", c",,1\n')
    assert read(path, "csv", options={"escape": "\\"}).column("k").to_pylist() == ['a "b", c']


def test_a_header_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("v;ts;k\n1.5;2024-01-31 12:30:00.123456;'a'\n-;;b\n")
    options = {"header": "true", "sep": ";", "quote": "'", "nullValue": "-"}
    expected = pa.table([["a", "b"], [AT, None], [1.5, None]], schema=SCHEMA)
    assert read(path, "csv", options=options).equals(expected)
    path.write_text("v;ts\n1.5;2024-01-31 12:30:00\n")
    with pytest.raises(BadFile, match=r"x\.csv: the header does not name the column 'k'"):
        read(path, "csv", options=options)


def test_times_in_text() -> None:
    texts = pa.array(
        ["2024-01-31 12:30:00.123456", "2024-01-31T12:30:00Z", "2024-01-31T12:30+01:00", "2024-01-31", None]
    )
    instants = instants_of(texts, TS, "Asia/Tokyo").to_pylist()
    assert [instant and (instant.hour, instant.minute) for instant in instants] == [
        (3, 30),
        (12, 30),
        (11, 30),
        (15, 0),
        None,
    ]
    naive = instants_of(texts.slice(0, 1), pa.timestamp("us"), "Asia/Tokyo").to_pylist()
    assert naive == [AT.replace(tzinfo=None)]
    finer = pa.array(
        ["2024-01-31T12:30:00.123456789Z", "2024-01-31T12:30:00.1234567+00:00", "2024-01-31 12:30:00.12345678"]
    )
    assert instants_of(finer, TS, "UTC").to_pylist() == [AT] * 3
    for wrong in ("yesterday", "12:30"):
        with pytest.raises(pa.ArrowInvalid):
            instants_of(pa.array([wrong]), TS, "UTC")


@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "+02:00", "UTC"])
def test_times_at_which_clocks_change(zone: str) -> None:
    """As Java has it: the first of two instants, and a time that is skipped counts from before."""
    start = dt.datetime(2024, 1, 1)
    local = [start + dt.timedelta(minutes=15 * i) for i in range(4 * 24 * 366)]
    got = instants_of(pa.array([t.isoformat() for t in local]), TS, zone).to_pylist()
    if zone == "+02:00":
        rules: dt.tzinfo = dt.timezone(dt.timedelta(hours=2))
    else:
        rules = ZoneInfo(zone)
    # Python, with fold=0, has both rules as well.
    assert got == [t.replace(tzinfo=rules).astimezone(dt.UTC) for t in local]
