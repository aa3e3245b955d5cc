"""Files in which children hand over the bodies of blocks, and references to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aion.core.ingest.encoding import decode
from aion.errors import CorruptBlock, CorruptState, DiskError
from state_backends.files.bodies import ALIGNMENT, Bodies, Places, damage, read_footer
from state_backends.files.handed import HandedFile, name_of, sweep
from state_backends.format.block import UNNUMBERED, Block, Compacted, numbered, parse
from tests.server.conftest import SCHEMA, block
from tests.spilled import mapped_bytes

NAME = name_of(7, "c0ffee", "attempt")
BLOCKS = [block(*range(n), slice_us=n) for n in (1, 100, 3, 5000)]


@pytest.fixture
def handed(tmp_path: Path) -> Iterator[list[Block]]:
    """References to the blocks, in a file that is complete."""
    file = HandedFile(tmp_path, NAME)
    try:
        references = [file.add(b) for b in BLOCKS]
        assert not (tmp_path / NAME).exists(), "nobody sees a file that is not complete"
        file.end()
        file.seal()
        yield references
    finally:
        file.close()


def test_what_is_handed_over_is_for_its_user_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        file = HandedFile(tmp_path / "query" / "operator" / "handed", NAME)
        file.add(BLOCKS[0])
        file.end()
        file.seal()
        file.close()
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert len(made) == 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)


def test_a_reference_leads_to_the_rows(tmp_path: Path, handed: list[Block]) -> None:
    bodies = Bodies(Places([str(tmp_path / "elsewhere"), str(tmp_path)]))
    for reference, original in zip(handed, BLOCKS, strict=True):
        came = parse(bytes(reference.stored))
        assert came == reference and came.size_bytes == len(came.stored) < 200
        assert came.header.size_bytes == original.size_bytes
        found = bodies.of(came)
        assert decode(found, SCHEMA) == decode(original, SCHEMA)
        assert found.body.address % ALIGNMENT == 0, "so Arrow copies nothing"
    del bodies, found
    assert Bodies(Places([])).of(BLOCKS[0]) is BLOCKS[0]


def test_a_sorted_block_gets_its_number_with_the_first_use(handed: list[Block]) -> None:
    header = handed[0].header
    unnumbered = handed[0]._replace(header=header._replace(compacted=Compacted(UNNUMBERED, 5, 9)))
    came = parse(numbered(unnumbered, 17).stored)
    assert came.header.compacted == Compacted(17, 5, 9)
    assert came.at == handed[0].at
    assert numbered(handed[0], 17) is handed[0] and numbered(BLOCKS[0], 17) is BLOCKS[0]


@pytest.mark.parametrize("at", [3, 40, 66, 75, 90, -1])
def test_a_damaged_reference_is_not_followed(handed: list[Block], at: int) -> None:
    data = bytearray(handed[1].stored)
    data[at] ^= 1
    with pytest.raises(CorruptBlock):
        parse(data, "block 5")


def test_a_file_that_is_gone_or_too_short_is_named(tmp_path: Path, handed: list[Block]) -> None:
    with pytest.raises(CorruptBlock, match=NAME):
        _ = Bodies(Places([str(tmp_path / "elsewhere")])).of(handed[0]).body
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:200])
    with pytest.raises(CorruptBlock, match=f"{NAME}: it ends before"):
        _ = Bodies(Places([str(tmp_path)])).of(handed[-1]).body
    with pytest.raises(CorruptState, match="not complete"):
        read_footer(tmp_path / NAME)


def test_every_damaged_byte_of_a_body_is_found(tmp_path: Path, handed: list[Block]) -> None:
    footer = read_footer(tmp_path / NAME)
    data = bytearray((tmp_path / NAME).read_bytes())
    assert footer.size_bytes == len(data) and len(footer.bodies) == len(BLOCKS)
    assert damage(data, footer.crc) is None
    for offset, size, _ in footer.bodies:
        data[offset + size // 2] ^= 1
        assert f"body at {offset}" in (damage(data, footer.crc) or "")
        data[offset + size // 2] ^= 1
    assert "list of bodies" in (damage(data, footer.crc ^ 1) or "")


def test_a_file_that_is_not_sealed_leaves_nothing(tmp_path: Path) -> None:
    file = HandedFile(tmp_path, NAME)
    file.add(BLOCKS[3])
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    file = HandedFile(tmp_path, NAME)
    try:
        monkeypatch.setattr("state_backends.files.handed.os.writev", fails)
        with pytest.raises(DiskError, match="No space left"):
            for _ in range(100):
                file.add(BLOCKS[3])
            file.end()
        file.seal()
    finally:
        file.close()
    assert list(tmp_path.iterdir()) == []


def test_only_files_of_earlier_batches_and_the_same_lineage_are_swept(tmp_path: Path) -> None:
    names = [name_of(batch, lineage, "x") for batch in (5, 6, 7, 10) for lineage in ("ours", "theirs")]
    for name in [*names, "notes.txt", name_of(5, "ours", "y").replace(".bodies", ".part")]:
        (tmp_path / name).touch()
    sweep(tmp_path, "ours", 7)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {n for n in names if "theirs" in n or n[11:21] >= f"{7:010d}"} | {"notes.txt"}
    sweep(tmp_path / "missing", "ours", 7)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is in memory")
def test_a_process_keeps_the_bodies_that_it_is_reading_and_no_others(tmp_path: Path) -> None:
    large = [block(*range(n, n + 200_000), slice_us=n) for n in range(8)]
    file = HandedFile(tmp_path, NAME)
    try:
        references = [file.add(b) for b in large]
        file.end()
        file.seal()
    finally:
        file.close()
    bodies = Bodies(Places([str(tmp_path)]))
    most = 0
    for reference, original in zip(references, large, strict=True):
        rows = decode(bodies.of(reference), SCHEMA)
        assert rows == decode(original, SCHEMA)
        most = max(most, mapped_bytes(tmp_path / NAME))
    whole = (tmp_path / NAME).stat().st_size
    assert whole / len(large) <= most < 2 * whole / len(large), "two are there when one has just been opened"
    del rows
    assert mapped_bytes(tmp_path / NAME) <= 1 << 17, "the system maps some pages around those that are read"
