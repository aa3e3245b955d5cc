"""Every aggregate against plain Python: any values, any split of the events into blocks, any tree of merging them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aion import aggregates as A
from aion.aggregates.binding import bind
from aion.aggregates.layout import Layout
from aion.errors import ApplyError, ConfigError, SchemaError
from tests import aggregate_oracle as o
from tests import oracle
from tests.examples import some

Row = dict[str, Any]
TIME = pa.timestamp("us", "UTC")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    digits = st.integers(1 - 10**precision, 10**precision - 1)
    return digits.map(lambda n: Decimal(f"{n}e-{scale}"))  # arithmetic would round to the context's 28 digits


floats = st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e300, 3.25e-9, math.nan, math.inf, -math.inf])
NUMBERS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "tinyint": (pa.int8(), st.integers(-128, 127)),
    "bigint": (pa.int64(), st.integers(-(2**40), 2**40)),
    "float": (pa.float32(), st.sampled_from([0.0, -0.0, 1.5, -2.0, math.nan, math.inf])),
    "double": (pa.float64(), floats),
}
ORDERED: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    **NUMBERS,
    "decimal": (pa.decimal128(10, 2), st.integers(-(10**9), 10**9).map(lambda n: Decimal(n).scaleb(-2))),
    "boolean": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.sampled_from(["", "a", "ab", "ä", "z"])),
    "binary": (pa.binary(), st.binary(max_size=2)),
    "date": (pa.date32(), st.dates(date(1960, 1, 1), date(2030, 1, 1))),
    "timestamp": (TIME, st.integers(-5, 5).map(lambda s: EPOCH + timedelta(seconds=s))),
}
PAIR = pa.struct([("x", pa.float64()), ("y", pa.struct([("s", pa.string()), ("t", pa.int64())]))])
PAIRS = st.fixed_dictionaries(
    {
        "x": st.none() | st.sampled_from([0.0, -0.0, -2.0, math.inf]),
        "y": st.none()
        | st.fixed_dictionaries(
            {"s": st.none() | st.sampled_from(["", "a", "b"]), "t": st.none() | st.integers(-2, 2)}
        ),
    }
)
ANY = {
    **ORDERED,
    "array": (pa.list_(pa.int32()), st.lists(st.none() | st.integers(0, 3), max_size=2)),
    "struct": (pa.struct([("x", pa.int32())]), st.fixed_dictionaries({"x": st.none() | st.integers(0, 3)})),
}


@st.composite
def tables(draw: st.DrawFn, kinds: dict[str, Any], most: int = 25) -> tuple[pa.Schema, list[Row]]:
    """Rows of a key, a time with ties and nulls, a value ``v`` and another ``w`` to order or combine it with."""
    kind, other = draw(st.sampled_from(sorted(kinds))), draw(st.sampled_from(sorted(ORDERED)))
    schema = pa.schema([("k", pa.string()), ("ts", TIME), ("v", kinds[kind][0]), ("w", ORDERED[other][0])])
    few = draw(st.lists(kinds[kind][1], min_size=1, max_size=4))  # so that values come again
    rows = st.fixed_dictionaries(
        {
            "k": st.sampled_from(["a", "b", None]),
            "ts": st.none() | st.integers(-3, 3).map(lambda s: EPOCH + timedelta(seconds=s)),
            "v": st.none() | st.sampled_from(few) | kinds[kind][1],
            "w": st.none() | ORDERED[other][1],
        }
    )
    return schema, draw(st.lists(rows, min_size=1, max_size=most))


def lifted(layout: Layout, rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    arrays = {f.name: pa.array([r[f.name] for r in rows], f.type, from_pandas=False) for f in schema}
    return layout.lift({"k": arrays["k"]}, arrays)


def merged(layout: Layout, parts: Sequence[pa.Table], draw: st.DataObject) -> pa.Table:
    """Merges neighbours until one is left: any tree, but the order of arrival is kept."""
    parts = list(parts)
    while len(parts) > 1:
        i = draw.draw(st.integers(0, len(parts) - 2))
        some = draw.draw(st.integers(2, len(parts) - i))
        parts[i : i + some] = [layout.combine(["k"], pa.concat_tables(parts[i : i + some]))]
    return parts[0]


def cut(rows: list[Row], draw: st.DataObject) -> list[list[Row]]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(rows)), max_size=5)))
    return [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def lowered(layout: Layout, table: pa.Table) -> dict[Any, Any]:
    table = layout.combine(["k"], table)
    results = layout.lower(layout.states(table))
    for bound in layout.bound:
        assert results[bound.name].type == bound.type, f"{bound.name}: the type that it was bound with"
    columns = [results[b.name].to_pylist() for b in layout.bound]
    return dict(zip(table.column("k").to_pylist(), zip(*columns, strict=True), strict=True))


Case = tuple[A.Aggregate, o.Function, Callable[[Any, Any], bool]]


def check(schema: pa.Schema, rows: list[Row], cases: Sequence[Case], draw: st.DataObject) -> None:
    layout = Layout([bind(f"r{i}", a, schema, "ts") for i, (a, _, _) in enumerate(cases)])
    found = lowered(layout, merged(layout, [lifted(layout, part, schema) for part in cut(rows, draw)], draw))
    assert found.keys() == {r["k"] for r in rows}
    for key, results in found.items():
        mine = [r for r in rows if r["k"] == key]
        for result, (aggregate, function, alike) in zip(results, cases, strict=True):
            wanted = function(mine)
            assert alike(result, wanted), f"{aggregate} of {mine}: {result!r}, not {wanted!r}"


INTEGERS = {
    "tinyint": NUMBERS["tinyint"],
    "smallint": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "bigint": (pa.int64(), st.integers(-(2**46), 2**46 - 1)),
}
# Values whose sums a double holds exactly, in whatever order they are added.
halves = st.integers(-(2**20), 2**20).map(lambda n: n / 2) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
FLOATS = {"float": (pa.float32(), halves), "double": (pa.float64(), halves)}
DECIMALS = {
    f"decimal({precision}, {scale})": (pa.decimal128(precision, scale), decimals(precision, scale))
    for precision, scale in [(5, 2), (10, 0), (20, 20), (28, 6), (33, 3)]
}
WHOLE = {
    **ORDERED,
    **INTEGERS,
    "any bigint": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "any double": (pa.float64(), st.floats()),
    "wide decimal": (pa.decimal128(38, 6), decimals(30, 6)),
    "any text": (pa.string(), st.text(max_size=4)),
    "any date": (pa.date32(), st.dates()),
    "any time": (pa.timestamp("us"), st.datetimes()),
    "any instant": (TIME, st.datetimes(timezones=st.just(UTC))),
}


def of_values(function: Callable[[list[Any]], Any]) -> o.Function:
    return lambda rows: function([row["v"] for row in rows])


@pytest.mark.slow
@given(tables(WHOLE), st.data())
def test_counts_and_extremes(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    cases: list[Case] = [
        (A.count(), len, o.same),
        (A.count("v"), of_values(oracle.spark_count), o.same),
        (A.min("v"), of_values(oracle.spark_min), o.same),
        (A.max("v"), of_values(oracle.spark_max), o.same),
    ]
    check(*data, cases, draw)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | PAIRS), min_size=1, max_size=12), st.data())
def test_structs_are_ordered_by_their_fields(given_: list[tuple[str, Any]], draw: st.DataObject) -> None:
    schema = pa.schema([("k", pa.string()), ("ts", TIME), ("v", pa.int64()), ("w", PAIR)])
    rows: list[Row] = [{"k": k, "ts": EPOCH, "v": number, "w": w} for number, (k, w) in enumerate(given_)]
    cases: list[Case] = [
        (A.min("w"), partial(o.smallest, column="w"), o.same),
        (A.max("w"), partial(o.largest, column="w"), o.same),
        (A.min_by("v", "w"), partial(o.by, column="v", order="w", least=True), o.same),
        (A.max_by("v", "w"), partial(o.by, column="v", order="w", least=False), o.same),
        (A.max_by("v", "w", 2), partial(o.best, column="v", order="w", k=2, least=False), o.same),
        (A.top_k("w", 2), partial(o.best, column="w", order="w", k=2, least=False), o.same),
    ]
    check(schema, rows, cases, draw)


@given(tables(INTEGERS) | tables(FLOATS), st.data())
def test_sums_and_means(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    cases: list[Case] = [
        (A.sum("v"), of_values(oracle.spark_sum), o.same),
        (A.mean("v"), of_values(oracle.spark_mean), o.close),
    ]
    check(*data, cases, draw)
    assert A.avg is A.mean


@given(tables(DECIMALS), st.data())
def test_decimals_stay_decimals(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    scale = data[0].field("v").type.scale
    cases: list[Case] = [
        (A.sum("v"), of_values(oracle.spark_sum), o.same),
        (A.mean("v"), of_values(lambda values: oracle.spark_decimal_mean(values, scale + 4)), o.same),
    ]
    check(*data, cases, draw)


@given(tables(NUMBERS), st.data())
def test_variances(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    schema, rows = data
    assume(all(r["v"] != 1e300 for r in rows))  # whose square no double holds
    cases: list[Case] = []
    for function, sample, root in [
        (A.var_samp, True, False),
        (A.var_pop, False, False),
        (A.stddev_samp, True, True),
        (A.stddev_pop, False, True),
    ]:
        cases.append((function("v"), partial(o.variance, column="v", sample=sample, root=root), o.close))
    cases += [(A.mean("v"), partial(o.mean, column="v"), o.close), (A.count("v"), partial(o.count, column="v"), o.same)]
    check(schema, rows, cases, draw)
    assert A.variance is A.var_samp and A.stddev is A.std is A.stddev_samp


@given(tables(ANY), st.data())
def test_first_and_last_by_time(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    cases: list[Case] = []
    for ignore in (False, True):
        cases.append((A.first("v", ignore), partial(o.first, column="v", ignorenulls=ignore), o.same))
        cases.append((A.last("v", ignore), partial(o.last, column="v", ignorenulls=ignore), o.same))
    check(*data, cases, draw)


@given(tables(ANY), st.data(), st.integers(1, 4))
def test_min_by_and_max_by(data: tuple[pa.Schema, list[Row]], draw: st.DataObject, k: int) -> None:
    cases: list[Case] = [
        (A.min_by("v", "w"), partial(o.by, column="v", order="w", least=True), o.same),
        (A.max_by("v", "w"), partial(o.by, column="v", order="w", least=False), o.same),
        (A.min_by("v", "w", k), partial(o.best, column="v", order="w", k=k, least=True), o.same),
        (A.max_by("v", "w", k), partial(o.best, column="v", order="w", k=k, least=False), o.same),
        (A.max_by("w", "w", k), partial(o.best, column="w", order="w", k=k, least=False), o.same),
        (A.top_k("w", k), partial(o.best, column="w", order="w", k=k, least=False), o.same),
    ]
    check(*data, cases, draw)


@given(tables(ORDERED), st.data())
def test_distinct_values(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    few: list[Case] = [
        (A.count_distinct("v"), lambda rows: len(o.distinct(rows, "v")), o.same),
        (A.count_distinct("v", "w"), lambda rows: len(o.distinct(rows, "v", "w")), o.same),
        (A.collect_set("v"), lambda rows: o.distinct(rows, "v"), o.as_set),
        # Of so few values the sketch knows each.
        (A.approx_count_distinct("v"), lambda rows: len(o.distinct(rows, "v")), o.same),
    ]
    check(*data, few, draw)
    check(*data, [*few, (A.collect_list("v"), partial(o.there, column="v"), o.same)], draw)


@given(tables(ANY), st.data())
def test_all_values(data: tuple[pa.Schema, list[Row]], draw: st.DataObject) -> None:
    check(*data, [(A.collect_list("v"), partial(o.there, column="v"), o.same)], draw)


SHARES = [0.0, 0.1, 0.25, 0.5, 0.9, 1.0]


@given(tables(NUMBERS), st.data(), st.sampled_from(SHARES))
def test_percentiles(data: tuple[pa.Schema, list[Row]], draw: st.DataObject, share: float) -> None:
    def several(rows: o.Rows) -> list[float] | None:
        found = [o.percentile(rows, "v", s) for s in SHARES]
        return None if None in found else found  # type: ignore[return-value]

    cases: list[Case] = [
        (A.median("v"), partial(o.percentile, column="v", share=0.5), o.close),
        (A.percentile("v", share), partial(o.percentile, column="v", share=share), o.close),
        (A.percentile("v", SHARES), several, o.close),
    ]
    check(*data, cases, draw)


QUANTIFIABLE = {name: ORDERED[name] for name in ("bigint", "float", "double", "decimal", "date", "timestamp")}


@given(tables(QUANTIFIABLE), st.data(), st.sampled_from(SHARES))
def test_approximate_percentiles_of_few_values_are_exact(
    data: tuple[pa.Schema, list[Row]], draw: st.DataObject, share: float
) -> None:
    def several(rows: o.Rows) -> list[Any] | None:
        return [o.nth(rows, "v", s) for s in SHARES] if o.there(rows, "v") else None

    cases: list[Case] = [
        (A.approx_percentile("v", share), partial(o.nth, column="v", share=share), o.same),
        (A.approx_percentile("v", SHARES, 100), several, o.same),
    ]
    check(*data, cases, draw)
    assert A.percentile_approx is A.approx_percentile


def joined_texts() -> A.Aggregate:
    """Values joined in the order of arrival, with a counter: associative, and no more."""
    return A.aggregate(
        ["v", "w"],
        lift=lambda v, w: [
            pc.binary_join_element_wise(v.cast(pa.string()), w, ":", null_handling="replace"),
            np.ones(len(v), np.int64),
        ],
        combine=lambda a, b: [pc.binary_join_element_wise(a[0], b[0], ","), pc.add(a[1], b[1])],
        lower=lambda text, n: pc.binary_join_element_wise(text, n.cast(pa.string()), "="),
        partial="text string, n bigint",
        result="string",
        name="joined",
    )


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 9), st.sampled_from("xyz")), min_size=1),
    st.data(),
)
def test_functions_of_the_users_own(values: list[tuple[str, int | None, str]], draw: st.DataObject) -> None:
    schema = pa.schema([("k", pa.string()), ("ts", TIME), ("v", pa.int64()), ("w", pa.string())])
    rows = [{"k": k, "ts": EPOCH, "v": v, "w": w} for k, v, w in values]

    def wanted(mine: o.Rows) -> str:
        return ",".join(f"{'' if r['v'] is None else r['v']}:{r['w']}" for r in mine) + f"={len(mine)}"

    check(schema, rows, [(joined_texts(), wanted, o.same)], draw)


# -- what is declared ---------------------------------------------------------------------------------------

SCHEMA = pa.schema([("k", pa.string()), ("ts", TIME), ("v", pa.float64()), ("w", pa.int64())])
DECLARED: dict[str, tuple[A.Aggregate, str]] = {
    "count": (A.count(), "dci"),
    "count of a column": (A.count("v"), "dci"),
    "sum": (A.sum("v"), "dci"),
    "sum of integers": (A.sum("w"), "dci"),
    "mean": (A.mean("v"), "dci"),
    "variance": (A.variance("v"), "dci"),
    "stddev": (A.stddev("v"), "dci"),
    "min": (A.min("v"), "dc"),
    "max": (A.max("v"), "dc"),
    "first": (A.first("v"), "d"),
    "last": (A.last("v"), "d"),
    "min_by": (A.min_by("v", "w"), "d"),
    "max_by": (A.max_by("v", "w", 3), "d"),
    "top_k": (A.top_k("v", 3), "dc"),
    "count_distinct": (A.count_distinct("v"), "c"),
    "approx_count_distinct": (A.approx_count_distinct("v"), "dc"),
    "collect_list": (A.collect_list("v"), ""),
    "collect_set": (A.collect_set("v"), "c"),
    "median": (A.median("v"), "c"),
    "percentile": (A.percentile("v", 0.1), "c"),
    "approx_percentile": (A.approx_percentile("v", 0.1), "d"),
    "aggregate": (joined_texts(), "d"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_properties_are_declared(name: str) -> None:
    aggregate, properties = DECLARED[name]
    schema = SCHEMA if name != "aggregate" else SCHEMA.set(3, pa.field("w", pa.string()))
    bound = bind(name, aggregate, schema, "ts")
    found = {"d": bound.decomposable, "c": bound.commutative, "i": bound.invertible}
    assert found == {p: p in properties for p in "dci"}


@some(2 / 5)
@given(tables({"double": NUMBERS["double"]}), st.randoms(use_true_random=False))
def test_what_commutes_does(data: tuple[pa.Schema, list[Row]], random: Any) -> None:
    """In any order of arrival, and of merging: the very same values, to the last bit."""
    schema, rows = data
    schema = schema.set(3, pa.field("w", pa.int64()))
    rows = [{**r, "w": i} for i, r in enumerate(rows)]
    some = [name for name, (_, properties) in DECLARED.items() if "c" in properties]
    layout = Layout([bind(name, DECLARED[name][0], schema, "ts") for name in some])
    at_once = lowered(layout, lifted(layout, rows, schema))
    random.shuffle(rows)
    size = random.randint(1, len(rows))
    parts = [lifted(layout, rows[i : i + size], schema) for i in range(0, len(rows), size)]
    random.shuffle(parts)
    again = lowered(layout, pa.concat_tables(parts))
    for key, results in at_once.items():
        for name, one, other in zip(some, results, again[key], strict=True):
            if name == "collect_set":
                assert o.as_set(one, {("NaN",) if math.isnan(v) else (v,) for v in other})
            else:
                alike = o.close if name in ("variance", "stddev") else o.same
                assert alike(one, other), f"{name}: {one!r} and {other!r}"


def test_holistic_aggregates_of_a_column_share_its_values() -> None:
    asked = [A.median("v"), A.percentile("v", 0.9), A.collect_list("v"), A.count_distinct("v"), A.collect_set("v")]
    layout = Layout([bind(f"r{i}", a, SCHEMA, "ts") for i, a in enumerate(asked)])
    assert [str(f.type) for f in layout.fields] == ["int64", "list<item: double>"], "the values once, and nothing else"
    assert layout.holistic and layout.columns == ["v"]
    mixed = Layout([bind("m", A.median("v"), SCHEMA, "ts"), bind("s", A.sum("w"), SCHEMA, "ts")])
    assert [str(f.type) for f in mixed.fields] == ["int64", "list<item: double>", "int64"], "of w only the sum"


def test_zeros_and_nan_are_collected_once() -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.float64())])
    values = np.array([-0.0, 0.0, np.nan, np.inf - np.inf, np.copysign(np.nan, -1), 1.0])
    layout = Layout([bind("r", A.collect_set("v"), schema)])
    lists = lowered(layout, layout.lift({"k": pa.array(["a"] * 6)}, {"v": pa.array(values, from_pandas=False)}))
    assert sorted(map(str, lists["a"][0])) == ["0.0", "1.0", "nan"], "as Spark has it, without a sign"


def test_moments_share_their_sums() -> None:
    asked = [A.stddev("v"), A.var_pop("v"), A.mean("v"), A.sum("v"), A.count("v")]
    layout = Layout([bind(f"r{i}", a, SCHEMA, "ts") for i, a in enumerate(asked)])
    assert len(layout.fields) == 5, "events, sum in two, count, squares"


# -- bad input ----------------------------------------------------------------------------------------------


def options(**given: Any) -> dict[str, Any]:
    identity = {"lift": lambda v: v, "combine": lambda a, b: a, "lower": lambda v: v}
    return {**identity, "partial": "x double", "result": "double", "name": "mine", **given}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: A.percentile("v", 1.5), r"percentile: percentage=1.5 must be a number from 0 to 1"),
        (lambda: A.percentile("v", []), r"percentage=\[\]"),
        (lambda: A.percentile("v", "0.5"), r"percentage='0.5'"),
        (lambda: A.approx_percentile("v", 0.5, 0), r"accuracy=0 must be an integer from 1 to"),
        (lambda: A.approx_count_distinct("v", 0.0), r"rsd=0.0"),
        (lambda: A.approx_count_distinct("v", 1e-9), r"rsd=1e-09"),
        (lambda: A.approx_count_distinct("v", 1e-320), r"rsd=1e-320"),
        (lambda: A.approx_count_distinct("v", math.nan), r"rsd=nan"),
        (lambda: A.sum(None), r"sum: None is not the name of a column"),  # type: ignore[arg-type]
        (lambda: A.sum(["v"]), r"sum: \['v'\] is not the name of a column"),  # type: ignore[arg-type]
        (lambda: A.min_by("v", 0), r"min_by: 0 is not the name of a column"),  # type: ignore[arg-type]
        (lambda: A.first("v", "no"), r"first: ignorenulls='no' is neither True nor False"),  # type: ignore[arg-type]
        (lambda: A.aggregate(5, **options()), r"columns=5 must be"),  # type: ignore[arg-type]
        (lambda: A.aggregate(["v", 1], **options()), r"aggregate: 1 is not the name"),  # type: ignore[list-item]
        (lambda: A.aggregate("v", **options(result=5)), r"result=5 must be a type"),
        (lambda: A.aggregate("v", **options(partial=None)), r"partial=None must be a schema"),
        (lambda: A.aggregate("v", **options(commutative=[])), r"commutative=\[\] is neither"),
        (lambda: A.top_k("v", 0), r"top_k: k=0 must be an integer from 1"),
        (lambda: A.max_by("v", "w", 2.0), r"max_by: k=2.0"),  # type: ignore[arg-type]
        (lambda: A.aggregate("v", **options(lift=3)), r"lift=3 is not a function"),
        (lambda: A.aggregate("v", **options(name="")), r"name=''"),
    ],
)
def test_options_that_cannot_be(make: Callable[[], A.Aggregate], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (A.median("s"), r"'r' = median\(s\) needs numbers, not string; cast the column"),
        (A.var_samp("d"), r"takes decimals of type decimal128, with up to 38 digits, not decimal256"),
        (A.sum("d"), r"takes decimals of type decimal128, with up to 38 digits, not decimal256"),
        (A.stddev("t"), "needs numbers, not timestamp"),
        (A.approx_percentile("s", 0.5), "needs numbers, dates or times, not string"),
        (A.max_by("s", "l"), "cannot order values of type list"),
        (A.top_k("l", 2), "cannot order values of type list"),
        (A.count_distinct("s", "l"), "cannot compare values of type list<item: int64>"),
        (A.approx_count_distinct("l"), "cannot compare values"),
        (A.collect_set("l"), "cannot compare values"),
        (A.first("nowhere"), r"names a column that does not exist: 'nowhere'; the columns are s, d, t, l"),
        (A.max_by("s", "nowhere"), r"'nowhere'"),
        (A.aggregate("s", **options(partial="x blob")), "unknown type 'blob'"),
        (A.aggregate("s", **options(result="blob")), "unknown type 'blob'"),
    ],
)
def test_columns_that_cannot_serve(aggregate: A.Aggregate, said: str) -> None:
    schema = pa.schema([("s", pa.string()), ("d", pa.decimal256(50, 2)), ("t", TIME), ("l", pa.list_(pa.int64()))])
    with pytest.raises(SchemaError, match=said):
        bind("r", aggregate, schema, "t")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (options(lift=lambda v: v.nowhere), "mine: lift: AttributeError"),
        (options(lift=lambda v: [v, v]), "mine: lift: ValueError: returned 2 arrays, but 1 are needed"),
        (options(combine=lambda a, b: a[0].slice(1)), "mine: combine: ValueError: returned arrays of"),
        (options(lower=lambda v: v.cast(pa.string()).cast(pa.bool_())), "mine: lower: ArrowInvalid"),
    ],
)
def test_functions_that_fail_are_named(wrong: dict[str, Any], said: str) -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.float64())])
    layout = Layout([bind("r", A.aggregate("v", **wrong), schema)])
    with pytest.raises(ApplyError, match=said):
        lowered(layout, lifted(layout, [{"k": "a", "v": 1.5}, {"k": "a", "v": 2.5}], schema))
