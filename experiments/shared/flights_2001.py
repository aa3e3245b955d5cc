"""Three million flights of 2001 in the United States, and how late each was. A second real data set.

It is the file ``flights-3m.parquet`` of the npm package ``vega-datasets``. Nothing here depends on that package: to use
the flights, download it and pass its path. Its times are local; only differences of times of one flight are used.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from aion.errors import ConfigError

MEMBER = "package/data/flights-3m.parquet"
HOW_TO_GET = "npm pack vega-datasets@3.2.1, then --flights-2001 vega-datasets-3.2.1.tgz"
MINUTE_US = 60_000_000


def load(path: Path) -> pa.Table:
    """Returns the flights in the order in which they came: ``ts``, as scheduled; ``origin``; ``arrived``, when it came.

    Times are UTC in microseconds. A flight comes as many minutes after its schedule as it was late. ``path``: the npm
    package, or the file in it. Raises ConfigError.
    """
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            with tarfile.open(path) as package:
                file = package.extractfile(MEMBER)
                assert file is not None
                table = pq.read_table(pa.BufferReader(file.read()))
        table = table.select(["date", "delay", "origin"])
    except (OSError, KeyError, tarfile.TarError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} has no flights of 2001: {error}. {HOW_TO_GET}") from None
    table = table.filter(table["delay"].is_valid())
    scheduled_us: npt.NDArray[np.int64] = table["date"].cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
    arrived_us = scheduled_us + table["delay"].to_numpy() * MINUTE_US
    order = np.argsort(arrived_us, kind="stable")
    instant = pa.timestamp("us", "UTC")
    return pa.table(
        {
            "ts": pa.array(scheduled_us[order]).cast(instant),
            "origin": table["origin"].cast(pa.string()).take(pa.array(order)),
            "arrived": pa.array(arrived_us[order]).cast(instant),
        }
    )
