"""Which layer of a policy wins: keyword, Spark conf, file or default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import aion.config as config
from aion.config import Policy, load_policy, resolve
from aion.errors import PolicyError
from tests.policy_files import MIB, refused, write


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
        "spark.aion.lateness.initial_bound": "0",
        "spark.aion.destage.class": "mine:Mine",
        "spark.aion.destage.arguments": '{"a": 1, "b": null}',
    }
    policy = resolve("low_memory", keyword={}, spark_conf=conf)
    assert (policy.memory.moderate, policy.memory.budget, policy.io.codec_threads) == (0.7, config.Share(30.0), 3)
    assert policy.destage.idle_after is None
    assert policy.lateness.initial_bound_us == 0
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
        ({"spark.aion.memory.budget.x": "1"}, "memory.budget: {'x': '1'} is not possible; write a size above 0"),
        ({"spark.aion.state.shards": "many"}, "state.shards: 'many' is not possible; write auto, or an integer from 1"),
        ({"spark.aion.lateness.initial_bound": "600"}, "lateness.initial_bound: '600' is not possible; "
         "write a duration in us, ms, s, m, h, d or w"),
        ({"spark.aion.policy": "fast"}, "'fast' is not a preset"),
        ({"spark.aion.memory.budget": "null"}, "memory.budget: null is not possible; write a size above 0"),
        ({"spark.aion.memory.scarce": "90"}, "memory.scarce: '90' is not possible; write a share above 0 and up to 1"),
        ({"spark.aion.destage.idle_after": "60"}, "destage.idle_after: '60' is not possible; "
         "write a duration in us, ms, s, m, h, d or w"),
        ({"spark.aion.destage.arguments": "{a: 1"}, "destage.arguments: '{a: 1' is not possible; "
         "write a mapping of names"),
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
    """The user may set the budget by keyword, Spark conf, mapping or file, also on top of a preset."""
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


@given(preset=PRESET, thresholds=st.dictionaries(st.sampled_from(["moderate", "scarce"]), st.floats(0.01, 0.99)))
def test_thresholds_that_the_user_did_not_set_follow_those_that_he_set(
    preset: str, thresholds: dict[str, float]
) -> None:
    inner = [thresholds[name] for name in ("moderate", "scarce") if name in thresholds]
    assume(inner == sorted(inner))
    given_ = {f"memory.{name}": share for name, share in thresholds.items()}
    memory = load_policy(preset, given_).memory
    assert {name: getattr(memory, name) for name in thresholds} == thresholds
    assert memory.resume < memory.moderate <= memory.scarce


def test_a_number_without_a_unit_is_not_a_duration_in_json() -> None:
    with pytest.raises(
        PolicyError,
        match=r"trigger\.interval: 60 is not possible; write a duration in us, ms, s, m, h, d or w, such as 90s",
    ):
        resolve(None, keyword={}, spark_conf={"spark.aion.policy": '{"trigger": {"interval": 60}}'})


def test_a_share_of_numpy_is_shown_like_any_other() -> None:
    assert load_policy("standard", {"memory.moderate": np.float64(0.5)}).memory.moderate == 0.5
    assert "is not possible: as a share it is '50%'; write a size" in refused({"memory": {"budget": np.float64(0.5)}})


def test_thresholds_that_agree_stay_as_they_are() -> None:
    before = load_policy("standard").memory
    memory = load_policy("standard", {"memory.moderate": 0.8}).memory
    assert (memory.resume, memory.moderate, memory.scarce) == (0.64, 0.8, before.scarce)
    memory = load_policy("standard", {"memory.moderate": 0.95}).memory
    assert (memory.resume, memory.scarce) == (0.76, 0.95)
    memory = load_policy("standard", {"memory.scarce": 0.5}).memory
    assert (memory.resume, memory.moderate) == (0.4, 0.5)
