"""The flights of 2001 come in the order in which they came."""

from __future__ import annotations

import io
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.shared.flights_2001 import MEMBER, load


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package as npm makes it: two flights in time, one that is late, and one that never came."""
    dates = [datetime(2001, 1, 1, hour) for hour in (5, 6, 7, 8)]
    table = pa.table({"date": dates, "delay": [90, 0, -10, None], "origin": pa.array(list("abcd"), pa.large_string())})
    file = io.BytesIO()
    pq.write_table(table, file)
    path = tmp_path / "vega-datasets-3.2.1.tgz"
    with tarfile.open(path, "w:gz") as made:
        member = tarfile.TarInfo(MEMBER)
        member.size = file.tell()
        file.seek(0)
        made.addfile(member, file)
    (tmp_path / "flights-3m.parquet").write_bytes(file.getvalue())
    return path


def test_flights_come_in_the_order_in_which_they_came(package: Path) -> None:
    table = load(package)
    assert table["origin"].to_pylist() == ["b", "a", "c"]
    assert table["arrived"].to_pylist() == [
        datetime(2001, 1, 1, h, m, tzinfo=UTC) for h, m in ((6, 0), (6, 30), (6, 50))
    ]
    assert load(package.with_name("flights-3m.parquet")).equals(table)
