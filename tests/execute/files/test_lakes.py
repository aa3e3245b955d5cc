"""Which files of a table a stream reads, in tables of deltalake and pyiceberg."""

from __future__ import annotations

import base64
import datetime as dt
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aion.core.ingest.file_splits import Split
from aion.core.ingest.lake_versions import Added, delta_files, renamed_column
from aion.errors import ConfigError, StorageError
from aion.execute.files.formats import Format
from aion.execute.files.lakes import LakeStream, opened
from aion.execute.files.reading import FileReader
from tests.sinks.lakes import LAKES, Lake, fresh_threads

Offset = Mapping[str, Any]


@pytest.fixture(params=LAKES)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    with fresh_threads(request.param):
        yield Lake(request.param, tmp_path)


@pytest.fixture
def delta(tmp_path: Path) -> Lake:
    return Lake("delta", tmp_path)


@pytest.fixture
def iceberg(tmp_path: Path) -> Iterator[Lake]:
    with fresh_threads("iceberg"):
        yield Lake("iceberg", tmp_path)


def rows(first: int, count: int = 4, days: int = 2) -> pa.Table:
    """Each day is a partition, and so a file."""
    numbers = list(range(first, first + count))
    return pa.table({"n": numbers, "day": [f"d {n % days}/é" for n in numbers]})


class Reading:
    """A stream of a table from an offset on, until all is read."""

    def __init__(self, lake: Lake, start: Offset | None = None, limit: int | None = None, **options: str) -> None:
        self.offsets: list[Offset] = [start or {}]
        self.batches: list[list[int]] = []
        with closing(LakeStream(opened(lake.kind, lake.name("minutes"), {**lake.options, **options}))) as stream:
            while (end := stream.advanced(self.offsets[-1], limit)) != self.offsets[-1]:
                assert len(self.offsets) < 100
                self.batches.append(numbers(lake, stream, self.offsets[-1], end))
                stream.forget_before(self.offsets[-1])
                self.offsets.append(json.loads(json.dumps(end)))

    @property
    def numbers(self) -> list[int]:
        return sorted(n for batch in self.batches for n in batch)

    @property
    def end(self) -> Offset:
        return self.offsets[-1]


def numbers(lake: Lake, stream: LakeStream, start: Offset, end: Offset) -> list[int]:
    """The events between two offsets, which are read as the tasks read them."""
    schema = pa.schema([("n", pa.int64()), ("day", pa.string()), ("more", pa.int64())])
    reader = FileReader(Format(lake.kind), schema, schema, None, (), None, "UTC", case_sensitive=False)
    found = []
    for version, file in stream.files(start, end):
        for batch in reader.read(Split(file.path, file.length, version=version, values=file.values)):
            found += batch["n"].to_pylist()
            assert set(batch["day"].to_pylist()) <= {"d 0/é", "d 1/é"}
            assert batch["more"].null_count in (0, batch.num_rows)
    return found


def between(lake: Lake, start: Offset, end: Offset) -> list[int]:
    with closing(LakeStream(opened(lake.kind, lake.name("minutes"), lake.options))) as stream:
        return numbers(lake, stream, start, end)


@pytest.mark.parametrize("limit", [1, 3, None])
def test_each_file_is_read_once_in_batches_of_limited_size(lake: Lake, limit: int | None) -> None:
    """With partitions, and with columns that older files do not have. Also from any offset on, and again."""
    lake.put(rows(0), by="day")
    lake.put(rows(4))
    first = Reading(lake, limit=limit)
    assert first.numbers == list(range(8))
    lake.put(rows(8).append_column("more", pa.array([7] * 4)))
    lake.put(rows(12, days=1))
    later = Reading(lake, first.end, limit)
    assert later.numbers == list(range(8, 16))
    sizes = [len(batch) // 2 for batch in (*first.batches, *later.batches[:-1])]
    assert sizes == {1: [1] * 6, 3: [3, 1], None: [4]}[limit]
    assert [len(batch) for batch in later.batches[-1:]] == [{1: 4, 3: 8, None: 8}[limit]]
    for start, end, batch in zip(first.offsets, first.offsets[1:], first.batches, strict=False):
        assert between(lake, start, end) == batch
    # The oldest files come first: those of later ones would make them late.
    assert limit is None or first.batches[0][0] < 4


def test_a_first_batch_that_runs_again_has_the_files_of_the_first_time(lake: Lake) -> None:
    lake.put(rows(0), by="day")
    first = Reading(lake)
    lake.put(rows(4))
    assert between(lake, {}, first.end) == first.batches[0]
    assert Reading(lake, first.end).numbers == [4, 5, 6, 7]


def test_nothing_new_is_seen_after_the_newest_version_of_the_beginning(lake: Lake) -> None:
    """A query with the trigger ``availableNow`` would not end otherwise."""
    lake.put(rows(0))
    with closing(LakeStream(opened(lake.kind, lake.name("minutes"), lake.options))) as stream:
        stream.stop_at_newest()
        lake.put(rows(4))
        end = stream.advanced({}, None)
        assert len(numbers(lake, stream, {}, end)) == 4 and stream.advanced(end, None) == end
    assert Reading(lake, end).numbers == [4, 5, 6, 7]


def test_compaction_is_passed_over(lake: Lake) -> None:
    lake.put(rows(0))
    lake.put(rows(4))
    first = Reading(lake)
    compact(lake)
    lake.put(rows(8))
    assert Reading(lake, first.end, limit=1).batches == [[8, 9, 10, 11]]
    assert Reading(lake).numbers == list(range(12))


def compact(lake: Lake) -> None:
    """pyiceberg does not compact. A snapshot that Spark's rewrite has made says only in its summary that it did."""
    if lake.kind == "delta":
        lake.table().optimize.compact()
        return
    table = lake.table()
    lake.table().overwrite(table.scan().to_arrow())
    with changed_metadata(lake) as metadata:
        made = metadata["snapshots"][len(table.snapshots()) :]
        for snapshot in made:
            snapshot["summary"]["operation"] = "replace"


@contextmanager
def changed_metadata(iceberg: Lake) -> Iterator[dict[str, Any]]:
    """What pyiceberg does not write, but other engines do."""
    place = Path(iceberg.table().metadata_location.removeprefix("file://"))
    metadata = json.loads(place.read_text())
    yield metadata
    place.write_text(json.dumps(metadata))


def delete_a_part(lake: Lake) -> None:
    lake.table().delete("n = 1")


def delete_a_partition(lake: Lake) -> None:
    lake.table().delete("day = 'd 1/é'")


@pytest.mark.parametrize(
    ("kind", "change", "message", "option"),
    [
        ("delta", delete_a_part, r"version 1 of table '.*minutes' deletes or changes rows", "skipChangeCommits"),
        ("delta", delete_a_partition, r"version 1 of table '.*minutes' deletes rows, and a stream", "ignoreDeletes"),
        ("iceberg", delete_a_part, r"snapshot \d+ of .* changes rows", "streaming-skip-overwrite-snapshots"),
        ("iceberg", delete_a_partition, r"snapshot \d+ of .* deletes rows, and", "streaming-skip-delete-snapshots"),
    ],
)
def test_a_version_that_deletes_rows_is_refused_or_passed_over(
    tmp_path: Path, kind: str, change: Callable[[Lake], None], message: str, option: str
) -> None:
    with fresh_threads(kind):
        lake = Lake(kind, tmp_path)
        lake.put(rows(0), by="day")
        first = Reading(lake)
        change(lake)
        lake.put(rows(4))
        with pytest.raises(ConfigError, match=f"{message}.*'{option}': 'true'"):
            Reading(lake, first.end)
        assert Reading(lake, first.end, **{option: "True"}).numbers == [4, 5, 6, 7]


def test_a_stream_begins_where_its_options_say(lake: Lake) -> None:
    for first in (0, 4, 8):
        lake.put(rows(first))
    if lake.kind == "delta":
        assert Reading(lake, startingVersion="1").numbers == list(range(4, 12))
        latest: dict[str, str] = {"STARTINGVERSION": "latest"}
    else:
        versions = [snapshot.snapshot_id for snapshot in lake.table().snapshots()]
        times = [snapshot.timestamp_ms for snapshot in lake.table().snapshots()]
        assert Reading(lake, **{"start-snapshot-id": str(versions[0])}).numbers == list(range(4, 12))
        assert Reading(lake, **{"stream-from-timestamp": str(times[1])}).numbers == list(range(4, 12))
        latest = {"stream-from-timestamp": str(times[2] + 1_000_000)}
    end = Reading(lake, **latest).end
    lake.put(rows(12))
    assert between(lake, {}, end) == []
    assert Reading(lake, end).numbers == [12, 13, 14, 15]


def test_what_was_deleted_before_it_was_read_is_an_error_that_names_it(lake: Lake) -> None:
    lake.put(rows(0))
    first = Reading(lake)
    lake.put(rows(4, days=1))
    lake.put(rows(8, days=1))
    version = lake.table().version() - 1 if lake.kind == "delta" else lake.table().snapshots()[1].snapshot_id
    for file in files_of(lake, first.end)[:1]:
        file.unlink()
    with pytest.raises(
        StorageError, match=rf"\.parquet: .*version {version} of the table has this file. If it was vac"
    ):
        Reading(lake, first.end, limit=1)
    if lake.kind == "delta":
        lake.table().create_checkpoint()
        for old in range(version + 1):
            (Path(lake.name("minutes")) / "_delta_log" / f"{old:020}.json").unlink()
        message = (
            rf"version {version} of table .* cannot be read. If its log was cleaned up before, begin with a new ch"
        )
    else:
        lake.table().maintenance.expire_snapshots().by_id(version).commit()
        message = (
            rf"what came after snapshot {first.end['version']} of table .* is not known: it or a later one has expired"
        )
    with pytest.raises(StorageError, match=message):
        Reading(lake, first.end)


def test_a_snapshot_that_was_read_may_expire(iceberg: Lake) -> None:
    """Later ones name it as Iceberg writes them. pyiceberg does not, and then nobody knows what is missing."""
    iceberg.put(rows(0))
    first = Reading(iceberg)
    iceberg.put(rows(4))
    with changed_metadata(iceberg) as metadata:
        del metadata["snapshots"][0], metadata["snapshot-log"][0]
    assert Reading(iceberg, first.end).numbers == [4, 5, 6, 7]


def test_manifests_with_files_of_older_snapshots(iceberg: Lake) -> None:
    """Iceberg writes small manifests together when it appends."""
    iceberg.put(rows(0))
    iceberg.set({"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"})
    first = Reading(iceberg)
    for number in (4, 8):
        iceberg.put(rows(number))
    table = iceberg.table()
    assert len(table.current_snapshot().manifests(table.io)) == 1
    assert Reading(iceberg, first.end).numbers == list(range(4, 12))
    assert [batch[0] for batch in Reading(iceberg, limit=1).batches] == [0, 4, 8]


def files_of(lake: Lake, start: Offset) -> list[Path]:
    with closing(LakeStream(opened(lake.kind, lake.name("minutes"), lake.options))) as stream:
        end = stream.advanced(start, None)
        return [Path(file.path.removeprefix("file://").removeprefix("file:")) for _, file in stream.files(start, end)]


def test_another_table_of_the_same_name_is_refused(lake: Lake) -> None:
    lake.put(rows(0))
    end = Reading(lake).end
    lake.delete()
    lake.put(rows(0))
    with pytest.raises(ConfigError, match=r"was it deleted and made again\? Begin with a new checkpoint"):
        Reading(lake, end)


@pytest.mark.parametrize("versions", [1, 2, 4])
def test_a_table_that_is_made_again_during_a_run_is_refused(lake: Lake, versions: int) -> None:
    """Its later versions do not say that they are of another table. Nothing of it is read before that is noticed."""
    for number in (0, 4, 8):
        lake.put(rows(number))
    with closing(LakeStream(opened(lake.kind, lake.name("minutes"), lake.options))) as stream:
        end = stream.advanced({}, None)
        lake.delete()
        for number in range(versions):
            lake.put(rows(100 + 4 * number))
        with pytest.raises(ConfigError, match=r"was it deleted and made again\? Begin with a new checkpoint"):
            for number in range(4):
                assert stream.advanced(end, None) == end
                lake.put(rows(200 + 4 * number))


def test_rows_of_an_empty_table_are_waited_for(lake: Lake) -> None:
    """A table of Iceberg may have no snapshot yet."""
    if lake.kind == "delta":
        lake.put(rows(0, 0), by="day")
    else:
        with lake.catalog() as catalog:
            catalog.create_namespace("tests")
            catalog.create_table("tests.minutes", rows(0).schema)
    first = Reading(lake)
    assert first.numbers == [] and (first.end == {}) == (lake.kind == "iceberg")
    lake.put(rows(0))
    assert Reading(lake, first.end).numbers == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.date32(), dt.date(2024, 2, 29)),
        (pa.timestamp("us", "UTC"), dt.datetime(2024, 2, 29, 12, 30, 0, 123456, dt.UTC)),
        (pa.timestamp("us"), dt.datetime(1969, 2, 28, 12, 30)),
        (pa.decimal128(9, 2), Decimal("7.10")),
        (pa.bool_(), True),
        (pa.float64(), 0.1),
        (pa.string(), " %20=null/"),
    ],
)
def test_values_of_partitions(lake: Lake, type_: pa.DataType, value: object) -> None:
    """Those of the first version are read in another way than those of later ones."""
    schema = pa.schema([("n", pa.int64()), ("day", type_)])
    table = pa.table({"n": [1, 2], "day": [value, None]}, schema=schema)
    found = []
    reader = FileReader(Format(lake.kind), schema, schema, None, (), None, "UTC", case_sensitive=False)
    with fresh_stream(lake, table) as stream:
        start: Offset = {}
        for _ in range(2):
            end = stream.advanced(start, None)
            parts = [Split(file.path, file.length, values=file.values) for _, file in stream.files(start, end)]
            found.append(
                sorted((row["n"], row["day"]) for part in parts for b in reader.read(part) for row in b.to_pylist())
            )
            start = end
            lake.put(table)
    assert found == [[(1, value), (2, None)]] * 2


@contextmanager
def fresh_stream(lake: Lake, table: pa.Table) -> Iterator[LakeStream]:
    lake.put(table, by="day")
    with closing(LakeStream(opened(lake.kind, lake.name("minutes"), lake.options))) as stream:
        yield stream


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("delta", {"startingVersion": "9"}, "startingVersion is 9, and table .* has 0"),
        ("delta", {"startingVersion": "last"}, "startingVersion is 'last', and not a whole number, nor latest"),
        ("delta", {"ignoreDeletes": "yes"}, "ignoreDeletes is 'yes', and neither true nor false"),
        ("iceberg", {"start-snapshot-id": "latest"}, "start-snapshot-id is 'latest', and not a whole number$"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, kind: str, options: dict[str, str], message: str) -> None:
    with fresh_threads(kind):
        lake = Lake(kind, tmp_path)
        lake.put(rows(0))
        with pytest.raises(ConfigError, match=message):
            Reading(lake, **options)


def test_a_table_that_is_not_there(lake: Lake) -> None:
    lake.put(rows(0), table="other")
    with pytest.raises(ConfigError, match=r"minutes' is no table of Delta Lake|there is no table 'tests.minutes'"):
        Reading(lake)


# -- what a reader of Parquet would read wrongly -----------------------------------------------------------------------


def commit(delta: Lake, *actions: dict[str, Any]) -> None:
    """A commit as other engines write it."""
    log = Path(delta.name("minutes")) / "_delta_log"
    version = len(list(log.glob("*.json")))
    (log / f"{version:020}.json").write_text("".join(f"{json.dumps(action)}\n" for action in actions))


def actions_of(delta: Lake, version: int) -> list[dict[str, Any]]:
    log = Path(delta.name("minutes")) / "_delta_log" / f"{version:020}.json"
    return [json.loads(line) for line in log.read_text().splitlines()]


VECTORS = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"],
           "writerFeatures": ["deletionVectors"]}  # fmt: skip
# A bitmap with the third row, in the base 85 of ZeroMQ, which has other letters than Python's.
_BITMAP = struct.pack("<IQIIIHHIHxx", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 2)
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_PYTHONS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TEXT = base64.b85encode(_BITMAP).decode().translate(str.maketrans(_PYTHONS, _LETTERS))
VECTOR = {"storageType": "i", "pathOrInlineDv": _TEXT, "sizeInBytes": len(_BITMAP), "cardinality": 1}


def test_deletion_vectors_are_refused(delta: Lake) -> None:
    """A table may have the feature. It is a file with a vector that is refused."""
    delta.put(rows(0, 40, days=1))
    (added,) = (action["add"] for action in actions_of(delta, 0) if "add" in action)
    commit(delta, {"protocol": VECTORS})
    first = Reading(delta)
    assert len(first.numbers) == 40
    removed = {"path": added["path"], "dataChange": True, "deletionTimestamp": 1}
    commit(delta, {"remove": removed}, {"add": {**added, "deletionVector": VECTOR}})
    with pytest.raises(ConfigError, match=r"version 2 of table .* deletes or changes rows"):
        Reading(delta, first.end)
    with pytest.raises(ConfigError, match=r"version 2 of table .* has files with deletion vectors, and read_files wo"):
        Reading(delta)


def test_columns_with_other_names_in_files_are_refused(delta: Lake) -> None:
    delta.put(rows(0))
    first = Reading(delta)
    (of_table,) = (action["metaData"] for action in actions_of(delta, 0) if "metaData" in action)
    with closing(LakeStream(opened("delta", delta.name("minutes"), {}))) as stream:
        commit(delta, {"metaData": {**of_table, "configuration": {"delta.columnMapping.mode": "name"}}})
        with pytest.raises(ConfigError, match=r"^version 1 of table .* maps columns to other names"):
            stream.advanced(first.end, None)
    delta.put(rows(4))
    with pytest.raises(ConfigError, match=r"^table .* maps columns to other names"):
        Reading(delta, startingVersion="2")


def test_columns_of_iceberg_that_were_renamed_are_refused(iceberg: Lake) -> None:
    iceberg.put(rows(0))
    first = Reading(iceberg)
    with iceberg.table().update_schema() as update:
        update.rename_column("n", "number")
    for start in (first.end, {}):
        with pytest.raises(ConfigError, match=r"column 'number' of table 'tests\.minutes' had another name"):
            Reading(iceberg, start)


def test_files_of_deletes_are_refused(iceberg: Lake) -> None:
    """pyiceberg writes none, so a manifest is declared to be one of them."""
    from pyiceberg.manifest import ManifestContent, write_manifest_list

    iceberg.put(rows(0))
    first = Reading(iceberg)
    iceberg.put(rows(4))
    table = iceberg.table()
    snapshot = table.current_snapshot()
    manifests = snapshot.manifests(table.io)
    manifests[0][3] = ManifestContent.DELETES
    out = table.io.new_output(snapshot.manifest_list)
    place = Path(snapshot.manifest_list.removeprefix("file://"))
    place.unlink()
    with write_manifest_list(2, out, snapshot.snapshot_id, None, snapshot.sequence_number, "null") as writer:
        writer.add_manifests(manifests)
    for start in (first.end, {}):
        with pytest.raises(ConfigError, match=rf"snapshot {snapshot.snapshot_id} of .* has files of deletes"):
            Reading(iceberg, start)


def test_a_newer_format_is_refused(iceberg: Lake) -> None:
    iceberg.put(rows(0))
    with changed_metadata(iceberg) as metadata:
        metadata |= {"format-version": 3, "next-row-id": 4}
    with pytest.raises(ConfigError, match="has version 3 of the Iceberg format, and read_files reads tables up to"):
        Reading(iceberg)


# -- what a commit says ------------------------------------------------------------------------------------------------


def test_files_in_a_commit_of_another_engine() -> None:
    """Paths are URLs, of other folders also, and an empty text in a partition is null, as Delta's protocol says."""
    actions = [
        {"commitInfo": {"operation": "WRITE"}},
        {"add": {"path": "a%20b=%C3%A9/x.parquet", "size": 7, "partitionValues": {"a b": "", "c": "1"}, "stats": None}},
        {"add": {"path": "s3://other/y%2520.parquet", "size": 8, "partitionValues": {}, "dataChange": True}},
        {"add": {"path": "moved.parquet", "size": 9, "partitionValues": {}, "dataChange": False}},
        {"cdc": {"path": "changes.parquet", "size": 9, "partitionValues": {}, "dataChange": False}},
    ]
    assert list(delta_files(actions, "s3://here/t", "a commit", ())) == [
        Added("s3://here/t/a b=é/x.parquet", 7, '{"a b": null, "c": "1"}'),
        Added("s3://other/y%20.parquet", 8, "{}"),
    ]
    vector = {"add": {"path": "z", "size": 1, "partitionValues": {}, "deletionVector": {"cardinality": 1}}}
    for action, message in (
        (vector, "^a commit has files with deletion vectors"),
        ({"remove": {"path": "z"}}, "^a commit deletes rows"),
        (
            {"protocol": {"readerFeatures": ["columnMapping", "variantType"]}},
            "^a commit has the Delta feature 'variantT",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            list(delta_files([action], "t", "a commit", ()))


@pytest.mark.parametrize(
    ("schemas", "renamed"),
    [
        ([{1: "a"}, {1: "a", 2: "b"}, {2: "b"}], None),
        ([{1: "a"}, {1: "b"}], "b"),
        ([{1: "a"}, {}, {2: "a"}], "a"),
        ([{1: "a", 2: "a.x"}, {1: "a", 2: "a.y"}], "a.y"),
    ],
)
def test_renamed_columns(schemas: list[dict[int, str]], renamed: str | None) -> None:
    assert renamed_column(schemas) == renamed
