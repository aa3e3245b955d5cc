"""What a table of newest results costs: ``aion.sinks.upsert`` beside the database's own bulk load of the same rows.

Both begin with the panes of a batch in Arrow, write them to a table with the same index, and take turns. First all rows
are of new windows, then each replaces one. The bulk load knows neither retractions nor batches that are run again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pyarrow as pa

    from aion.sinks.database import Database

AT_LEAST = 0.5
"""The least share of the speed of a bulk load."""
MINUTE_US = 60_000_000
TABLE = "aion_experiment"
FILES = ("sqlite", "duckdb")
PACKAGES = ("aion", "pyarrow", "duckdb", "adbc-driver-postgresql")
Write = Callable[["pa.Table", int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    rows: int
    batches: int
    runs: int
    warm_ups: int


def sinks(
    databases: Annotated[str, typer.Option(help="Databases that are files: some of sqlite,duckdb.")] = "",
    postgresql: Annotated[
        str, typer.Option(metavar="URI", help=f"A PostgreSQL database; the table {TABLE} in it is made and removed.")
    ] = "",
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 200_000,
    batches: Annotated[int, typer.Option(min=1, help="Batches per run.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per contender.")] = 3,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs per contender before those.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/sinks"),
) -> None:
    """Measure how many rows a second a sink writes, beside the database's own bulk load."""
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    settings = Settings(rows, batches, runs, warm_ups)
    kinds = bench.pick(databases, FILES)
    console = wide_console()
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    try:
        uris = {kind: f"{kind}:///{work / kind}" for kind in kinds}
        if postgresql:
            uris["postgresql"] = postgresql
        rates = measure(uris, settings, console.print)
    finally:
        shutil.rmtree(work)
    summaries = bench.summarise(rates)
    targets = [
        bench.Target(f"{kind} {leg} upsert", f"{kind} new bulk load", AT_LEAST if leg == "new" else None)
        for kind in uris
        for leg in ("new", "again")
    ]
    judged = bench.verdicts(targets, summaries)
    bench.write_json(
        out / "sinks.json",
        {
            "experiment": "sinks",
            "settings": asdict(settings),
            "versions": bench.versions(PACKAGES),
            "machine": bench.machine(),
            "rates": rates,
            "ratios": {f"{v.target.over} / {v.target.under}": v.ratio for v in judged},
        },
    )
    title = f"rows/s into a table, {batches} batches of {rows:,} rows"
    bench.bar_chart(out / "sinks.png", title, {}, rates, "rows/s")
    console.print(bench.rates_table(title, {}, summaries, {}, "rows/s"))
    console.print(bench.ratios_table({}, judged))
    console.print(f"written: {out / 'sinks'}.json and .png", highlight=False)


def measure(uris: dict[str, str], settings: Settings, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Rows per second of each run, by database, leg and contender."""
    from experiments.shared import bench

    new = [panes(settings.rows, number * settings.rows) for number in range(settings.batches)]
    rates: dict[str, list[float]] = {}
    for kind, uri in uris.items():
        for turn in bench.turns(("upsert", "bulk load"), settings.runs, settings.warm_ups):
            legs = {"new": new, "again": new} if turn.contender == "upsert" else {"new": new}
            with table_in(uri, new[0]):
                write = upserting(uri) if turn.contender == "upsert" else loading(kind, uri)
                batch = 0
                for leg, tables in legs.items():
                    begin = time.perf_counter()
                    for rows in tables:
                        write(rows, batch)
                        batch += 1
                    rate = settings.rows * settings.batches / (time.perf_counter() - begin)
                    say(f"{kind} {leg} {turn.contender}: {rate:,.0f} rows/s{' (warm-up)' if turn.warm_up else ''}")
                    if not turn.warm_up:
                        rates.setdefault(f"{kind} {leg} {turn.contender}", []).append(rate)
    return rates


def panes(rows: int, first: int) -> pa.Table:
    """The means of as many keys in windows of a minute, a thousand keys in each."""
    import numpy as np
    import pyarrow as pa

    from aion.core.query.columns import DROPPED_COLUMNS, result_schema

    numbers = np.arange(first, first + rows)
    instant = pa.timestamp("us", "UTC")
    outputs = [pa.field("n", pa.int64()), pa.field("mean", pa.float64())]
    schema = result_schema([pa.field("k", pa.int64())], instant, outputs)
    kept = [field for field in schema if field.name not in DROPPED_COLUMNS]
    starts = numbers // 1_000 * MINUTE_US
    columns = {
        "k": numbers % 1_000,
        "window": ["minute"] * rows,
        "window_start": starts,
        "window_end": starts + MINUTE_US,
        "n": numbers,
        "mean": np.sqrt(numbers),
        "pane": np.zeros(rows, np.int32),
        "kind": ["on_time"] * rows,
        "events": numbers,
        "late_events": np.zeros(rows, np.int64),
        "closes_at": starts + 60 * MINUTE_US,
        "pane_seq": np.arange(rows),
    }
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in kept], schema=pa.schema(kept))


@contextmanager
def table_in(uri: str, rows: pa.Table) -> Iterator[None]:
    """An empty table with the index that a sink makes."""
    from aion.sinks.database import TableName, prepare
    from aion.sinks.rows import Panes
    from aion.sinks.uris import opened

    name = TableName.of(TABLE)
    _drop(uri)
    with opened(uri) as database:
        prepare(database, name, Panes.of([(name, {}) for name in rows.column_names], ["k"]).change(rows))
    try:
        yield
    finally:
        _drop(uri)


def _drop(uri: str) -> None:
    from aion.sinks.uris import opened

    with opened(uri) as database:
        database.query(f"DROP TABLE IF EXISTS {TABLE}")


def upserting(uri: str) -> Write:
    """What a query's call runs when it has the rows."""
    from aion.sinks import upsert
    from aion.sinks.marks import History, Mark

    sink, history = upsert(uri, TABLE, key="k"), History("experiment", "")
    return lambda rows, batch: sink.write(rows, Mark(history, batch))


def loading(kind: str, uri: str) -> Write:
    """The fastest way of the database itself into a table, in a transaction for each batch."""
    from aion.sinks.uris import opened

    def load(rows: pa.Table, batch: int) -> None:
        with opened(uri) as database:
            LOADS[kind](database, rows.drop(["pane_seq"]))

    return load


def _load_sqlite(database: Database, rows: pa.Table) -> None:
    from aion.sinks.sqlite import python_rows

    connection: Any = database.driver
    connection.executemany(f"INSERT INTO {TABLE} VALUES ({', '.join('?' * rows.num_columns)})", python_rows(rows))


def _load_duckdb(database: Database, rows: pa.Table) -> None:
    connection: Any = database.driver
    connection.register("loaded", rows)
    connection.execute(f"INSERT INTO {TABLE} SELECT * FROM loaded")


def _load_postgresql(database: Database, rows: pa.Table) -> None:
    """Binary COPY."""
    database.driver.adbc_ingest(TABLE, rows, mode="append")


LOADS: dict[str, Callable[[Database, pa.Table], None]] = {
    "sqlite": _load_sqlite,
    "duckdb": _load_duckdb,
    "postgresql": _load_postgresql,
}
