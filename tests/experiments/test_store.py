"""`aion experiment store`: its verdicts, its arithmetic, and each leg once, in miniature."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from aion.core.ingest.encoding import decode
from experiments.store import report as store_report
from experiments.store.command import CONTENDERS, DEFAULTS, fits, line, remarks
from experiments.store.common import (
    BLOCK_BYTES,
    MIB,
    MemorySampler,
    Sample,
    drop_page_cache,
    encoded,
    memory_use,
    random_batches,
)
from experiments.store.legs import LEGS, perform, run_leg
from experiments.store.report import BLOB_SIZES, Check, checks, past_series, series
from experiments.store.settings import OVERCOMMIT, Settings
from experiments.store.windows import mean_of_payloads

TINY = Settings(
    state_bytes=24 * MIB,
    disk_bytes=4 * MIB,
    window_bytes=8 * MIB,
    commit_blocks=8,
    gap_s=0.1,
    past_windows=(1, 3),
    past_batches=2,
    past_events=1000,
    runs=1,
)


def ingest_run(rate: float, peak: float = 0, growth: float = 0) -> dict[str, Any]:
    memory = {"peak_bytes": peak, "growth_bytes": growth}
    return {"bytes_per_s": rate, "memory": memory, "curve_mib": [(0.0, 0.0), (1.0, 2.0)]}


def results(budget: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    past = {"1": 1.0, "10": 1.05, "100": 1.1, "1000": 1.2}
    return {
        "ingest": {
            "tiered": [ingest_run(80, 1.2 * budget, 0.01 * budget), ingest_run(90, 1.3 * budget, -budget)],
            "memory": [ingest_run(100), ingest_run(100)],
        },
        "disk": {
            "plain": [{"write_bytes_per_s": 10.0, "read_bytes_per_s": 10.0}],
            "p-bucket": [{"write_bytes_per_s": 6.0, "read_bytes_per_s": 5.9}],
        },
        "late": {"memory": [{"seconds": 2.0}], "prestaged": [{"seconds": 2.2}], "unstaged": [{"seconds": 9.0}]},
        "past": {"all": [dict.fromkeys(("seconds", "cpu_seconds", "io_seconds"), past)] * 2},
    }


# --- verdicts -----------------------------------------------------------------------------------------------


def test_every_target_of_the_issue_is_judged() -> None:
    found = {check.what: check for check in checks(results(DEFAULTS.budget_bytes), DEFAULTS)}
    assert {what.partition(":")[0] for what in found} == {
        "resident memory", "flat", "ingestion", "writing", "staging", "late execution", "on-time batch",
    }  # fmt: skip
    assert {what: check.words for what, check in found.items() if check.words != "holds"} == {
        "resident memory: peak / budget, worst run": "does not hold",
        "staging: p-bucket / plain file": "does not hold",
        "late execution: without prestaging / in memory": "no target",
        "on-time batch: 1,000 past windows / 1": "does not hold",
        **{f"on-time batch: {k} past windows / 1, processor time": "no target" for k in ("10", "100", "1,000")},
    }
    assert found["ingestion: tiered / memory"].measured == pytest.approx(0.85)
    assert found["flat: growth, 2nd to last quarter / budget, worst run"].measured == pytest.approx(0.01)


def test_what_was_not_measured_is_not_judged() -> None:
    assert checks({}, DEFAULTS) == []
    only = {"ingest": {"tiered": [ingest_run(80, 1, 1)]}}
    assert [check.words for check in checks(only, DEFAULTS)] == ["holds", "holds"]


@pytest.mark.parametrize(
    ("sense", "measured", "holds"),
    [("at most", 1.15, True), ("at most", 1.16, False), ("at least", 0.6, True), ("at least", 0.59, False)],
)
def test_a_bound_itself_still_holds(sense: Any, measured: float, holds: bool) -> None:
    check = Check("x", measured, sense, 1.15 if sense == "at most" else 0.6)
    assert check.holds is holds


@pytest.mark.slow
def test_tables_json_and_figures(tmp_path: Path) -> None:
    found = results(DEFAULTS.budget_bytes)
    for _, title, unit, values in store_report.figures(found):
        assert store_report.figures_table(title, unit, values).row_count == len(values)
    assert store_report.checks_table(checks(found, DEFAULTS)).row_count == len(checks(found, DEFAULTS))
    paths = store_report.write(tmp_path, {"experiment": "store"}, found, DEFAULTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)
    record = json.loads((tmp_path / "store.json").read_text())
    assert record["results"] == found | {"ingest": json.loads(json.dumps(found["ingest"]))}
    assert {check["verdict"] for check in record["checks"]} == {"holds", "does not hold", "no target"}


def test_series_are_by_contender_and_run() -> None:
    found = results(100)
    assert series(found, "ingest", "memory.peak_bytes")["tiered"] == [120, 130]
    assert series(found, "late", "seconds") == {"memory": [2.0], "prestaged": [2.2], "unstaged": [9.0]}
    assert past_series({}) == {}


# --- arithmetic ---------------------------------------------------------------------------------------------


def test_growth_is_between_the_second_and_the_last_quarter() -> None:
    samples = [Sample(b, 1000 + (b if b < 25 else 25 + b // 10)) for b in range(101)]
    use = memory_use(samples, 900, 100)
    assert use.peak_bytes == 100 + 35
    assert use.growth_bytes == pytest.approx(5, abs=1)
    with pytest.raises(ValueError, match="larger state"):
        memory_use(samples[:30], 900, 100)


def test_the_sampler_sees_memory_come() -> None:
    with MemorySampler() as sampler:
        held = np.ones(256 * MIB, np.uint8)  # much more than a collection elsewhere in this process can free
        deadline = time.monotonic() + 20
        while len(sampler.samples) < 3 or sampler.resident_bytes() - sampler.baseline_bytes < 128 * MIB:
            assert time.monotonic() < deadline, sampler.samples
            held += 1  # pages that nobody touches may be taken away


def test_the_page_cache_is_dropped_of_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "b").hardlink_to(tmp_path / "a")
    assert drop_page_cache(tmp_path) == drop_page_cache(tmp_path, tmp_path / "live") == 5000
    assert (tmp_path / "a").read_bytes() == b"x" * 5000


@pytest.mark.parametrize("payload", [1, 2304])
def test_blocks_are_real_events_of_about_a_mebibyte(payload: int) -> None:
    batch, other = random_batches(2, payload, seed=3)
    block = encoded(batch, 60)
    assert 0.9 * BLOCK_BYTES < block.size_bytes < 1.1 * BLOCK_BYTES
    assert decode(block, batch.schema).equals(batch)
    assert not batch.equals(other)
    assert random_batches(1, payload, seed=3)[0].equals(batch)
    assert set(pc.binary_length(batch["payload"]).to_pylist()) == {payload}


def test_the_function_looks_at_every_payload() -> None:
    batches = random_batches(2, 100, seed=1, block_bytes=10_000)
    together = b"".join(p for b in batches for p in b["payload"].to_pylist())
    found = mean_of_payloads((), None, iter([batches[0].slice(0, 7), batches[0].slice(7), batches[1]]))
    assert found["payload"] == pytest.approx(np.frombuffer(together, np.uint8).mean())
    assert found["value"] == pytest.approx(np.concatenate([b["value"].to_numpy() for b in batches]).mean())


# --- options ------------------------------------------------------------------------------------------------


def test_state_is_so_many_budgets() -> None:
    assert DEFAULTS.state_bytes == OVERCOMMIT * DEFAULTS.budget_bytes
    assert f"budget {DEFAULTS.budget_bytes // MIB}" in remarks(DEFAULTS)


def test_each_leg_has_contenders() -> None:
    assert set(CONTENDERS) == set(LEGS)


def test_the_memory_backend_takes_part_where_it_fits() -> None:
    assert fits(DEFAULTS, 8 << 30)
    assert not fits(DEFAULTS, DEFAULTS.state_bytes)


# --- the legs, in miniature ---------------------------------------------------------------------------------


def request(leg: str, contender: str, folder: Path) -> dict[str, Any]:
    asked = {"leg": leg, "contender": contender, "settings": asdict(TINY), "folder": str(folder)}
    return perform(json.dumps(asked))


@pytest.mark.parametrize("contender", CONTENDERS["disk"])
def test_disk(contender: str, tmp_path: Path) -> None:
    found = request("disk", contender, tmp_path)
    assert found["write_bytes_per_s"] > 0 and found["read_bytes_per_s"] > 0
    assert found["dropped_bytes"] >= found["bytes"] > 0.9 * TINY.disk_bytes


@pytest.mark.parametrize("contender", CONTENDERS["late"])
def test_late(contender: str, tmp_path: Path) -> None:
    found = request("late", contender, tmp_path)
    assert found["window_bytes"] > 0.9 * TINY.window_bytes
    assert (found["hits"] > 0) == (contender == "prestaged")
    assert (found["misses"] > 0) == (contender not in ("memory", "prestaged")), "late events stay for their execution"


def test_past(tmp_path: Path) -> None:
    found = request("past", "all", tmp_path)
    assert set(found["seconds"]) == {"1", "3"}
    assert "1: " in line("past", found)


@pytest.mark.parametrize("contender", CONTENDERS["blobs"])
def test_blobs(contender: str, tmp_path: Path) -> None:
    found = request("blobs", contender, tmp_path)
    assert all(found[f"{what}_bytes_per_s"].keys() == set(BLOB_SIZES) for what in ("write", "read"))
    assert found["dropped_bytes"] >= found["bytes"] > 2 * 0.9 * TINY.disk_bytes
    assert "64 KiB: " in line("blobs", found)


def test_blob_files_are_compared_without_a_target() -> None:
    def run(factor: float) -> dict[str, Any]:
        speeds = {size: factor * (i + 1) for i, size in enumerate(BLOB_SIZES)}
        return {"write_bytes_per_s": speeds, "read_bytes_per_s": speeds}

    found = checks({"blobs": {"sst": [run(10)], "blob-files": [run(8), run(9)]}}, DEFAULTS)
    assert [(check.measured, check.words) for check in found] == [(pytest.approx(0.85), "no target")] * 4


@pytest.mark.slow
def test_ingest_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = run_leg("ingest", "tiered", TINY, tmp_path)
    assert found["state_bytes"] >= TINY.state_bytes
    assert found["m_bucket_bytes"] + found["disk_only_bytes"] == found["state_bytes"], "nothing is lost"
    assert found["budget_peak_bytes"] < 2 * TINY.budget_bytes + 2 * MIB
    assert found["files_bytes"] > found["state_bytes"], "all of it was committed"


@pytest.mark.slow
def test_a_leg_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ingest of nosuch failed:(.|\n)*KeyError"):
        run_leg("ingest", "nosuch", TINY, tmp_path)
