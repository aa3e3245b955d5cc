"""The claims of `aion experiment memory-pressure` can hold and fail, and two results can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.memory_pressure import compare, report
from experiments.memory_pressure.findings import findings, verdict
from experiments.memory_pressure.settings import (
    load_settings,
)


def result(backend: str, past: int, part: str = "full", status: str = "done", **of: Any) -> dict[str, Any]:
    """A cell with the series that are given, each of three equal values.

    ``memory``: above a floor of 1,000 MiB. Its state is 100 MiB for each past window, and there are 150 MiB for it.
    """
    memory, normal, windows, rate, late_rate, young, old, hits, share = (
        of.get(name, default)
        for name, default in (
            ("memory", 100.0), ("normal", 100.0), ("windows", 50.0), ("rate", 1e4), ("late_rate", 1e4),
            ("young", 0.02), ("old", 0.0), ("hits", 5), ("share", 0.5),
        )
    )  # fmt: skip
    pace = of.get("pace", "real")
    return {
        "workload": "average",
        "backend": backend,
        "past_windows": past,
        "part": part,
        "status": status,
        "agrees": of.get("agrees", True),
        "difference": "mean differs" if of.get("agrees") is False else None,
        "why": "the tree took 9 bytes" if status == "died" else None,
        "limit": "watched",
        "page_cache": {"times": 3, "files": 10, "cached": of.get("cached", 0)},
        "spec": {
            "policy": {"io": {"codec_threads": 2}} if backend == "tiered" else None,
            "pace": pace,
            "floor_bytes": 1000 << 20,
            "held_bytes": (100 * past) << 20,
            "state_bytes": of.get("state_mib", 150) << 20,
            "native_bytes": (75 << 20) if backend == "tiered" else 0,
            "limit_bytes": 1150 << 20,
        },
        "measured": {
            "batches": 3,
            "memory_mib": {kind: [1000.0 + memory] * 3 for kind in ("total", "jvm", "workers", "server", "driver")},
            "peak_mib": 1000.0 + memory,
            "ingestion": {"normal": [normal] * 3, "windows": [windows] * 3, "all": [normal * 1.5] * 3,
                          "pace": [share] * 3 if pace == "real" else []},
            "processing": {"normal": [rate] * 3, "all": [late_rate] * of.get("values", 3)},
            "panes": of.get("panes", {"on_time": 3, "final": 3}),
            "gc": {"young_share": young, "old_share": old},
            "dropped": 0,
            "state": {"staging": {"hits": hits, "misses": 0, "blocked_s": 0.0}} if backend == "tiered" else None,
        },
    }  # fmt: skip


def said(results: list[dict[str, Any]], figure: str, words: str, *, scaled: bool = True) -> str:
    found = [f.verdict for f in findings(results, scaled=scaled) if f.figure == figure and words in f.paper]
    assert len(found) == 1, found
    return found[0]


OURS = [result("tiered", 1), result("tiered", 8)]


@pytest.mark.parametrize(
    ("results", "figure", "words", "expected"),
    [
        # figure 2
        ([*OURS, result("spark-list", 1), result("spark-list", 8, status="died")], "2", "crashes", True),
        ([*OURS, result("spark-list", 1), result("spark-list", 8)], "2", "crashes", False),
        (OURS, "2", "the same for any number", True),
        ([result("tiered", 1), result("tiered", 8, memory=300.0)], "2", "the same for any number", False),
        ([result("tiered", 1), result("tiered", 8, status="died")], "2", "the same for any number", False),
        ([*OURS, result("spark-list", 8, memory=500.0)], "2", "less memory", True),
        (OURS, "2", "its budget and a quarter", True),
        ([*OURS, result("tiered", 32, memory=345.0)], "2", "its budget and a quarter", False),
        ([*OURS, result("tiered", 32, status="died")], "2", "its budget and a quarter", False),
        # figures 3, 5, 7
        ([*OURS, result("memory", 1, normal=120.0)], "3", "18 %", True),
        ([*OURS, result("memory", 1, normal=130.0)], "3", "18 %", False),
        ([*OURS, result("memory", 1, windows=58.0)], "4", "16 %", True),
        ([*OURS, result("memory", 1, windows=62.0)], "4", "16 %", False),
        ([*OURS, result("memory", 8, rate=1.4e4)], "5", "31 %", True),
        ([*OURS, result("memory", 8, rate=1.5e4)], "5", "31 %", False),
        ([*OURS, result("memory", 8, late_rate=1.4e4)], "7", "31 %", True),
        ([*OURS, result("memory", 8, late_rate=1.5e4)], "7", "31 %", False),
        # figure 6
        ([result("flink-heap", 1), result("flink-heap", 8, old=0.1)], "6", "time on garbage collection", True),
        ([result("flink-heap", 1), result("flink-heap", 8)], "6", "time on garbage collection", False),
        # figure 8
        ([*OURS, result("tiered", 8, "no-prestaging", late_rate=50.0)], "8", "two orders", True),
        ([*OURS, result("tiered", 8, "no-prestaging", late_rate=5000.0)], "8", "two orders", False),
        ([*OURS, result("tiered", 8, "no-prestaging", normal=80.0)], "8", "about 20 %", True),
        ([*OURS, result("tiered", 8, "no-prestaging", normal=99.0)], "8", "about 20 %", False),
        ([*OURS, result("tiered", 8, "no-codec-threads", status="died")], "8", "one thread", True),
        ([*OURS, result("tiered", 8, "no-codec-threads")], "8", "one thread", False),
        (
            [*OURS, result("tiered", 1, "4-io-threads"), result("tiered", 8, "4-io-threads", late_rate=5e3)],
            "8", "several I/O threads", True,
        ),
        ([*OURS, result("tiered", 1, "4-io-threads"), result("tiered", 8, "4-io-threads")], "8", "several I/O", False),
    ],
)  # fmt: skip
def test_every_claim_can_hold_and_fail(
    results: list[dict[str, Any]], figure: str, words: str, expected: bool | None
) -> None:
    assert said(results, figure, words) == verdict(expected, scaled=True)
    assert said(results, figure, words, scaled=False) == verdict(expected, scaled=False)


SWEEP = [
    *OURS,
    result("spark-list", 1, memory=1400.0),
    result("spark-list", 8, status="died"),
    {"workload": "average", "backend": "memory", "past_windows": 8, "part": "full", "status": "not run", "why": "<&>"},
    result("tiered", 1, "no-prestaging"),
]


def write_report(out: Path, **changed: Any) -> dict[str, Any]:
    settings = load_settings(
        None, {"scale": 0.1, "backend": "tiered,memory,spark-list", "past_windows": "1,8", **changed}
    )
    record = report.record_of(settings, SWEEP, {"claims": [{"paper": "p", "found": "f", "holds": True}]})
    report.write(out, settings, record)
    return record


@pytest.mark.proof
def test_a_comparison_names_what_was_set_differently_and_nothing_else(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_report(tmp_path / name, seed=seed)
    place = tmp_path / "b" / "memory-pressure.json"
    other = json.loads(place.read_text())
    for each in other["results"]:
        if each.get("spec", {}).get("policy"):
            each["spec"]["policy"]["io"]["codec_threads"] = 4
            each["measured"]["ingestion"]["normal"] = [50.0]
    place.write_text(json.dumps(other))
    changed, cells_of, paths = compare.write(tmp_path / "both", (tmp_path / "a", tmp_path / "b"))
    assert changed == [("seed", "1", "2"), ("policy.io.codec_threads", "2", "4")]
    rows = {row[0]: dict(zip(cells_of.headings, row, strict=True)) for row in cells_of.rows}
    assert rows["average tiered N=8"]["normal events/s: B / A"] == "0.50"
    assert rows["average tiered N=8"]["memory, MiB: B / A"] == "1.00"
    assert rows["average spark-list N=8"]["A"] == "died"
    assert all(path.exists() for path in paths)
    assert "policy.io.codec_threads" in paths[0].read_text()
