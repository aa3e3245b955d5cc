"""Compares two sweeps: the settings that differ, and the results side by side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aion.errors import ConfigError
from experiments.memory_pressure.figures import plain, save
from experiments.memory_pressure.report import Sheet, heading, image, page_of, paragraph, table
from experiments.shared import bench

RECORD = "memory-pressure.json"
SERIES = {
    "memory, MiB": ("memory_mib", "total"),
    "normal events/s": ("ingestion", "normal"),
    "events/s": ("ingestion", "all"),
    "processing, events/s": ("processing", "all"),
}


def load_record(place: Path) -> dict[str, Any]:
    """The record in a sweep's folder, or in its JSON file. Raises ConfigError."""
    path = place / RECORD if place.is_dir() else place
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result of aion experiment memory-pressure: {error}") from None
    if not isinstance(record, dict) or record.get("experiment") != "memory-pressure":
        raise ConfigError(f"{path} is no result of aion experiment memory-pressure")
    return record


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists stay whole, and what is empty is left out."""
    if isinstance(values, Mapping):
        found: dict[str, Any] = {}
        for key, value in values.items():
            found |= flat(value, f"{path}.{key}" if path else str(key))
        return found
    return {path: values}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value in A, value in B) for each setting, policy key, version and machine property that differs."""
    # Compare the policies of the same cell, if there is one: the bound depends on workload and past windows.
    both = next((pair[1:] for pair in pairs(a, b) if all(map(_policy_of, pair[1:]))), None)
    policies = [_policy_of(result) for result in both] if both else [_first_policy(record) for record in (a, b)]
    sides = [_settings_of(record, policy) for record, policy in zip((a, b), policies, strict=True)]
    keys = dict.fromkeys([*sides[0], *sides[1]])
    return [
        (key, _text(sides[0], key), _text(sides[1], key))
        for key in keys
        if sides[0].get(key, _text) != sides[1].get(key, _text)
    ]


def _settings_of(record: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    # Compare policies by content, not by name: two names may mean the same policy, and one name two policies.
    settings = {key: value for key, value in record["settings"].items() if key != "policy"}
    machine = {key: value for key, value in record["machine"].items() if key != "load_average"}
    return flat({**settings, "policy": policy, "versions": record["versions"], "machine": machine})


def _policy_of(result: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] | None = (result or {}).get("spec", {}).get("policy")
    return found or {}


def _first_policy(record: Mapping[str, Any]) -> dict[str, Any]:
    return next(filter(None, map(_policy_of, record["results"])), {})


def _text(side: Mapping[str, Any], key: str) -> str:
    return json.dumps(side[key]) if key in side else "–"


def pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """Cells with the same workload, store, variant and past windows in A and B. None if a sweep does not have it."""
    sides = [
        {(r["workload"], r["backend"], r["part"], r["past_windows"]): r for r in record["results"]} for record in (a, b)
    ]
    return [(key, sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys([*sides[0], *sides[1]])]


def median_of(result: Mapping[str, Any] | None, outer: str, inner: str) -> float | None:
    series = (result or {}).get("measured", {}).get(outer, {}).get(inner, [])
    return statistics.median(series) if series else None


def sheet(a: Mapping[str, Any], b: Mapping[str, Any]) -> Sheet:
    headings = ["cell", "A", "B", *(f"{name}: {side}" for name in SERIES for side in ("A", "B", "B / A"))]
    rows = []
    for key, one, other in pairs(a, b):
        name = f"{key[0]} {key[1]}{'' if key[2] == 'full' else ' ' + key[2]} N={key[3]}"
        row = [name, *((r or {}).get("status", "–") for r in (one, other))]
        for path in SERIES.values():
            in_a, in_b = median_of(one, *path), median_of(other, *path)
            row += ["" if m is None else f"{m:,.0f}" for m in (in_a, in_b)]
            row.append("" if not in_a or in_b is None else f"{in_b / in_a:.2f}")
        rows.append(row)
    return Sheet(headings, rows, left=3)


def draw(path: Path, a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Draws B over A, a bar for each cell and series. Returns False if they have no finished cell in common."""
    from matplotlib.figure import Figure

    both = [
        (f"{key[0]} {key[1]} {key[2]} {key[3]}", one, other)
        for key, one, other in pairs(a, b)
        if one and other and one["status"] == other["status"] == "done"
    ]
    if not both:
        return False
    figure = Figure(figsize=(4 * len(SERIES), 1.4 + 0.4 * len(both)), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(SERIES), sharey=True)
    for i, (axes, (name, series)) in enumerate(zip(panels, SERIES.items(), strict=True)):
        medians = [(median_of(one, *series), median_of(other, *series)) for _, one, other in both]
        axes.barh([label for label, *_ in both], [(y / x if x and y else 0.0) for x, y in medians], color="#0072B2")
        axes.axvline(1.0, color="#1b1b1b", linewidth=0.8)
        axes.set(title=name, xlabel=f"{names[1]} / {names[0]}" if i == 0 else "")
        plain(axes)
    axes.invert_yaxis()
    save(figure, path)
    return True


def write(out: Path, places: Sequence[Path]) -> tuple[list[tuple[str, str, str]], Sheet, list[Path]]:
    """Writes ``compare.html``, ``compare.json`` and a PNG to ``out``."""
    a, b = (load_record(place) for place in places)
    changed, cells = differences(a, b), sheet(a, b)
    paths = [out / "compare.html", out / "compare.json"]
    rows = [dict(zip(cells.headings, row, strict=True)) for row in cells.rows]
    sides = {name: str(place) for name, place in zip("AB", places, strict=True)}
    bench.write_json(paths[1], {"compared": sides, "changed": changed, "cells": rows})
    body = [heading("Two runs", 1), *(paragraph(f"{name}: {place}") for name, place in sides.items())]
    settings = table(Sheet(["setting", "A", "B"], changed, left=3)) if changed else paragraph("Nothing.")
    body += [heading("What changed"), settings]
    if draw(out / "compare.png", a, b, ("A", "B")):
        paths.append(out / "compare.png")
        body += [heading("B over A"), image(paths[-1], "B over A")]
    body += [heading("All cells, medians"), table(cells)]
    paths[0].write_text(page_of("Two runs", body))
    return changed, cells, paths
