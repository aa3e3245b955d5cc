"""Remembers the rules of time zones that a query has used, so that all its tasks slice time in the same way.

The driver sends its rules with the plan, so executors need no zone database, and may have another one. After a restart
the driver may have new rules, but windows that live keep their edges (:mod:`aion.core.timed.calendar_state`). A child
does not know those windows. It therefore also ends slices where any earlier rules of the query ended them. It finds
these rules here: beside the query's checkpoint, so that they go where it goes. A file is named by its content.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow.fs as pafs

from aion.core.calendars import ZoneRules
from aion.core.query.plan import Plan
from aion.errors import StateError
from aion.execute.files.places import place_of
from aion.execute.files.skipped import write_once
from state_backends.files.remote import WHOLE_PUTS, storage_errors

FOLDER = "aion-zones"
"""The folder in the checkpoint."""
SUFFIX = ".tzif"


class ZoneFiles:
    """The rules of one operator. ``checkpoint``: of the query, as Spark writes it. ``name``: of the operator."""

    def __init__(self, checkpoint: str, name: str) -> None:
        self._checkpoint = checkpoint
        self._filesystem, root = place_of(checkpoint)
        self._folder = f"{root.rstrip('/')}/{FOLDER}/{name}"

    def add(self, plan: Plan) -> None:
        """Makes the plan's rules durable. No shard may commit before. Raises StorageError."""
        known = self._known()
        for rules in {window.edges.rules for window in plan.calendars.values()}:
            if (name := _name_of(rules)) not in known:
                self._write(name, rules.tzif)

    def sliced(self, plan: Plan) -> Plan:
        """The plan for tasks that make slices: they end by all rules of the query. Raises StorageError, StateError."""
        earlier: dict[str, list[ZoneRules]] = {}
        for name, path in self._before:
            zone = unquote(name.rpartition("-")[0])
            if any(w.zone == zone and name != _name_of(w.edges.rules) for w in plan.calendars.values()):
                earlier.setdefault(zone, []).append(self._read(name, zone, path))
        changed = {n: w.with_rules(*earlier[w.zone]) for n, w in plan.calendars.items() if w.zone in earlier}
        return plan.with_windows(changed) if changed else plan

    def check(self, snapshot: Mapping[str, Any] | None) -> None:
        """Raises StateError if the rules that a shard's snapshot needs are not here. Then slices would be wrong."""
        needed = {r for kept in (snapshot or {}).get("calendars", {}).values() for r in kept["rules"]}
        missing = needed - {name.removesuffix(SUFFIX).rpartition("-")[2] for name in self._known()}
        if missing:
            raise StateError(
                f"the rules of a time zone changed, and {self._folder} in the checkpoint lacks the earlier ones "
                f"({', '.join(sorted(missing))}), by which windows that live were made; copy the folder {FOLDER} from "
                "the checkpoint from which this one was made"
            )

    @cached_property
    def _before(self) -> list[tuple[str, str]]:
        """Name and path of each file when it was first asked for: during a run, only the run's own rules are added."""
        return sorted(self._known().items())

    def _known(self) -> dict[str, str]:
        """The path of each file, by name."""
        with storage_errors(self._checkpoint):
            found = self._filesystem.get_file_info(pafs.FileSelector(self._folder, allow_not_found=True))
        return {file.base_name: file.path for file in found if file.base_name.endswith(SUFFIX)}

    def _read(self, name: str, zone: str, path: str) -> ZoneRules:
        with storage_errors(self._checkpoint), self._filesystem.open_input_stream(path) as stream:
            rules = ZoneRules(zone, stream.read())
        if _name_of(rules) != name:
            raise StateError(f"{path} is damaged: its content does not fit its name")
        return rules

    def _write(self, name: str, data: bytes) -> None:
        with storage_errors(self._checkpoint):
            if isinstance(self._filesystem, pafs.LocalFileSystem):
                write_once(Path(self._folder), name, data, uuid.uuid4().hex)
                return
            whole = self._filesystem.type_name in WHOLE_PUTS
            path = f"{self._folder}/{name}"
            written = path if whole else f"{path}.{uuid.uuid4().hex}"
            self._filesystem.create_dir(self._folder, recursive=True)
            with self._filesystem.open_output_stream(written) as out:
                out.write(data)
            if not whole:
                with contextlib.suppress(FileExistsError):
                    self._filesystem.move(written, path)


def _name_of(rules: ZoneRules) -> str:
    return f"{quote(rules.name, safe='')}-{rules.digest}{SUFFIX}"
