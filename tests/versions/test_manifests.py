"""A manifest is what was written."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from state_backends.versions.manifest import FileEntry, Manifest, dump, load
from tests.versions.host import IDENTITY


@given(
    st.builds(
        Manifest,
        token=st.text(max_size=5),
        parent=st.none() | st.text(max_size=5),
        version=st.integers(1, 2**40),
        identity=st.just(IDENTITY),
        files=st.lists(
            st.builds(FileEntry, st.integers(0, 2**63 - 1), st.text(), *[st.integers(0, 2**40)] * 4),
            max_size=3,
        ).map(tuple),
        purged=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
        snapshot=st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3)),
        next_file_no=st.integers(0, 2**63 - 1),
    )
)
def test_a_manifest_is_what_was_written(manifest: Manifest) -> None:
    try:
        data = dump(manifest)
    except orjson.JSONEncodeError:
        return  # text that is no text: lone surrogates
    assert load(data, "m") == manifest
    assert data.count(b"\n") == 2, "one object, and its checksum"
