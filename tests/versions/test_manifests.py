"""A manifest is what was written."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from state_backends.versions.manifest import FileEntry, Manifest, dump, load
from tests.versions.host import IDENTITY

names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,9}", fullmatch=True)
runs = st.lists(st.integers(0, 2**40), unique=True, max_size=6).map(
    lambda ends: tuple(zip(sorted(ends)[:-1:2], sorted(ends)[1::2], strict=True))
)


@given(
    st.builds(
        Manifest,
        token=names,
        parent=st.none() | names,
        version=st.integers(1, 2**40),
        identity=st.just(IDENTITY),
        files=st.lists(
            st.builds(FileEntry, st.integers(0, 2**63 - 1), names, *[st.integers(0, 2**40)] * 4, st.none() | runs),
            max_size=3,
        ).map(tuple),
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
