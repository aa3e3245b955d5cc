"""The events of Nexmark. Of 50, one is a person, three are auctions and 46 are bids, as in Beam's generator.

Half of all bids are on a hot auction, three quarters come from a hot bidder, and three quarters of all auctions are of
a hot seller. A hot one is the first of the newest hundred; the others are among those that are in flight.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

PERSON, AUCTION, BID = "person", "auction", "bid"
EVERY, PEOPLE, AUCTIONS = 50, 1, 3
"""Of 50 events, how many are people and auctions. The others are bids."""
HOT_AUCTION, HOT_BIDDER, HOT_SELLER = 2, 4, 4
"""All but one of this many have to do with a hot one."""
HOT_AMONG = 100
IN_FLIGHT_AUCTIONS, ACTIVE_PEOPLE = 100, 1000
SECOND_US = 1_000_000
ORIGIN_US = 1_767_225_600 * SECOND_US
DISORDER_US = 2 * SECOND_US
"""An event comes up to two seconds after its time."""
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("auction", pa.int64()),
        ("person", pa.int64()),
        ("price", pa.int64()),
        ("ts", pa.timestamp("us", "UTC")),
    ]
)
DDL = "kind string, auction bigint, person bigint, price bigint, ts timestamp"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stream:
    """How many events come, how many in a second of event time, and in how many batches."""

    events: int
    per_second: int
    batches: int
    seed: int


def generate(stream: Stream) -> pa.Table:
    """Returns all events, in the order in which they come. ``person`` is a bidder, a seller, or the person."""
    draw = np.random.default_rng(stream.seed)
    number = np.arange(stream.events)
    place, round_ = number % EVERY, number // EVERY
    is_person, is_auction = place < PEOPLE, (place >= PEOPLE) & (place < PEOPLE + AUCTIONS)
    is_bid = ~is_person & ~is_auction
    newest_person = round_ * PEOPLE
    newest_auction = round_ * AUCTIONS + np.clip(place - PEOPLE, 0, AUCTIONS - 1)
    auction = np.where(is_auction, newest_auction, _chosen(draw, newest_auction, HOT_AUCTION, IN_FLIGHT_AUCTIONS))
    hot = np.where(is_bid, HOT_BIDDER, HOT_SELLER)
    person = np.where(is_person, newest_person, _chosen(draw, newest_person, hot, ACTIVE_PEOPLE))
    price = np.round(10.0 ** (draw.random(stream.events) * 6) * 100).astype(np.int64)
    kind = np.select([is_person, is_auction], [PERSON, AUCTION], BID)
    times = ORIGIN_US + number * SECOND_US // stream.per_second
    order = np.argsort(times + draw.integers(0, DISORDER_US, stream.events), kind="stable")
    columns = [
        pa.array(kind[order]),
        pa.array(auction[order], mask=is_person[order]),
        pa.array(person[order]),
        pa.array(price[order], mask=~is_bid[order]),
        pa.array(times[order]).cast(SCHEMA.field("ts").type),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _chosen(draw: np.random.Generator, newest: Ints, hot: int | Ints, among: int) -> Ints:
    """Returns for each event a hot one, or one of those in flight, counted back from the newest."""
    is_hot = draw.random(len(newest)) * hot >= 1
    back = (draw.random(len(newest)) * np.minimum(among, newest + 1)).astype(np.int64)
    return np.where(is_hot, newest // HOT_AMONG * HOT_AMONG, newest - back)


def write(stream: Stream, table: pa.Table, folder: Path) -> list[Path]:
    """Writes the batches, one file each, and two that only move the watermark, so that all windows end."""
    folder.mkdir(parents=True)
    paths: list[Path] = []
    for part in (*_parts(table, stream.batches), *_ends(table)):
        paths.append(folder / f"{len(paths):06d}.parquet")
        pq.write_table(part, paths[-1])
        os.utime(paths[-1], (1_700_000_000 + len(paths), 1_700_000_000 + len(paths)))  # Spark reads them in this order
    return paths


def _parts(table: pa.Table, batches: int) -> Iterator[pa.Table]:
    edges = [table.num_rows * batch // batches for batch in range(batches + 1)]
    for begin, end in itertools.pairwise(edges):
        yield table.slice(begin, end - begin)


def _ends(table: pa.Table) -> Iterator[pa.Table]:
    """Yields a bid, a person and an auction that have nothing to do with each other, hours later. Spark filters before
    it looks for the watermark, so there is one of each kind that queries keep, and a join keeps no nulls.
    """
    last_us = int(pa.compute.max(table.column("ts")).cast(pa.int64()).as_py())
    kinds = [BID, PERSON, AUCTION]
    numbers = pa.array([-1, -2, -3])
    for hours in (1, 2):
        at = pa.array([last_us + hours * 3600 * SECOND_US] * len(kinds)).cast(SCHEMA.field("ts").type)
        none = pa.nulls(len(kinds), pa.int64())
        yield pa.Table.from_arrays([pa.array(kinds), numbers, numbers, none, at], schema=SCHEMA)
