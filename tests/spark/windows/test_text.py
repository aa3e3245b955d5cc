"""CSV and JSON: each line gives the same row as in Spark's own batch reader, however strange the line."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion import errors
from tests.spark.conftest import Sink
from tests.spark.windows.test_windowed import BOUND

TIMES = [
    "2026-01-01T00:00:00", "2026-01-01 00:00:00", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00+02",
    "2026-01-01T00:00+02:30", "2026-01-01T00:00:00 Europe/Paris", "2026-01-01T00:00:00Europe/Paris",
    "2026-01-01T00:00:00.1234567Z", "2026-01-01 00:00:00.123456789", "2026-01-01", "2026-01", "2026", "1500-02-29",
    "1500-03-01T00:00:00", "1582-10-10", "0001-01-01T00:00:00", "1969-12-31T23:59:59.9999999Z", "2024-03-31T02:30:00",
    "2024-10-27T02:30:00", "12:30", "1767225600", "1767225600.5", "", " ", "now", "yesterday", "T00:00:00",
    "2026-01-01T24:00:00", "2026-13-01", "2026-02-30", "2026-1-1", " 2026-01-01T00:00:00 ", "2026-01-01T00:00:00 PST",
    "2026-01-01T00:00:00+02:00:00", "2026-01-01T00:00:00 GMT+1", "+12026-01-01T00:00:00", "01/02/2026",
    "2026-01-01T00:00:00,5",
]  # fmt: skip
NUMBERS = [
    "0", "-0", "7", "+7", "007", "127", "128", "-129", "32768", "2147483647", "2147483648", "9223372036854775807",
    "9223372036854775808", "1e3", "1E400", "1.0", "1.5", "-1.5e-3", ".5", "5.", "1.234567", "12345678.9", "123456789.1",
    "0.1234567890123456789", "0x10", "1_000", "1,5", "NaN", "nan", "Infinity", "-Infinity", "+INF", "-INF", "INF",
    "inf", "1d", "1f", " 1 ",
]  # fmt: skip
WORDS = ["true", "false", "TRUE", "True", "yes", "t", "1", "0", "null", "NULL", "a", "ü€😀", "AQI=", "a b", "'q'"]
JSON_VALUES = [
    *NUMBERS, *WORDS, *(f'"{text}"' for text in [*TIMES, *NUMBERS, *WORDS]), "[]", "[1]", '[1, "2", null, 3.5]',
    '["x"]', "[[1], [2]]", "{}", '{"a": 1}', '{"a": "1", "b": [1, 2]}', '{"A": 1, "a": 2}', '{"a": 1, "a": 2}',
    '{"a": {"a": 1}}', '{"t": "2026-01-01T00:00:00Z", "a": null}', '{"x": 1.0, "y": 2.50}', r'"a\u0000b"',
    r'"\ud83d\ude00"', r'"\x"', '"a\tb"', r'"\n\"\\"', '[{"a": 1}, {"a": "x"}, 3]', "NaN", "-Infinity", '"unfinished',
    "[1", '{"a": 1', "'single'",
]  # fmt: skip
JSON_LINES = [
    '{"s": "a", "i": 1}', "{}", "[]", "[1]", '[{"s": "a"}, {"s": "b", "i": "x"}]', '[{"i": 1}]', "null", "true", "1",
    '"s"', "", "  ", '{"s": "a"', '{"s": "a"}}', '{"s": "a"} {"s": "b"}', '{"s": "a"} // why', '/* why */ {"s": "a"}',
    "# why", '{"s": 1, "s": 2}', '{"S": "upper", "s": "lower"}', '{"S": "upper"}', "{'s': 'single'}", "{s: 1}",
    '{"s": "a",}', '{"unknown": {"deep": [1, {"x": null}]}, "s": "a"}', '\ufeff{"s": "a mark within"}',
    '{"s": "a", "i": 1, "i": "x"}', '{"corrupt": "given", "s": "a"}', '{"s": "é"}', "not json",
    '{"at": "2026-01-01T00:00:00Z", "s": {"a": [1, 2.50]}}',
    '{"m": {"k": 1, "k": 2}, "l": [1, null], "o": {"t": "2026-01-01"}}', '{"m": {"k": "x"}, "i": 3}', '{"i": 9e99}',
]  # fmt: skip
JSON_COLUMNS = {
    "s": "string", "b": "boolean", "y": "tinyint", "h": "smallint", "i": "int", "n": "bigint", "f": "float",
    "d": "double", "c": "decimal(10, 2)", "w": "decimal(38, 18)", "at": "timestamp", "local": "timestamp_ntz",
    "day": "date", "bin": "binary", "o": "struct<a: int, t: timestamp, b: array<string>>", "l": "array<bigint>",
    "lo": "array<struct<a: int>>", "m": "map<string, int>", "mt": "map<string, timestamp>", "corrupt": "string",
}  # fmt: skip
CSV_COLUMNS = {
    "id": "string", "s": "string", "b": "boolean", "y": "tinyint", "i": "int", "n": "bigint", "f": "float",
    "d": "double", "c": "decimal(10, 2)", "at": "timestamp", "local": "timestamp_ntz", "day": "date", "bin": "binary",
    "corrupt": "string",
}  # fmt: skip
CSV_LINES = [
    'a,"quoted, with a comma",true', 'a,"a ""doubled"" quote"', r'a,"an \"escaped\" quote"', r"a,C:\dir,true",
    r'a,"C:\\dir"', "", "  ", ",", ",,", 'a,""', "a,", 'a, "space before"', 'a,"unfinished',
    "a,b,true,1,1,1,1,1,1,2026-01-01,,,,,one more", "one", "a,it's", 'a,in"side', 'a,"x"y', "# a comment", "a,NULL",
    "a,null", 'a,"null"', "a,-", 'a,"-"', "a;b", "\ufeffa,b",
]  # fmt: skip


def ddl(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {type_}" for name, type_ in columns.items())


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def as_text(rows: DataFrame) -> list[str]:
    """The rows as Spark writes them: Python has not all of its times."""
    columns = F.struct(*(F.col(f"`{name}`") for name in rows.columns))
    return sorted(
        row.text for row in rows.select(F.to_json(columns, {"ignoreNullFields": "false"}).alias("text")).collect()
    )


def streamed(
    spark: SparkSession, folder: Path, format_: str, columns: Mapping[str, str], options: Mapping[str, Any], path: Path
) -> list[str]:
    rows: list[str] = []
    files = aion.read_files(
        spark, folder, format=format_, schema=ddl(columns), options=options, watermark=("at", "0 s")
    ).to_df()
    query = files.writeStream.foreachBatch(lambda batch, _: rows.extend(as_text(batch)))
    query.option("checkpointLocation", str(path)).trigger(availableNow=True).start().awaitTermination()
    return sorted(rows)


def check_rows(
    spark: SparkSession, folder: Path, format_: str, columns: Mapping[str, str], options: Mapping[str, Any], path: Path
) -> list[str]:
    """Checks that each file gives the same rows as in Spark's batch reader, and returns them."""
    expected = as_text(spark.read.schema(ddl(columns)).options(**options).format(format_).load(str(folder)))
    assert streamed(spark, folder, format_, columns, options, path) == expected
    return expected


def json_files() -> dict[str, bytes]:
    """Each kind of value in each column, in lines of its own."""
    lines = [f'{{"{name}": {value}}}' for name in JSON_COLUMNS for value in JSON_VALUES if "\n" not in value]
    more = "\r\n".join(JSON_LINES)
    return {
        "values.json": "\n".join([*lines, '{"s": "a last line without an end"}']).encode(),
        "lines.json": b"\xef\xbb\xbf" + more.encode(),
        "packed.json.gz": gzip.compress("\n".join(JSON_LINES).encode()),
        "bytes.json": b'{"s": "\xff\xfe", "i": 1}\n{"s": "a\x00b"}\n\n\n',
        "blank.json": b"\n\r\n",
    }


def csv_files(header: bytes) -> dict[str, bytes]:
    """Each kind of value in each column, in lines of its own; the others are empty."""
    names = [name for name in CSV_COLUMNS if name != "corrupt"]
    lines = [
        ",".join([f"{name}-{number}", *(f'"{text}"' if name == other else "" for other in names[1:])])
        for name in names[1:]
        for number, text in enumerate([*TIMES, *NUMBERS, *WORDS])
    ]
    return {
        "values.csv": header + "\n".join(lines).encode(),
        "lines.csv": b"\xef\xbb\xbf" + header + "\r\n".join(CSV_LINES).encode(),
        "packed.csv.gz": gzip.compress(header + "\n".join(CSV_LINES).encode() + b"\n"),
        "header.csv": header or b"\n",
        "others.csv": b"s,id,b\nfirst,second,true\n",
    }


@pytest.mark.slow
def test_json_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", json_files())
    options = {"columnNameOfCorruptRecord": "corrupt"}
    rows = check_rows(spark, folder, "json", JSON_COLUMNS, options, tmp_path / "checkpoint")
    assert len(rows) > 2_000


def test_csv_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", csv_files(b"id,s\n"))
    options = {"columnNameOfCorruptRecord": "corrupt", "header": True}
    rows = check_rows(spark, folder, "csv", CSV_COLUMNS, options, tmp_path / "checkpoint")
    assert len(rows) > 900


@pytest.mark.proof
@pytest.mark.parametrize(
    ("format_", "options"),
    [
        ("json", {"mode": "DROPMALFORMED"}),
        ("json", {"allowComments": True, "allowSingleQuotes": False, "allowUnquotedFieldNames": True}),
        ("json", {"timeZone": "Asia/Tokyo", "encoding": "UTF-8", "lineSep": "\n"}),
        ("json", {"timestampFormat": "yyyy-MM-dd'T'HH:mm[:ss][.SSSSSS][XXX]", "dateFormat": "MM/dd/yyyy"}),
        ("json", {"primitivesAsString": True, "prefersDecimal": True, "allowNonNumericNumbers": False}),
        ("csv", {"mode": "DROPMALFORMED", "header": True}),
        ("csv", {"nullValue": "-", "emptyValue": "none", "comment": "#", "ignoreLeadingWhiteSpace": True}),
        ("csv", {"escape": '"', "quote": "'", "sep": ";", "nanValue": "nan", "positiveInf": "+INF"}),
        ("csv", {"multiLine": True, "lineSep": "\n", "maxColumns": 20}),
        ("csv", {"timestampFormat": "yyyy-MM-dd HH:mm:ss[.SSSSSS]", "dateFormat": "yyyy-M-d", "locale": "de"}),
    ],
    ids=str,
)  # fmt: skip
def test_options_mean_what_they_mean_to_spark(
    spark: SparkSession, tmp_path: Path, format_: str, options: dict[str, Any]
) -> None:
    folder = write(tmp_path / "in", json_files() if format_ == "json" else csv_files(b""))
    columns = JSON_COLUMNS if format_ == "json" else CSV_COLUMNS
    more = {"columnNameOfCorruptRecord": "corrupt"} if "mode" not in options else {}
    check_rows(spark, folder, format_, columns, {**options, **more}, tmp_path / "checkpoint")


@pytest.mark.proof
@pytest.mark.parametrize("sensitive", [True, False])
def test_names_by_case(spark: SparkSession, tmp_path: Path, sensitive: bool) -> None:
    lines = b'{"at": "2026-01-01", "a": 1, "A": 2}\n{"AT": "2026-01-01", "A": 3}\n'
    folder = write(tmp_path / "in", {"x.json": lines})
    columns = {"at": "timestamp", "A": "int", **({"a": "int"} if sensitive else {})}
    spark.conf.set("spark.sql.caseSensitive", sensitive)
    try:
        rows = check_rows(spark, folder, "json", columns, {}, tmp_path / "checkpoint")
    finally:
        spark.conf.set("spark.sql.caseSensitive", False)
    assert len(rows) == 2


@pytest.mark.proof
@pytest.mark.parametrize(
    ("format_", "content", "options"),
    [("json", b'{"s": \n', {"mode": "FAILFAST"}), ("csv", b"x,y\n1,2\n", {"header": True, "enforceSchema": False})],
)
def test_a_line_that_fails_spark_fails_the_query(
    spark: SparkSession, tmp_path: Path, format_: str, content: bytes, options: dict[str, Any]
) -> None:
    folder = write(tmp_path / "in", {"x": content})
    columns = {"at": "timestamp", "s": "string"}
    with pytest.raises(Exception, match=r"FAILFAST|CSV header does not conform"):
        streamed(spark, folder, format_, columns, options, tmp_path / "checkpoint")


@pytest.mark.slow
def test_windows_of_lines_with_a_filter_and_a_transform(spark: SparkSession, tmp_path: Path) -> None:
    """They come from folders that hold values, and from columns whose names need quotes. A number is text for a key."""
    lines = [f'{{"at": "2026-01-01T00:{i // 60:02d}:{i % 60:02d}Z", "my.key": {i % 3}, "v": {i}}}' for i in range(61)]
    (tmp_path / "in").mkdir()
    for day in (1, 2):
        write(tmp_path / "in" / f"day={day}", {"x.json": "\n".join([*lines, "not json", "{}"]).encode()})

    def longer(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column("w", pc.add(batch.column("v"), 100))

    what: dict[str, Any] = {
        "key": ["my.key", "day"], "time": "at", "windows": aion.Tumbling("10 seconds"), "policy": BOUND,
        "aggregates": {"n": A.count(), "sum": A.sum("w")},
    }  # fmt: skip
    events = aion.read_files(
        spark, tmp_path / "in", format="json", schema="at timestamp, v int, `my.key` string, day int",
        watermark=("at", "0 s"), where=pc.field("v") > 7, transform=longer,
    )  # fmt: skip
    rows = Sink(tmp_path).run(aion.windowed(events, **what))
    expected: dict[tuple[str, int, int], tuple[int, int]] = {}
    for day in (1, 2):
        for v in range(8, 60):
            place = (str(v % 3), day, v // 10 * 10)
            n, total = expected.get(place, (0, 0))
            expected[place] = n + 1, total + v + 100
    got = {(r["my.key"], r["day"], r["window_start"].second): (r["n"], r["sum"]) for r in rows}
    assert got == expected and len(rows) == len(expected)
    assert f"Spark reads the files of {tmp_path}/in as json, and of them the columns at, v, my.key, day" in " ".join(
        aion.explain(events, **what).split()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"on_bad_file": "drop"},
            "on_bad_file: Spark reads json line by line, and drops no file as a whole; leave it out",
        ),
        ({"tasks": 4}, "tasks: Spark itself decides how many tasks read json; leave it out"),
        ({"options": {"singleVariantColumn": "v"}}, "options: 'singleVariantColumn' is not one of pathGlobFilter"),
        ({"options": {"header": True}}, "options: 'header' is not one of pathGlobFilter"),
        ({"options": {"lineSep": ""}}, "options: Spark does not take {'lineSep': ''} for json: "),
        ({"options": {"timeZone": "Atlantis"}}, "The timezone: Atlantis is invalid"),
        (
            {"format": "csv", "options": {"Header": "yes"}},
            "for csv: org.apache.spark.SparkException: header flag can be",
        ),
        ({"format": "csv", "options": {"quote": "abc"}}, "quote cannot be more than one character, but got abc"),
    ],
)
def test_wrong_arguments(spark: SparkSession, change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        aion.read_files(
            spark, "in", **{"format": "json", "schema": "at timestamp", "watermark": ("at", "1 s"), **change}
        )
    assert message in str(caught.value)
