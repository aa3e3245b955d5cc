"""Values that were stored by another schema of the same variable.

If Spark's state store has the Avro encoding (``spark.sql.streaming.stateStore.encodingFormat``), fields may be added,
removed, moved, and get another type, as Avro's rules for reading allow. Spark refuses every other change when the query
starts. A value becomes what Spark's Avro reader makes of it. For Avro, dates are ints, timestamps and intervals are
longs, and texts are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from aion.stateful.types import Avro, Convert, listed, or_none, paired, same, scalar

_READS: Mapping[tuple[Avro | None, Avro | None], Convert] = {
    (Avro.LONG, Avro.LONG): same,
    (Avro.LONG, Avro.FLOAT): lambda v: float(np.int64(v).astype(np.float32)),  # a double on the way would round, too
    (Avro.LONG, Avro.DOUBLE): float,
    (Avro.FLOAT, Avro.DOUBLE): float,
    (Avro.STRING, Avro.BYTES): str.encode,
    (Avro.BYTES, Avro.STRING): lambda v: v.decode(errors="replace"),
}
"""What Avro makes of a value that was written as one type and is read as another."""


def converter(old: DataType, new: DataType) -> Convert:
    """Makes a plain value of the type ``new`` from one of the type ``old``. What cannot be converted becomes null."""
    match old, new:
        case StructType(), StructType():
            at = {name: i for i, name in enumerate(old.names)}
            fields = [
                (at[field.name], converter(old[field.name].dataType, field.dataType)) if field.name in at else None
                for field in new
            ]
            return or_none(lambda v: [None if found is None else found[1](v[found[0]]) for found in fields])
        case ArrayType(), ArrayType():
            return listed(converter(old.elementType, new.elementType))
        case MapType(), MapType():
            return paired(converter(old.keyType, new.keyType), converter(old.valueType, new.valueType))
    if type(old) is type(new):
        return same
    before, now = (None if (row := scalar(type_)) is None else row.avro for type_ in (old, new))
    return or_none(_READS.get((before, now), lambda v: None))
