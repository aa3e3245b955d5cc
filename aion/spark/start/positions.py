"""Says how far queries are, to the heartbeats in them (:mod:`aion.spark.api.heartbeat`), while there are any.

Only the driver can say this exactly: the watermark after the last batch and the offsets up to which sources were read
are in Spark's own objects, and a heartbeat asks while Spark waits for its answer. A heartbeat writes the name of its
run, as a line, and gets a line of JSON. The socket is in a folder that only this user can enter.
"""

from __future__ import annotations

import json
import logging
import os
import socketserver
import tempfile
import threading
from pathlib import Path
from typing import Any

from aion.core.heartbeat import RUN
from state_backends.server.server_folder import private

log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.5


def address() -> Path:
    """Returns the socket of this process."""
    return Path(tempfile.gettempdir()) / f"aion-{os.getuid()}" / f"driver-{os.getpid()}"


class _Answers:
    """The queries that have a heartbeat, and the thread that answers for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executions: list[Any] = []

    def add(self, execution: Any) -> None:
        """Answers for a query from now on, until it has ended. ``execution``: Spark's object. Raises ServerError."""
        with self._lock:
            self._executions.append(execution)
            if len(self._executions) == 1:
                path = address()
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                private(path.parent)
                path.unlink(missing_ok=True)
                server = socketserver.UnixStreamServer(str(path), _Handler)
                server.timeout = _POLL_SECONDS
                threading.Thread(target=self._serve, args=(server, path), name="aion-positions", daemon=True).start()

    def _serve(self, server: socketserver.UnixStreamServer, path: Path) -> None:
        while True:
            server.handle_request()
            with self._lock:
                self._executions = [execution for execution in self._executions if _is_active(execution)]
                if not self._executions:
                    server.server_close()
                    path.unlink(missing_ok=True)
                    return

    def position(self, run: str) -> dict[str, Any]:
        """Returns how far the query is that has this run of a heartbeat."""
        with self._lock:
            executions = list(self._executions)
        for execution in executions:
            offsets = _offsets(execution)
            if any(json.loads(offset)[RUN] == run for offset in offsets if _is_beat(offset)):
                others = [offset for offset in offsets if not _is_beat(offset)]
                return {"watermark_ms": execution.watermarkTracker().currentWatermark(), "others": others}
        return {"error": "no query that runs has this heartbeat"}


_answers = _Answers()
add = _answers.add


class _Handler(socketserver.StreamRequestHandler):
    timeout = _PATIENCE_SECONDS

    def handle(self) -> None:
        run = self.rfile.readline(100).decode().strip()
        try:
            answer = _answers.position(run)
        except Exception as error:
            log.exception("the position of a query could not be found")
            answer = {"error": str(error)}
        self.wfile.write(f"{json.dumps(answer)}\n".encode())


def _is_active(execution: Any) -> bool:
    try:
        return bool(execution.isActive())
    except Exception:  # Spark was stopped
        return False


def _offsets(execution: Any) -> list[str]:
    """Returns the offsets up to which the batches of a query have read its sources, as JSON."""
    found, sources = execution.availableOffsets(), execution.sources()
    options = (found.get(sources.apply(number)) for number in range(sources.size()))
    return [option.get().json() for option in options if option.isDefined()]


def _is_beat(offset: str) -> bool:
    return f'"{RUN}"' in offset
