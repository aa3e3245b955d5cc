"""The index of a table, read from a part of its bytes, finds what RocksDB finds."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocksdict import Cache, SstFileWriter

from aion.errors import CorruptState
from state_backends.format.sst_table import END, TableIndex, index_of, metaindex, parts
from state_backends.store.map.run_files import run_options
from state_backends.store.sst_file import rocksdb_options


def written(path: Path, entries: dict[bytes, bytes], *, run: bool) -> bytes:
    options = (run_options if run else rocksdb_options)(Cache(1 << 20))
    writer = SstFileWriter(options)
    writer.open(str(path))
    for key in sorted(entries):
        writer[key] = entries[key]
    writer.finish()
    return path.read_bytes()


def index_in(data: bytes) -> TableIndex:
    listed = metaindex(data[-END.size :], len(data))
    where, data_end = parts(data[listed.begin : listed.end])
    return index_of(data[where.begin : where.end], data_end)


@pytest.mark.parametrize("run", [False, True], ids=["blocks", "run"])
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 600), most=st.sampled_from([20, 300, 9000]))
def test_every_key_is_in_the_range_that_is_found_for_it(
    tmp_path_factory: pytest.TempPathFactory, run: bool, seed: int, count: int, most: int
) -> None:
    chosen = random.Random(seed)
    entries = {chosen.randbytes(chosen.randint(1, 24)): chosen.randbytes(chosen.randint(0, most)) for _ in range(count)}
    data = written(tmp_path_factory.mktemp("table") / "a.sst", entries, run=run)
    index = index_in(data)
    spans = [index.span(at) for at in range(len(index))]
    assert spans[0].begin == 0 and spans[-1].end == index.data.end <= len(data)
    assert all(one.end == other.begin for one, other in itertools.pairwise(spans))
    keys = sorted(entries)
    for key in [*chosen.sample(keys, min(len(keys), 50)), keys[0], keys[-1]]:
        at = index.find(key)
        assert index.last_key(at) >= key and (at == 0 or index.last_key(at - 1) < key)
        if not run:
            assert entries[key][:4096] in data[spans[at].begin : spans[at].end]
    assert index.find(b"\xff" * 30) in (len(index) - 1, len(index))


def test_what_is_no_table_or_cut_off_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "a.sst", {b"%05d" % n: bytes(100) for n in range(1000)}, run=False)
    with pytest.raises(CorruptState, match="not a complete SST file"):
        index_in(data[:-1])
    with pytest.raises(CorruptState, match="not a complete SST file"):
        index_in(bytes(1000))
    listed = metaindex(data[-END.size :], len(data))
    block = data[listed.begin : listed.end]
    for cut in range(1, 20):
        with pytest.raises(CorruptState):
            parts(block[: len(block) // cut // 2] + block[-5:])
