"""A self-contained HTML report with figures, tables, settings, versions and machine; and the same as JSON."""

from __future__ import annotations

import base64
import html
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.memory_pressure import figures
from experiments.memory_pressure.findings import Finding, Result, by_past, death, findings, verdict
from experiments.memory_pressure.settings import FULL, Cell, Settings, words
from experiments.shared import bench

PACKAGES = ("aion", "pyspark", "pyarrow", "pandas", "numpy", "rocksdict", "psutil", "matplotlib")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
img { max-width: 100%; } pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 12px; }
.holds { color: #1a7f37; font-weight: 600; } .fails { color: #c0392b; font-weight: 600; } .open { color: #777; }
.note { background: #fff6dd; border-left: 4px solid #e69f00; padding: .5rem .9rem; }
"""
VERDICT_CLASSES = {"holds": "holds", "holds at this scale": "holds", "does not hold": "fails", "not judged": "open"}
EXPLAINED = {
    "2": "Resident memory of JVM, Python workers, state server and driver, four times a second after the warm-up. "
    "Pages that processes share are divided among them. Boxes: quartiles and median; whiskers: minimum and maximum. "
    "Grey: the contender's floor, the most that its processes take without state, with their whole basic heap. Dashes: "
    "its limit, which is the floor, the memory for state, and that for events on their way. Cross: it died there, and "
    "did not run with more past windows.",
    "3": "Events of the newest window per second, from the start of its batch to the start of the next one.",
    "4": "As figure 3, with late events: the mean over the newest window and the N past ones, which get fewer events.",
    "5": "Events of an execution per second, from the call of the window's function to its end, including reading; "
    "with keys, from the first call to the end of the last. spark-list and spark-window have no figure, since the list "
    "is copied before the function is called.",
    "6": "Share of the time spent by the JVM's garbage collectors, pauses and concurrent work.",
    "7": "As figure 5, with final executions.",
    "8": "One part of the policy is changed at a time.",
    "9": "The staleness experiment, planned on distributions, without Spark.",
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: headings, rows of text, and how many columns from the left are aligned left."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def record_of(settings: Settings, results: Sequence[Result], staleness: Mapping[str, Any] | None) -> dict[str, Any]:
    """The content of the JSON file, from which the report is made."""
    found = findings(results, scaled=settings.is_scaled)
    return {
        "experiment": "memory-pressure",
        "settings": settings.model_dump(mode="json"),
        "summary": words(settings),
        "scaled": settings.is_scaled,
        "state_bytes": {workload: settings.state_bytes(workload) for workload in settings.workload},
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "findings": [asdict(finding) for finding in [*found, *staleness_findings(staleness)]],
        "results": list(results),
        "staleness": staleness,
    }


def staleness_findings(staleness: Mapping[str, Any] | None) -> list[Finding]:
    """Q4: the claims with the verdicts of the staleness experiment. They do not depend on the scale."""
    claims = staleness["claims"] if staleness else []
    return [Finding("9", c["paper"], c["found"], verdict(c["holds"], scaled=False)) for c in claims]


def write(out: Path, settings: Settings, record: Mapping[str, Any]) -> list[Path]:
    """Writes ``report.html``, ``memory-pressure.json`` and a PNG for each figure."""
    drawn = figures.draw_all(record["results"], out)
    if (picture := out / "figure-9.png").exists() and record["staleness"]:
        drawn["9"] = picture
    bench.write_json(out / "memory-pressure.json", record)
    page = out / "report.html"
    unfinished = page.with_name("report.html.part")
    unfinished.write_text(html_of(record, drawn))
    unfinished.replace(page)
    return [page, out / "memory-pressure.json", *drawn.values()]


def html_of(record: Mapping[str, Any], drawn: Mapping[str, Path]) -> str:
    body = [heading("Memory pressure", 1), paragraph(record["summary"])]
    if record["scaled"]:
        body.append(
            '<p class="note">Scaled: smaller than the paper\'s setting. A confirmed claim is confirmed at this scale '
            "only.</p>"
        )
    body += [heading("The paper's claims"), findings_table(record["findings"])]
    for number, title in {**figures.TITLES, "9": "staleness"}.items():
        if number not in drawn:
            continue
        body += [heading(f"Figure {number}: {title}"), paragraph(EXPLAINED[number]), image(drawn[number], title)]
        body.append(findings_table([f for f in record["findings"] if f["figure"] == number]))
        if number == "8":
            body.append(table(parts_sheet(record["results"])))
    body += [heading("Deaths"), table(deaths_sheet(record["results"]))]
    body += [heading("All cells"), table(cells_sheet(record["results"]))]
    kinds = {result["limit"] for result in record["results"] if "limit" in result}
    body += [heading("Limit"), *(paragraph(f"Enforced by: {kind}.") for kind in sorted(kinds))]
    body += [heading("Settings"), preformatted(yaml.safe_dump(record["settings"], sort_keys=False))]
    policy = next((r["spec"]["policy"] for r in record["results"] if r.get("spec", {}).get("policy")), None)
    if policy:
        body += [paragraph("Aion's policy in its first cell:"), preformatted(yaml.safe_dump(policy))]
    versions = json.loads(json.dumps({**record["versions"], "machine": record["machine"]}))
    body += [heading("Versions and machine"), preformatted(yaml.safe_dump(versions, sort_keys=False))]
    return page_of("Memory pressure", body)


# -- tables -----------------------------------------------------------------------------------------------


def findings_sheet(found: Sequence[Mapping[str, Any]]) -> Sheet:
    rows = [[f["figure"], f["paper"], f["measured"], f["verdict"]] for f in found]
    return Sheet(["figure", "the paper", "here", "verdict"], rows, left=4)


def deaths_sheet(results: Sequence[Result]) -> Sheet:
    """The number of past windows with which each contender died, and how."""
    rows = []
    for workload, backend, part in dict.fromkeys((r["workload"], r["backend"], r["part"]) for r in results):
        of = by_past(results, workload, backend, part)
        died = death(of)
        asked = [past for past, result in of.items() if result["status"] in ("done", "died", "failed")]
        how = of[died]["why"] if died else f"not with up to {max(asked)}" if asked else "not run"
        rows.append([workload, backend, part, str(died or "–"), how])
    return Sheet(["workload", "state in", "policy", "past windows", "how"], rows, left=5)


HEADINGS = ("MiB", "JVM", "workers", "server", "peak", "normal/s", "all/s", "exec/s", "GC", "dropped")


def cells_sheet(results: Sequence[Result]) -> Sheet:
    """A row of medians for each cell. Its name ends in N; rates are of events; ``exec/s``: in executions."""
    headings = ["cell", "status", *HEADINGS]
    rows = []
    for result in results:
        wrong = f"done, with wrong results: {result.get('difference')}" if result.get("agrees") is False else "done"
        status = wrong if result["status"] == "done" else f"{result['status']}: {result.get('why', '')}"
        cell = Cell(*(result[name] for name in ("workload", "backend", "past_windows", "part")))
        rows.append([cell.name, status[:90], *figures_of(result)])
    return Sheet(headings, rows, left=2)


def figures_of(result: Result) -> list[str]:
    """The figures for :data:`HEADINGS`."""
    found = result.get("measured")
    if not found:
        return [""] * len(HEADINGS)
    gc = found["gc"]
    series = [
        *(found["memory_mib"][kind] for kind in ("total", "jvm", "workers", "server")),
        [found["peak_mib"]],
        found["ingestion"]["normal"],
        found["ingestion"]["all"],
        found["processing"]["all"],
    ]
    numbers = [f"{statistics.median(values):,.0f}" if values else "" for values in series]
    return [*numbers, f"{gc['young_share'] + gc['old_share']:.1%}" if gc else "", f"{found['dropped']:,}"]


def parts_sheet(results: Sequence[Result]) -> Sheet:
    """Each variant of the policy and the full policy, by past windows, with the hits and misses of prestaging."""
    workload = next(result["workload"] for result in results if result["part"] != FULL)
    rows = []
    for result in results:
        if result["workload"] == workload and result["backend"] == "tiered":
            state = (result.get("measured") or {}).get("state") or {}
            staging = state.get("staging", {})
            met = f"{staging.get('hits', 0):,} / {staging.get('misses', 0):,}" if staging else ""
            waited = f"{staging.get('blocked_s', 0.0):.2f}" if staging else ""
            values = figures_of(result)
            rows.append(
                [result["part"], str(result["past_windows"]), result["status"], values[0], *values[5:8], met, waited]
            )
    headings = ["policy", "N", "status", "MiB", "normal/s", "all/s", "exec/s", "hits / misses", "waited, s"]
    return Sheet(headings, rows, left=3)


# -- HTML ---------------------------------------------------------------------------------------------------


def page_of(title: str, body: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def image(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def table(sheet: Sheet) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        made = []
        for i, text in enumerate(cells):
            kind = VERDICT_CLASSES.get(text, "") if i == len(cells) - 1 else ""
            kind = kind or ("" if i < sheet.left else "n")
            shown = f' class="{kind}"' if kind else ""
            made.append(f"<{tag}{shown}>{html.escape(text)}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    lines = [row(sheet.headings, "th"), *(row(cells, "td") for cells in sheet.rows)]
    return f"<table>{''.join(lines)}</table>"


def findings_table(found: Sequence[Mapping[str, Any]]) -> str:
    return table(findings_sheet(found)) if found else ""
