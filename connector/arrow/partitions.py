"""Rows by partition: the transforms of a spec over Arrow columns, and which rows make the same tuple.

The rule kept: a row goes where `seamark.metaserver.iceberg.types.transforms` says that its values go, which is where
Java's writers put it. Numbers and strings are computed a column at a time; what is left, wide decimals and the buckets
of decimals, by that very function, once for each distinct value. Values are in the form of `expressions.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.casting import UNKNOWN, Unwritable
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.types.murmur3 import murmur3
from seamark.metaserver.iceberg.types.schema import Schema, StructType
from seamark.metaserver.iceberg.types.transforms import (
    IDENTITY,
    UNITS_PER_DAY,
    VOID,
    function,
    name_of,
    result_type,
    width_of,
)
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import FLOATS, decimal_scale, encode_json
from seamark.metaserver.index.keys.arrow_keys import keys_of
from seamark.metaserver.index.keys.keys import Keys, has_codes, mask_of

Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Partition = tuple[Any, ...]
"""One value for each field of the spec; None for null."""

_BIAS = np.uint64(1 << 63)
_LONG_VALUE_BYTES = 4096
"""Strings beyond are hashed one by one: a column's hashing takes a turn for every four bytes of its longest."""
_CODES_MAX = 2**62
_NARROW = 2**15
"""Numbers of 16 bits are sorted by their digits, which takes a tenth of the time."""
_EXACTLY = Context(prec=100)


class Values(NamedTuple):
    """A column by its distinct values: row r has `values[codes[r]]`. int64[rows]; one of the values may be None."""

    codes: Longs
    values: list[Any]


@dataclass(frozen=True)
class PartitionTerm:
    """A transform of a column. `places` leads to the column through the structs of a batch."""

    transform: str
    kind: str
    places: tuple[int, ...]

    def of(self, rows: pa.RecordBatch | pa.Table) -> Values:
        return transformed(self.transform, self.kind, column_at(rows, self.places))

    @property
    def result(self) -> str:
        """Type of its values."""
        return result_type(self.transform, self.kind)


def term_of(transform: str, sources: Sequence[int], schema: Schema, what: str) -> PartitionTerm:
    """Of a column of the table's schema; batches are such as `casting.conform` makes. Unwritable naming `what`."""
    column = schema.column(sources[0]) if len(sources) == 1 else None
    if transform == VOID:
        return PartitionTerm(VOID, column.type if column is not None and isinstance(column.type, str) else "int", ())
    if column is None or not isinstance(column.type, str):
        raise Unwritable(f"{what} is of columns {list(sources)}, which are not one column of a primitive type")
    try:
        function(transform, column.type)
    except BadRequest as error:
        raise Unwritable(f"{what} cannot be written: {error.message}") from None
    return PartitionTerm(transform, column.type, places_of(column.id, schema))


def places_of(column_id: int, schema: Schema) -> tuple[int, ...]:
    """Numbers of the fields that lead to a column, in batches of the table's Arrow schema."""
    path = [column_id]
    while (parent := schema.index.by_id[path[0]].parent) is not None:
        path.insert(0, parent)
    fields, places = schema.fields, []
    for one in path:
        written = [field for field in fields if field.type != UNKNOWN]
        place, field = next((place, field) for place, field in enumerate(written) if field.id == one)
        places.append(place)
        fields = field.type.fields if isinstance(field.type, StructType) else ()
    return tuple(places)


def column_at(rows: pa.RecordBatch | pa.Table, places: tuple[int, ...]) -> pa.Array | pa.ChunkedArray:
    """Null where a struct on the way is; for no places at all nulls."""
    if not places:
        return pa.nulls(rows.num_rows)
    column = rows.column(places[0])
    return pc.struct_field(column, list(places[1:])) if len(places) > 1 else column


class Partitioner:
    """Of one spec and schema. Unwritable where files cannot be written by the spec."""

    def __init__(self, spec: PartitionSpec, schema: Schema) -> None:
        self.names = [field.name for field in spec.fields]
        self.terms = [
            term_of(field.transform, field.sources, schema, f"Partition field {field.name}") for field in spec.fields
        ]

    def split(self, batch: pa.RecordBatch) -> list[tuple[Partition, Longs | None]]:
        """The partitions of a batch's rows, and which rows are in each, ascending; None for all of them."""
        if not batch.num_rows:
            return []
        columns = [term.of(batch) for term in self.terms if term.transform != VOID]
        if all(len(column.values) == 1 for column in columns):
            return [(self._tuple([column.values[0] for column in columns]), None)]
        codes = _combined(columns)
        if codes.max() < _NARROW:
            codes = codes.astype(np.int16)
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=codes[order[0]] - 1))
        groups = np.split(order, starts[1:])
        return [(self._tuple([column.values[column.codes[rows[0]]] for column in columns]), rows) for rows in groups]

    def _tuple(self, values: Sequence[Any]) -> Partition:
        left = iter(values)
        return tuple(None if term.transform == VOID else next(left) for term in self.terms)

    def json(self, partition: Partition) -> list[object]:
        """As a ContentFile of the REST standard has it."""
        return [encode_json(term.result, value) for term, value in zip(self.terms, partition, strict=True)]


def _combined(columns: Sequence[Values]) -> Longs:
    """int64[rows]: one number for each combination of values."""
    codes, count = columns[0].codes, len(columns[0].values)
    for column in columns[1:]:
        if count * len(column.values) > _CODES_MAX:
            distinct, codes = np.unique(codes, return_inverse=True)
            count = len(distinct)
        codes, count = codes * len(column.values) + column.codes, count * len(column.values)
    return codes


def transformed(transform: str, kind: str, column: pa.Array | pa.ChunkedArray) -> Values:
    """What a known transform makes of a column of the table's type. ValueError where it does not hold such values."""
    name = name_of(transform)
    if name == VOID or pa.types.is_null(column.type):
        return Values(np.zeros(len(column), dtype=np.int64), [None])
    base = base_name(kind)
    if name == "truncate" and base in ("string", "binary"):
        cut = pc.utf8_slice_codeunits if base == "string" else pc.binary_slice
        return _by_dictionary(IDENTITY, kind, cut(column, 0, width_of(transform)))
    if not has_codes(kind):
        if name == "bucket" and base != "decimal":
            return _bucket_of_bytes(keys_of(column, kind), width_of(transform))
        return _by_dictionary(transform, kind, column)
    keys = keys_of(column, kind)
    if base in FLOATS:
        return _floats(keys)
    if name == "bucket" and base == "decimal":
        apply = function(transform, kind)
        return _mapped(_distinct(_numbers(keys), keys), apply)
    found = _distinct(_VECTORISED[name](_numbers(keys), transform, kind), keys)
    return (
        Values(found.codes, [None if one is None else bool(one) for one in found.values])
        if base == "boolean"
        else found
    )


def _numbers(keys: Keys) -> Longs:
    assert keys.codes is not None
    return keys.codes.view(np.int64) if keys.kind == "boolean" else (keys.codes ^ _BIAS).view(np.int64)


def _distinct(numbers: Longs, keys: Keys) -> Values:
    """`numbers` are those of the keys; a null's is of no meaning."""
    valid = keys.valid
    if valid is None:
        distinct, codes = np.unique(numbers, return_inverse=True)
        return Values(codes, distinct.tolist())
    there = mask_of(valid, keys.rows)
    distinct, places = np.unique(numbers[there], return_inverse=True)
    codes = np.full(keys.rows, len(distinct), dtype=np.int64)
    codes[there] = places
    return Values(codes, [*distinct.tolist(), *([] if there.all() else [None])])


def _floats(keys: Keys) -> Values:
    """By bits: -0.0 is not 0.0, and all NaN are one."""
    assert keys.codes is not None
    codes = keys.codes if keys.nan is None else np.where(mask_of(keys.nan, keys.rows), np.uint64(2**64 - 1), keys.codes)
    found = _distinct((codes ^ _BIAS).view(np.int64), keys)
    return Values(found.codes, [None if one is None else _double(one + (1 << 63)) for one in found.values])


def _double(code: int) -> float:
    if code == 2**64 - 1:
        return float("nan")
    bits = code ^ (1 << 63) if code >> 63 else code ^ (2**64 - 1)
    return float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])


def _mapped(found: Values, apply: Callable[[Any], Any]) -> Values:
    """With what `apply` makes of each distinct value, of which several may become one."""
    places: dict[Any, int] = {}
    becomes = [places.setdefault(None if one is None else apply(one), len(places)) for one in found.values]
    return Values(np.array(becomes, dtype=np.int64)[found.codes], list(places))


def _by_dictionary(transform: str, kind: str, column: pa.Array | pa.ChunkedArray) -> Values:
    """Of a type whose values are bytes, or wide decimals."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        return Values(np.zeros(0, dtype=np.int64), [])
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    found = array.dictionary_encode()
    values = found.dictionary.to_pylist()
    if base_name(kind) == "decimal":
        scale = decimal_scale(kind)
        values = [int(one.scaleb(scale, _EXACTLY)) for one in values]
    codes = found.indices.fill_null(len(values)).to_numpy(zero_copy_only=False).astype(np.int64)
    distinct = Values(codes, [*values, *([None] if found.null_count else [])])
    return distinct if transform == IDENTITY else _mapped(distinct, function(transform, kind))


# Numbers, a column at a time


def _identity(numbers: Longs, _transform: str, _kind: str) -> Longs:
    return numbers


def _truncate(numbers: Longs, transform: str, kind: str) -> Longs:
    made = numbers - numbers % width_of(transform)
    return made.astype(np.int32).astype(np.int64) if kind == "int" else made


def _bucket(numbers: Longs, transform: str, kind: str) -> Longs:
    hashed = numbers // 1000 if kind.endswith("_ns") else numbers
    low, high = hashed.view(np.uint64).astype(np.uint32), (hashed.view(np.uint64) >> np.uint64(32)).astype(np.uint32)
    state = _mixed(_mixed(np.zeros(len(low), dtype=np.uint32), low), high)
    return _bucket_of(_finished(state ^ np.uint32(8)), width_of(transform))


def _days(numbers: Longs, kind: str) -> Longs:
    return numbers // UNITS_PER_DAY[kind]


def _day(numbers: Longs, _transform: str, kind: str) -> Longs:
    return _days(numbers, kind)


def _hour(numbers: Longs, _transform: str, kind: str) -> Longs:
    hours = numbers // (UNITS_PER_DAY[kind] // 24)
    return hours.astype(np.int32).astype(np.int64)  # as Java cuts it


def _month(numbers: Longs, _transform: str, kind: str) -> Longs:
    return _days(numbers, kind).view("datetime64[D]").astype("datetime64[M]").view(np.int64)


def _year(numbers: Longs, _transform: str, kind: str) -> Longs:
    return _days(numbers, kind).view("datetime64[D]").astype("datetime64[Y]").view(np.int64)


_VECTORISED: dict[str, Callable[[Longs, str, str], Longs]] = {
    IDENTITY: _identity,
    "truncate": _truncate,
    "bucket": _bucket,
    "day": _day,
    "hour": _hour,
    "month": _month,
    "year": _year,
}


# Murmur3 (Iceberg spec, appendix B), a column at a time


def _bucket_of(hashes: Words, width: int) -> Longs:
    return (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % width


def _scrambled(block: Words) -> Words:
    block = block * np.uint32(0xCC9E2D51)
    return (block << np.uint32(15) | block >> np.uint32(17)) * np.uint32(0x1B873593)


def _mixed(state: Words, block: Words) -> Words:
    state = state ^ _scrambled(block)
    return (state << np.uint32(13) | state >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)


def _finished(state: Words) -> Words:
    state = (state ^ state >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    state = (state ^ state >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return state ^ state >> np.uint32(16)


def _bucket_of_bytes(keys: Keys, width: int) -> Values:
    assert keys.starts is not None
    assert keys.heap is not None
    return _distinct(_bucket_of(hashes_of(keys.starts, keys.heap), width), keys)


def hashes_of(starts: Longs, heap: npt.NDArray[np.uint8]) -> Words:
    """Murmur3 of the bytes of each row, uint32[rows]; row r's are heap[starts[r]:starts[r + 1]]."""
    lengths = np.diff(starts)
    state = np.zeros(len(lengths), dtype=np.uint32)
    padded = np.concatenate([heap, np.zeros(4, dtype=np.uint8)])
    long = np.flatnonzero(lengths > _LONG_VALUE_BYTES)
    rows, at = np.flatnonzero((lengths >= 4) & (lengths <= _LONG_VALUE_BYTES)), 0
    while len(rows):
        state[rows] = _mixed(state[rows], _words(padded, starts[rows] + at))
        at += 4
        rows = rows[lengths[rows] >= at + 4]
    tail = np.flatnonzero(lengths % 4)
    left = (lengths[tail] % 4).astype(np.uint32)
    last = _words(padded, starts[tail + 1] - left) & ((np.uint32(1) << left * np.uint32(8)) - np.uint32(1))
    state[tail] ^= _scrambled(last)
    hashes = _finished(state ^ lengths.astype(np.uint32))
    for row in long.tolist():
        hashes[row] = murmur3(heap[starts[row] : starts[row + 1]].tobytes())
    return hashes


def _words(heap: npt.NDArray[np.uint8], at: Longs) -> Words:
    """The four bytes at each place, little-endian."""
    found = heap[at].astype(np.uint32)
    for byte in (1, 2, 3):
        found |= heap[at + byte].astype(np.uint32) << np.uint32(8 * byte)
    return found
