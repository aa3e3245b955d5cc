"""The codecs of a block: every type, every value, bit by bit; and what is said of a body that does not read."""

from __future__ import annotations

import itertools
import zlib
from decimal import Context, Decimal
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.core.ingest.encoding import About, decode, encode
from aion.core.query.plan import make_plan
from aion.errors import CorruptBlock, FormatError, SchemaError
from aion.execute.panes.applying import dropped_events
from aion.execute.panes.contents import NO_WINDOW
from state_backends.format import block as block_module
from state_backends.format.block import HEADER_BYTES, Block, BlockKind, Codec, Compression, check, parse

CODECS = list(itertools.product(Codec, Compression))


def block_of(batch: pa.RecordBatch, codec: Codec, compression: Compression = Compression.NONE) -> Block:
    return encode(batch, About(BlockKind.EVENTS, -5, batch.num_rows, -3, 2**62), compression=compression, codec=codec)


def round_trip(batch: pa.RecordBatch, codec: Codec, compression: Compression = Compression.NONE) -> pa.RecordBatch:
    return decode(parse(block_of(batch, codec, compression).stored), batch.schema)


def text_of(column: pa.Array) -> bytes:
    return bytes(block_of(pa.record_batch([column], ["x"]), Codec.JSON).stored[HEADER_BYTES:])


# -- all types, random values -----------------------------------------------------------------------------


def integers(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.sampled_from([low, high, 0, min(2**53 + 1, high)]) | st.integers(low, high)


def ints_as(type_: pa.DataType) -> Any:
    bits = type_.bit_width
    return lambda values: pa.array(values, pa.int32() if bits == 32 else pa.int64()).view(type_)


def floats_as(type_: pa.DataType) -> Any:
    uint = {16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}[type_.bit_width]
    return lambda values: pa.array(values, uint).view(type_)


def array_as(type_: pa.DataType) -> Any:
    return lambda values: pa.array(values, type_)


# Bytes that are no UTF-8: a lone surrogate, a cut sequence, an overlong one, none at all of it.
BROKEN = [b"\xed\xa0\x80", b"caf\xc3", b"\xc0\x80", b"\xff\n\x00"]
TEXTS = st.sampled_from(["", "\n", '"', "\\", "\0", "\u2028", "\x7f", '{"base64": "AA=="}', "NaN", "😀"]) | st.text()
TIMES = [
    pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us"), pa.duration("us"), pa.timestamp("us"),
    pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns"), pa.timestamp("s"),
]  # fmt: skip
BITS = {16: [0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x8000], 32: [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x80000000]}
BITS[64] = [0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, 0xFFF8000000000001, 0x7FF0000000000001, 1 << 63, 1]


def decimals(precision: int) -> st.SearchStrategy[int]:
    limit = 10**precision - 1
    return st.sampled_from([0, limit, -limit]) | st.integers(-limit, limit)


def scaled(type_: Any) -> Any:
    def build(values: list[int | None]) -> pa.Array:
        return pa.array([None if v is None else Decimal(v).scaleb(-type_.scale, CONTEXT) for v in values], type_)

    return build


CONTEXT = Context(prec=100)

# (type, values, how an array is made of values and None)
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any], Any]] = [
    *((t, integers(t.bit_width), array_as(t)) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((t, integers(t.bit_width, signed=False), array_as(t)) for t in (pa.uint8(), pa.uint32(), pa.uint64())),
    *(
        (t, st.sampled_from(BITS[t.bit_width]) | integers(t.bit_width, signed=False), floats_as(t))
        for t in (pa.float16(), pa.float32(), pa.float64())
    ),
    *((t, integers(t.bit_width), ints_as(t)) for t in TIMES),
    *(
        (t, decimals(t.precision), scaled(t))
        for t in (pa.decimal128(38, 10), pa.decimal128(5, -3), pa.decimal256(76, 76), pa.decimal128(1, 0))
    ),
    *((t, TEXTS, array_as(t)) for t in (pa.string(), pa.large_string(), pa.string_view())),
    (
        pa.string(),
        TEXTS.map(str.encode) | st.sampled_from(BROKEN),
        lambda values: pa.array(values, pa.binary()).cast(pa.string(), safe=False),
    ),
    *((t, st.binary(), array_as(t)) for t in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(3), st.binary(min_size=3, max_size=3), array_as(pa.binary(3))),
    (pa.bool_(), st.booleans(), array_as(pa.bool_())),
    (pa.null(), st.none(), array_as(pa.null())),
]
TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["list", "large_list", "fixed"]), inner),
        st.tuples(st.just("map"), inner, inner),
        st.tuples(st.just("struct"), st.lists(inner, max_size=3)),
    ),
    max_leaves=4,
)


@st.composite
def arrays(draw: st.DrawFn, type_: Any, n: int, *, nulls: bool = True) -> pa.Array:
    """An array of ``n``, cut out of a longer one, so that every offset is put to the test."""
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    whole = draw(_whole(type_, before + n + after, nulls))
    return whole.slice(before, n)


@st.composite
def _whole(draw: st.DrawFn, type_: Any, n: int, nulls: bool) -> pa.Array:
    there = draw(st.lists(st.booleans(), min_size=n, max_size=n)) if nulls else [True] * n
    mask = pa.array([not t for t in there], pa.bool_())
    if isinstance(type_[0], pa.DataType):
        _, values, build = type_
        return build([draw(values) if t else None for t in there])
    if type_[0] == "struct":
        children = [draw(arrays(t, n)) for t in type_[1]]
        # Two fields of one name are no error in Arrow.
        names = draw(
            st.lists(st.sampled_from(["a", "b", "a#1", "ä\n"]), min_size=len(children), max_size=len(children))
        )
        fields = [pa.field(name, c.type) for name, c in zip(names, children, strict=True)]
        if not children:
            return pa.array([{} if t else None for t in there], pa.struct([]))
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    if type_[0] == "fixed":
        values = draw(arrays(type_[1], 2 * n))
        return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(values.type, 2), mask=mask)
    lengths = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    ends = [0, *itertools.accumulate(lengths)]
    # A null list may have items under it.
    if type_[0] == "map":
        keys, items = draw(arrays(type_[1], ends[-1], nulls=False)), draw(arrays(type_[2], ends[-1]))
        if keys.null_count:  # of the null type
            keys = pa.nulls(ends[-1], pa.int8()).fill_null(0)
        return pa.MapArray.from_arrays(pa.array(ends, pa.int32()), keys, items, mask=mask)
    values = draw(arrays(type_[1], ends[-1]))
    if type_[0] == "list":
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, mask=mask)
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values, mask=mask)


def exact(array: pa.Array) -> list[Any]:
    """The values such that == compares bits: NaN is itself, -0.0 is not 0.0, times are what is stored."""
    type_ = array.type
    valid = array.is_valid().to_pylist()
    if pa.types.is_struct(type_):
        columns = [exact(c) for c in array.flatten()]
        return [tuple(c[i] for c in columns) if there else None for i, there in enumerate(valid)]
    if pa.types.is_map(type_) or pa.types.is_list(type_) or pa.types.is_large_list(type_):
        rows = []
        for i, there in enumerate(valid):
            a, b = array.offsets[i].as_py(), array.offsets[i + 1].as_py()
            columns = [array.keys, array.items] if pa.types.is_map(type_) else [array.values]
            rows.append([exact(c.slice(a, b - a)) for c in columns] if there else None)
        return rows
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        at = [(array.offset + i) * size for i in range(len(array))]
        return [exact(array.values.slice(a, size)) if there else None for a, there in zip(at, valid, strict=True)]
    if pa.types.is_floating(type_):
        return array.view({16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}[type_.bit_width]).to_pylist()
    if pa.types.is_temporal(type_):
        return array.view(pa.int32() if type_.bit_width == 32 else pa.int64()).to_pylist()
    if pa.types.is_string(type_):
        return array.cast(pa.binary()).to_pylist()
    return array.to_pylist()


@given(st.data())
@pytest.mark.parametrize("codec", Codec)
def test_every_type_and_every_value_comes_back_as_it_was(codec: Codec, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 4))
    columns = [data.draw(arrays(t, n)) for t in data.draw(st.lists(TYPES, min_size=1, max_size=3))]
    compression = data.draw(st.sampled_from(Compression))
    names = data.draw(st.lists(st.text(), min_size=len(columns), max_size=len(columns)))
    batch = pa.record_batch(columns, names)
    back = round_trip(batch, codec, compression)
    assert back.schema.equals(batch.schema, check_metadata=True)
    back.validate()  # not in full: strings that are no UTF-8, and dates that are no whole days, are kept as well
    assert [exact(c) for c in back.columns] == [exact(c) for c in batch.columns]


@pytest.mark.parametrize(("codec", "compression"), CODECS)
@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_blocks_of_any_number_of_rows(codec: Codec, compression: Compression, rows: int) -> None:
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64()), "s": pa.array(["ä\n"] * rows, pa.string())})
    block = block_of(batch, codec, compression)
    header = parse(block.stored).header
    assert (header.codec, header.compression, header.rows) == (codec, compression, rows)
    assert decode(block, batch.schema).equals(batch)
    if rows == 3000 and compression is not Compression.NONE:
        assert header.body_bytes < header.raw_bytes * 0.6


@pytest.mark.parametrize("codec", Codec)
def test_rows_without_columns_are_counted(codec: Codec) -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert round_trip(batch, codec).num_rows == 2


@pytest.mark.parametrize("codec", Codec)
def test_schemas_keep_metadata_and_what_may_be_null(codec: Codec) -> None:
    inner = pa.struct([pa.field("a", pa.int8(), False), pa.field("b", pa.list_(pa.field("item", pa.int8(), False)))])
    schema = pa.schema([pa.field("x", inner, metadata={"k": "v"})], metadata={"m": "n"})
    batch = pa.record_batch([pa.array([{"a": 1, "b": [1]}, None], inner)], schema=schema)
    assert round_trip(batch, codec).schema.equals(schema, check_metadata=True)
    assert round_trip(batch, codec).equals(batch)


# -- the text ---------------------------------------------------------------------------------------------


def test_json_is_one_object_per_line_whatever_is_in_the_strings() -> None:
    batch = pa.record_batch({"n": [2**53 + 1, None, -1], "s": ['a\n{"n":1}', '"\r\n', "\u2028\0"]})
    lines = bytes(block_of(batch, Codec.JSON).stored[HEADER_BYTES:]).decode().split("\n")
    assert lines.pop() == ""
    assert [orjson.loads(line) for line in lines] == batch.to_pylist()
    assert lines[0] == '{"n":9007199254740993,"s":"a\\n{\\"n\\":1}"}'


@pytest.mark.parametrize(
    ("column", "spelled"),
    [
        (pa.array([1.5, float("nan"), float("inf"), float("-inf"), -0.0]), '1.5 "NaN" "Infinity" "-Infinity" -0.0'),
        (floats_as(pa.float64())([0xFFF8 << 48, 1]), '"NaN:fff8000000000000" 5e-324'),
        (pa.array([Decimal("1.10"), Decimal("-0.05")]), '"1.10" "-0.05"'),
        (pa.array([b"\x00\xff"]), '"AP8="'),
        (pa.array(["é", '"']), '"é" "\\""'),
        (pa.array([b"caf\xc3", b"ok"]).cast(pa.string(), safe=False), '{"base64":"Y2Fmww=="} "ok"'),
        (pa.array([1_500_000], pa.timestamp("us", "UTC")), "1500000"),
        (pa.array([-1], pa.date32()), "-1"),
        (pa.array([[("a", 1), ("a", None)]], pa.map_(pa.string(), pa.int8())), '[["a",1],["a",null]]'),
        (pa.array([[], None, [None]], pa.list_(pa.int8())), "[] null [null]"),
        (pa.array([{"a": 1, "b": None}, None]), '{"a":1,"b":null} null'),
    ],
)
def test_how_json_spells_what_it_has_no_words_for(column: pa.Array, spelled: str) -> None:
    assert text_of(column).decode() == "".join(f'{{"x":{value}}}\n' for value in spelled.split())


@pytest.mark.parametrize(
    "column",
    [pa.array(["a"]).dictionary_encode(), pa.array([(1, 2, 3)], pa.month_day_nano_interval())],
)
def test_what_json_cannot_carry_is_said_with_its_type(column: pa.Array) -> None:
    with pytest.raises(SchemaError, match=r"json.*(dictionary|interval).*use codec arrow"):
        text_of(column)


# -- damage -----------------------------------------------------------------------------------------------

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.struct([("d", pa.decimal128(5, 2)), ("b", pa.list_(pa.binary()))]))])
GOOD = '{"n":1,"s":{"d":"1.00","b":["AA=="]}}'


def raw_block(body: bytes, codec: Codec, compression: Compression = Compression.NONE, rows: int = 1) -> Block:
    """A block around any body, with the checksum that fits: what a bug, and not a disk, would leave behind."""
    base = block_of(pa.record_batch({"x": [0]}), codec).header
    header = base._replace(
        compression=compression, rows=rows, raw_bytes=len(body), body_bytes=len(body), crc=zlib.crc32(body)
    )
    return parse(block_module._pack(header) + body)


@pytest.mark.parametrize(
    "body",
    [
        "", "{", "null", "1", "[]", "{}", "\0", f"{GOOD}\n{GOOD}", f"{GOOD},{GOOD}", f"{GOOD}x",
        '{"n":1}', '{"n":1,"s":null,"t":2}', '{"n":"1","s":null}', '{"n":18446744073709551615,"s":null}',
        '{"n":1,"s":[]}', '{"n":1,"s":{"d":"1.00"}}', '{"n":1,"s":{"d":"x","b":null}}',
        '{"n":1,"s":{"d":"1.001","b":null}}',
        '{"n":1,"s":{"d":"1.00","b":1}}', '{"n":1,"s":{"d":"1.00","b":["A"]}}', '{"n":1,"s":{"d":"1.00","b":["Ä"]}}',
        '{"n":true,"s":null}', "\ud800",
    ],
)  # fmt: skip
def test_a_body_that_is_not_json_of_the_schema_is_corrupt_and_named(body: str) -> None:
    assert decode(raw_block(GOOD.encode(), Codec.JSON), SCHEMA).num_rows == 1
    with pytest.raises(CorruptBlock, match=r"^block 7: "):
        decode(raw_block(body.encode("utf-8", "surrogatepass"), Codec.JSON), SCHEMA, "block 7")


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
@pytest.mark.parametrize("codec", Codec)
def test_a_body_that_does_not_decompress_is_corrupt_and_named(codec: Codec, compression: Compression) -> None:
    with pytest.raises(CorruptBlock, match=r"^block 7: "):
        decode(raw_block(b"no frame at all", codec, compression), SCHEMA, "block 7")


def test_a_body_that_is_not_arrow_is_corrupt_and_named() -> None:
    for body in (b"", b"\xff\xff\xff\xff\x10\0\0\0junkjunkjunkjunk", b"x" * 100):
        with pytest.raises(CorruptBlock, match=r"^block 7: "):
            decode(raw_block(body, Codec.ARROW), SCHEMA, "block 7")


@pytest.mark.parametrize(("codec", "compression"), CODECS)
def test_every_flipped_bit_and_every_truncation_is_found(codec: Codec, compression: Compression) -> None:
    batch = pa.record_batch({"x": [1, 2, 3], "s": ["a", None, "ö"]})
    data = bytes(block_of(batch, codec, compression).stored)
    for position, bit in itertools.product(range(len(data)), range(8)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        with pytest.raises(CorruptBlock, match=r"^block 7: "):
            check(parse(bytes(damaged), "block 7"), "block 7")
    for length in range(len(data)):
        with pytest.raises(CorruptBlock, match=r"^block 7: "):
            parse(data[:length], "block 7")


def test_a_codec_of_the_future_is_a_format_error_and_not_damage() -> None:
    header = block_of(pa.record_batch({"x": [1]}), Codec.ARROW).header
    for change in ({"codec": 9}, {"kind": 9}, {"compression": 9}):
        data = block_module._pack(header._replace(body_bytes=0, **change))
        with pytest.raises(FormatError, match=r"^block 7: 9 is not a valid"):
            parse(data, "block 7")


def test_a_dropped_event_whose_text_is_no_utf8_is_told_escaped() -> None:
    """Spark's strings may hold any bytes; one late event of that kind must not end the query."""
    schema = pa.schema([("ts", pa.timestamp("us")), ("s", pa.string()), ("n", pa.int64())])
    plan = make_plan(
        schema,
        key=None,
        time="ts",
        windows=aion.Tumbling("1 second"),
        aggregates=None,
        apply=lambda key, window, events: {},
        outputs="n bigint",
    )
    texts = pa.array([b"caf\xc3", b"\xc3\xa9", None], pa.binary()).cast(pa.string(), safe=False)
    batch = pa.record_batch(
        [pa.array([0, 1, 2**62]).cast(pa.timestamp("us")), texts, pa.array([1, 2, 3])], schema=schema
    )
    rows = dropped_events(plan, batch, np.arange(3), NO_WINDOW.take(np.zeros(3, np.int64)), None, "no time")
    events = [orjson.loads(text) for text in rows.column("event").to_pylist()]
    assert [(e["s"], e["n"]) for e in events] == [("caf\\xc3", 1), ("é", 2), (None, 3)]
