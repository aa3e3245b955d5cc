"""Where the state of a chaos round is: a folder, or a bucket that fails, answers slowly, or does not answer at all."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos", "AWS_EC2_METADATA_DISABLED": "true"}
BUSY = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'


class FolderPlace:
    """State in a local folder."""

    bucket: Bucket | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.uri = str(self.folder)


class Bucket:
    """State in a bucket of a real S3 server (moto's) on the loopback interface, with faults between it and its clients.

    Without a fault, requests pass.
    """

    folder: Path | None = None

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        os.environ.update(CREDENTIALS)  # Spark and the state servers inherit them
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._fails = 0.0
        self._waits_s = 0.0
        self._answers = threading.Event()
        self._answers.set()
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._number = 0
        self.uri = self.new()

    @property
    def bucket(self) -> Bucket:
        return self

    def new(self) -> str:
        """The URI of a new bucket."""
        import pyarrow.fs as pafs

        self._number += 1
        query = f"scheme=http&endpoint_override=127.0.0.1:{self._server.server_port}&region=us-east-1"
        fs, _ = pafs.FileSystem.from_uri(f"s3://chaos/?{query}&allow_bucket_creation=true")
        name = f"chaos-{self._number}"
        fs.create_dir(name)
        return f"s3://{name}/state?{query}"

    @contextmanager
    def failing(self, share: float) -> Iterator[None]:
        """This share of the requests is refused with status 503, as by a busy service."""
        self._fails = share
        yield
        self._fails = 0.0

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Each request takes this much longer."""
        self._waits_s = seconds
        yield
        self._waits_s = 0.0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """No request gets an answer before the end."""
        self._answers.clear()
        yield
        self._answers.set()

    def close(self) -> None:
        self._answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _respond(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self._answers.wait()
        if self._waits_s:
            time.sleep(self._waits_s)
        if self._fails and random.random() < self._fails:
            # Read what the client sends. Otherwise it sees a broken connection before it sees the answer.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))])
            return [BUSY]
        found: Iterable[bytes] = self._app(environ, start_response)
        return found


Place = FolderPlace | Bucket
STORES = ("folder", "s3")
