"""The settings of a sweep, from a YAML file and the command line, and the cells that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from aion.config import Policy, load_policy, policy_to_json, resolve
from aion.config.values import size_bytes
from aion.errors import ConfigError
from experiments.workloads import NAMES, load
from experiments.workloads.application import BACKENDS, is_aion
from experiments.workloads.model import Shape

PAPER_MEMORY_BYTES = 8 << 30
PAPER_WARM_UP, PAPER_MEASURED = 10, 30
SCALED_SIZES = ("memory.budget", "memory.bucket_limit", "apply.memory")
SMALLEST_BYTES = 256 << 10
SMALLEST_HEAP_BYTES = 512 << 20
FULL = "full"

PARTS: dict[str, dict[str, Any]] = {
    "no-prestaging": {"prestage": {"mode": "none"}},
    "no-codec-threads": {"io": {"codec_threads": 0}},
    "4-io-threads": {"io": {"threads": 4}},
    "keep-0.1": {"destage": {"keep_fraction": 0.1}},
    "keep-0.5": {"destage": {"keep_fraction": 0.5}},
    "victim-slowest": {"memory": {"victim": "slowest"}},
    "codec-json": {"state": {"codec": "json"}},
    "compression-lz4": {"state": {"compression": "lz4"}},
    "compression-zstd": {"state": {"compression": "zstd"}},
}
"""Q3: variants of the policy, each with one part changed. The first three are the paper's (figure 8)."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Heap(_Strict):
    """The JVM's heap: 512 MiB, about the least that Spark starts with, plus a share of a cell's memory above ``base``.

    With stock Spark the JVM holds the state, so it gets most of that memory.
    """

    aion: float = Field(default=0.25, ge=0, le=1)
    spark: float = Field(default=0.85, ge=0, le=1)


class Settings(_Strict):
    """The settings of one sweep. Sizes are written as in policies ("2GiB")."""

    workload: list[str] = ["average"]
    past_windows: list[int] = list(range(1, 11))
    backend: list[str] = ["tiered", "spark-list"]
    policy: str | dict[str, Any] = "standard"
    parts: dict[str, dict[str, Any]] = {}
    """Variants of the policy. Each runs the first workload with Aion's tiered store."""
    scale: float = Field(default=1.0, gt=0, le=1)
    memory: str | None = None
    """The limit of a cell's whole process tree. null: 8 GiB for state, scaled, plus ``base``."""
    base: str = "1792MiB"
    """The memory of an idle tree: JVM, driver, workers, server."""
    heap: Heap = Heap()
    collector: Literal["parallel", "g1"] = "parallel"
    """The JVM's garbage collector. parallel was Java's default when the paper was written."""
    limit: str = "auto"
    """auto: a systemd scope if possible, else watched. watched: sample, kill. cgroup:PATH: your own control group."""
    warm_up: int = Field(default=PAPER_WARM_UP, ge=1)
    measured: int = Field(default=PAPER_MEASURED, ge=1)
    pace: Literal["real", "max"] = "real"
    """real: a window's events arrive in a window's time, as in the paper. max: as fast as Spark takes them."""
    executions: Literal["twice", "policy"] = "twice"
    """twice: at a window's end, and at its end plus the allowed lateness, as in the paper. policy: as it says."""
    source: Literal["files", "rate", "kafka"] = "files"
    kafka: str | None = None
    cores: int = Field(default=2, ge=1)
    seed: int = Field(default=1, ge=0)
    stall_s: float = Field(default=300.0, gt=0)
    """Kill a cell after this time without a finished batch, but at the earliest after the time of 20 windows."""
    after_death: Literal["stop", "go on"] = "stop"
    """stop: a contender that died of memory does not run with more past windows."""
    staleness: bool = True
    keep_data: bool = False

    @field_validator("past_windows", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        if isinstance(value, list):
            value = ",".join(map(str, value))
        return numbers(value) if isinstance(value, str | int) else value

    @field_validator("workload", "backend", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("workload")
    @classmethod
    def _workloads(cls, value: list[str]) -> list[str]:
        return _known(value, NAMES)

    @field_validator("backend")
    @classmethod
    def _backends(cls, value: list[str]) -> list[str]:
        return _known(value, BACKENDS)

    @property
    def memory_bytes(self) -> int:
        """The limit of a cell's process tree."""
        if self.memory is not None:
            return size_bytes(self.memory, what="memory")
        return size_bytes(self.base, what="base") + round(PAPER_MEMORY_BYTES * self.scale**2)

    @property
    def is_scaled(self) -> bool:
        """Whether anything is smaller than in the paper. Then a result holds only at this scale."""
        smaller = self.memory_bytes < PAPER_MEMORY_BYTES
        return self.scale < 1 or smaller or self.warm_up < PAPER_WARM_UP or self.measured < PAPER_MEASURED

    @property
    def batches(self) -> int:
        return self.warm_up + self.measured

    def shape(self, workload: str, past_windows: int) -> Shape:
        return Shape.of(load(workload).spec, past_windows=past_windows, scale=self.scale, seed=self.seed)


def _known(values: list[str], known: tuple[str, ...]) -> list[str]:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        raise ValueError(f"unknown: {', '.join(unknown)}; use {', '.join(known)}" if unknown else
                         f"empty; use some of {', '.join(known)}")  # fmt: skip
    return list(dict.fromkeys(values))


def numbers(text: str | int) -> list[int]:
    """``"1..4"`` is 1, 2, 3, 4; ``"1,4..6"`` is 1, 4, 5, 6. Raises ValueError."""
    found: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d{1,3})\s*(?:\.\.\s*(\d{1,3})\s*)?", part)
        if match is None:
            raise ValueError(f"{text!r}: write numbers like 1..10 or 1,4,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ValueError(f"{text!r}: numbers of past windows start at 1 and go up; write e.g. 1..10")
        found += range(first, last + 1)
    return sorted(set(found))


def load_settings(file: Path | None, given: Mapping[str, Any]) -> Settings:
    """The settings of the file, overridden by those in ``given`` that are not None. Raises ConfigError.

    A policy in the file that is a path is relative to the file's folder.
    """
    values: Any = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{file}: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: not a mapping of settings")
        policy = values.get("policy")
        if isinstance(policy, str) and (file.parent / policy).is_file():
            values["policy"] = str(file.parent / policy)
    try:
        settings = Settings(**{**values, **{k: v for k, v in given.items() if v is not None}})
        assert settings.memory_bytes
    except ValidationError as error:
        raise ConfigError("; ".join(map(_message, error.errors()))) from None
    if settings.source == "kafka" and not settings.kafka:
        raise ConfigError("kafka: the source kafka needs its servers, e.g. kafka: 'localhost:9092'")
    for name in (FULL, *settings.parts):
        cell_policy(settings, "tiered", settings.parts.get(name, {}), settings.shape(settings.workload[0], 1))
    return settings


def _message(error: ErrorDetails) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg'].removeprefix('Value error, ')}"
    known = list(Settings.model_fields)
    close = get_close_matches(name, known, 1)
    return f"{name}: unknown setting; {f'did you mean {close[0]}? ' if close else ''}settings are {', '.join(known)}"


# -- cells ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a workload, a store for its state, and a number of past windows. ``part``: a variant of the policy."""

    workload: str
    backend: str
    past_windows: int
    part: str = FULL

    @property
    def name(self) -> str:
        part = "" if self.part == FULL else f"-{self.part}"
        return f"{self.workload}-{self.backend}{part}-{self.past_windows:02d}"

    @property
    def contender(self) -> tuple[str, str, str]:
        """Everything but the number of past windows."""
        return self.workload, self.backend, self.part


def cells(settings: Settings) -> Iterator[Cell]:
    """All cells in order: few past windows first, backends next to each other in time; then the parts."""
    for workload in settings.workload:
        for past in settings.past_windows:
            for backend in settings.backend:
                yield Cell(workload, backend, past)
    for past in settings.past_windows:
        if settings.parts and not (settings.backend and "tiered" in settings.backend):
            yield Cell(settings.workload[0], "tiered", past)
        for part in settings.parts:
            yield Cell(settings.workload[0], "tiered", past, part)


def cell_policy(settings: Settings, backend: str, part: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Aion's policy for a cell: the sweep's, with memory scaled like the state, and a bound until which events come."""
    asked = load_policy(settings.policy) if isinstance(settings.policy, str) else _resolved(settings.policy)
    values = policy_to_json(asked)
    for key in SCALED_SIZES:
        section, name = key.split(".")
        size = values[section][name]
        if settings.scale < 1 and not (isinstance(size, str) and size.endswith("%")):
            values[section][name] = max(SMALLEST_BYTES, round(size_bytes(size) * settings.scale**2))
    budget = values["memory"]["budget"]
    if not (isinstance(budget, str) and budget.endswith("%")):
        limit = size_bytes(values["memory"]["bucket_limit"])
        values["memory"]["bucket_limit"] = min(limit, size_bytes(budget))
    values["state"]["backend"] = backend
    values["lateness"] |= {"initial_bound": shape.bound, "coverage": None}
    if settings.executions == "twice":
        values["trigger"] |= {"kind": "staleness", "executions": 1}
    for section, keys in part.items():
        if section not in values or not isinstance(keys, Mapping):
            raise ConfigError(f"parts: {section!r} is not a section of a policy")
        values[section] |= keys
    return policy_to_json(_resolved(values))


def _resolved(values: Mapping[str, Any]) -> Policy:
    return resolve(values, keyword={}, spark_conf={})


def cell_spec(settings: Settings, cell: Cell) -> dict[str, Any]:
    """Everything that a cell's result depends on, as plain values. It also identifies the result later."""
    shape = settings.shape(cell.workload, cell.past_windows)
    share = settings.heap.aion if is_aion(cell.backend) else settings.heap.spark
    state_bytes = max(0, settings.memory_bytes - size_bytes(settings.base))
    part = settings.parts.get(cell.part, {})
    return {
        "workload": cell.workload,
        "backend": cell.backend,
        "past_windows": cell.past_windows,
        "part": cell.part,
        "policy": cell_policy(settings, cell.backend, part, shape) if is_aion(cell.backend) else None,
        "scale": settings.scale,
        "seed": settings.seed,
        "warm_up": settings.warm_up,
        "measured": settings.measured,
        "pace": settings.pace,
        "source": settings.source,
        "kafka": settings.kafka,
        "cores": settings.cores,
        "limit": settings.limit,
        "limit_bytes": settings.memory_bytes,
        "collector": settings.collector,
        "heap_bytes": (SMALLEST_HEAP_BYTES + round(state_bytes * share)) >> 20 << 20,
    }


def words(settings: Settings) -> str:
    """The settings in one line."""
    at = "" if settings.scale == 1 else f", scaled by {settings.scale:g} (rates, windows; memory by its square)"
    return (
        f"{', '.join(settings.workload)}; {', '.join(settings.backend)}; past windows "
        f"{', '.join(map(str, settings.past_windows))}{at}; {settings.memory_bytes / (1 << 20):,.0f} MiB for each cell"
    )
