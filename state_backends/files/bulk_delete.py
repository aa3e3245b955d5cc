"""Deletes many objects of S3 with one request, where boto3 is installed.

For each object pyarrow makes three requests: it looks for the object, deletes it, and writes an empty object with the
name of its folder. Here one request deletes a thousand objects.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aion.thresholds import threshold

_AT_ONCE = threshold(1000, 2)  # S3's limit
log = logging.getLogger(__name__)


def on_s3(uri: str, region: str) -> Callable[[Sequence[str]], None] | None:
    """Returns a function that deletes paths (``bucket/key``) below a URI. None if boto3 is not installed.

    ``region``: as pyarrow found it. boto3 looks for credentials in the same places as pyarrow. The function raises
    OSError.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        log.info("boto3 is not installed, so objects are deleted one by one: pip install aion[s3]")
        return None
    options = {name: values[-1] for name, values in parse_qs(urlsplit(uri).query).items()}
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    client: Any = boto3.client("s3", region_name=region, endpoint_url=endpoint)

    def delete(paths: Sequence[str]) -> None:
        for bucket, in_bucket in itertools.groupby(sorted(paths), lambda path: path.partition("/")[0]):
            keys = [{"Key": path.partition("/")[2]} for path in in_bucket]
            for begin in range(0, len(keys), _AT_ONCE):
                objects = {"Objects": keys[begin : begin + _AT_ONCE], "Quiet": True}
                try:
                    answer = client.delete_objects(Bucket=bucket, Delete=objects)
                except (BotoCoreError, ClientError) as error:
                    raise OSError(f"objects of {bucket} cannot be deleted: {error}") from error
                for failed in answer.get("Errors", ()):
                    raise OSError(f"{bucket}/{failed['Key']} cannot be deleted: {failed['Message']}")

    return delete
