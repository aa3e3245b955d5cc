"""The settings of a sweep, from a YAML file and the command line, and the cells that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from aion.config import Policy, load_policy, policy_to_json, resolve
from aion.config.values import size_bytes
from aion.errors import ConfigError
from experiments.shared.state_server import HOW
from experiments.workloads import NAMES, load
from experiments.workloads.application import BACKENDS, FLINK, is_aion
from experiments.workloads.model import Shape

PAPER_STATE_BYTES = 8 << 30
STATE_OVER_BUDGET = 10
"""Without ``state``, a contender gets a tenth of the state that it has to keep with the most past windows."""
FLOOR_PAYLOAD_BYTES = 16
"""What an event of a floor carries besides the columns that results depend on: too little to be state."""
PAPER_WARM_UP, PAPER_MEASURED = 10, 30
SMALLEST_BYTES = 256 << 10
FLIGHT_BATCHES = 8
"""What every tree gets for events on their way, in batches: copies in the JVM, in workers, and between them."""
FULL = "full"
FLINK_WORKLOAD = "average"
"""The only one with a program for Flink."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a contender gets of the memory for state, as shares.

    ``heap``: of the JVM, above ``least_heap``, with which it starts. ``native``: the limit of a store outside the heap,
    its buffers and caches. ``flight``: what the heap gets of the memory for events on their way, which Spark copies.
    """

    heap: float
    native: float = 0.0
    least_heap: int = 512 << 20
    flight: float = 0.5


SHARES = {
    "tiered": Share(0.25, 0.5),
    "memory": Share(0.25, 0.5),
    "rocksdb": Share(0.25, 0.5),
    "spark-state": Share(0.25, 0.5),
    "spark-list": Share(0.85),
    "spark-window": Share(0.85),
    "flink-heap": Share(1.0, least_heap=192 << 20, flight=0),
    "flink-rocksdb": Share(0.25, 0.5, least_heap=192 << 20),
}
"""The same for all stores of a kind. Aion's memory store has no limit of its own."""
BUCKET_SHARE, APPLY_SHARE = 0.3, 0.125

PARTS: dict[str, dict[str, Any]] = {
    "no-prestaging": {"prestage": {"mode": "none"}},
    "no-codec-threads": {"io": {"codec_threads": 0}},
    "4-io-threads": {"server": "4-io-threads"},
    "learnt-bound": {"lateness": {"coverage": 0.99}},
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


class Others(_Strict):
    """What runs of the workloads after the first one, and with how many past windows the variants of the policy do."""

    backend: list[str] | None = None
    past_windows: list[int] | None = None


class Settings(_Strict):
    """The settings of one sweep. Sizes are written as in policies ("2GiB")."""

    workload: list[str] = ["average"]
    past_windows: list[int] = list(range(1, 11))
    backend: list[str] = ["tiered", "spark-list"]
    policy: str | dict[str, Any] = "standard"
    parts: dict[str, dict[str, Any]] = {}
    """Variants of the policy. Each runs the first workload with Aion's tiered store.

    ``server``, beside the sections of a policy, is a state server of :mod:`experiments.shared.state_server`.
    """
    others: Others = Others()
    """Fewer stores and past windows for the workloads after the first, and for ``parts``. null: the same."""
    scale: float = Field(default=1.0, gt=0, le=1)
    state: str | None = None
    """What each contender gets for state, above its own floor. null: a tenth of the state with the most past windows.

    The floor is the memory of its process tree without state. The sweep measures it.
    """
    flink: str | None = None
    """Flink's jars: a folder with them, or the wheel of apache-flink-libraries. null: leave Flink out."""
    collector: Literal["parallel", "g1"] = "parallel"
    """The JVM's garbage collector. parallel was Java's default when the paper was written."""
    limit: str = "auto"
    """auto: a systemd scope if possible, else watched. watched: sample, kill. cgroup:PATH: your own control group."""
    warm_up: int | None = Field(default=PAPER_WARM_UP, ge=1)
    """Windows before the measured ones. null: one more than the past windows, after which the state grows no longer."""
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

    @field_validator("others")
    @classmethod
    def _known_others(cls, value: Others) -> Others:
        _known(value.backend or ["tiered"], BACKENDS)
        return value

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

    def state_bytes(self, workload: str) -> int:
        """What each contender gets for state."""
        if self.state is not None:
            return size_bytes(self.state, what="state")
        most = max(cell.past_windows for cell in cells(self) if cell.workload == workload)
        return self.shape(workload, most).held_bytes // STATE_OVER_BUDGET

    @property
    def is_scaled(self) -> bool:
        """Whether anything is smaller than in the paper. Then a result holds only at this scale."""
        smaller = any(self.state_bytes(workload) < PAPER_STATE_BYTES for workload in self.workload)
        return self.scale < 1 or smaller or (self.warm_up or 0) < PAPER_WARM_UP or self.measured < PAPER_MEASURED

    def warm_up_of(self, cell: Cell) -> int:
        """A floor has as many batches, and so panes, as the longest cell. A JVM grows with what it compiles."""
        if self.warm_up is not None:
            return self.warm_up
        most = max(self.past_windows_of(cell.workload)) if cell.floor else cell.past_windows
        return most + 1

    def batches_of(self, cell: Cell) -> int:
        return self.warm_up_of(cell) + self.measured

    def past_windows_of(self, workload: str) -> list[int]:
        """The numbers of past windows with which the stores run this workload."""
        is_first = workload == self.workload[0]
        return self.past_windows if is_first else self.others.past_windows or self.past_windows

    def shape(self, workload: str, past_windows: int) -> Shape:
        return Shape.of(load(workload).spec, past_windows=past_windows, scale=self.scale, seed=self.seed)

    def cell_shape(self, cell: Cell) -> Shape:
        key = {"workload": cell.workload, "past_windows": cell.past_windows, "floor": cell.floor}
        return shape_of({**key, "scale": self.scale, "seed": self.seed})


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
        assert all(map(settings.state_bytes, settings.workload))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_message, error.errors()))) from None
    if settings.source == "kafka" and not settings.kafka:
        raise ConfigError("kafka: the source kafka needs its servers, e.g. kafka: 'localhost:9092'")
    for name in (FULL, *settings.parts):
        shape, state_bytes = settings.shape(settings.workload[0], 1), settings.state_bytes(settings.workload[0])
        cell_policy(settings, "tiered", settings.parts.get(name, {}), shape, state_bytes)
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
    floor: bool = False
    """The same panes with next to no state, to measure the memory that is not for state."""

    @property
    def name(self) -> str:
        if self.floor:
            return f"{self.workload}-{self.backend}-floor"
        part = "" if self.part == FULL else f"-{self.part}"
        return f"{self.workload}-{self.backend}{part}-{self.past_windows:02d}"

    @property
    def contender(self) -> tuple[str, str, str]:
        """Everything but the number of past windows."""
        return self.workload, self.backend, self.part

    @property
    def its_floor(self) -> Cell:
        return Cell(self.workload, self.backend, 1, floor=True)


def cells(settings: Settings) -> Iterator[Cell]:
    """All cells in order: few past windows first, backends next to each other in time; then the parts."""
    first = settings.workload[0]
    for workload in settings.workload:
        backends = settings.backend if workload == first else settings.others.backend or settings.backend
        for past in settings.past_windows_of(workload):
            for backend in backends:
                if backend not in FLINK or (settings.flink is not None and workload == FLINK_WORKLOAD):
                    yield Cell(workload, backend, past)
    for past in settings.others.past_windows or settings.past_windows:
        if settings.parts:
            yield Cell(first, "tiered", past)
        for part in settings.parts:
            yield Cell(first, "tiered", past, part)


def cell_policy(
    settings: Settings, backend: str, part: Mapping[str, Any], shape: Shape, state_bytes: int
) -> dict[str, Any]:
    """Aion's policy for a cell: the sweep's, with the memory that a cell gets, and a bound until which events come."""
    asked = load_policy(settings.policy) if isinstance(settings.policy, str) else _resolved(settings.policy)
    values = policy_to_json(asked)
    sizes = {name: max(SMALLEST_BYTES, round(state_bytes * share)) for name, share in (
        ("budget", SHARES[backend].native), ("bucket", BUCKET_SHARE), ("apply", APPLY_SHARE))}  # fmt: skip
    values["memory"] |= {"budget": sizes["budget"], "bucket_limit": min(sizes["bucket"], sizes["budget"])}
    values["apply"]["memory"] = sizes["apply"]
    values["state"]["backend"] = backend
    values["lateness"] |= {"initial_bound": shape.bound, "coverage": None}
    if settings.executions == "twice":
        values["trigger"] |= {"kind": "staleness", "executions": 1}
    for section, keys in part.items():
        if section == "server":
            if keys not in HOW:
                raise ConfigError(f"parts: server: {keys!r} is not one of {', '.join(HOW)}")
            continue
        if section not in values or not isinstance(keys, Mapping):
            raise ConfigError(f"parts: {section!r} is not a section of a policy")
        values[section] |= keys
    return policy_to_json(_resolved(values))


def _resolved(values: Mapping[str, Any]) -> Policy:
    return resolve(values, keyword={}, spark_conf={})


def cell_spec(settings: Settings, cell: Cell, floor_bytes: int = 0) -> dict[str, Any]:
    """Everything that a cell's result depends on, as plain values. It also identifies the result later.

    ``floor_bytes``: what was measured for the contender's floor. The floor's own cell has no limit but the machine's.
    """
    shape = settings.cell_shape(cell)
    share, state_bytes = SHARES[cell.backend], settings.state_bytes(cell.workload)
    part = settings.parts.get(cell.part, {})
    flight_bytes = FLIGHT_BATCHES * shape.events_per_batch * shape.event_bytes
    memory = psutil.virtual_memory().total if cell.floor else floor_bytes + flight_bytes + state_bytes
    heap_bytes = share.least_heap + (0 if cell.floor else round(state_bytes * share.heap + flight_bytes * share.flight))
    return {
        "workload": cell.workload,
        "backend": cell.backend,
        "past_windows": cell.past_windows,
        "part": cell.part,
        "server": part.get("server"),
        "floor": cell.floor,
        "policy": cell_policy(settings, cell.backend, part, shape, state_bytes) if is_aion(cell.backend) else None,
        "scale": settings.scale,
        "seed": settings.seed,
        "warm_up": settings.warm_up_of(cell),
        "measured": settings.measured,
        "pace": "max" if cell.floor else settings.pace,
        "source": "files" if cell.floor else settings.source,
        "kafka": settings.kafka,
        "cores": settings.cores,
        "limit": "watched" if cell.floor else settings.limit,
        "limit_bytes": memory,
        "floor_bytes": floor_bytes,
        "flight_bytes": flight_bytes,
        "state_bytes": state_bytes,
        "held_bytes": shape.held_bytes,
        "native_bytes": round(state_bytes * share.native),
        "collector": settings.collector,
        "heap_bytes": heap_bytes >> 20 << 20,
    }


def shape_of(spec: Mapping[str, Any]) -> Shape:
    """The shape of a cell's workload, from its spec."""
    workload = load(spec["workload"])
    shape = Shape.of(workload.spec, past_windows=spec["past_windows"], scale=spec["scale"], seed=spec["seed"])
    return replace(shape, payload_bytes=FLOOR_PAYLOAD_BYTES) if spec["floor"] else shape


def words(settings: Settings) -> str:
    """The settings in one line."""
    at = "" if settings.scale == 1 else f", scaled by {settings.scale:g} (rates and windows)"
    state = ", ".join(f"{settings.state_bytes(workload) / (1 << 20):,.0f}" for workload in settings.workload)
    return (
        f"{', '.join(settings.workload)}; {', '.join(settings.backend)}; past windows "
        f"{', '.join(map(str, settings.past_windows))}{at}; {state} MiB for state, above each one's floor"
    )


START_S, MIB_PER_S, BATCH_S = 20.0, 40.0, 0.8
"""For an estimate: what a cell takes to start, what it takes in, and the least that a batch takes, on two cores."""


def estimate(settings: Settings) -> str:
    """How many cells a sweep has, and about how long it takes and how much disk it needs."""
    todo = list(dict.fromkeys(cells(settings)))
    floors = {cell.its_floor for cell in todo}
    seconds, disk = 0.0, 0
    for cell in (*floors, *todo):
        shape = settings.cell_shape(cell)
        batch_bytes = shape.events_per_batch * shape.event_bytes
        # An event is written, and read for each of its executions.
        one_s = max(BATCH_S, batch_bytes * 3 / MIB_PER_S / (1 << 20))
        batches = settings.batches_of(cell)
        is_real = settings.pace == "real" and not cell.floor
        seconds += START_S + batches * max(one_s, shape.window_us / 1e6 if is_real else 0)
        # At the pace of real time, a query is stopped after its last batch.
        seconds += 0 if is_real else len(shape.heartbeats(batches)) * BATCH_S
        disk = max(disk, batches * batch_bytes + 2 * shape.held_bytes)
    took = f"{seconds / 60:.0f} minutes" if seconds < 5_400 else f"{seconds / 3_600:.0f} hours"
    return f"{len(todo)} cells and {len(floors)} floors; at most about {took}, and {disk / 1e9:.1f} GB of disk"
