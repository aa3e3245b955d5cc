"""What ``check_writable`` says of a place for state that cannot be used: each cause has its own sentence."""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path

import pytest

from aion.errors import DiskError, StorageError
from state_backends.files.causes import told
from state_backends.files.location import locate
from tests.object_store import ObjectStore


def said(place: str) -> str:
    with closing(locate(place)) as location, pytest.raises((DiskError, StorageError)) as refused:
        location.check_writable()
    return str(refused.value)


def test_a_place_that_can_be_written_is_left_as_it_was(bucket: ObjectStore, tmp_path: Path) -> None:
    for place in (bucket.uri("state"), str(tmp_path / "state")):
        with closing(locate(place)) as location:
            location.check_writable()
    assert bucket.objects() == {} and list((tmp_path / "state").iterdir()) == []


def test_a_bucket_that_is_not_there(bucket: ObjectStore) -> None:
    uri = bucket.uri("state", bucket="no-such-bucket")
    assert said(uri) == f"state.dir {uri}: there is no bucket 'no-such-bucket'; make it"


@pytest.mark.parametrize("uri", ["s3://?endpoint_override=127.0.0.1:1", "gs://"])
def test_a_uri_without_a_bucket(uri: str) -> None:
    assert said(uri) == f"state.dir {uri}: it names no bucket; write scheme://bucket/path"


def test_credentials_that_the_store_does_not_know(bucket: ObjectStore) -> None:
    with bucket.denied():
        assert ": the store does not know the credentials of this host: check AWS_ACCESS_KEY_ID" in said(
            bucket.uri("state")
        )


def test_credentials_that_were_taken_away_after_the_start(bucket: ObjectStore) -> None:
    with closing(locate(bucket.uri("state"))) as location:
        location.check_writable()
        with bucket.denied(), pytest.raises(StorageError, match=": the store does not know the credentials of this"):
            location.check_writable()


@pytest.mark.parametrize("below", ["", "/deep/down"])
def test_a_file_where_a_folder_must_be(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    text = said(str(tmp_path / "file") + below)
    assert text.startswith(f"writing state in {tmp_path}/file{below} failed: ")
    assert "(a file is where a folder must be: move it away, or set state.dir to another folder)" in text


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    assert "(give this user the right to write there, or set state.dir to another folder)" in said(
        str(tmp_path / "state")
    )


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which the system makes nothing")
def test_a_folder_that_nobody_may_write() -> None:
    text = said("/proc/state")
    assert text.startswith("writing state in /proc/state failed: ")
    assert re.search(r"\(.*(was removed|right to write|read-only).*\)$", text), text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("AWS Error NETWORK_CONNECTION during HeadBucket operation: curlCode: 6, Couldn't resolve host name",
         "no host has the name of the endpoint"),
        ("AWS Error NETWORK_CONNECTION during HeadBucket operation: curlCode: 7, Couldn't connect to server",
         "the endpoint does not answer"),
        ("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload operation", "there is no such bucket"),
        ("AWS Error UNKNOWN (HTTP status 301) during HeadBucket operation: PermanentRedirect", "in another region"),
        ("An error occurred (ExpiredToken) when calling the PutObject operation", "have expired: renew them"),
        ("Unable to locate credentials", "this host has no credentials"),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", "have no right to do this"),
        ("An error occurred (SlowDown) when calling the PutObject operation", "asks for fewer requests"),
        ("Unable to load libhdfs: ./libhdfs.so: cannot open shared object file", "HDFS needs Java"),
    ],
)  # fmt: skip
def test_each_cause_has_its_own_sentence_and_keeps_what_the_client_said(text: str, sentence: str) -> None:
    assert sentence in told(text) and told(text).endswith(f"({text})")


def test_a_cause_that_is_not_known_stays_as_it_is() -> None:
    assert told("Unexpected query parameter in S3 URI: 'retries'") == "Unexpected query parameter in S3 URI: 'retries'"
