"""``aion diff``: what a query would do with its state if it were started again with other definitions."""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from aion.base.schema import parse_schema
from aion.config import load_policy
from aion.core.query.sink_notes import FOLDER, Note, lacking, notes_of
from aion.errors import ConfigError, StorageError
from aion.execute.evolving import State, windows_go_on
from aion.local import normal_schema
from aion.sinks.notes import columns_now
from aion.spec import Spec
from state_backends.files.location import locate
from state_backends.files.remote import pyarrow_uri, storage_errors
from state_backends.versions.lineage import operator_of


class Checkpoint(NamedTuple):
    """What a checkpoint says of its query. ``location``: as Spark writes it. ``batch``: the last one that has ended.
    ``notes``: of the tables that it writes to.
    """

    location: str
    query: str
    batch: int | None
    notes: tuple[Note, ...] = ()


def diff(checkpoint: str, what: str, *, schema: str, state_dir: str) -> list[str]:
    """Returns, for each operator, a line that names it, and lines that say what would change.

    ``what``: the specification, as ``module:name``: an :class:`aion.Spec`, or several. ``schema``: the columns of the
    input, as Spark's DDL. Raises ForeignState if an operator could not go on, ConfigError, StateError, StorageError.
    """
    found = read_checkpoint(checkpoint)
    lines = []
    columns = parse_schema(schema)
    for spec in specs_of(what):
        with closing(locate(state_dir)) as location:
            stored = operator_of(location, found.query, spec.name, found.location)
        if stored is None:
            raise ConfigError(
                f"{state_dir}: the query {found.query} has no state of an operator {spec.name!r}; give the folder of "
                "spark.aion.state.dir with --state, and the operator's name in the Spec"
            )
        plan = spec.plan(normal_schema(columns, spec.time_column))
        policy = load_policy("standard" if spec.policy is None else spec.policy, spec.policy_overrides)
        kept = State(state_dir, found.query, spec.name, found.location, stored)
        goes_on = windows_go_on(plan, policy, spec.on_removed, kept, found.batch)
        lines.append(f"{spec.name}:")
        said = goes_on.said or ["nothing changes"]
        said += lacking(found.notes, spec.name, goes_on.columns, columns_now)
        lines += [f"  {line}" for line in said]
    return lines


def read_checkpoint(checkpoint: str) -> Checkpoint:
    """Raises ConfigError if there is none, StorageError if its place cannot be reached."""
    try:
        if "://" in checkpoint:
            fs, base = pafs.FileSystem.from_uri(pyarrow_uri(checkpoint))
            location = checkpoint.rstrip("/")
        else:
            fs, base = pafs.LocalFileSystem(), os.path.realpath(checkpoint)
            location = f"file:{base}"
        with storage_errors(checkpoint):
            if fs.get_file_info(f"{base}/metadata").type is not pafs.FileType.File:
                raise ConfigError(f"{checkpoint}: not the checkpoint of a streaming query; it has no metadata")
            with fs.open_input_stream(f"{base}/metadata") as stream:
                query = str(json.loads(stream.read())["id"])
            selected = fs.get_file_info(pafs.FileSelector(f"{base}/{FOLDER}", allow_not_found=True))
            notes = notes_of(_text(fs, f.path) for f in selected if f.path.endswith(".json"))
            names = [f.base_name for f in fs.get_file_info(pafs.FileSelector(f"{base}/commits", allow_not_found=True))]
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{checkpoint} cannot be reached from here: {error}") from error
    return Checkpoint(location, query, max((int(name) for name in names if name.isdecimal()), default=None), notes)


def _text(fs: Any, path: str) -> bytes:
    with fs.open_input_stream(path) as stream:
        return bytes(stream.read())


def specs_of(what: str) -> list[Spec]:
    """Returns what ``module:name`` stands for. Raises ConfigError."""
    module, separator, name = what.partition(":")
    if not separator or not module or not name:
        raise ConfigError(f"{what!r} is not a specification; give module:name, e.g. jobs.traffic:spec")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what}: {error}") from error
    if not isinstance(found, Spec | dict | list | tuple):
        raise ConfigError(f"{what}: {found!r} is not an aion.Spec, and not a list of them")
    several = list(found.values()) if isinstance(found, dict) else [found] if isinstance(found, Spec) else list(found)
    if not several or not all(isinstance(spec, Spec) for spec in several):
        raise ConfigError(f"{what}: {found!r} is not an aion.Spec, and not a list of them")
    return several
