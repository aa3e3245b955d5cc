"""What S3 can do and pyarrow cannot, where boto3 is installed.

Deleting: for each object pyarrow makes three requests: it looks for the object, deletes it, and writes an empty object
with the name of its folder. Here one request deletes a thousand objects. Writing: pyarrow replaces an object that is
there already. Uploads in parts: pyarrow cannot end one that was not completed, and S3 keeps its parts.
Copying: pyarrow copies no object above 5 GiB.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from state_backends.files.requests import Requests
from state_backends.thresholds import threshold

LARGEST_COPY = threshold(5 << 30, 256)
"""The largest object that S3 copies at once."""
_PART_BYTES = 512 << 20
AT_ONCE = threshold(1000, 2)
"""The most objects that S3 deletes for one request."""
ABANDONED = timedelta(days=1)  # no upload takes as long
log = logging.getLogger(__name__)


class S3:
    """A client. Paths are ``bucket/key``. Every method raises OSError. ``requests`` counts what it does."""

    def __init__(self, client: Any, requests: Requests | None = None) -> None:
        self._client = client
        self._requests = requests or Requests()

    def counted_by(self, requests: Requests) -> S3:
        return S3(self._client, requests)

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects, if they exist."""
        for bucket, in_bucket in itertools.groupby(sorted(paths), lambda path: path.partition("/")[0]):
            keys = [{"Key": path.partition("/")[2]} for path in in_bucket]
            for begin in range(0, len(keys), AT_ONCE):
                objects = {"Objects": keys[begin : begin + AT_ONCE], "Quiet": True}
                self._requests.count("delete")
                with _errors(f"objects of {bucket} cannot be deleted"):
                    answer = self._client.delete_objects(Bucket=bucket, Delete=objects)
                for failed in answer.get("Errors", ()):
                    raise OSError(f"{bucket}/{failed['Key']} cannot be deleted: {failed['Message']}")

    def put_once(self, path: str, data: bytes) -> bool:
        """Writes an object if there is none. Returns whether it did. Raises NotImplementedError if it cannot."""
        from botocore.exceptions import ClientError

        bucket, _, key = path.partition("/")
        self._requests.count("put", written_bytes=len(data))
        with _errors("it cannot be written"):
            try:
                self._client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
            except ClientError as error:
                match error.response["Error"]["Code"]:
                    case "PreconditionFailed" | "ConditionalRequestConflict":  # it is there, or is being written
                        return False
                    case "NotImplemented":
                        raise NotImplementedError from error
                raise
        return True

    def copy(self, source: str, target: str) -> None:
        """Copies an object in parts. It appears when it is complete. S3 does it: no bytes pass through this host."""
        from boto3.s3.transfer import TransferConfig

        (source_bucket, _, source_key), (bucket, _, key) = source.partition("/"), target.partition("/")
        self._requests.count("copy")
        how = TransferConfig(multipart_threshold=LARGEST_COPY, multipart_chunksize=_PART_BYTES)
        with _errors("it cannot be copied"):
            self._client.copy({"Bucket": source_bucket, "Key": source_key}, bucket, key, Config=how)

    def end_uploads(self, prefix: str, age: timedelta = ABANDONED) -> None:
        """Ends uploads in parts that were not completed, and began at least ``age`` ago. By default their task died."""
        bucket, _, key = prefix.partition("/")
        before = datetime.now(UTC) - age
        with _errors("unfinished uploads cannot be ended"):
            for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=key):
                self._requests.count("list")
                for upload in page.get("Uploads", ()):
                    if not age or upload["Initiated"] < before:
                        self._requests.count("delete")
                        self._client.abort_multipart_upload(
                            Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )


def client_of(uri: str, region: str) -> S3 | None:
    """Returns a client for the bucket of a URI, with pyarrow's options. None if boto3 is not installed.

    ``region``: as pyarrow found it. boto3 looks for credentials in the same places as pyarrow.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        log.debug("boto3 is not installed, so objects are deleted one by one: pip install aion[s3]")
        return None
    options = {name: values[-1] for name, values in parse_qs(urlsplit(uri).query).items()}
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    in_path = endpoint and options.get("force_virtual_addressing", "false").lower() not in ("true", "1")
    config = Config(s3={"addressing_style": "path" if in_path else "auto"})
    return S3(boto3.Session().client("s3", region_name=region, endpoint_url=endpoint, config=config))


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Turns boto3's errors into OSError."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise OSError(f"{doing}: {error}") from error
