"""A real S3 server for tests: moto's, in a thread, on loopback. Nobody else reaches it, and nothing is stored."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

import pyarrow.fs as pafs

# What pyarrow finds in the environment, as it would find real ones; and it must not ask an instance for them.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
IN_MEMORY = {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 << 20)}  # an object up to this size opens no file


class ObjectStore:
    """A bucket of its own on the server at ``port``."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self.fs, _ = pafs.FileSystem.from_uri(self.uri("", "allow_bucket_creation=true"))
        self.fs.create_dir(self.bucket)

    def uri(self, path: str, *more: str, bucket: str | None = None) -> str:
        query = "&".join(["scheme=http", f"endpoint_override=127.0.0.1:{self.port}", "region=us-east-1", *more])
        return f"s3://{bucket or self.bucket}/{path}?{query}"

    def objects(self) -> dict[str, bytes]:
        """Everything that the bucket holds, by path below it, but for markers of folders."""
        infos = self.fs.get_file_info(pafs.FileSelector(self.bucket, recursive=True))
        return {i.path.partition("/")[2]: self.get(i.path) for i in infos if i.is_file}

    def get(self, path: str) -> bytes:
        with self.fs.open_input_stream(path) as stream:
            data: bytes = stream.read()
            return data

    def put(self, path: str, data: bytes) -> None:
        with self.fs.open_output_stream(f"{self.bucket}/{path}") as stream:
            stream.write(data)

    @contextmanager
    def denied(self) -> Iterator[None]:
        """For a while nobody has any right."""
        self._post("reset-auth", b"0")
        try:
            yield
        finally:
            self._post("reset-auth", b"inf")

    @contextmanager
    def watched(self, delay_s: float = 0.0) -> Iterator[Watched]:
        """What this bucket is asked for meanwhile, with a delay for each request."""
        watched = _watches[self.port][self.bucket] = Watched(delay_s)
        try:
            yield watched
        finally:
            del _watches[self.port][self.bucket]

    def _post(self, what: str, body: bytes) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/moto-api/{what}", body, {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=30).close()


class Watched:
    """Requests by class, as the server saw them, and the bytes of files that it sent."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.read: dict[str, list[tuple[int, int]]] = {}
        """By path, the ranges that were read: offset and bytes."""

    def count(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def saw(self, environ: dict[str, Any], headers: dict[str, str]) -> None:
        kind, path = _kind(environ), environ["PATH_INFO"]
        with self._lock:
            if kind == "get":
                begin, end, whole = 0, int(headers["content-length"]) - 1, int(headers["content-length"])
                if found := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers.get("content-range", "")):
                    begin, end, whole = map(int, found.groups())
                kind = "get" if end + 1 - begin == whole else "range"
                self._counts["read_bytes"] += end + 1 - begin
                self.read.setdefault(path, []).append((begin, end + 1 - begin))
            self._counts[kind] += 1


def _kind(environ: dict[str, Any]) -> str:
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    match environ["REQUEST_METHOD"]:
        case "GET" if "list-type" in query or "uploads" in query:
            return "list"
        case "POST" if "delete" in query:
            return "delete"
        case "PUT" if "HTTP_X_AMZ_COPY_SOURCE" in environ:
            return "copy"
        case method:
            return {"POST": "put"}.get(method, method.lower())


_watches: dict[int, dict[str, Watched]] = {}


def _watching(app: Any, watches: dict[str, Watched]) -> Any:
    """The server's application, which tells those who watch a bucket."""

    def respond(environ: dict[str, Any], start: Any) -> Any:
        watched = watches.get(environ["PATH_INFO"].split("/")[1])
        if watched is None:
            return app(environ, start)
        time.sleep(watched.delay_s)

        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            watched.saw(environ, {name.lower(): value for name, value in headers})
            return start(status, headers, *rest)

        return app(environ, started)

    return respond


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server that runs meanwhile."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    os.environ.update(CREDENTIALS | IN_MEMORY)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    watches: dict[str, Watched] = {}
    app: Any = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _watching(app, watches), threaded=True)
    _watches[server.server_port] = watches
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        del _watches[server.server_port]
