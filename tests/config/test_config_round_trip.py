"""A policy survives being written as JSON, as Spark settings and as YAML."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

import aion.config as config
from aion.config import load_policy, resolve
from tests.durations import us
from tests.policy_files import ROOT, write

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
    moderate, scarce = sorted(draw(st.lists(st.floats(0, 1, exclude_min=True), min_size=2, max_size=2)))
    budget, bucket = sorted(draw(st.tuples(sizes, sizes)), reverse=True)
    return {
        "budget": draw(st.one_of(st.just(budget), percents)), "bucket_limit": bucket, "moderate": moderate,
        "scarce": scarce, "victim": draw(st.sampled_from(["largest", "slowest"])),
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
                        st.integers(1, 10**15).map(us),
                        st.decimals(min_value="0.0001", max_value=10**6, places=4).map(lambda number: f"{number}x"),
                    )
                },
            ),
        ),
        "prestage": st.one_of(plugins, st.sampled_from(["predictive", "none"]).map(lambda mode: {"mode": mode})),
        "io": st.fixed_dictionaries(
            {"codec_threads": st.integers(0, 64)},
            optional={"rate_limit": st.one_of(st.none(), sizes)},
        ),
        "blocks": st.integers(1, 1 << 30).map(lambda size: {"target": size}),
        "lateness": st.integers(0, 10**17).map(lambda bound: {"initial_bound": us(bound)}),
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
    policy = load_policy("demo", {"memory_budget": 1_000_001, "lateness_initial_bound": us(1)})
    assert load_policy(write(tmp_path, yaml.safe_dump(config.policy_to_json(policy)))) == policy


def test_the_model_needs_no_spark() -> None:
    code = "import aion.config, sys; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
