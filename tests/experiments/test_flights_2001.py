"""The flights of 2001: read from the npm package, or from its file, in the order in which they came."""

from __future__ import annotations

import io
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aion.errors import ConfigError
from experiments.cleanup.runs import flight_times_us
from experiments.completeness.settings import DEFAULTS
from experiments.completeness.streams import feed
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


def test_they_are_streams_of_both_experiments(package: Path) -> None:
    scheduled_us, arrived_us = flight_times_us(package)
    assert (arrived_us - scheduled_us).tolist() == [0, 90 * 60_000_000, -10 * 60_000_000]
    batches = list(feed("flights 2001 1h", DEFAULTS, package).batches())
    assert sum(table.num_rows for _, table in batches) == 3
    assert feed("flights 2001 1d", DEFAULTS, package).key == "origin"


def test_what_is_not_the_package_is_refused_with_the_way_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "other.tgz").write_text("no package")
    with tarfile.open(tmp_path / "empty.tgz", "w:gz"):
        pass
    for name in ("other.tgz", "empty.tgz", "missing.tgz", "missing.parquet"):
        with pytest.raises(ConfigError, match="npm pack vega-datasets"):
            load(tmp_path / name)
