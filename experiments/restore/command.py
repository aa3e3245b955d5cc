"""The time to open a shard on a host that has none of it in memory: does it depend on its files, or on their bytes?

It makes shards of different sizes with the same number of files, and shards of the same size with different numbers of
files, by commits as batches make them. Then it opens them by their tokens, in turns, each time without page cache.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from state_backends.versions.shard import Shard

MIB = 1 << 20
BLOCK_BYTES = MIB
ALLOWED_GROWTH = 2.0
"""The most time to open the largest shard, as a multiple of that for the smallest with as many files."""
PACKAGES = ("aion", "pyarrow", "rocksdict")


@dataclass(frozen=True, slots=True)
class Case:
    """A shard to open."""

    files: int
    mib: int


def restore(
    sizes_mib: Annotated[str, typer.Option(help="Sizes in MiB of the shards with the same number of files.")] = (
        "64,256,1024"
    ),
    files: Annotated[int, typer.Option(min=1, help="Number of files of these shards.")] = 32,
    file_counts: Annotated[str, typer.Option(help="Numbers of files of the shards of the same size.")] = "8,32,128,512",
    size_mib: Annotated[int, typer.Option(min=1, help="Size in MiB of these shards.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="How often each shard is opened.")] = 5,
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for the state during the runs.", file_okay=False)
    ] = Path("out/restore"),
) -> None:
    """Seconds to open a shard, by its number of files and by its bytes."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from rich.table import Table

    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    by_size = [Case(files, mib) for mib in numbers(sizes_mib)]
    by_files = [Case(count, size_mib) for count in numbers(file_counts)]
    console = wide_console()
    check_room(out, max(sum(case.mib for case in cases) for cases in (by_size, by_files)) * MIB)
    record = {"experiment": "restore", "versions": bench.versions(PACKAGES), "machine": bench.machine()}
    results: dict[str, Any] = {}
    for title, cases in (("the same number of files", by_size), ("the same size", by_files)):
        with console.status(title):
            found = measure(cases, runs, out)
        results[title] = [{**asdict(case), **figures} for case, figures in found.items()]
        bench.write_json(out / "restore.json", {**record, "results": results})
        table = Table(title=f"opening a shard: {title}", title_justify="left")
        for heading in ("MiB", "files", "blocks", "open s", "lowest", "highest", "ms per file", "first block ms"):
            table.add_column(heading, justify="right")
        for case in cases:
            table.add_row(f"{case.mib:,}", f"{case.files:,}", *cells(case, found[case]))
        console.print(table)
    opened = [statistics.median(result["open_s"]) for result in results["the same number of files"]]
    growth, verdict = opened[-1] / opened[0], "does not hold"
    if growth <= ALLOWED_GROWTH:
        verdict = "holds"
    console.print(
        f"{by_size[-1].mib / by_size[0].mib:,.0f} times the bytes in as many files: {growth:.2f} times the time "
        f"(target: at most {ALLOWED_GROWTH:g}; {verdict})",
        highlight=False,
    )
    console.print(f"written: {out / 'restore.json'}", highlight=False)


def numbers(text: str) -> list[int]:
    """``"64,256"`` as ascending numbers. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r}: write numbers above 0, separated by commas, e.g. '64,256'")
    return sorted({int(part) for part in parts})


def check_room(out: Path, needed_bytes: int) -> None:
    """Raises BadParameter if the disk has no room for the shards, with 20 % to spare."""
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if free < needed_bytes * 1.2:
        raise typer.BadParameter(f"{out} has {free / MIB:,.0f} MiB free; the shards need {needed_bytes / MIB:,.0f}")


def cells(case: Case, result: dict[str, Any]) -> list[str]:
    opened = result["open_s"]
    median = statistics.median(opened)
    first = statistics.median(result["first_block_s"])
    return [
        f"{result['blocks']:,}",
        *(f"{s:.3f}" for s in (median, min(opened), max(opened))),
        f"{median / case.files * 1e3:.2f}",
        f"{first * 1e3:.1f}",
    ]


def measure(cases: Sequence[Case], runs: int, out: Path) -> dict[Case, dict[str, Any]]:
    """Makes the shards, opens each ``runs`` times, and removes them.

    The shards take turns, so that noise on the machine affects all of them alike.
    """
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    folders = {case: work / str(number) for number, case in enumerate(cases)}
    found: dict[Case, dict[str, Any]] = {}
    tokens: dict[Case, str] = {}
    try:
        for case, folder in folders.items():
            begin = time.perf_counter()
            tokens[case], blocks = fill(case, folder)
            fill_s = time.perf_counter() - begin
            found[case] = {"blocks": blocks, "fill_s": fill_s, "open_s": [], "first_block_s": []}
            files = len(list((folder / "versions" / "files").iterdir()))
            if files != case.files:
                raise RuntimeError(f"the shard has {files} files; expected {case.files}")
        for _ in range(runs):
            for case, folder in folders.items():
                open_s, first_s = open_once(folder, tokens[case])
                found[case]["open_s"].append(open_s)
                found[case]["first_block_s"].append(first_s)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


def open_once(folder: Path, token: str) -> tuple[float, float]:
    """Seconds to open the shard, and then to read one block of it. None of it is in the page cache before."""
    from experiments.store.common import drop_page_cache

    drop_page_cache(folder)
    with shard_in(folder) as shard:
        begin = time.perf_counter()
        shard.open(token, "reader", shard.identity)
        opened = time.perf_counter()
        next(iter(shard.read("reader", [0])))
        return opened - begin, time.perf_counter() - opened


def fill(case: Case, folder: Path) -> tuple[str, int]:
    """Commits files one by one, each with the blocks of one window. Returns the token and the number of blocks."""
    from experiments.store.common import MINUTE_US, encoded, random_batches

    share = case.mib * MIB // case.files
    (batch,) = random_batches(1, 200, 0, min(BLOCK_BYTES, share))
    token, seq = None, 0
    with shard_in(folder) as shard:
        for number in range(case.files):
            attempt = f"{number:010d}-restore"
            shard.open(token, attempt, shard.identity)
            block = encoded(batch, number * MINUTE_US)
            for _ in range(max(1, round(share / block.size_bytes))):
                shard.append(attempt, [(seq, True, block)])
                seq += 1
            shard.commit(attempt, {"next_seq": seq})
            token = attempt
    assert token is not None
    return token, seq


@contextmanager
def shard_in(folder: Path) -> Iterator[Shard]:
    """A shard as on a host, except that a batch is one file however large it is."""
    from state_backends.backends import Stores
    from state_backends.files.storage import LocalStorage
    from state_backends.store.io_thread import IoThread
    from state_backends.store.m_bucket import MemoryBudget
    from state_backends.store.options import StoreOptions
    from state_backends.versions.manifest import Identity
    from state_backends.versions.shard import Shard

    io, budget = IoThread(), MemoryBudget(1 << 40)
    shard = Shard(
        Identity("query", "restore", 0, 1, {}),
        LocalStorage(folder / "versions"),
        folder / "live",
        lambda p: Stores.of("tiered", p, io, budget, StoreOptions(bucket_limit_bytes=1 << 40, outbox_bytes=1 << 40)),
        retain=1,
    )
    try:
        yield shard
    finally:
        shard.close()
        io.close()
