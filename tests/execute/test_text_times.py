"""Times that are text, in the names of folders."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from aion.execute.files.reading import instants_of
from tests.execute.files.test_file_reading import AT, TS


def test_times_in_text() -> None:
    texts = pa.array(
        ["2024-01-31 12:30:00.123456", "2024-01-31T12:30:00Z", "2024-01-31T12:30+01:00", "2024-01-31", None]
    )
    instants = instants_of(texts, TS, "Asia/Tokyo").to_pylist()
    assert [instant and (instant.hour, instant.minute) for instant in instants] == [
        (3, 30),
        (12, 30),
        (11, 30),
        (15, 0),
        None,
    ]
    naive = instants_of(texts.slice(0, 1), pa.timestamp("us"), "Asia/Tokyo").to_pylist()
    assert naive == [AT.replace(tzinfo=None)]
    finer = pa.array(
        ["2024-01-31T12:30:00.123456789Z", "2024-01-31T12:30:00.1234567+00:00", "2024-01-31 12:30:00.12345678"]
    )
    assert instants_of(finer, TS, "UTC").to_pylist() == [AT] * 3
    for wrong in ("yesterday", "12:30"):
        with pytest.raises(pa.ArrowInvalid):
            instants_of(pa.array([wrong]), TS, "UTC")


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "+02:00", "UTC"])
def test_times_at_which_clocks_change(zone: str) -> None:
    """As Java has it: the first of two instants, and a time that is skipped counts from before."""
    start = dt.datetime(2024, 1, 1)
    local = [start + dt.timedelta(minutes=15 * i) for i in range(4 * 24 * 366)]
    got = instants_of(pa.array([t.isoformat() for t in local]), TS, zone).to_pylist()
    if zone == "+02:00":
        rules: dt.tzinfo = dt.timezone(dt.timedelta(hours=2))
    else:
        rules = ZoneInfo(zone)
    # Python, with fold=0, has both rules as well.
    assert got == [t.replace(tzinfo=rules).astimezone(dt.UTC) for t in local]
