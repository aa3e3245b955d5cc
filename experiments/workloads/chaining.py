"""Later stages on panes. In them, a later pane of a window replaces the earlier one.

Two windowed operators cannot follow each other in one query. Spark uses the smallest watermark that a query declares.
So the second operator's watermark, which waits for panes, would hold up the first one's, which produces them. Instead,
the operators of the first stage run side by side in one query, as a union, and ``foreachBatch`` passes each batch of
their panes to :class:`LastPanes`, an upsert by key and window that keeps the newest pane. The later stages recompute
the windows that changed, from the last panes, and replace their earlier results. Both steps are idempotent, so a batch
that Spark repeats after a failure changes nothing.

A stage whose function finds nothing must still yield a row (a count of 0). Otherwise nothing would replace an earlier
result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

TIMES = ("window_start", "window_end")
NOT_VALUES = ("stage", *TIMES, "pane", "kind", "began", "ended")


class LastPanes:
    """The rows of the newest pane of each stage, window and key.

    ``keys``: the key columns of each stage. Rows with equal keys and pane belong together. ``folder``: the rows are
    there, a file for each stage and window, and nothing but the names is in memory; a new instance finds them again.
    None: they are in memory. ``keep_us``: forget windows that end this long before the newest one.
    """

    def __init__(
        self, keys: Mapping[str, tuple[str, ...]], *, folder: Path | None = None, keep_us: int | None = None
    ) -> None:
        self._keys = keys
        self._keep_us = keep_us
        self._rows: MutableMapping[tuple[str, int], pd.DataFrame] = {} if folder is None else _Files(folder)
        self._ends = {where: _end_of(rows) for where, rows in self._rows.items()}

    def upsert(self, rows: pa.Table) -> set[tuple[str, int]]:
        """Adds the panes of a batch. Returns (stage, start of the window in µs) of all windows that changed."""
        for name in TIMES:
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, name, rows[name].cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
        touched: set[tuple[str, int]] = set()
        for (stage, start), new in rows.to_pandas().groupby(["stage", "window_start"], sort=False):
            where = (str(stage), int(start))
            self._rows[where] = newest(self._rows.get(where), new, self._keys[where[0]])
            self._ends[where] = _end_of(new)
            touched.add(where)
        self._forget()
        return touched

    def of(self, stage: str, start_us: int) -> pd.DataFrame:
        """The keys and values of the last pane; empty, without columns, if there is none."""
        found = self._rows.get((stage, start_us))
        if found is None:
            return pd.DataFrame()
        columns = [name for name in found.columns if name not in NOT_VALUES]
        return found[columns].dropna(axis="columns", how="all").reset_index(drop=True)

    def _forget(self) -> None:
        if self._keep_us is None or not self._ends:
            return
        newest_us = max(self._ends.values())
        for where in [where for where, end_us in self._ends.items() if end_us < newest_us - self._keep_us]:
            del self._rows[where], self._ends[where]


def _end_of(rows: pd.DataFrame) -> int:
    return int(rows["window_end"].iloc[0])


class _Files(MutableMapping[tuple[str, int], pd.DataFrame]):
    """Frames in files, by stage and start of the window."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, where: tuple[str, int]) -> pd.DataFrame:
        try:
            rows: pd.DataFrame = pq.read_table(self._path(where)).to_pandas()
        except FileNotFoundError:
            raise KeyError(where) from None
        return rows

    def __setitem__(self, where: tuple[str, int], rows: pd.DataFrame) -> None:
        write_whole(self._path(where), pa.Table.from_pandas(rows, preserve_index=False))

    def __delitem__(self, where: tuple[str, int]) -> None:
        self._path(where).unlink()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((path.parent.name, int(path.stem)) for path in sorted(self._folder.glob("*/*.parquet")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, where: tuple[str, int]) -> Path:
        return self._folder / where[0] / f"{where[1]}.parquet"


def newest(old: pd.DataFrame | None, new: pd.DataFrame, keys: tuple[str, ...]) -> pd.DataFrame:
    """For each key the rows of the largest pane. If panes are equal, those of ``new``, since a batch may come twice."""
    new = new[new["pane"] == _newest_pane(new, keys)]
    if old is None:
        return new
    if not keys:
        return new if new["pane"].iloc[0] >= old["pane"].iloc[0] else old
    by = list(keys)
    panes = {side: frame.drop_duplicates(by).set_index(by)["pane"] for side, frame in (("old", old), ("new", new))}
    both = pd.concat(panes, axis=1)
    wins = (both["new"] >= both["old"]) | both["old"].isna()
    chosen = wins.reindex(_index(new, by)).to_numpy(), wins.reindex(_index(old, by)).to_numpy()
    return pd.concat([old[~chosen[1]], new[chosen[0]]], ignore_index=True)


def _newest_pane(frame: pd.DataFrame, keys: tuple[str, ...]) -> pd.Series[int]:
    """For each row, the largest pane of its key."""
    per_key = frame.groupby(list(keys) if keys else (lambda _: 0), sort=False, dropna=False)
    return per_key["pane"].transform("max")


def _index(frame: pd.DataFrame, by: list[str]) -> pd.Index:
    return pd.Index(frame[by[0]]) if len(by) == 1 else pd.MultiIndex.from_frame(frame[by])


class Results:
    """The results of the last stages: a file for each of their windows, replaced whenever it changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, finals: Mapping[tuple[str, int], pd.DataFrame]) -> None:
        for (name, start_us), rows in finals.items():
            rows = rows.assign(window_start=start_us)
            write_whole(self.folder / name / f"{start_us}.parquet", pa.Table.from_pandas(rows, preserve_index=False))

    def read(self) -> dict[str, pd.DataFrame]:
        """The results of each stage, all windows together."""
        return {
            stage.name: pd.concat([pq.read_table(p).to_pandas() for p in sorted(stage.iterdir())], ignore_index=True)
            for stage in sorted(self.folder.iterdir())
        }


def write_whole(path: Path, rows: pa.Table) -> None:
    """Writes the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    pq.write_table(rows, unfinished)
    unfinished.replace(path)
