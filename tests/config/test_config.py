"""What a policy may say: sizes, durations, places, ports; and what it says by default."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import aion.config as config
from aion.base.time import EACH_BATCH_US
from aion.config import Policy, life_of_a_window, load_policy, policy_to_json
from aion.config.values import show
from aion.errors import ConfigError, PolicyError
from tests.policy_files import MIB, refused, write

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
    with pytest.raises(
        ConfigError, match=r"'512m' is not possible: the unit 'm' is unknown; .*'512MiB' here; .*KiB MiB GiB TiB"
    ):
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
            state: {backend: rocksdb, codec: json, compression: zstd, shards: 12, dir: s3://bucket/state,
                    kept_copies: 1GiB, local_copies: 2GiB}
            memory: {budget: 1GiB, bucket_limit: 4096, moderate: 50%, scarce: 1.0, victim: slowest}
            destage: {keep_fraction: 12.5%, idle_after: 2.5x, class: my.own:Thing.Inner, arguments: {a: [1, {b: x}]}}
            prestage: {mode: predictive, class: mine:Plan, arguments: {}}
            io: {codec_threads: 0, rate_limit: 100 MB}
            blocks: {target: 64KB}
            lateness: {initial_bound: 1 hour 30 minutes}
            trigger: {kind: every_batch}
            """,
        )
    )
    assert policy.state.model_dump() == {
        "backend": "rocksdb", "codec": "json", "compression": "zstd", "shards": 12, "dir": "s3://bucket/state",
        "kept_copies_bytes": "1GiB", "local_copies_bytes": "2GiB",
    }  # fmt: skip
    memory, destage, io = policy.memory, policy.destage, policy.io
    assert (memory.budget_bytes, memory.bucket_limit_bytes) == (1 << 30, 4096)
    assert (memory.moderate, memory.resume, memory.scarce, memory.victim) == (0.5, 0.4, 1.0, "slowest")
    assert (destage.keep_fraction, destage.idle_multiple, destage.idle_after_us) == (0.125, 2.5, None)
    assert (destage.class_path, dict(destage.arguments)) == ("my.own:Thing.Inner", {"a": [1, {"b": "x"}]})
    assert (policy.prestage.mode, policy.prestage.class_path) == ("predictive", "mine:Plan")
    assert (io.codec_threads, io.rate_limit_bytes_per_s) == (0, 100_000_000)
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


@pytest.mark.parametrize("bound", [0, timedelta(seconds=90), "90s", "0s"])
def test_a_bound_in_python_is_a_duration_or_zero(bound: object) -> None:
    policy = load_policy({}, {"lateness_initial_bound": bound})
    assert policy.lateness.initial_bound_us == (0 if bound in (0, "0s") else 90_000_000)


def test_early_panes_come_in_each_batch_or_as_the_watermark_moves() -> None:
    policy = load_policy({"trigger": {"early": "batch"}})
    assert policy.trigger.early_us == EACH_BATCH_US
    assert policy_to_json(policy)["trigger"]["early"] == "batch"
    assert any(when.startswith("a batch ends") for when, _ in life_of_a_window(policy, 1 << 30))
    assert load_policy({"trigger": {"early": "interval 10 seconds"}}).trigger.early_us == 10_000_000


@pytest.mark.parametrize(
    ("value", "us", "multiple"),
    [(None, None, None), ("90s", 90_000_000, None), (timedelta(seconds=1), 1_000_000, None), ("3x", None, 3.0),
     (" 0.5 x ", None, 0.5), (config.Multiple(2.0), None, 2.0)],
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
     "fsspec+memory://x"],
)  # fmt: skip
def test_places_of_state_that_may_be(place: str) -> None:
    assert load_policy({"state": {"dir": place}}).state.dir == place


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_azure_is_refused_with_the_reason(scheme: str) -> None:
    """pyarrow's stream writes an empty object first."""
    with pytest.raises(PolicyError, match=r"state\.dir: .*state cannot be kept on Azure.*use one of file, s3"):
        load_policy({"state": {"dir": f"{scheme}://c@account.dfs.core.windows.net/p"}})


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


# -- ports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given_as", "port"), [(None, None), (0, 0), ("9464", 9464), (65_535, 65_535)])
def test_ports_that_are_accepted(given_as: object, port: int | None) -> None:
    assert load_policy("standard", {"metrics.port": given_as}).metrics.port == port


@pytest.mark.parametrize("given_as", [-1, 65_536, "http", 94.64, True, "127.0.0.1:9464"])
def test_ports_that_are_not(given_as: object) -> None:
    message = refused("standard", {"metrics.port": given_as})
    assert f"{show(given_as)} is not possible; write an integer from 0 to 65,535, or null" in message
