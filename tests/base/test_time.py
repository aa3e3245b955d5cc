"""Durations and instants: what is read, what is refused, and the way there and back."""

from __future__ import annotations

import contextlib
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.base.time import EPOCH, duration_us, format_duration, format_instant, instant_us
from aion.errors import ConfigError
from policies.durations import short_duration

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("20 seconds", 20 * SECOND),
        ("5m", 300 * SECOND),
        ("1 hour 30 minutes", 5400 * SECOND),
        ("1h30m", 5400 * SECOND),
        ("1.5h", 5400 * SECOND),
        ("1 DAY", 86_400 * SECOND),
        ("2 weeks", 14 * 86_400 * SECOND),
        ("250ms", 250_000),
        ("7 us", 7),
        ("  3  s  ", 3 * SECOND),
        ("-5 hours", -18_000 * SECOND),
        ("+1 minute", 60 * SECOND),
        ("0 s", 0),
        ("0.5 us", 0),
        (0, 0),
        ("interval 5 minutes", 300 * SECOND),
        ("INTERVAL '5' MINUTE", 300 * SECOND),
        ("interval '1 02:03:04.5' day to second", 93_784_500_000),
        ("- 5 hours", -18_000 * SECOND),
        ("1 day -2 hours", 79_200 * SECOND),
        (".5 seconds", 500_000),
        ("0.0000019 seconds", 1),
        (timedelta(minutes=2, microseconds=1), 120 * SECOND + 1),
        (timedelta(microseconds=-1), -1),
    ],
)
def test_durations_that_are_read(text: object, us: int) -> None:
    assert duration_us(text) == us


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "5",
        "m",
        "5 5",
        "five minutes",
        "5m!",
        "1:30",
        None,
        True,
        b"5m",
        [],
        np.timedelta64(5, "m"),
        pd.NaT,
        "interval",
        "intervals 5 m",
    ],
)
def test_what_is_no_duration_is_refused_and_shown(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"gap.*not a duration") as caught:
        duration_us(value, what="gap")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [5, -5, 1.5, 0.0, float("nan"), np.int64(5), np.float32(1.5), Decimal(5)])
def test_a_number_has_no_unit(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"gap of {value} has no unit; write e.g. '{value} seconds'"):
        duration_us(value, what="gap")


@pytest.mark.parametrize("unit", ["month", "years", "fortnight", "M5", "ns"])
def test_an_unknown_unit_is_named(unit: str) -> None:
    with pytest.raises(ConfigError, match="unknown unit"):
        duration_us(f"5 {unit}" if unit != "M5" else "5 MM")


def test_large_whole_numbers_are_exact() -> None:
    assert duration_us(f"{2**60 + 1} us") == 2**60 + 1


@given(st.text(alphabet="0123456789.-+ smhdwuµé", max_size=12))
def test_any_text_is_a_duration_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(duration_us(text), int)


@pytest.mark.parametrize("text", ["9" * 400 + ".0 s", "9" * 5000 + " s", "interval '" + " " * 10**6, "1 s " * 10**6])
def test_a_number_beyond_all_bounds_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError):
        duration_us(text)


@given(st.integers(-(10**18), 10**18) | st.integers(-(10**6), 10**6).map(lambda n: n * 60 * SECOND))
def test_a_formatted_duration_is_read_back(us: int) -> None:
    assert duration_us(format_duration(us)) == us


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (60 * SECOND, "1 minute"),
        (90 * SECOND, "90 seconds"),
        (86_400 * SECOND, "1 day"),
        (1_000, "1 millisecond"),
        (0, "0 microseconds"),
        (1_001, "1001 microseconds"),
    ],
)
def test_the_largest_unit_that_divides_is_used(us: int, text: str) -> None:
    assert format_duration(us) == text


def test_instants() -> None:
    assert instant_us(EPOCH) == 0
    assert instant_us(datetime(1970, 1, 1, 0, 0, 1)) == SECOND, "naive ones are UTC"
    assert instant_us(datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))) == 0
    assert instant_us(-7) == -7


@pytest.mark.parametrize("value", [True, "2020-01-01", 1.5, None, date(2020, 1, 1), pd.NaT])
def test_what_is_no_instant_is_refused_and_shown(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        instant_us(value)
    assert repr(value) in str(caught.value)


@given(st.datetimes(timezones=st.just(UTC)))
def test_an_instant_is_exact_to_the_microsecond(instant: datetime) -> None:
    us = instant_us(instant)
    assert EPOCH + timedelta(microseconds=us) == instant
    assert datetime.fromisoformat(format_instant(us)) == instant


@pytest.mark.parametrize("us", [2**63 - 1, -(2**63), 10**18])
def test_instants_outside_of_the_calendar_are_shown_as_microseconds(us: int) -> None:
    assert format_instant(us) == f"{us} us"


@pytest.mark.parametrize(
    ("us", "text"),
    [(999_999, "1,000 ms"), (1_000 * 86_400 * SECOND, "1,000 days"), (2**61, "26,700,000 days"), (1, "0.001 ms")],
)
def test_a_duration_for_people_has_no_exponent(us: int, text: str) -> None:
    assert short_duration(us) == text
