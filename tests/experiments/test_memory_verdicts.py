"""The verdicts of `aion experiment memory-pressure`, which hold or fail by what was measured, and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aion.errors import ConfigError
from experiments.memory_pressure import compare, report
from experiments.memory_pressure.figures import draw_parts
from experiments.memory_pressure.findings import Finding, findings, verdict
from experiments.memory_pressure.settings import (
    load_settings,
)

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"

# --- verdicts ----------------------------------------------------------------------------------------------------


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


def test_variants_that_all_died_have_no_figure(tmp_path: Path) -> None:
    died = [result("tiered", 1, status="died"), result("tiered", 1, "4-io-threads", status="died")]
    assert not draw_parts(died, tmp_path / "figure.png")
    lived = [result("tiered", 1, status="died"), result("tiered", 1, "4-io-threads")]
    assert draw_parts(lived, tmp_path / "figure.png")


def test_verdicts() -> None:
    assert verdict(None, scaled=False) == "not judged"
    assert verdict(False, scaled=True) == "does not hold"
    assert verdict(True, scaled=True) == "holds at this scale"
    assert verdict(True, scaled=False) == "holds"


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


SLOW = result("tiered", 8, "no-prestaging", late_rate=50.0)
BIG = result("spark-list", 8, memory=500.0)
MANY = {"on_time": 3, "final": 3, "late": 30}


@pytest.mark.parametrize(
    ("results", "figure", "words", "why"),
    [
        # A contender that dies with any number of past windows shows no growth of its state.
        ([result("spark-list", 1, status="died")], "2", "crashes", "died with the fewest already"),
        ([result("spark-list", 1, agrees=False), result("spark-list", 8, status="died")], "2", "crashes", "fewest"),
        # One that lives was perhaps not asked for as much as the paper's.
        ([result("spark-list", 1), result("spark-list", 6)], "2", "crashes", "not run with 7"),
        ([result("spark-list", 8, status="failed")], "2", "crashes", "not run with 7"),
        ([result("spark-list", 8, state_mib=900)], "2", "crashes", "smaller than the memory for it"),
        # One number of past windows, or state that fits into memory, is flat whatever the store does.
        ([result("tiered", 1)], "2", "the same for any number", "fewer than two"),
        ([result("tiered", 1), result("tiered", 8, agrees=False)], "2", "the same for any number", "fewer than two"),
        ([result("tiered", 1), result("tiered", 2)], "2", "the same for any number", "less than the memory for it"),
        # The baseline's memory is only its floor.
        ([*OURS, result("spark-list", 8, memory=200.0)], "2", "less memory", "next to nothing"),
        # Rates of other work, of the source, or of a disturbed machine.
        ([*OURS, result("memory", 8, panes=MANY)], "3", "18 %", "did not run the same windows"),
        ([*OURS, result("memory", 8, panes={})], "7", "31 %", "did not run the same windows"),
        ([result("tiered", 8, share=1.0), result("memory", 8, share=1.0)], "3", "18 %", "kept up with the source"),
        # A mean over more windows.
        ([result("tiered", 1), result("tiered", 8, windows=20.0)], "4", "falls", "whatever the engine does"),
        # More windows make more garbage.
        ([result("spark-list", 1), result("spark-list", 8, old=0.1, panes=MANY)], "6", "time on", "ran more windows"),
        ([result("flink-heap", 1, young=1e-4), result("flink-heap", 8, young=1e-3)], "6", "time on", "next to no time"),
        # Prestaging without idle time, without use, and from the page cache.
        ([result("tiered", 8, pace="max"), SLOW], "8", "two orders", "no idle time"),
        ([result("tiered", 8, hits=0), SLOW], "8", "two orders", "prestaged nothing"),
        ([result("tiered", 8, cached=5), SLOW], "8", "two orders", "50% of the files stayed"),
        ([{**result("tiered", 8), "page_cache": None}, SLOW], "8", "two orders", "was in the page cache"),
        ([result("tiered", 8, panes=MANY), SLOW], "8", "two orders", "did not run the same windows"),
        # A part that dies where the full policy does, too.
        (
            [result("tiered", 8, status="died"), result("tiered", 8, "no-codec-threads", status="died")],
            "8", "one thread", "the full policy did not live",
        ),
        ([*OURS, result("tiered", 2, "no-codec-threads")], "8", "one thread", "not run with 8"),
        ([*OURS, result("tiered", 8, "no-codec-threads", status="failed")], "8", "one thread", "not run with 8"),
    ],
)  # fmt: skip
def test_no_claim_holds_by_accident(results: list[dict[str, Any]], figure: str, words: str, why: str) -> None:
    assert said(results, figure, words) == "not judged"
    (found,) = [f for f in findings(results, scaled=True) if f.figure == figure and words in f.paper]
    assert why in found.measured


def test_medians_of_few_values_and_cells_with_wrong_results_are_not_compared() -> None:
    few = [*OURS, result("memory", 8, late_rate=1e4, values=2)]
    assert [f for f in findings(few, scaled=True) if f.figure == "7"] == []
    wrong = [*OURS, result("memory", 8, agrees=False)]
    assert [f for f in findings(wrong, scaled=True) if f.figure in "3457" and "31 %" in f.paper] == []
    (found,) = [f for f in findings(wrong, scaled=True) if f.figure == "–"]
    assert (found.verdict, found.measured) == ("does not hold", "2 of 3 finished cells; memory full 8: mean differs")


def loaded(of: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
    return {**of, **load, "spec": {**of["spec"], **load["spec"]}}


def test_rates_say_nothing_where_others_were_at_work_meanwhile() -> None:
    quiet, busy = (
        {"load_average": [[load] * 3, [load] * 3], "spec": {"cores": 2, "policy": None}} for load in (3.0, 30.0)
    )
    for loads, expected in (((quiet, quiet), True), ((busy, busy), True), ((quiet, busy), None)):
        ours, theirs = result("tiered", 1), result("memory", 1)
        both = [loaded(ours, loads[0]), loaded(theirs, loads[1])]
        assert said(both, "3", "18 %") == verdict(expected, scaled=True)
    words = [finding.measured for finding in findings(both, scaled=True) if finding.figure == "3"]
    assert "load averages 3 to 30 on 2 cores" in words[0]


def test_what_did_not_run_says_nothing() -> None:
    assert findings([], scaled=True) == []


# --- reports -----------------------------------------------------------------------------------------------------

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


@pytest.mark.slow
def test_the_report_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    record = write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"(?:src|href)\s*=\s*\"(?!data:image/png;base64,)", page) == []
    assert "http://" not in page and "https://" not in page and "@import" not in page
    for number in "2345678":
        assert f"Figure {number}:" in page
        png = (tmp_path / f"figure-{number}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
    assert "Scaled: smaller" in page and "holds at this scale" in page
    assert "&lt;&amp;&gt;" in page and "<&>" not in page
    assert json.loads((tmp_path / "memory-pressure.json").read_text())["findings"] == record["findings"]
    assert Finding(**record["findings"][-1]) == Finding("9", "p", "f", "holds")


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


@pytest.mark.parametrize("found", [b'{"experiment": "ingest"}', b"[1]", b"\xff"])
def test_only_results_can_be_compared(tmp_path: Path, found: bytes) -> None:
    (tmp_path / "memory-pressure.json").write_bytes(found)
    with pytest.raises(ConfigError, match="no result of"):
        compare.load_record(tmp_path)
