"""What going back makes of a checkpoint (:mod:`aion.spark.taking_over.rewind`): Spark's logs end with an earlier batch.

Going back is begun by a note in the checkpoint. Whatever is interrupted after that, the next start completes: the logs
are cut, and sinks that have not been taken back find in REWOUND that they must be.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass

from aion.core.query.sink_notes import REWOUND
from aion.execute.files.skipped import FOLDER
from aion.spark.session.checkpoint_files import CheckpointFiles, ReadableFiles

NOTE = "aion-rewinding.json"
"""The file of a checkpoint that says that going back has begun and has not ended."""
_VERSION = re.compile(r"(\d+)(_[0-9a-fA-F-]+)?\.(delta|snapshot|zip|changelog)")
"""The files in which Spark keeps a version of its own state. A batch makes the version with the next number."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewound:
    """``to``: the batch that becomes the last one. ``before``: the one that was. ``id``: of this going back."""

    to: int
    before: int
    id: str


def begun(files: ReadableFiles) -> Rewound | None:
    """Returns what has begun in a checkpoint, or None if nothing has."""
    return Rewound(**json.loads(files.read(NOTE))) if NOTE in files.names() else None


def begin(files: CheckpointFiles, rewound: Rewound) -> None:
    """Notes that going back begins. From here on it is completed, by :func:`complete` or by the next start."""
    files.write(f".{NOTE}", json.dumps(asdict(rewound)))
    files.move(f".{NOTE}", NOTE)
    files.write(REWOUND, json.dumps(asdict(rewound)))


def complete(files: CheckpointFiles, rewound: Rewound) -> None:
    """Cuts the logs, what was decided about files, and Spark's state behind a batch. This may be done again."""
    files.write(REWOUND, json.dumps(asdict(rewound)))
    # The last entries first: what is left is always the checkpoint of a query that was stopped.
    for name in ("commits", "offsets", *(f"{FOLDER}/{stream}" for stream in files.names(FOLDER))):
        for batch in sorted(filter(str.isdecimal, files.names(name)), key=int, reverse=True):
            if int(batch) > rewound.to:
                files.delete(f"{name}/{batch}")
    _cut_state(files, "state", rewound.to)
    files.delete(NOTE)


def complete_interrupted(files: CheckpointFiles) -> None:
    """Completes what an interrupted command has begun, if there is such a thing."""
    if (rewound := begun(files)) is not None:
        log.warning("%s: a rewind was interrupted; the query goes on after batch %d", files.location, rewound.to)
        complete(files, rewound)


def version_of(name: str) -> int | None:
    """Returns the number of the version that a file of Spark's state is of, or None if it is of another kind."""
    found = _VERSION.fullmatch(name)
    return None if found is None else int(found[1])


def _cut_state(files: CheckpointFiles, folder: str, batch: int) -> None:
    """Deletes versions that later batches made. Stores without ids would read them again, as if they were theirs."""
    for name in files.names(folder):
        path = f"{folder}/{name}"
        version = version_of(name)
        if version is not None:
            if version > batch + 1:
                files.delete(path)
        elif name == "_metadata":
            for later in files.batches(f"{path}/v2"):
                if later > batch and min(files.batches(f"{path}/v2")) <= batch:
                    files.delete(f"{path}/v2/{later}")
        elif name not in ("SSTs", "logs", "archive", "_stateSchema") and files.is_folder(path):
            _cut_state(files, path, batch)
