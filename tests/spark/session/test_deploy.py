"""The job of ``deploy/`` runs by its page's command, with state in an S3 server, by credentials in the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aion.config import SPARK_PREFIX
from tests import documents, jvm
from tests.object_store import CREDENTIALS, ObjectStore
from tests.server.conftest import wait_until
from tests.spark.truths import Event, positions, tolls, write

SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("segment", pa.int32()), ("speed", pa.float64())])
STATE = f"{SPARK_PREFIX}state.dir"


def command(bucket: ObjectStore) -> list[str]:
    """The command of the page. In place of the bucket it names one of the server here, as the page says."""
    page = "docs/operate/deploy.md"
    of_page = [c for c in documents.commands(("spark-submit",)) if c.page == page and c.words[0] == "spark-submit"]
    (found,) = (c for c in of_page if "local[2,4]" in c.words)
    uri = documents.spark_settings(found)[STATE]
    assert uri == "s3://BUCKET/aion?region=REGION"
    said = uri.replace("BUCKET", bucket.bucket).replace("REGION", "us-east-1")
    said += f"&endpoint_override=127.0.0.1:{bucket.port}&scheme=http"
    words = [word.replace(uri, said) for word in found.words]
    words[0] = str(Path(sys.executable).parent / "spark-submit")
    words[1:1] = ["--driver-java-options", jvm.OPTIONS, "--conf", "spark.ui.enabled=false"]
    return [str(documents.ROOT / word) if word == "deploy/job.py" else word for word in words]


@contextmanager
def running(words: list[str], folder: Path) -> Iterator[None]:
    """The job, until it is ended as Docker and Kubernetes end a container."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "SPARK_"))}
    environment |= {**CREDENTIALS, "PYTHONPATH": str(documents.ROOT), "PYSPARK_PYTHON": sys.executable}
    with (folder / "log").open("a") as log:
        job = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
        assert job.poll() is None, (folder / "log").read_text()[-3000:]
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(60)


def panes(folder: Path) -> Mapping[tuple[int, float, float], int]:
    """How many cars the newest pane of each segment and minute has. Of files that are complete."""
    rows = []
    for file in folder.glob("*.parquet"):
        with suppress(pa.ArrowInvalid):
            rows += pq.read_table(file).to_pylist()
    newest = {}
    for row in sorted((row for row in rows if row["kind"] != "dropped"), key=lambda row: row["pane"]):
        place = row["segment"], row["window_start"].timestamp(), row["window_end"].timestamp()
        newest[place] = row["cars"]
    return newest


@pytest.mark.proof
def test_the_job_goes_on_after_its_container_was_ended(tmp_path: Path, bucket: ObjectStore) -> None:
    first, *rest = positions()
    write(tmp_path / "positions", strip(first), SCHEMA)
    with running(command(bucket), tmp_path):
        wait_until(lambda: len(panes(tmp_path / "tolls")) > 0, 180)
    before = bucket.objects()
    assert {path.split("/")[0] for path in before} == {"aion"}
    for events in rest:
        write(tmp_path / "positions", strip(events), SCHEMA)
    events = [event for part in (first, *rest) for event in part if event["user"] != "end"]
    truth = {place: cars for place, (cars, _) in tolls(events, 60, 60).items()}
    with running(command(bucket), tmp_path):
        wait_until(lambda: panes(tmp_path / "tolls") == truth, 180)
    assert bucket.objects().keys() != before.keys()
    assert not (tmp_path / "aion-state").exists() and not (tmp_path / "checkpoints" / "aion-state").exists()


def strip(events: list[Event]) -> list[Event]:
    return [{name: event[name] for name in SCHEMA.names} for event in events]
