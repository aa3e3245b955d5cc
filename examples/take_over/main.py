"""A stock Spark job with a stateful processor is stopped, and goes on with its state in Aion: same code and totals."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

JOB = Path(__file__).with_name("job.py")
ACCOUNTS, BOOKINGS = 500, 5_000
STOCK = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}


def main(out: Path) -> int:
    rng = random.Random(1)
    totals: Counter[str] = Counter()
    place = {name: out / name for name in ("bookings", "stock", "aion", "results", "state")}
    place["bookings"].mkdir(parents=True)

    def book(number: int) -> None:
        made = [(f"account-{rng.randrange(ACCOUNTS)}", rng.randrange(-50, 100)) for _ in range(BOOKINGS)]
        for account, amount in made:
            totals[account] += amount
        accounts, amounts = zip(*made, strict=True)
        table = pa.table({"account": accounts, "amount": pa.array(amounts, pa.int64())})
        pq.write_table(table, place["bookings"] / f"{number:03d}.parquet")

    book(0)
    book(1)
    print("two batches on stock Spark")
    run([sys.executable, str(JOB)], STOCK, place["bookings"], place["stock"], place["results"])

    print("aion migrate")
    settings = [f"--conf={key}={value}" for key, value in STOCK.items()]
    migrate = [sys.executable, "-m", "aion", "migrate", str(place["stock"]), str(place["aion"])]
    quiet([*migrate, "--state", str(place["state"]), *settings], os.environ)

    book(2)
    print("one more, the same job on Aion")
    on_aion = STOCK | {"spark.aion.stateful.enabled": "true", "spark.aion.state.dir": str(place["state"])}
    del on_aion["spark.sql.streaming.stateStore.providerClass"]
    run([sys.executable, "-m", "aion.run", str(JOB)], on_aion, place["bookings"], place["aion"], place["results"])
    return compare(place["results"], totals)


def run(program: list[str], settings: dict[str, str], *arguments: Path) -> None:
    """Runs the job as spark-submit would, with these settings."""
    submit = " ".join(f"--conf {key}={value}" for key, value in settings.items())
    submit_args = f"{submit} pyspark-shell"
    environment = os.environ | {"PYSPARK_SUBMIT_ARGS": submit_args, "PYSPARK_PYTHON": sys.executable}
    quiet([*program, *map(str, arguments)], environment)


def quiet(command: list[str], environment: os._Environ[str] | dict[str, str]) -> None:
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def compare(results: Path, totals: Counter[str]) -> int:
    """Compares the last total of each account with the sum of all its bookings."""
    found: dict[str, int] = {}
    for batch in sorted(results.iterdir(), key=lambda path: int(path.name.rpartition("=")[2])):
        for file in batch.glob("*.parquet"):
            found |= {row["account"]: row["total"] for row in pq.ParquetFile(file).read().to_pylist()}
    wrong = [account for account in totals if found.get(account) != totals[account]]
    print(f"{len(totals)} accounts, {len(wrong)} differ from the sum of their bookings")
    return int(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a new folder for data, state and results")
    given = parser.parse_args().out
    if given is not None and given.exists():
        parser.error(f"--out {given} exists; the checkpoint is taken over once, so name a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(main((given or Path(temporary)).absolute()))
