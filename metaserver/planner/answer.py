"""A finished plan as JSON: `file-scan-tasks` and `delete-files` (REST spec, schema `ScanTasks`).

Written as text, file by file, from the columns of the blocks: what many files share (the residual, the partition, the
format) is written once and joined in, and no object is built per file. Answers come in pieces of a few hundred files,
so that whoever sends them can let others have their turn in between.

What clients insist on, beyond the specification: Java's fails on its executors without `residual-filter`, and refuses
`delete-files` without tasks. PyIceberg 0.12 has no parser for nulls in `partition`, and takes strings that stand for
dates there for strings (`Dialect`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metaserver.errors import Corrupt, NotAcceptable
from metaserver.iceberg.expression_json import expression_json
from metaserver.iceberg.expressions import Expression, Value
from metaserver.iceberg.metadata import TableMetadata
from metaserver.iceberg.transforms import canonical, result_type
from metaserver.iceberg.types import base_name
from metaserver.iceberg.values import FLOATS, INTS, LONGS, MICROS_PER_DAY, NANOS_PER_MICRO, encode, encode_json
from metaserver.index.block import Block
from metaserver.index.packing import MISSING, NONE, Column, Form
from metaserver.planner._answer import CHOICE, CONSTANT, HEX, ITEMS, NUMBER, TEXT, write
from metaserver.planner.scan import Scan
from metaserver.wire import encode_json as to_json

FILES_PER_PIECE = 125
"""About a quarter of a millisecond of work."""
STATS_PER_PIECE = 500
"""Columns times files, where statistics are asked for."""
_FRAGMENTS_MAX = 10_000
_FEW = 16
_CONTENTS = {MISSING: b"data", 0: b"data", 1: b"position-deletes", 2: b"equality-deletes"}
"""Version 1 does not say."""
_DATA_NUMBERS = ("first_row_id",)
_DELETE_NUMBERS = ("content_offset", "content_size_in_bytes")
_COUNTS = {
    "column-sizes": "column_sizes",
    "value-counts": "value_counts",
    "null-value-counts": "null_value_counts",
    "nan-value-counts": "nan_value_counts",
}
_DTYPES = {
    "boolean": "<i1",
    **dict.fromkeys(INTS, "<i4"),
    **dict.fromkeys(LONGS, "<i8"),
    "float": "<f4",
    "double": "<f8",
}
"""Single-value serialisation of what has a fixed size (spec, appendix D)."""
_INT_LIKE = frozenset({"date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Dialect:
    """How partition values are written.

    PyIceberg puts them unchanged into columns that a data file lacks (identity partitions, spec "Column Projection"),
    so dates and times have to be the numbers it would read from a manifest. A partition it would misread (a null, or
    binary) is left out of the answer: then it has none to put there, and fails where it would need one.
    """

    numbers_for_times: bool = False
    unreadable: frozenset[str] = frozenset()
    """Types, and "null"."""
    comes_back: bool = True
    """Asks again after a plan that was not ready."""


STANDARD = Dialect()
PYICEBERG = Dialect(numbers_for_times=True, unreadable=frozenset({"null", "binary", "fixed"}), comes_back=False)


def dialect_of(user_agent: str) -> Dialect:
    return PYICEBERG if user_agent.startswith("PyIceberg/") else STANDARD


class Answer:
    """The tasks of one answer. `tasks` is to be exhausted before `delete_files` is asked."""

    def __init__(self, scan: Scan, *, stats: Sequence[int] = (), dialect: Dialect = STANDARD) -> None:
        """`stats` are ids of columns whose statistics the client asked for."""
        self._scan = scan
        self._partitions = _Partitions(scan.metadata, dialect)
        self._stats = tuple(sorted(set(stats)))
        self._residuals: dict[int, tuple[Expression, bytes]] = {}
        self._deletes: dict[int, int] = {}

    def tasks(self, rows: Longs) -> Iterator[bytes]:
        """The items of `file-scan-tasks` for these rows of the view, ascending; pieces to be joined without anything.

        Corrupt, naming the manifest, for a file that cannot be answered. NotAcceptable for one that JSON cannot carry.
        """
        size = FILES_PER_PIECE if not self._stats else max(10, STATS_PER_PIECE // (1 + len(self._stats)))
        comma = b""
        for block, first, local in _runs(self._scan.view.locate, rows):
            files = _Files(block, self._partitions, self._stats, self._residual)
            for start in range(0, len(local), size):
                part = local[start : start + size]
                references = [self._references(found) for found in self._scan.deletes_of(part + first)]
                yield comma + files.write(part, references)
                comma = b","

    def delete_files(self) -> Iterator[bytes]:
        """The items of `delete-files`, those that the tasks so far refer to; pieces as above. Nothing for none."""
        comma = b""
        writers: dict[int, _Files] = {}
        for row in self._deletes:
            block, local = self._scan.view.locate_delete(row)
            files = writers.get(id(block))
            if files is None:
                files = writers[id(block)] = _Files(block, self._partitions)
            yield comma + files.write(np.array([local], dtype=np.int64))
            comma = b","

    def _references(self, found: Sequence[int]) -> bytes:
        if not found:
            return b""
        index = self._deletes
        places = ",".join([str(index.setdefault(one, len(index))) for one in found])
        return f',"delete-file-references":[{places}]'.encode()

    def _residual(self, block: Block, partition: tuple[Value | None, ...]) -> bytes:
        residual = self._scan.residual_in(block.spec_id, block.partition_fields, partition)
        # By identity: partitions share residuals, and a long list of values takes long to compare or to hash.
        known = self._residuals.get(id(residual))
        if known is None:
            if len(self._residuals) >= _FRAGMENTS_MAX:
                self._residuals.clear()
            known = self._residuals[id(residual)] = (residual, to_json(expression_json(residual)))
        return known[1]


def _runs(locate: Callable[[int], tuple[Block, int]], rows: Longs) -> Iterator[tuple[Block, int, Longs]]:
    """(block, the view's row of its first, rows within it), block by block."""
    start = 0
    while start < len(rows):
        row = int(rows[start])
        block, local = locate(row)
        first = row - local
        end = int(np.searchsorted(rows, first + block.rows))
        yield block, first, rows[start:end] - first
        start = end


class _Files:
    """Writes content files (REST spec, schemas `DataFile`, `PositionDeleteFile`, `EqualityDeleteFile`) of one block."""

    def __init__(
        self,
        block: Block,
        partitions: _Partitions,
        stats: tuple[int, ...] = (),
        residual: Callable[[Block, tuple[Value | None, ...]], bytes] | None = None,
    ) -> None:
        self._block = block
        self._is_data = block.content == 0
        self._shared = partitions.shared(block, residual)
        self._path = _text(block, "file_path")
        self._optional = tuple(self._optional_parts())
        self._stats = _Statistics(block, stats) if self._is_data and stats else None

    def write(self, rows: Longs, references: list[bytes] | None = None) -> bytes:
        """JSON objects, commas between them: scan tasks with `references`, without them the files alone.

        Corrupt, naming the manifest.
        """
        try:
            return self._written(rows, references)
        except (ValueError, KeyError) as error:
            raise Corrupt(f"The manifest {self._block.location} holds a file that makes no sense: {error}") from None

    def _written(self, rows: Longs, references: list[bytes] | None) -> bytes:
        block = self._block
        if self._path is None:
            raise ValueError("it has no path")
        shared = self._shared(rows)
        opening = b'{"spec-id":%d,"content":"' % block.spec_id
        parts: list[tuple[object, ...]] = [
            (CONSTANT, (b"" if references is None else b'{"data-file":') + opening),
            self._content(rows),
            (TEXT, b'","file-path":"', b'"', self._path),
            self._format(rows),
            (CHOICE, [partition for partition, _ in shared]),
            *self._optional,
        ]
        if self._stats is not None:
            parts.append((CHOICE, self._stats.write(rows)))
        parts.append((CONSTANT, b"}"))
        if references is not None:
            parts += [
                (CHOICE, references),
                (CONSTANT, b',"residual-filter":'),
                (CHOICE, [residual for _, residual in shared]),
                (CONSTANT, b"}"),
            ]
        return write(rows, tuple(parts), block.rows, b",")

    def _content(self, rows: Longs) -> tuple[object, ...]:
        column = self._block.long_column("content")
        if column is None:
            return CONSTANT, _CONTENTS[MISSING]
        if column.packed.width == 0 and column.packed.presence == NONE:
            return CONSTANT, _CONTENTS[column.packed.base]
        return CHOICE, [_CONTENTS[content] for content in column.longs()[rows].tolist()]

    def _format(self, rows: Longs) -> tuple[object, ...]:
        column = self._block.text_column("file_format")
        if column is None:
            raise ValueError("it has no format")
        if column.packed.width == 0:
            return CONSTANT, _format(column.packed.common)
        return CHOICE, [_format(column.key(row)) for row in rows.tolist()]

    def _optional_parts(self) -> Iterator[tuple[object, ...]]:
        block = self._block
        kind_of = _DATA_NUMBERS if self._is_data else _DELETE_NUMBERS
        for name in ("file_size_in_bytes", "record_count", "sort_order_id", *kind_of):
            if (column := block.long_column(name)) is not None:
                yield NUMBER, _key(name), _integers(block, column)
        for name in ("split_offsets",) if self._is_data else ("split_offsets", "equality_ids"):
            if (columns := block.list_columns(name)) is not None:
                yield ITEMS, _key(name) + b"[", b"]", *columns
        if (metadata := _text(block, "key_metadata")) is not None:
            yield HEX, _key("key_metadata") + b'"', b'"', metadata
        if not self._is_data and (path := _text(block, "referenced_data_file")) is not None:
            yield TEXT, _key("referenced_data_file") + b'"', b'"', path


def _key(name: str) -> bytes:
    return f',"{name.replace("_", "-")}":'.encode()


@lru_cache(maxsize=16)
def _format(name: object) -> bytes:
    if not isinstance(name, bytes):
        raise ValueError("it has no format")
    return b',"file-format":' + to_json(name.decode().lower())


def _text(block: Block, name: str) -> tuple[object, ...] | None:
    column = block.text_column(name)
    return None if column is None else _column(block, column)


def _column(block: Block, column: Column) -> tuple[object, ...]:
    """As `_answer.write` takes it. Valid as long as the block is held."""
    packed = column.packed
    places = _at(block, packed.lengths), packed.lengths_width, _at(block, packed.ends), _at(block, packed.tails)
    return packed.width, _at(block, packed.codes), _at(block, packed.presence), packed.common, *places


def _integers(block: Block, column: Column) -> tuple[object, ...]:
    """As `_column`."""
    packed = column.packed
    return packed.width, _at(block, packed.codes), _at(block, packed.presence), packed.base


def _at(block: Block, offset: int) -> int:
    return 0 if offset == NONE else block.address + offset


def _keys(block: Block, column: Column | None) -> Callable[[Longs], list[Any]]:
    """What tells the column's values apart, of many rows at once; of floats the bits, since 0.0 == -0.0."""
    if column is None:
        return lambda rows: [None] * len(rows)
    if column.packed.form == Form.STRINGS:
        # The prefix tells an empty string from none.
        parts = ((HEX, b"=", b"", _column(block, column)),)
        return lambda rows: write(rows, parts, block.rows, b",").split(b",")
    integers = column.packed.form == Form.INTEGERS
    numbers = cache(lambda: column.longs() if integers else column.doubles().view(np.int64))
    present = None if column.packed.presence == NONE else cache(column.present)

    def read(rows: Longs) -> list[Any]:
        if integers and len(rows) <= _FEW:  # not worth unpacking the column
            return [column.key(row) for row in rows.tolist()]
        if present is None:
            return list(numbers()[rows].tolist())
        return list(zip(numbers()[rows].tolist(), present()[rows].tolist(), strict=True))

    return read


Texts = Callable[[Longs], list[str | None]]
"""Reads many rows at once; None for a row that has nothing."""


class _Statistics:
    """Writes column statistics: counts as numbers, bounds as hex (REST spec, `CountMap` and `ValueMap`)."""

    def __init__(self, block: Block, columns: tuple[int, ...]) -> None:
        known = [column for column in columns if column in block.columns]
        self._maps: list[tuple[str, list[tuple[str, Texts]]]] = [
            (wire, [(str(column), _counts(block.count(name, column))) for column in known])
            for wire, name in _COUNTS.items()
        ]
        for side in ("lower", "upper"):
            bounds = [(str(column), _bounds(block, side, column)) for column in known]
            self._maps.append((f"{side}-bounds", [(key, read) for key, read in bounds if read is not None]))

    def write(self, rows: Longs) -> list[bytes]:
        """`,"value-counts":{…},…`, one a row; nothing for a map without keys."""
        written = [_written_map(name, columns, rows) for name, columns in self._maps if columns]
        return [text.encode() for text in map("".join, zip(*written, strict=True))] if written else [b""] * len(rows)


def _written_map(name: str, columns: list[tuple[str, Texts]], rows: Longs) -> list[str]:
    keys = [key for key, _ in columns]
    values = zip(*(read(rows) for _, read in columns), strict=True)
    return [_map(name, keys, texts) for texts in values]


def _map(name: str, keys: list[str], texts: tuple[str | None, ...]) -> str:
    there = [text for text in texts if text is not None]
    if not there:
        return ""
    if len(there) < len(keys):
        keys = [key for key, text in zip(keys, texts, strict=True) if text is not None]
    return f',"{name}":{{"keys":[{",".join(keys)}],"values":[{",".join(there)}]}}'


def _counts(array: Longs) -> Texts:
    return lambda rows: [None if count == MISSING else str(count) for count in array[rows].tolist()]


def _bounds(block: Block, side: str, column_id: int) -> Texts | None:
    """None where the block has no bounds of this column."""
    column, kind = block.bound_column(side, column_id), block.kind(column_id)
    if column is None or kind is None:
        return None
    dtype = _DTYPES.get(kind)
    if dtype is None and not kind.startswith("decimal"):
        parts = ((HEX, b"=", b"", _column(block, column)),)
        return lambda rows: [
            f'"{text[1:]}"' if text else None for text in write(rows, parts, block.rows, b",").decode().split(",")
        ]
    present = column.present()
    if dtype is None:
        return lambda rows: [_bound(block, side, column_id, kind, row) for row in rows.tolist()]
    numbers = (column.doubles() if kind in FLOATS else column.longs()).astype(dtype)
    size = 2 * numbers.itemsize

    def read(rows: Longs) -> list[str | None]:
        digits = numbers[rows].tobytes().hex().upper()
        there = present[rows].tolist()
        return [f'"{digits[at * size : (at + 1) * size]}"' if known else None for at, known in enumerate(there)]

    return read


def _bound(block: Block, side: str, column_id: int, kind: str, row: int) -> str | None:
    value = block.bound(side, column_id, row)
    return None if value is None else f'"{encode(kind, value).hex().upper()}"'


class _Field(NamedTuple):
    """A field of a table's partition spec."""

    position: int
    """In the block's tuples; -1 for one that is null in all of them."""
    stored: str
    """Its type in the block."""
    target: str
    """Its type in the answer."""
    readable: bool
    """By this client, where it is not null."""


class _Partitions:
    """Partition tuples as JSON, in the order and the types of the table's spec, which a manifest's may lag behind."""

    def __init__(self, metadata: TableMetadata, dialect: Dialect) -> None:
        self._metadata = metadata
        self._dialect = dialect
        self._texts: dict[tuple[str, str, Value], str] = {}
        self._known: dict[tuple[object, ...], dict[tuple[object, ...], tuple[bytes, bytes]]] = {}

    def shared(
        self, block: Block, residual: Callable[[Block, tuple[Value | None, ...]], bytes] | None
    ) -> Callable[[Longs], list[tuple[bytes, bytes]]]:
        """What the files of a partition share, of rows of the block: `,"partition":[…]`, and the residual.

        The first is empty where this client could not read it, the second where none is wanted.
        """
        fields = self._fields(block)
        known = self._known.setdefault((block.spec_id, block.partition_fields, residual is None), {})
        keys_of = [_keys(block, column) for column in block.partition_columns]

        def pairs(rows: Longs) -> list[tuple[bytes, bytes]]:
            found = []
            keys = zip(*(read(rows) for read in keys_of), strict=True) if keys_of else [()] * len(rows)
            for row, key in zip(rows.tolist(), keys, strict=True):
                pair = known.get(key)
                if pair is None:
                    if len(known) >= _FRAGMENTS_MAX:
                        known.clear()
                    values = block.partition(row)
                    text = b"" if residual is None else residual(block, values)
                    pair = known[key] = (self._fragment(fields, values).encode(), text)
                found.append(pair)
            return found

        return pairs

    def _fields(self, block: Block) -> tuple[_Field, ...]:
        spec = self._metadata.spec(block.spec_id)
        if spec is None:
            raise Corrupt(f"The manifest {block.location} has the partition spec {block.spec_id}, the table has not")
        schema = self._metadata.current_schema
        stored = {field_id: (position, kind) for position, (field_id, kind) in enumerate(block.partition_fields)}
        fields = []
        for field in spec.fields:
            position, kind = stored.get(field.field_id or 0, (-1, ""))
            source = schema.column(field.sources[0]) if len(field.sources) == 1 else None
            if source is None or not isinstance(source.type, str):
                # Java gives the field of a dropped column the type `unknown`, whose only value is null.
                fields.append(_Field(-1, kind, kind, True))
            else:
                target = result_type(canonical(field.transform), source.type)
                fields.append(_Field(position, kind, target, base_name(target) not in self._dialect.unreadable))
        return tuple(fields)

    def _fragment(self, fields: tuple[_Field, ...], values: tuple[Value | None, ...]) -> str:
        texts = []
        for field in fields:
            value = None if field.position < 0 else values[field.position]
            if "null" in self._dialect.unreadable if value is None else not field.readable:
                return ""
            texts.append("null" if value is None else self._value(field.stored, field.target, value))
        return f',"partition":[{",".join(texts)}]'

    def _value(self, kind: str, target: str, value: Value) -> str:
        if isinstance(value, float):  # not to be found by: 0.0 == -0.0
            return _float_text(target, value)
        known = self._texts.get((kind, target, value))
        if known is None:
            promoted = _promoted(kind, target, value)
            as_number = self._dialect.numbers_for_times and target in _INT_LIKE
            if len(self._texts) >= _FRAGMENTS_MAX:
                self._texts.clear()
            known = to_json(promoted if as_number else encode_json(target, promoted)).decode()
            self._texts[kind, target, value] = known
        return known


def _promoted(kind: str, target: str, value: Value) -> Value:
    """A value written before its column was promoted, as one of the new type (spec, "Schema Evolution")."""
    if kind == "date" and target in ("timestamp", "timestamp_ns"):
        assert isinstance(value, int)
        return value * MICROS_PER_DAY * (NANOS_PER_MICRO if target == "timestamp_ns" else 1)
    return value


def _float_text(target: str, value: float) -> str:
    """JSON has no infinity, but numbers beyond the range of doubles, which parsers read as one. It has no NaN."""
    if math.isnan(value):
        raise NotAcceptable(
            "A file's partition is NaN, which no scan task can say in JSON; plan this table in the client: "
            "set its property seamark.scan-planning-mode to client"
        )
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return to_json(encode_json(target, value)).decode()
