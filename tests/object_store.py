"""A real S3 server for tests: moto's, in a thread, on loopback. Nobody else reaches it, and nothing is stored."""

from __future__ import annotations

import logging
import os
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs as pafs

# What pyarrow finds in the environment, as it would find real ones; and it must not ask an instance for them.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


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

    def _post(self, what: str, body: bytes) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/moto-api/{what}", body, {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server that runs meanwhile."""
    from moto.server import ThreadedMotoServer

    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()
