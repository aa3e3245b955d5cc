"""A name that stored state or a request gives leads to no other folder."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from aion.errors import CorruptBlock, CorruptState
from state_backends.files.location import LocalLocation
from state_backends.format.block import Block, BodyAt, parse
from state_backends.store.file_index import Indexed
from state_backends.store.sst_file import read_index
from state_backends.versions.audit import StateFolder
from state_backends.versions.lineage import find_version, take_all
from state_backends.versions.manifest import dump_operator, load, load_operator
from tests.stores.rig import make_block
from tests.versions.host import IDENTITY, Host

LEAD_ELSEWHERE = [
    "../../outside.sst",
    "/tmp/outside.sst",
    "a/b.sst",
    "..",
    ".",
    "",
    ".hidden",
    "a\0b",
    "a\n",
    "ä.sst",
    7,
]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Changes a manifest or ``operator.json`` so that its checksum is right."""
    value = json.loads(path.read_bytes().splitlines()[0])
    change(value)
    body = orjson.dumps(value)
    path.write_bytes(data := body + b"\n%08x\n" % zlib.crc32(body))
    return data


def refused(name: Any) -> str:
    return "it contains .* not a plain name" if isinstance(name, str) else ".*Expected `str.*got `int`"


CHANGES: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "file": lambda value, name: value["files"][0].update(name=name),
    "token": lambda value, name: value.update(token=name),
    "parent": lambda value, name: value.update(parent=name),
    "older version": lambda value, name: value["history"][0].__setitem__(0, name),
    "file of an older version": lambda value, name: value["history"][0][1].append([name, 1]),
    "query": lambda value, name: value["identity"].update(query=name),
    "operator": lambda value, name: value["identity"].update(operator=name),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_manifest_with_a_name_that_is_not_plain_is_refused(make: Callable[..., Host], what: str) -> None:
    host = make()
    token = host.commit(host.commit(None, (0, 0)), (1, 10))
    whole = host.manifest(token).read_bytes()
    for name in LEAD_ELSEWHERE:
        data = rewrite(host.manifest(token), lambda value, name=name: CHANGES[what](value, name))  # type: ignore[misc]
        with pytest.raises(CorruptState, match=rf"manifest m\.json: {refused(name)}"):
            load(data, "m.json")
        host.manifest(token).write_bytes(whole)


@pytest.mark.parametrize("where", ["tiered", "remote"])
def test_a_shard_writes_and_deletes_nothing_outside_its_folder(make: Callable[..., Host], where: str) -> None:
    host = make(where)
    token = host.commit(None, (0, 0))
    host.restart()
    outside = host.folder / "outside.sst"
    outside.write_bytes(b"somebody else's")
    rewrite(host.manifest(token), lambda value: value["files"][0].update(name="../../outside.sst"))
    with pytest.raises(CorruptState, match=r"outside\.sst.*not a plain name"):
        host.open(token)
    assert outside.read_bytes() == b"somebody else's"
    assert {path.name for path in host.folder.glob("*.sst")} == {"outside.sst"}


def test_the_tools_refuse_it_too(tmp_path: Path) -> None:
    location = LocalLocation(tmp_path / "state")
    theirs, ours = (location.storage(("q", "o", *names, "shard-00000"), tmp_path, "") for names in ((), ("lineage-a",)))
    host = Host("tiered", tmp_path / "host")
    host.storage = host.shard.storage = theirs
    token = host.commit(None, (0, 0))
    host.stop()
    manifest = Path(theirs.where(token))
    rewrite(manifest, lambda value: value["files"][0].update(name="../../../../outside.sst"))
    take_all(theirs, ours)
    assert not list(tmp_path.rglob("lineage-a/*"))
    folder = StateFolder(str(tmp_path / "state"))
    assert "not a plain name" in str(folder.check(("q", "o", "shard-00000")).versions[0].problem)
    folder.close()
    with pytest.raises(CorruptState, match=r"the checkpoint names '../../secret'"):
        find_version(location, "q", "o", 0, "../../secret", tmp_path)


@pytest.mark.parametrize("name", LEAD_ELSEWHERE)
def test_what_the_shards_share_has_plain_names(tmp_path: Path, name: Any) -> None:
    for field in ("query", "operator"):
        (path := tmp_path / "operator.json").write_bytes(dump_operator(IDENTITY))
        data = rewrite(path, lambda value, field=field: value.update({field: name}))  # type: ignore[misc]
        with pytest.raises(CorruptState, match=rf"operator\.json: {refused(name)}"):
            load_operator(data, "operator.json")


@pytest.mark.parametrize("name", [name for name in LEAD_ELSEWHERE if isinstance(name, str)])
def test_the_body_of_a_block_is_in_a_file_with_a_plain_name(name: str) -> None:
    block = make_block(0, 0)
    reference = Block(block.header, b"", BodyAt(name, 0))
    with pytest.raises(CorruptBlock, match=r"block 7: its body is in a file with the name .* not a plain name"):
        parse(reference.stored, "block 7")
    index = orjson.dumps({"file": "f", "blocks": [Indexed.of(7, reference).to_json()]})
    with pytest.raises(CorruptState, match=r"block 7 has its body in .* not a plain name"):
        read_index(index)
