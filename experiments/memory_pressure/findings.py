"""The paper's claims in section 5, figure by figure, and whether the results of a sweep confirm them.

Pure functions of results. Ratios are of medians. The paper's "baseline" is its engine with all state in memory. Here
that is Aion's ``memory`` store if the sweep has it, and stock Spark's lists.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.memory_pressure.settings import FULL

PAPER_CRASHES = {"average": 7, "bigrams": 9, "stock": 5, "linear-road": 8}
CODEC_CRASHES = 8
OURS, LISTS, ALL_IN_MEMORY = "tiered", "spark-list", "memory"
FLAT = 0.15
"""Our definition of flat: medians differ by at most this share from the one with the fewest past windows."""
GROWS, FALLS = 1.1, 0.9
"""Our definition of a trend: a smaller change than this counts as noise."""

DISTURBED, LOADED = 2.0, 4.0
"""Cells were disturbed by other processes if their load averages differ by more than the first factor, and the largest
one is more than the second factor times the cores."""

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim of the paper, the measurement, and the verdict."""

    figure: str
    paper: str
    measured: str
    verdict: str


def verdict(holds: bool | None, *, scaled: bool) -> str:
    """The verdict in words. ``holds`` is None if too little was measured.

    A scaled experiment can refute a claim, but confirms it only at its own scale.
    """
    if holds is None:
        return "not measured"
    if not holds:
        return "does not hold"
    return "holds at this scale" if scaled else "holds"


def by_past(results: Iterable[Result], workload: str, backend: str, part: str = FULL) -> dict[int, Result]:
    """The results of one contender, by number of past windows."""
    return {
        result["past_windows"]: result
        for result in sorted(results, key=lambda r: r["past_windows"])
        if (result["workload"], result["backend"], result["part"]) == (workload, backend, part)
    }


def medians(of: Mapping[int, Result], *path: str) -> dict[int, float]:
    """The median of a series for each finished cell, by number of past windows. Leaves out empty series."""
    found = {}
    for past, result in of.items():
        if result["status"] != "done":
            continue
        series: Any = result["measured"]
        for name in path:
            series = series.get(name) if isinstance(series, Mapping) else None
        if series:
            found[past] = statistics.median(series)
    return found


def death(of: Mapping[int, Result]) -> int | None:
    """The smallest number of past windows with which it died of memory; None if it did not."""
    return min((past for past, result in of.items() if result["status"] == "died"), default=None)


def lived(of: Mapping[int, Result], past_windows: int) -> bool:
    """Whether it finished with at least as many past windows as crashed it in the paper. If not, nothing is known."""
    return any(past >= past_windows and result["status"] == "done" for past, result in of.items())


def ratios(over: Mapping[int, float], under: Mapping[int, float]) -> dict[int, float]:
    return {past: over[past] / under[past] for past in over if under.get(past)}


def disturbed(of: Iterable[Mapping[int, Result]]) -> str | None:
    """Why the rates of these cells cannot be compared; None if they can. Rates depend on other load on the machine."""
    loads, cores = [], 1
    for results in of:
        for result in results.values():
            if result["status"] == "done" and "load_average" in result:
                before, after = result["load_average"]
                loads.append((before[0] + after[0]) / 2)
                cores = max(cores, result["spec"]["cores"])
    if not loads or max(loads) <= LOADED * cores or max(loads) <= DISTURBED * min(loads):
        return None
    return f"load averages {min(loads):.0f} to {max(loads):.0f} on {cores} cores: the machine had other load"


def rated(figure: str, paper: str, measured: str, holds: bool, scaled: bool, *of: Mapping[int, Result]) -> Finding:
    """A finding on rates. There is no verdict if the cells were disturbed by other load."""
    why = disturbed(of)
    return Finding(
        figure, paper, f"{measured}; {why}" if why else measured, verdict(None if why else holds, scaled=scaled)
    )


def findings(results: Sequence[Result], *, scaled: bool) -> list[Finding]:
    """The findings for figures 2 to 8, workload by workload."""
    found: list[Finding] = []
    for workload in dict.fromkeys(result["workload"] for result in results):
        for of_figure in (memory, ingestion, late_ingestion, processing, collection):
            found += of_figure(results, workload, scaled)
    first = next((result["workload"] for result in results if result["part"] != FULL), None)
    found += parts(results, first, scaled) if first else []
    return sorted(found, key=lambda finding: finding.figure)


def memory(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 2."""
    found = []
    for backend in (LISTS, ALL_IN_MEMORY):
        of = by_past(results, workload, backend)
        if not of:
            continue
        died, totals = death(of), medians(of, "memory_mib", "total")
        grown = _growth(totals)
        words = f"died with {died}" if died else f"did not die with up to {max(of)}"
        if len(totals) > 1:
            words += f"; memory grew {grown:.2f} times from {min(totals)} to {max(totals)}"
        asked = lived(of, PAPER_CRASHES[workload])
        found.append(
            Finding(
                "2",
                f"{workload}: state in memory grows with past windows, until it crashes, after "
                f"{PAPER_CRASHES[workload]} of them ({backend})",
                words,
                verdict(True if died else False if asked else None, scaled=scaled),
            )
        )
    ours = by_past(results, workload, OURS)
    totals = medians(ours, "memory_mib", "total")
    if ours:
        low, high = _spread(totals)
        died = death(ours)
        words = f"medians {low:.0%} to {high:.0%} of that with {min(totals)}" if totals else "no cell finished"
        judged = died is None and low >= 1 - FLAT and high <= 1 + FLAT if len(totals) > 1 or died else None
        found.append(
            Finding(
                "2",
                f"{workload}: Aion's memory is the same for any number of past windows",
                words + (f"; died with {died}" if died else ""),
                verdict(judged, scaled=scaled),
            )
        )
    saved = ratios(totals, medians(by_past(results, workload, LISTS), "memory_mib", "total"))
    if saved:
        most = max(saved)
        share = 1 - saved[most]
        found.append(
            Finding(
                "2",
                f"{workload}: Aion takes 24 % to 50 % less memory than the baseline",
                f"with {most}: {abs(share):.0%} {'less' if share >= 0 else 'more'}, for the whole process tree",
                verdict(share >= 0.24, scaled=scaled),
            )
        )
    return found


def _compared(
    results: Sequence[Result],
    workload: str,
    path: tuple[str, ...],
    at_least: float,
    figure: str,
    claim: str,
    scaled: bool,
) -> list[Finding]:
    """The ratio of ours to each baseline. The verdict is on the worst number of past windows."""
    found = []
    ours = by_past(results, workload, OURS)
    for baseline in (ALL_IN_MEMORY, LISTS):
        theirs = by_past(results, workload, baseline)
        compared = ratios(medians(ours, *path), medians(theirs, *path))
        if compared:
            low, high = min(compared.values()), max(compared.values())
            words = f"{low:.2f} to {high:.2f} times {baseline}, with {_list(compared)}"
            sides = [{past: side[past] for past in compared} for side in (ours, theirs)]
            found.append(rated(figure, f"{workload}: {claim} ({baseline})", words, low >= at_least, scaled, *sides))
    return found


def ingestion(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 3."""
    claim = "normal events are ingested at 18 % less than the baseline's rate at worst"
    return _compared(results, workload, ("ingestion", "normal"), 0.82, "3", claim, scaled)


def late_ingestion(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 4."""
    claim = "with late events, ingestion is 16 % less than the baseline's rate at worst"
    found = _compared(results, workload, ("ingestion", "windows"), 0.84, "4", claim, scaled)
    ours = by_past(results, workload, OURS)
    rates = medians(ours, "ingestion", "windows")
    if len(rates) > 1:
        share = _growth(rates)
        claim = f"{workload}: the mean rate per window, past windows included, falls with more past windows"
        words = f"with {max(rates)} it is {share:.2f} times that with {min(rates)}"
        found.append(rated("4", claim, words, share < FALLS, scaled, ours))
    return found


def processing(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figures 5 and 7."""
    found = []
    for figure, series, words in (("5", "normal", "normal events"), ("7", "all", "normal and late events")):
        claim = f"{words} are processed at 31 % less than the baseline's rate at worst"
        found += _compared(results, workload, ("processing", series), 0.69, figure, claim, scaled)
    return found


def collection(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 6."""
    of = by_past(results, workload, LISTS)
    shares = {past: result["measured"]["gc"] for past, result in of.items() if result.get("measured", {}).get("gc")}
    if len(shares) < 2:
        return []
    first, last = (shares[past] for past in (min(shares), max(shares)))
    total = [share["young_share"] + share["old_share"] for share in (first, last)]
    words = f"{total[0]:.1%} of the time with {min(shares)}, {total[1]:.1%} with {max(shares)}"
    found = [
        Finding(
            "6",
            f"{workload}: with more past windows the baseline spends more time on garbage collection ({LISTS})",
            f"{words}; old generation {first['old_share']:.1%} and {last['old_share']:.1%}",
            verdict(total[1] > total[0] * GROWS, scaled=scaled),
        )
    ]
    ours = by_past(results, workload, OURS)
    both = [past for past in shares if past in ours and ours[past].get("measured", {}).get("gc")]
    if both:
        most = max(both)
        mine, theirs = ours[most]["measured"]["gc"]["young_share"], shares[most]["young_share"]
        found.append(
            Finding(
                "6",
                f"{workload}: Aion collects the young generation more than the baseline does",
                f"with {most}: {mine:.1%} of the time, {theirs:.1%} by {LISTS}",
                verdict(mine > theirs, scaled=scaled),
            )
        )
    return found


def parts(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 8: the paper's three variants of the policy, compared with the full policy."""
    full, found = by_past(results, workload, OURS), []

    def compared(part: str, *path: str) -> dict[int, float]:
        return ratios(medians(by_past(results, workload, OURS, part), *path), medians(full, *path))

    alone = by_past(results, workload, OURS, "no-prestaging")
    none = compared("no-prestaging", "processing", "all")
    if none:
        worst = min(none.values())
        claim = f"{workload}: without prestaging, processing is two orders of magnitude slower"
        words = f"{worst:.2f} to {max(none.values()):.2f} times the rate with it, with {_list(none)}"
        found.append(rated("8", claim, words, worst <= 0.01, scaled, alone, full))
    slower = compared("no-prestaging", "ingestion", "all")
    if slower:
        share = min(slower.values())
        claim = f"{workload}: without prestaging, about 20 % fewer events are ingested"
        words = f"{share:.2f} times at worst"
        found.append(rated("8", claim, words, 0.7 <= share <= 0.9, scaled, alone, full))
    codec = by_past(results, workload, OURS, "no-codec-threads")
    if codec:
        died = death(codec)
        found.append(
            Finding(
                "8",
                f"{workload}: with one thread for serialisation it crashes, after {CODEC_CRASHES} past windows",
                f"died with {died}" if died else f"did not die with up to {max(codec)}",
                verdict(True if died else False if lived(codec, CODEC_CRASHES) else None, scaled=scaled),
            )
        )
    several = by_past(results, workload, OURS, "4-io-threads")
    theirs, mine = (medians(of, "processing", "all") for of in (several, full))
    if len(theirs) > 1 and len(mine) > 1:
        falls = _growth(theirs) < FALLS and _growth(theirs) < _growth(mine)
        claim = f"{workload}: with several I/O threads, processing slows down with more past windows"
        words = f"{_growth(theirs):.2f} times from {min(theirs)} to {max(theirs)}; with one {_growth(mine):.2f} times"
        found.append(rated("8", claim, words, falls, scaled, several, full))
    return found


def _growth(medians: Mapping[int, float]) -> float:
    """The value with the most past windows divided by that with the fewest; 1 if there are none."""
    return medians[max(medians)] / medians[min(medians)] if medians and medians[min(medians)] else 1.0


def _spread(medians: Mapping[int, float]) -> tuple[float, float]:
    if not medians:
        return 1.0, 1.0
    shares = [value / medians[min(medians)] for value in medians.values()]
    return min(shares), max(shares)


def _list(numbers: Iterable[int]) -> str:
    return f"{', '.join(map(str, numbers))} past windows"
