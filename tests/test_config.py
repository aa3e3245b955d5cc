"""The policy: what is accepted, what is refused and how, which layer wins, and the way there and back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

import aion.config as config
from aion.config import Policy, load_policy, resolve
from aion.errors import ConfigError, PolicyError

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def refused(source: Any, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source, overrides)
    return str(caught.value)


# -- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1), ("1", 1), ("7 B", 7), ("1KiB", 1024), ("512MiB", 512 * MIB), ("1 GiB", 1 << 30),
        ("2TiB", 2 << 40), ("1KB", 1000), ("3 MB", 3_000_000), ("1GB", 10**9), ("1.5KiB", 1536),
        ("0.1 KiB", 102), ("64mib", 64 * MIB), (" 5MiB ", 5 * MIB),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert config.size_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "1 MiB 2 KiB", "1e6", "1,5MiB", "25%", "٣MiB", 1.5, "1.5", True, None, [1], 0, -1, "-1MiB",
     "0.5B", "9999999TiB", 1 << 63, "9" * 5000],
)  # fmt: skip
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError, match=r"budget: .*64MiB"):
        config.size_bytes(text, what="budget")


def test_a_size_in_the_units_of_spark_is_told_its_spelling_here() -> None:
    with pytest.raises(ConfigError, match=r"'512m' has the unknown unit 'm'; .*'512MiB'.*KiB MiB GiB TiB"):
        config.size_bytes("512m")


@given(st.integers(1, (1 << 63) - 1))
def test_the_spelling_of_a_size_is_exact(size: int) -> None:
    assert config.size_bytes(config.format_bytes(size)) == size


# -- what is accepted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# a comment\n", "null", "{}", "memory:\nstate:\n  # backend: memory\n"])
def test_what_is_not_written_is_the_default(tmp_path: Path, text: str) -> None:
    assert load_policy(write(tmp_path, text)) == Policy()


def test_every_key_of_a_file_arrives(tmp_path: Path) -> None:
    policy = load_policy(
        write(
            tmp_path,
            """
            state: {backend: rocksdb, codec: json, compression: zstd, shards: 12, dir: s3://bucket/state}
            memory: {budget: 1GiB, bucket_limit: 4096, moderate: 50%, resume: 0, scarce: 1.0, victim: slowest}
            destage: {keep_fraction: 12.5%, idle_after: 2.5x, class: my.own:Thing.Inner, arguments: {a: [1, {b: x}]}}
            prestage: {mode: predictive, class: mine:Plan, arguments: {}}
            io: {codec_threads: 0, threads: 4, rate_limit: 100 MB}
            blocks: {target: 64KB}
            lateness: {initial_bound: 1 hour 30 minutes}
            trigger: {kind: every_batch}
            """,
        )
    )
    assert policy.state.model_dump() == {
        "backend": "rocksdb", "codec": "json", "compression": "zstd", "shards": 12, "dir": "s3://bucket/state",
    }  # fmt: skip
    memory, destage, io = policy.memory, policy.destage, policy.io
    assert (memory.budget_bytes, memory.bucket_limit_bytes) == (1 << 30, 4096)
    assert (memory.moderate, memory.resume, memory.scarce, memory.victim) == (0.5, 0.0, 1.0, "slowest")
    assert (destage.keep_fraction, destage.idle_multiple, destage.idle_after_us) == (0.125, 2.5, None)
    assert (destage.class_path, dict(destage.arguments)) == ("my.own:Thing.Inner", {"a": [1, {"b": "x"}]})
    assert (policy.prestage.mode, policy.prestage.class_path) == ("predictive", "mine:Plan")
    assert (io.codec_threads, io.threads, io.rate_limit_bytes_per_s) == (0, 4, 100_000_000)
    assert policy.blocks.target_bytes == 64_000
    assert policy.lateness.initial_bound_us == 5_400_000_000
    assert policy.trigger.kind == "every_batch"


def test_a_policy_comes_from_a_preset_a_path_a_mapping_or_a_policy(tmp_path: Path) -> None:
    file = write(tmp_path, "memory: {budget: 100MiB}")
    expected = Policy.model_validate({"memory": {"budget": "100MiB"}})
    for source in (
        file,
        str(file),
        {"memory": {"budget": "100MiB"}},
        {"memory": {"budget": 100 * MIB}},
        expected,
    ):
        assert load_policy(source) == expected
    assert load_policy("standard") == Policy()


def test_a_preset_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "low_memory").write_text("memory: {budget: 1GiB}")
    monkeypatch.chdir(tmp_path)
    assert load_policy("low_memory").memory.budget_bytes == 64 * MIB
    assert load_policy("./low_memory").memory.budget_bytes == 1 << 30


@pytest.mark.parametrize("bound", [0, 90_000_000, timedelta(seconds=90), "90s", "0s"])
def test_a_bound_in_python_is_a_duration_or_microseconds(bound: object) -> None:
    policy = load_policy({}, {"lateness_initial_bound": bound})
    assert policy.lateness.initial_bound_us == (0 if bound in (0, "0s") else 90_000_000)


@pytest.mark.parametrize(
    ("value", "us", "multiple"),
    [(None, None, None), ("90s", 90_000_000, None), (timedelta(seconds=1), 1_000_000, None), ("3x", None, 3.0),
     (" 0.5 x ", None, 0.5), (config.Multiple(2.0), None, 2.0), (5, 5, None)],
)  # fmt: skip
def test_idle_is_a_duration_a_multiple_or_off(value: object, us: int | None, multiple: float | None) -> None:
    destage = load_policy({}, {"destage_idle_after": value}).destage
    assert (destage.idle_after_us, destage.idle_multiple) == (us, multiple)


def test_a_budget_is_bytes_or_a_share_of_what_the_host_has() -> None:
    share = load_policy({"memory": {"budget": "25%"}})
    assert share.memory.budget == config.Share(25.0)
    assert config.budget_bytes(share, 1 << 30) == 256 * MIB
    assert config.bucket_limit_bytes(share, 1 << 30) == 64 * MIB
    assert config.bucket_limit_bytes(share, 100 * MIB) == config.budget_bytes(share, 100 * MIB) == 25 * MIB
    assert config.budget_bytes(load_policy({"memory": {"budget": "0.01%"}}), 100) == 1
    with pytest.raises(ConfigError, match="25% is a share"):
        _ = share.memory.budget_bytes
    absolute = load_policy("standard")
    assert config.budget_bytes(absolute, 1) == absolute.memory.budget_bytes == 512 * MIB


def test_arguments_do_not_change() -> None:
    mine = load_policy({"destage": {"class": "mine:Mine", "arguments": {"names": ["a"]}}})
    mine.destage.arguments["names"].append("b")
    assert dict(mine.destage.arguments) == {"names": ["a"]}
    assert len(mine.destage.arguments) == 1
    assert hash(mine) == hash(config.policy_from_json(config.policy_to_json(mine)))
    assert mine != load_policy({"destage": {"class": "mine:Mine"}})
    assert repr(mine.destage.arguments) == 'Arguments({"names": ["a"]})'


@pytest.mark.parametrize(
    "place",
    ["/x", "x/y:z", "c:/x", "file:///x", "s3://b/p?region=eu-west-1", "s3a://b", "gs://b/p", "hdfs://user@host:8020/p",
     "abfss://c@account.dfs.core.windows.net/p", "fsspec+memory://x"],
)  # fmt: skip
def test_places_of_state_that_may_be(place: str) -> None:
    assert load_policy({"state": {"dir": place}}).state.dir == place


@pytest.mark.parametrize("place", ["s3://id:hunter2@bucket/p", "abfs://c@a/p?client_secret=hunter2"])
def test_a_secret_in_a_place_is_refused_and_not_repeated(place: str) -> None:
    with pytest.raises(PolicyError, match=r"state\.dir: .* contains a secret.*environment") as told:
        load_policy({"state": {"dir": place}})
    assert "hunter2" not in str(told.value)


def test_a_class_is_not_imported_by_reading_its_policy(tmp_path: Path) -> None:
    policy = load_policy(write(tmp_path, "destage: {class: 'no.such.module:Thing'}"))
    assert policy.destage.class_path == "no.such.module:Thing"


def test_a_folder_may_be_a_path_object(tmp_path: Path) -> None:
    assert load_policy({}, {"state_dir": tmp_path}).state.dir == str(tmp_path)
    assert load_policy({"state": {"dir": "/x"}}, {"state_dir": None}).state.dir is None


def test_a_policy_does_not_change() -> None:
    policy = Policy()
    with pytest.raises(ValidationError):
        policy.state.backend = "memory"  # type: ignore[misc]
    assert hash(policy) == hash(Policy())


# -- what is refused, and how it is said --------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory: {budgt: 1MiB}", "memory.budgt: unknown key; did you mean memory.budget? "
         "allowed here: budget, bucket_limit, moderate, resume, scarce, victim"),
        ("memroy: {budget: 1MiB}", "memroy: unknown key; did you mean memory? "
         "allowed here: state, memory, destage, prestage, io, blocks, distribution, execution, apply, lateness"),
        ("budget: 1MiB", "budget: unknown key; did you mean memory.budget?"),
        ("memory.budget: 1MiB", "memory.budget: unknown key; write it as memory: {budget: ...}"),
        ("memory: {budget_bytes: 1MiB}", "memory.budget_bytes: unknown key; did you mean memory.budget?"),
        ("state: {1: 2}", "state.1: unknown key; allowed here: backend"),
        ("? [state]\n: {}", "?: unknown key"),
        ("memory: 512MiB", "memory: '512MiB' is not a section; write these keys below it: budget, bucket_limit"),
        ("memory: {budget: 2 parsec}", "memory.budget: '2 parsec' has the unknown unit 'parsec'; units"),
        ("memory: {budget: 0%}", "memory.budget: '0%' is out of range; a share is above 0% and at most 100%"),
        ("memory: {budget: 101%}", "memory.budget: '101%' is out of range; a share is above 0% and at most 100%"),
        ("memory: {budget: 0.25}", "memory.budget: 0.25 is not a size; write it as a share, '25%'"),
        ("memory: {budget: 1e2%}", "memory.budget: '1e2%' is not a size; write e.g. '64MiB'"),
        ("memory: {bucket_limit: 25%}", "memory.bucket_limit: '25%' is not a size; write e.g. '64MiB'"),
        ("memory: {moderate: 75}", "memory.moderate: 75 is not a share; write a number from 0 to 1, "
         "e.g. 0.75, or '75%'"),
        ("memory: {moderate: -0.1}", "memory.moderate: -0.1 is not a share; write a number from 0 to 1"),
        ("memory: {moderate: .nan}", "memory.moderate: nan is not a share; write a number from 0 to 1"),
        ("memory: {moderate: true}", "memory.moderate: true is not a share; write a number from 0 to 1"),
        ("memory: {moderate: a lot}", "memory.moderate: 'a lot' is not a share; write a number from 0 to 1"),
        ("memory: {resume: 0.8, moderate: 0.75}", "memory.resume: 0.8 is not below memory.moderate, 0.75; set resume "
         "lower than moderate"),
        ("memory: {resume: 1}", "memory.resume: 1.0 is not below memory.moderate, 1.0; set resume lower than moderate; "
         "memory.moderate is from the defaults"),
        ("memory: {moderate: 95%, scarce: 0.9}", "memory.scarce: 0.9 is below memory.moderate, 0.95; set it to at "
         "least that"),
        ("memory: {victim: oldest}", "memory.victim: 'oldest' is not possible; write 'largest' or 'slowest'"),
        ("destage: {keep_fraction: 2}", "destage.keep_fraction: 2 is not a share; write a number from 0 to 1"),
        ("destage: {idle_after: 3}", "destage.idle_after: 3 has no unit; write e.g. '3s' or '3m'; or a multiple of the "
         "median time of an execution, e.g. '3x'; or null"),
        ("destage: {idle_after: 0}", "destage.idle_after: 0 is not an idle time; write a duration above 0"),
        ("destage: {idle_after: 0x}", "destage.idle_after: '0x' is out of range; write a multiple above 0, e.g. '3x'"),
        ("destage: {idle_after: -2s}", "destage.idle_after: '-2s' is negative"),
        ("destage: {idle_after: soon}", "destage.idle_after: 'soon' is not a duration; write e.g. '20 seconds' or "
         "'5m'; or a multiple"),
        ("destage: {class: mine}", "destage.class: 'mine' is not a class; write package.module:Class, or null"),
        ("destage: {class: 'my-module:Mine'}", "destage.class: 'my-module:Mine' is not a class"),
        ("destage: {class: mine:Mine, arguments: 5}", "destage.arguments: 5 is not a mapping; write names and values"),
        ("destage: {class: mine:Mine, arguments: {two words: 5}}", "destage.arguments: 'two words' is not an "
         "argument name; write e.g. 'limit: 5'"),
        ("destage: {class: mine:Mine, arguments: {at: 2024-01-01}}", "cannot be sent to executors"),
        ("destage: {class: mine:Mine, arguments: {x: .inf}}", "cannot be sent to executors"),
        ("destage: {arguments: {x: 5}}", "destage.arguments: given without a class; set class too, or remove "
         "arguments; destage.class is from the defaults"),
        ("prestage: {arguments: {x: 5}}", "prestage.arguments: given without a class"),
        ("prestage: {mode: }", "prestage.mode: null is not possible; write 'predictive', 'on_late_event' or 'none'"),
        ("prestage: {mode: none, class: mine:Plan}", "prestage.mode: none does not use class; set mode to predictive"),
        ("io: {codec_threads: -1}", "io.codec_threads: -1 is not a number of threads; write an integer "
         "from 0 to 1,024"),
        ("io: {codec_threads: 1.5}", "io.codec_threads: 1.5 is not a number of threads"),
        ("io: {codec_threads: true}", "io.codec_threads: true is not a number of threads"),
        ("io: {threads: 0}", "io.threads: 0 is not a number of threads; write an integer from 1 to 1,024"),
        ("io: {rate_limit: 0}", "io.rate_limit: 0 is out of range; a size is at least 1 byte"),
        ("io: {rate_limit: fast}", "io.rate_limit: 'fast' is not a size; write e.g. '64MiB'"),
        ("memory: {budget: -1}", "memory.budget: -1 is out of range; a size is at least 1 byte"),
        ("memory: {budget: }", "memory.budget: null is not a size"),
        ("memory: {budget: {a: 1}}", "memory.budget: {'a': 1} is not a size"),
        ("blocks: {target: 2GiB}", "blocks.target: 2GiB is too large for a Spark row; write at most"),
        ("lateness: {initial_bound: -5m}", "lateness.initial_bound: '-5m' is negative; write 0 or more"),
        ("lateness: {initial_bound: -1}", "lateness.initial_bound: -1 is negative; write 0 or more"),
        ("lateness: {initial_bound: 10}", "lateness.initial_bound: 10 has no unit; write e.g. '10s' or"),
        ("lateness: {initial_bound: 5 moons}", "lateness.initial_bound: '5 moons' has the unknown unit"),
        ("lateness: {initial_bound: 1.5}", "lateness.initial_bound: 1.5 is not a duration; write e.g."),
        ("lateness: {initial_bound: 9999999 days}", "is too long; write at most '3652500 days'"),
        ("lateness: {initial_bound: " + "9" * 400 + ".5 days}", "does not fit into 64 bits of microseconds"),
        ("state: {backend: rockdb}", "state.backend: 'rockdb' is not possible; "
         "write 'tiered', 'memory' or 'rocksdb'"),
        ("state: {compression: off}", "state.compression: false is not possible; write 'none', 'lz4' or"),
        ("state: {codec: pickle}", "state.codec: 'pickle' is not possible; write 'arrow' or 'json'"),
        ("state: {shards: 0}", "state.shards: 0 is not a number of shards; write 'auto' or an integer from 1"),
        ("state: {shards: true}", "state.shards: true is not a number of shards"),
        ("state: {dir: 5}", "state.dir: 5 is not a location; write a path"),
        ("state: {dir: 'ftp://host/x'}", "state.dir: 'ftp://host/x': pyarrow cannot open such a file system"),
        ("state: {dir: 'dbfs:/x'}", "state.dir: 'dbfs:/x': pyarrow cannot open such a file system; use one of file"),
        ("state: {dir: 's3:/bucket'}", "state.dir: 's3:/bucket' is not a URI; write s3://..."),
        (
            "trigger: {kind: hourly}",
            "trigger.kind: 'hourly' is not possible; write 'staleness', 'interval', 'count' or 'every_batch'",
        ),
        ("trigger: {bound: 0}", "trigger.bound: 0 is out of range; write a share above 0 and below 1, e.g. 0.05"),
        ("trigger: {executions: 0}", "0 is not a number of executions; write an integer from 1, or null"),
        ("trigger: {interval: 0}", "trigger.interval: 0 is not an interval; write a duration above 0, e.g. '1m'"),
        ("trigger: {count: 1.5}", "trigger.count: 1.5 is not a number of events; write an integer from 1"),
        ("memory: {budget: 1MiB, bucket_limit: 2MiB}", "memory.bucket_limit: 2MiB is larger than "
         "memory.budget, 1MiB; set bucket_limit to at most '1MiB'"),
        ("memory: {bucket_limit: 1GiB}", "memory.bucket_limit: 1GiB is larger than memory.budget, 512MiB; "
         "set bucket_limit to at most '512MiB'; memory.budget is from the defaults"),
        ("memory: {budget: 2024-13-45}", "this cannot be read as YAML: month must be in 1..12"),
        ("memory: [", "this cannot be read as YAML"),
        ("\tmemory: {}", "this cannot be read as YAML"),
        ("state: !!python/object/apply:os.getcwd []", "this cannot be read as YAML: could not determine"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_line_the_value_and_what_is_right(
    tmp_path: Path, line: str, says: str
) -> None:
    file = write(tmp_path, "# first line\n\n" + line)
    message = refused(file)
    assert message.startswith(f"{file}:3: "), message
    assert says in message
    assert "\n" not in message


def test_all_errors_of_a_file_are_told_in_the_order_of_their_lines(tmp_path: Path) -> None:
    text = "lateness:\n  initial_bound: -5m\nmemory:\n  budget: lots\n  budget: more\nstate:\n  backend: redis\n"
    lines = refused(write(tmp_path, text)).splitlines()
    places = [re.sub(r"^.*mine.yaml:(\d+): ([a-z_.]+): .*", r"\1 \2", line) for line in lines]
    assert places[0] == "2 lateness.initial_bound"
    assert "5 memory.budget" in places
    assert places[-1] == "7 state.backend"


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "state:\n  backend: memory\n  backend: tiered\nstate: {}\n")
    assert refused(file).splitlines() == [
        f"{file}:3: state.backend: written twice, first in {file}:2; keep one",
        f"{file}:4: state: written twice, first in {file}:1; keep one",
    ]


@pytest.mark.parametrize("text", ["- a list", "just words", "5"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "is not a policy; write sections: state, memory" in refused(write(tmp_path, text))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\xe9: 1", b"state: \x00", b"a: &a {b: *a}", b"a: 1\n---\nb: 1"])
def test_a_file_that_is_no_plain_yaml_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mine.yaml").write_bytes(data)
    assert "mine.yaml" in refused(tmp_path / "mine.yaml")


@pytest.mark.parametrize("source", ["standrd", "", "/no/such/file.yaml", Path("nowhere"), "\0", "x" * 5000])
def test_neither_a_preset_nor_a_file(source: str | Path) -> None:
    message = refused(source)
    assert "is not a preset and cannot be read as a file" in message
    assert "presets are demo, disk_only, low_latency, low_memory, memory_only, standard" in message
    assert ("did you mean standard?" in message) == (source == "standrd")


def test_a_folder_is_no_policy(tmp_path: Path) -> None:
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize("source", [5, None, ["standard"], b"standard"])
def test_what_cannot_be_a_policy_at_all(source: object) -> None:
    assert "give a preset (demo, disk_only" in refused(source)


def test_a_huge_value_is_shown_in_part() -> None:
    assert len(refused({"state": {"backend": "x" * 10_000}})) < 300


# -- layers -------------------------------------------------------------------------------------------


def test_a_keyword_wins_over_spark_conf_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "memory: {budget: 100MiB, bucket_limit: 1MiB}\nblocks: {target: 2MiB}\n")
    conf = {"spark.aion.memory.budget": "200MiB", "spark.aion.memory.bucket_limit": "2MiB"}
    policy = resolve(file, keyword={"memory_budget": "300MiB"}, spark_conf=conf)
    assert policy.memory.budget_bytes == 300 * MIB
    assert policy.memory.bucket_limit_bytes == 2 * MIB
    assert policy.blocks.target_bytes == 2 * MIB
    assert policy.lateness == Policy().lateness


@pytest.mark.parametrize("key", ["memory.budget", "memory_budget"])
def test_a_keyword_has_dots_or_underscores(key: str) -> None:
    assert load_policy("standard", {key: "1GiB"}).memory.budget_bytes == 1 << 30


def test_a_keyword_may_be_a_section() -> None:
    policy = load_policy("low_memory", {"memory": {"budget": "1GiB"}})
    assert (policy.memory.budget_bytes, policy.memory.bucket_limit_bytes) == (1 << 30, 8 * MIB)


def test_an_empty_section_leaves_what_lies_below_it() -> None:
    assert load_policy("low_memory", {"memory": None}) == load_policy("low_memory")


def test_spark_conf_names_the_policy_and_has_only_strings() -> None:
    conf = {
        "spark.aion.policy": "disk_only",
        "spark.aion.state.dir": "/state",
        "spark.aion.state.shards": " 8 ",
    }
    state = resolve(keyword={}, spark_conf=conf).state
    assert (state.backend, state.dir, state.shards) == ("rocksdb", "/state", 8)
    assert resolve("memory_only", keyword={}, spark_conf=conf).state.backend == "memory"
    assert resolve(keyword={}, spark_conf={}) == Policy()


def test_spark_conf_spells_numbers_null_and_mappings() -> None:
    conf = {
        "spark.aion.memory.moderate": "0.7",
        "spark.aion.memory.budget": "30%",
        "spark.aion.io.codec_threads": "3",
        "spark.aion.destage.idle_after": "null",
        "spark.aion.destage.class": "mine:Mine",
        "spark.aion.destage.arguments": '{"a": 1, "b": null}',
    }
    policy = resolve("low_memory", keyword={}, spark_conf=conf)
    assert (policy.memory.moderate, policy.memory.budget, policy.io.codec_threads) == (0.7, config.Share(30.0), 3)
    assert policy.destage.idle_after is None
    assert dict(policy.destage.arguments) == {"a": 1, "b": None}


def test_arguments_are_one_value_that_a_layer_replaces_as_a_whole(tmp_path: Path) -> None:
    file = write(tmp_path, "destage: {class: mine:Mine, arguments: {a: 1, b: 2}}")
    assert dict(load_policy(file, {"destage_arguments": {"a": 3}}).destage.arguments) == {"a": 3}
    assert dict(load_policy(file, {"destage": {"arguments": {"c": 3}}}).destage.arguments) == {"c": 3}
    assert dict(load_policy(file, {"destage_arguments": None}).destage.arguments) == {}
    assert dict(load_policy(file, {"destage": {"class": "mine:Other"}}).destage.arguments) == {"a": 1, "b": 2}


def test_settings_of_others_are_ignored() -> None:
    conf = {"spark.app.name": "x", "spark.aionic.memory": "5", "spark.sql.shuffle.partitions": "2"}
    assert resolve(keyword={}, spark_conf=conf) == Policy()


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"spark.aion.memory.budgt": "1"}, "memory.budgt: unknown key; did you mean memory.budget?"),
        ({"spark.aion.shards": "4"}, "shards: unknown key; did you mean state.shards?"),
        ({"spark.aion.memory_budget": "1GiB"}, "memory_budget: unknown key; did you mean memory.budget?"),
        ({"spark.aion.memory": "1"}, "memory: '1' is not a section"),
        ({"spark.aion.memory.budget.x": "1"}, "memory.budget: {'x': '1'} is not a size"),
        ({"spark.aion.state.shards": "many"}, "state.shards: 'many' is not a number of shards"),
        ({"spark.aion.lateness.initial_bound": "600"}, "lateness.initial_bound: '600' is not a duration"),
        ({"spark.aion.policy": "fast"}, "'fast' is not a preset"),
        ({"spark.aion.memory.budget": "null"}, "memory.budget: null is not a size"),
        ({"spark.aion.memory.scarce": "90"}, "memory.scarce: '90' is not a share; write a number from 0 to 1"),
        ({"spark.aion.destage.idle_after": "60"}, "destage.idle_after: '60' is not a duration"),
        ({"spark.aion.destage.arguments": "{a: 1"}, "destage.arguments: '{a: 1' is not a mapping"),
        ({"spark.aion.destage.arguments.a": "1"}, "destage.arguments.a: unknown key; destage.arguments is a single "
         "value: write it as a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_spark_setting_is_refused_by_its_name(conf: dict[str, str], says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        resolve(keyword={}, spark_conf=conf)
    assert str(caught.value).startswith(f"Spark conf {next(iter(conf))}: ")
    assert says in str(caught.value)


def test_a_wrong_keyword_is_refused_by_its_name() -> None:
    assert refused({}, {"memory_budgt": 1}).startswith("keyword memory_budgt: memory_budgt: unknown key; did you mean")
    assert refused({}, {"state_backend": "x"}).startswith("keyword state_backend: state.backend: 'x' is not possible")


def test_one_key_in_two_spellings_is_refused() -> None:
    message = refused({}, {"memory_budget": "1GiB", "memory.budget": "2GiB"})
    assert message == "keyword memory.budget: memory.budget: written in two ways; keep one"


def test_a_check_across_layers_names_both(tmp_path: Path) -> None:
    file = write(tmp_path, "memory:\n  budget: 1GiB\n  bucket_limit: 64MiB\n")
    message = refused(file, {"memory_budget": "32MiB"})
    assert message.startswith("keyword memory_budget: memory.bucket_limit: 64MiB is larger than memory.budget, 32MiB")
    assert message.endswith(f"memory.bucket_limit is from {file}:3")


PRESET = st.sampled_from(["standard", "low_memory", "low_latency", "demo"])


@pytest.mark.parametrize("preset", ["standard", "low_memory", "low_latency", "disk_only", "memory_only"])
def test_a_limit_that_the_user_did_not_set_follows_the_budget(preset: str, tmp_path: Path) -> None:
    """By keyword, Spark conf, a mapping or a file, and also on top of a policy that a preset made."""
    small = {"memory": {"budget": "4MiB"}}
    for policy in (
        load_policy(preset, {"memory_budget": "4MiB"}),
        resolve(preset, keyword={"memory": {"budget": "4MiB"}}, spark_conf={}),
        resolve(None, keyword={}, spark_conf={"spark.aion.policy": preset, "spark.aion.memory.budget": "4MiB"}),
        load_policy(load_policy(preset), {"memory.budget": "4MiB"}),
        load_policy(small),
        load_policy(write(tmp_path, "memory: {budget: 4MiB}")),
    ):
        assert (policy.memory.budget, policy.memory.bucket_limit_bytes) == (4 * MIB, 4 * MIB)
    large = load_policy(preset, {"memory_budget": "1TiB"})
    assert large.memory.bucket_limit_bytes == load_policy(preset).memory.bucket_limit_bytes
    assert config.MemoryPolicy(budget=4 * MIB).bucket_limit_bytes == 4 * MIB


def test_a_limit_that_the_user_set_does_not_follow(tmp_path: Path) -> None:
    for source in (
        {"memory": {"bucket_limit": "8MiB"}},
        load_policy("low_memory", {"memory.bucket_limit": "8MiB"}),
        write(tmp_path, "memory: {bucket_limit: 8MiB}"),
    ):
        assert "memory.bucket_limit: 8MiB is larger than memory.budget, 4MiB" in refused(
            source, {"memory_budget": 4 * MIB}
        )


@given(
    preset=PRESET, thresholds=st.dictionaries(st.sampled_from(["resume", "moderate", "scarce"]), st.floats(0.01, 0.99))
)
def test_thresholds_that_the_user_did_not_set_follow_those_that_he_set(
    preset: str, thresholds: dict[str, float]
) -> None:
    inner = [thresholds[name] for name in ("resume", "moderate", "scarce") if name in thresholds]
    assume(inner == sorted(set(inner)))
    given_ = {f"memory.{name}": share for name, share in thresholds.items()}
    memory = load_policy(preset, given_).memory
    assert {name: getattr(memory, name) for name in thresholds} == thresholds
    assert memory.resume < memory.moderate <= memory.scarce


def test_thresholds_that_agree_stay_as_they_are() -> None:
    before = load_policy("standard").memory
    memory = load_policy("standard", {"memory.moderate": 0.8}).memory
    assert (memory.resume, memory.moderate, memory.scarce) == (before.resume, 0.8, before.scarce)
    memory = load_policy("standard", {"memory.moderate": 0.95}).memory
    assert (memory.resume, memory.scarce) == (before.resume, 0.95)
    memory = load_policy("standard", {"memory.scarce": 0.5}).memory
    assert (memory.resume, memory.moderate) == (0.25, 0.5)


# -- there and back -----------------------------------------------------------------------------------

sizes = st.integers(1, 1 << 50)
fractions = st.floats(0, 1)
percents = st.decimals(min_value="0.001", max_value=100, places=3).map(lambda number: f"{number}%")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["limit", "names", "ä"]), values, max_size=3)
plugins = st.fixed_dictionaries({"class": st.sampled_from(["mine:Mine", "a.b:C.D"]), "arguments": arguments})


@st.composite
def memories(draw: st.DrawFn) -> dict[str, Any]:
    resume, moderate, scarce = sorted(draw(st.lists(fractions, min_size=3, max_size=3, unique=True)))
    budget, bucket = sorted(draw(st.tuples(sizes, sizes)), reverse=True)
    return {
        "budget": draw(st.one_of(st.just(budget), percents)), "bucket_limit": bucket, "moderate": moderate,
        "resume": resume, "scarce": scarce, "victim": draw(st.sampled_from(["largest", "slowest"])),
    }  # fmt: skip


trees = st.fixed_dictionaries(
    {},
    optional={
        "state": st.fixed_dictionaries(
            {},
            optional={
                "backend": st.sampled_from(["tiered", "memory", "rocksdb"]),
                "codec": st.sampled_from(["arrow", "json"]),
                "compression": st.sampled_from(["none", "lz4", "zstd"]),
                "shards": st.one_of(st.just("auto"), st.integers(1, 10_000)),
                "dir": st.one_of(st.none(), st.text("aä:/\n ").map(str.strip).filter(bool)),
            },
        ),
        "memory": memories(),
        "destage": st.one_of(
            plugins,
            st.fixed_dictionaries(
                {"keep_fraction": fractions},
                optional={
                    "idle_after": st.one_of(
                        st.none(),
                        st.integers(1, 10**15),
                        st.decimals(min_value="0.0001", max_value=10**6, places=4).map(lambda number: f"{number}x"),
                    )
                },
            ),
        ),
        "prestage": st.one_of(plugins, st.sampled_from(["predictive", "none"]).map(lambda mode: {"mode": mode})),
        "io": st.fixed_dictionaries(
            {"codec_threads": st.integers(0, 64), "threads": st.integers(1, 64)},
            optional={"rate_limit": st.one_of(st.none(), sizes)},
        ),
        "blocks": st.integers(1, 1 << 30).map(lambda size: {"target": size}),
        "lateness": st.integers(0, 10**17).map(lambda us: {"initial_bound": us}),
        "metrics": st.one_of(st.none(), st.integers(0, 65_535)).map(lambda port: {"port": port}),
    },
)


@given(trees)
def test_a_policy_survives_json(tree: dict[str, Any]) -> None:
    policy = load_policy(tree)
    shipped = json.loads(json.dumps(config.policy_to_json(policy)))
    assert config.policy_from_json(shipped) == policy


@given(trees)
def test_a_policy_survives_spark_settings(tree: dict[str, Any]) -> None:
    policy = load_policy(tree)
    conf = {
        f"spark.aion.{section}.{key}": config.setting_text(value)
        for section, keys in config.policy_to_json(policy).items()
        for key, value in keys.items()
    }
    assert resolve("low_latency", keyword={}, spark_conf=conf) == policy


def test_a_policy_survives_yaml(tmp_path: Path) -> None:
    policy = load_policy("demo", {"memory_budget": 1_000_001, "lateness_initial_bound": 1})
    assert load_policy(write(tmp_path, yaml.safe_dump(config.policy_to_json(policy)))) == policy


def test_the_model_needs_no_spark() -> None:
    code = "import aion.config, sys; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


# -- ports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given_as", "port"), [(None, None), (0, 0), ("9464", 9464), (65_535, 65_535)])
def test_ports_that_are_accepted(given_as: object, port: int | None) -> None:
    assert load_policy("standard", {"metrics.port": given_as}).metrics.port == port


@pytest.mark.parametrize("given_as", [-1, 65_536, "http", 94.64, True, "127.0.0.1:9464"])
def test_ports_that_are_not(given_as: object) -> None:
    assert "is not a port; write an integer from 0 to 65535, or null" in refused("standard", {"metrics.port": given_as})
