"""The paper's claims in section 5, figure by figure, and whether the results of a sweep confirm them.

Pure functions of results of one sweep. Ratios are of medians. The paper's "baseline" is its engine with all state in
memory: for speed that is Aion's ``memory`` store, for memory also stock Spark's lists and Flink's heap.

A verdict needs cells that did the same work, computed what a batch computation does, and could have shown the opposite.
Otherwise the finding says why there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.memory_pressure.settings import FULL

PAPER_CRASHES = {"average": 7, "bigrams": 9, "stock": 5, "linear-road": 8}
CODEC_CRASHES = 8
LEARNT = "learnt-bound"
"""The part that may drop events, so that its results differ."""
OURS, ALL_IN_MEMORY, LISTS, FLINK = "tiered", "memory", "spark-list", "flink-heap"
FLAT, GROWS = 0.15, 0.5
"""Memory is flat if it grows by at most the first share of what the state grows by; it grows from the second on."""
WITHIN = 1.25
MORE, FALLS = 1.1, 0.9
"""Our definition of a trend: a smaller change than this counts as noise."""
FEWEST_VALUES = 3
"""A median of fewer values is none."""
PACED = 0.95
"""From this share of the source's rate on, a rate says how fast events came, not how fast they could be taken in."""
CACHED = 0.1
"""Files were read from disk if at most this share of them was left in the page cache when they were evicted."""
LEAST_GC = 0.005
MIB = 1 << 20

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
    """The verdict in words. ``holds`` is None if what was measured allows none.

    A scaled experiment can refute a claim, but confirms it only at its own scale.
    """
    if holds is None:
        return "not judged"
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


def judged(of: Mapping[int, Result]) -> dict[int, Result]:
    """The finished cells whose results are not known to be wrong."""
    return {past: r for past, r in of.items() if r["status"] == "done" and r.get("agrees") is not False}


def medians(of: Mapping[int, Result], *path: str) -> dict[int, float]:
    """The median of a series for each judged cell, by number of past windows. Leaves out series of few values."""
    found = {}
    for past, result in judged(of).items():
        series: Any = result["measured"]
        for name in path:
            series = series.get(name) if isinstance(series, Mapping) else None
        if series and len(series) >= FEWEST_VALUES:
            found[past] = statistics.median(series)
    return found


def above_floor(of: Mapping[int, Result]) -> dict[int, float]:
    """The median memory of the tree, in MiB, without that of a tree without state."""
    totals = medians(of, "memory_mib", "total")
    return {past: total - of[past]["spec"]["floor_bytes"] / MIB for past, total in totals.items()}


def held(of: Mapping[int, Result], past: int) -> float:
    """The events that have to be kept, in MiB."""
    return float(of[past]["spec"]["held_bytes"]) / MIB


def death(of: Mapping[int, Result]) -> int | None:
    """The smallest number of past windows with which it died of memory; None if it did not."""
    return min((past for past, result in of.items() if result["status"] == "died"), default=None)


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


def other_work(one: Result, other: Result) -> str | None:
    """Why two cells did not do the same work; None if they did."""
    runs = [result["measured"].get("panes") or {} for result in (one, other)]
    if runs[0] == runs[1] and runs[0]:
        return None
    words = [", ".join(f"{count} {kind}" for kind, count in sorted(run.items())) or "unknown" for run in runs]
    return f"they did not run the same windows: {words[0]}; {words[1]}"


def paced(results: Iterable[Result], path: Sequence[str]) -> str | None:
    """Returns why rates of ingestion cannot be compared, because the source set the pace, or None if they can."""
    for result in results:
        if path[0] != "ingestion" or result["spec"]["pace"] != "real":
            return None
        series = result["measured"]["ingestion"]["pace"]
        if not series or min(series) < PACED:
            return None
    return "all of them kept up with the source"


def warm(results: Iterable[Result]) -> str | None:
    """Why reading from disk was not measured; None if it was."""
    for result in results:
        cache = result.get("page_cache") or {}
        if not cache.get("times") or not cache.get("files"):
            return "the state was in the page cache"
        if cache["cached"] > CACHED * cache["files"]:
            return f"{cache['cached'] / cache['files']:.0%} of the files stayed in the page cache"
    return None


def finding(figure: str, paper: str, measured: str, holds: bool | None, scaled: bool, *reasons: str | None) -> Finding:
    """A finding. There is no verdict if there is a reason against one."""
    against = [reason for reason in reasons if reason]
    words = "; not judged: ".join([measured, *against[:1]])
    return Finding(figure, paper, words, verdict(None if against else holds, scaled=scaled))


def findings(results: Sequence[Result], *, scaled: bool) -> list[Finding]:
    """The findings for figures 2 to 8, workload by workload."""
    found: list[Finding] = []
    for workload in dict.fromkeys(result["workload"] for result in results):
        found += correctness(results, workload)
        for of_figure in (memory, ingestion, late_ingestion, processing, collection):
            found += of_figure(results, workload, scaled)
    first = next((result["workload"] for result in results if result["part"] != FULL), None)
    found += parts(results, first, scaled) if first else []
    return sorted(found, key=lambda finding: finding.figure)


def correctness(results: Sequence[Result], workload: str) -> list[Finding]:
    """Whether all cells computed the same as a batch computation. Without that, no rate means anything."""
    done = [result for result in results if result["workload"] == workload and result["status"] == "done"]
    done = [result for result in done if result["part"] != LEARNT]
    if not done:
        return []
    wrong = [
        f"{r['backend']} {r['part']} {r['past_windows']}: {r['difference']}" for r in done if r.get("agrees") is False
    ]
    right = sum(result.get("agrees") is True for result in done)
    holds = False if wrong else True if right == len(done) else None
    words = "; ".join([f"{right} of {len(done)} finished cells", *wrong])
    return [Finding("–", f"{workload}: (ours) every cell's results are those of a batch computation", words,
                    verdict(holds, scaled=False))]  # fmt: skip


def memory(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 2."""
    baselines = {backend: by_past(results, workload, backend) for backend in (ALL_IN_MEMORY, LISTS, FLINK)}
    found = [_crash(of, workload, backend, scaled) for backend, of in baselines.items() if of]
    ours = by_past(results, workload, OURS)
    if not ours:
        return found
    found.append(_within(ours, workload, scaled))
    used, died = above_floor(ours), death(ours)
    claim = f"{workload}: Aion's memory is the same for any number of past windows"
    if died is not None:
        found.append(finding("2", claim, f"died with {died}", False, scaled))
    elif len(used) < 2:
        found.append(finding("2", claim, "fewer than two numbers of past windows", None, scaled))
    else:
        share, few, most, grown = _growth(ours, used)
        words = f"from {few} to {most} it grew by {share:.0%} of what the state grew by ({grown:,.0f} MiB)"
        small = grown < ours[most]["spec"]["state_bytes"] / MIB
        why = "the state grew by less than the memory for it" if small else None
        found.append(finding("2", claim, words, share <= FLAT, scaled, why))
    for backend, of in baselines.items():
        theirs = above_floor(of)
        both = [past for past in used if past in theirs]
        if both:
            most = max(both)
            claim = f"{workload}: Aion takes 24 % to 50 % less memory than the baseline ({backend})"
            share = 1 - max(0.0, used[most]) / theirs[most] if theirs[most] > 0 else 0.0
            words = f"with {most}: {used[most]:,.0f} MiB above its floor, {backend} {theirs[most]:,.0f} MiB"
            why = "it took next to nothing above its floor" if theirs[most] < held(ours, most) * GROWS else None
            found.append(finding("2", claim, words, share >= 0.24, scaled, why))
    return found


def _within(ours: Mapping[int, Result], workload: str, scaled: bool) -> Finding:
    """Ours: the whole tree, at its largest, beside the tree that has the same panes and no state."""
    claim = f"{workload}: (ours) a tree takes at most its floor, its budget and a quarter of both"
    shares = {
        past: result["measured"]["peak_mib"] * MIB / (spec["floor_bytes"] + spec.get("native_bytes", 0))
        for past, result in judged(ours).items()
        for spec in (result["spec"],)
    }
    died = death(ours)
    words = [f"{share:.2f} of both with {past}" for past, share in shares.items()]
    words += [f"died with {died}"] if died is not None else []
    holds = died is None and max(shares.values()) <= WITHIN if shares or died is not None else None
    return finding("2", claim, ", ".join(words) or "no cell finished", holds, scaled)


def _crash(of: Mapping[int, Result], workload: str, backend: str, scaled: bool) -> Finding:
    """It must have lived with fewer past windows: a contender that dies with any number shows no growth."""
    paper, died, used = PAPER_CRASHES[workload], death(of), above_floor(of)
    claim = f"{workload}: state in memory grows with past windows, until it crashes, after {paper} of them ({backend})"
    words, holds, why = f"did not die with up to {max(of)}", None, None
    if died is not None:
        lived = [past for past in judged(of) if past < died]
        words, holds = f"died with {died}" + (f", not with {max(lived)}" if lived else ""), True
        why = None if lived else "it died with the fewest already"
    elif max(judged(of), default=0) < paper:
        why = f"it was not run with {paper}"
    elif held(of, max(judged(of))) < of[max(judged(of))]["spec"]["state_bytes"] / MIB:
        why = "its state was smaller than the memory for it"
    else:
        holds = False
    if len(used) > 1:
        share, few, most, _ = _growth(of, used)
        words += f"; from {few} to {most} its memory grew by {share:.0%} of what the state grew by"
    return finding("2", claim, words, holds, scaled, why)


def _growth(of: Mapping[int, Result], used: Mapping[int, float]) -> tuple[float, int, int, float]:
    """What memory grew by, as a share of what the state grew by; from which past windows to which; the state's MiB."""
    few, most = min(used), max(used)
    grown = held(of, most) - held(of, few)
    return (used[most] - used[few]) / max(grown, 1e-9), few, most, grown


def _compared(
    results: Sequence[Result],
    workload: str,
    path: tuple[str, ...],
    at_least: float,
    figure: str,
    claim: str,
    scaled: bool,
) -> list[Finding]:
    """The ratio of ours to the same engine with its state in memory. The verdict is on the worst number of windows."""
    ours, theirs = (by_past(results, workload, backend) for backend in (OURS, ALL_IN_MEMORY))
    compared = ratios(medians(ours, *path), medians(theirs, *path))
    if not compared:
        return []
    words = (
        f"{min(compared.values()):.2f} to {max(compared.values()):.2f} times {ALL_IN_MEMORY}, with {_list(compared)}"
    )
    sides = [{past: side[past] for past in compared} for side in (ours, theirs)]
    work = next(filter(None, (other_work(ours[past], theirs[past]) for past in compared)), None)
    reasons = (work, disturbed(sides), paced([*sides[0].values(), *sides[1].values()], path))
    holds = min(compared.values()) >= at_least
    return [finding(figure, f"{workload}: {claim} ({ALL_IN_MEMORY})", words, holds, scaled, *reasons)]


def ingestion(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 3."""
    claim = "normal events are ingested at 18 % less than the baseline's rate at worst"
    return _compared(results, workload, ("ingestion", "normal"), 0.82, "3", claim, scaled)


def late_ingestion(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 4."""
    claim = "with late events, ingestion is 16 % less than the baseline's rate at worst"
    found = _compared(results, workload, ("ingestion", "windows"), 0.84, "4", claim, scaled)
    rates = medians(by_past(results, workload, OURS), "ingestion", "windows")
    if len(rates) > 1:
        claim = f"{workload}: the mean rate per window, past windows included, falls with more past windows"
        words = f"with {max(rates)} it is {_change(rates):.2f} times that with {min(rates)}"
        why = "a mean over more windows, with fewer events each, falls whatever the engine does"
        found.append(finding("4", claim, words, None, scaled, why))
    return found


def processing(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figures 5 and 7."""
    found = []
    for figure, series, words in (("5", "normal", "normal events"), ("7", "all", "normal and late events")):
        claim = f"{words} are processed at 31 % less than the baseline's rate at worst"
        found += _compared(results, workload, ("processing", series), 0.69, figure, claim, scaled)
    return found


def collection(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 6. Aion's state is not in the JVM, so only the baselines say something."""
    found = []
    for backend in (LISTS, FLINK):
        of = judged(by_past(results, workload, backend))
        shares = {past: result["measured"]["gc"] for past, result in of.items() if result["measured"]["gc"]}
        if len(shares) < 2:
            continue
        total = {past: share["young_share"] + share["old_share"] for past, share in shares.items()}
        few, most = min(total), max(total)
        claim = f"{workload}: with more past windows the baseline spends more time on garbage collection ({backend})"
        words = f"{total[few]:.1%} of the time with {few}, {total[most]:.1%} with {most}"
        words += f"; old generation {shares[few]['old_share']:.1%} and {shares[most]['old_share']:.1%}"
        work = "with more past windows it also ran more windows" if other_work(of[few], of[most]) else None
        little = "next to no time was spent on it" if total[most] < LEAST_GC else None
        found.append(finding("6", claim, words, total[most] > total[few] * MORE, scaled, work, little))
    return found


def parts(results: Sequence[Result], workload: str, scaled: bool) -> list[Finding]:
    """Figure 8: the paper's three variants of the policy, compared with the full policy."""
    full, found = by_past(results, workload, OURS), []

    def compared(part: str, path: tuple[str, ...], claim: str, least: float, most: float) -> None:
        alone = by_past(results, workload, OURS, part)
        shares = ratios(medians(alone, *path), medians(full, *path))
        if not shares:
            return
        sides = [{past: side[past] for past in shares} for side in (alone, full)]
        cells = [*sides[0].values(), *sides[1].values()]
        work = next(filter(None, (other_work(alone[past], full[past]) for past in shares)), None)
        idle = None if all(cell["spec"]["pace"] == "real" for cell in cells) else "no idle time in which to prestage"
        hits = sum(_staged(result) for result in sides[1].values())
        unused = None if hits else "the full policy prestaged nothing that was used"
        words = f"{min(shares.values()):.2f} to {max(shares.values()):.2f} times the rate with it, with {_list(shares)}"
        worst = min(shares.values())
        reasons = (work, idle, unused, warm(cells), disturbed(sides), paced(cells, path))
        found.append(finding("8", f"{workload}: {claim}", words, least <= worst <= most, scaled, *reasons))

    claim = "without prestaging, processing is two orders of magnitude slower"
    compared("no-prestaging", ("processing", "all"), claim, 0, 0.01)
    compared(
        "no-prestaging", ("ingestion", "all"), "without prestaging, about 20 % fewer events are ingested", 0.7, 0.9
    )
    if codec := by_past(results, workload, OURS, "no-codec-threads"):
        died, lived = death(codec), max(judged(codec), default=0)
        claim = f"{workload}: with one thread for serialisation it crashes, after {CODEC_CRASHES} past windows"
        words = f"died with {died}" if died else f"did not die with up to {max(codec)}"
        why = None
        if died is not None:
            why = None if died in judged(full) else f"the full policy did not live with {died} either"
        elif lived < CODEC_CRASHES:
            why = f"it was not run with {CODEC_CRASHES}"
        found.append(finding("8", claim, words, died is not None, scaled, why))
    several = by_past(results, workload, OURS, "4-io-threads")
    theirs, mine = (medians(of, "processing", "all") for of in (several, full))
    both = sorted(past for past in theirs if past in mine)
    if len(both) > 1:
        theirs, mine = ({past: side[past] for past in both} for side in (theirs, mine))
        falls = _change(theirs) < FALLS and _change(theirs) < _change(mine)
        claim = f"{workload}: with several I/O threads, processing slows down with more past windows"
        words = f"{_change(theirs):.2f} times from {both[0]} to {both[-1]}; with one {_change(mine):.2f} times"
        sides = [{past: side[past] for past in both} for side in (several, full)]
        cells = [*sides[0].values(), *sides[1].values()]
        work = next(filter(None, (other_work(several[past], full[past]) for past in both)), None)
        found.append(finding("8", claim, words, falls, scaled, work, warm(cells), disturbed(sides)))
    return found


def _staged(result: Result) -> int:
    state = result["measured"].get("state") or {}
    return int((state.get("staging") or {}).get("hits", 0))


def _change(medians: Mapping[int, float]) -> float:
    """The value with the most past windows divided by that with the fewest."""
    return medians[max(medians)] / medians[min(medians)] if medians[min(medians)] else 1.0


def _list(numbers: Iterable[int]) -> str:
    return f"{', '.join(map(str, numbers))} past windows"
