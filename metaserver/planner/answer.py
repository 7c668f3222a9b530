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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cache.memory import MemoryCache
from metaserver.errors import Corrupt, NotAcceptable
from metaserver.iceberg.expression_json import expression_json
from metaserver.iceberg.expressions import Expression, Value
from metaserver.iceberg.metadata import TableMetadata
from metaserver.iceberg.residuals import nameable
from metaserver.iceberg.transforms import canonical, result_type
from metaserver.iceberg.types import base_name
from metaserver.iceberg.values import FLOATS, INTS, LONGS, MICROS_PER_DAY, NANOS_PER_MICRO, encode, encode_json
from metaserver.index.block import Block, doubles_at, longs_at, present_at
from metaserver.index.packing import MISSING, NONE, Column, Form
from metaserver.planner._answer import CHOICE, CONSTANT, HEX, ITEMS, NUMBER, TEXT, write
from metaserver.planner.scan import Scan
from metaserver.wire import encode_json as to_json

FILES_PER_PIECE = 125
"""About a quarter of a millisecond of work."""
STATS_PER_PIECE = 500
"""Columns times files, where statistics are asked for."""
_RESIDUALS_MAX = 10_000
_PARTITION_BYTES = 4 << 20
"""Partition tuples that are kept as text, for each kind of manifest and client, of which `_KINDS_MAX` are kept."""
_KINDS_MAX = 8
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
        self._residuals = _Residuals(scan)
        self._stats = tuple(sorted(set(stats)))
        self._deletes: dict[int, int] = {}

    def tasks(self, rows: Longs) -> Iterator[bytes]:
        """The items of `file-scan-tasks` for these rows of the view, ascending; pieces to be joined without anything.

        Corrupt, naming the manifest, for a file that cannot be answered. NotAcceptable for one that JSON cannot carry.
        """
        size = FILES_PER_PIECE if not self._stats else max(10, STATS_PER_PIECE // (1 + len(self._stats)))
        comma = b""
        for block, first, local in _runs(self._scan.view.locate, rows):
            files = _Files(block, self._partitions, self._residuals, self._stats)
            for start in range(0, len(local), size):
                part = local[start : start + size]
                references = [self._references(found) for found in self._scan.deletes_of(part + first)]
                yield comma + files.write(part, references)
                comma = b","

    def delete_files(self) -> Iterator[bytes]:
        """The items of `delete-files`, those that the tasks so far refer to; pieces as above. Nothing for none."""
        comma = b""
        located = map(self._scan.view.locate_delete, self._deletes)
        for _, alike in groupby(located, key=lambda place: id(place[0])):
            places = list(alike)
            files = _Files(places[0][0], self._partitions)
            local = np.array([row for _, row in places], dtype=np.int64)
            for start in range(0, len(local), FILES_PER_PIECE):
                yield comma + files.write(local[start : start + FILES_PER_PIECE])
                comma = b","

    def _references(self, found: Sequence[int]) -> bytes:
        if not found:
            return b""
        index = self._deletes
        places = ",".join([str(index.setdefault(one, len(index))) for one in found])
        return f',"delete-file-references":[{places}]'.encode()


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


Part = tuple[object, ...]
"""As `_answer.write` takes it."""


class _Files:
    """Writes content files (REST spec, schemas `DataFile`, `PositionDeleteFile`, `EqualityDeleteFile`) of one block."""

    def __init__(
        self,
        block: Block,
        partitions: _Partitions,
        residuals: _Residuals | None = None,
        stats: tuple[int, ...] = (),
    ) -> None:
        """With `residuals` they are scan tasks. Corrupt, naming the manifest."""
        self._block = block
        self._columns = _columns(block)
        self._partitions = partitions
        self._residuals = residuals
        self._stats = _Statistics(block, stats) if block.content == 0 and stats else None

    def write(self, rows: Longs, references: list[bytes] | None = None) -> bytes:
        """JSON objects, commas between them: scan tasks with `references`, without them the files alone.

        Corrupt, naming the manifest.
        """
        with _naming(self._block):
            return self._written(rows, references)

    def _written(self, rows: Longs, references: list[bytes] | None) -> bytes:
        block, columns = self._block, self._columns
        parts: list[Part] = [
            (CONSTANT, columns.opening if references is None else b'{"data-file":' + columns.opening),
            columns.content or (CHOICE, _contents(block, rows)),
            columns.path,
            columns.format or (CHOICE, _formats(block, rows)),
            (CHOICE, self._partitions.texts(block, columns, rows)),
            *columns.optional,
        ]
        if self._stats is not None:
            parts.append((CHOICE, self._stats.write(rows)))
        parts.append((CONSTANT, b"}"))
        if references is not None and self._residuals is not None:
            parts += [
                (CHOICE, references),
                (CONSTANT, b',"residual-filter":'),
                self._residuals.part(block, columns, rows),
                (CONSTANT, b"}"),
            ]
        return write(rows, tuple(parts), block.rows, b",")


@contextmanager
def _naming(block: Block) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        raise Corrupt(f"The manifest {block.location} holds a file that makes no sense: {error}") from None


class _Columns(NamedTuple):
    """What is the same whatever is asked of a block: where its columns lie, and what all of its files share.

    Addresses, valid as long as the block is held.
    """

    opening: bytes
    content: Part | None
    """None where the files differ."""
    path: Part
    format: Part | None
    """As `content`."""
    optional: tuple[Part, ...]
    partition: tuple[Part | None, ...]
    """What tells the values of each partition field apart; None for floats, which are no numbers to `write`."""


_KNOWN: WeakKeyDictionary[Block, _Columns] = WeakKeyDictionary()
"""Of blocks that are held, so as many as those; small beside the directory that a block has of its columns."""


def _columns(block: Block) -> _Columns:
    """Corrupt, naming the manifest."""
    found = _KNOWN.get(block)
    if found is None:
        with _naming(block):
            found = _KNOWN[block] = _located(block)
    return found


def _located(block: Block) -> _Columns:
    path, formats, contents = block.text_column("file_path"), block.text_column("file_format"), _uniform_content(block)
    if path is None:
        raise ValueError("it has no path")
    if formats is None:
        raise ValueError("it has no format")
    return _Columns(
        b'{"spec-id":%d,"content":"' % block.spec_id,
        None if contents is None else (CONSTANT, contents),
        (TEXT, b'","file-path":"', b'"', _strings(block, path)),
        (CONSTANT, _format(formats.packed.common)) if formats.packed.width == 0 else None,
        tuple(_optional_parts(block)),
        tuple(_telling_apart(block, column) for column in block.partition_columns),
    )


def _uniform_content(block: Block) -> bytes | None:
    column = block.long_column("content")
    if column is None:
        return _CONTENTS[MISSING]
    uniform = column.packed.width == 0 and column.packed.presence == NONE
    return _CONTENTS[column.packed.base] if uniform else None


def _contents(block: Block, rows: Longs) -> list[bytes]:
    column = block.long_column("content")
    assert column is not None
    return [_CONTENTS[content] for content in longs_at(column, rows).tolist()]


def _formats(block: Block, rows: Longs) -> list[bytes]:
    column = block.text_column("file_format")
    assert column is not None
    return [_format(column.key(row)) for row in rows.tolist()]


def _optional_parts(block: Block) -> Iterator[Part]:
    is_data = block.content == 0
    kind_of = _DATA_NUMBERS if is_data else _DELETE_NUMBERS
    for name in ("file_size_in_bytes", "record_count", "sort_order_id", *kind_of):
        if (column := block.long_column(name)) is not None:
            yield NUMBER, _key(name), _integers(block, column)
    for name in ("split_offsets",) if is_data else ("split_offsets", "equality_ids"):
        if (columns := block.list_columns(name)) is not None:
            sizes, values = columns
            yield ITEMS, _key(name) + b"[", b"]", _integers(block, sizes), _integers(block, values), values.rows
    if (metadata := block.text_column("key_metadata")) is not None:
        yield HEX, _key("key_metadata") + b'"', b'"', _strings(block, metadata)
    if not is_data and (path := block.text_column("referenced_data_file")) is not None:
        yield TEXT, _key("referenced_data_file") + b'"', b'"', _strings(block, path)


def _key(name: str) -> bytes:
    return f',"{name.replace("_", "-")}":'.encode()


@lru_cache(maxsize=16)
def _format(name: object) -> bytes:
    if not isinstance(name, bytes):
        raise ValueError("it has no format")
    return b',"file-format":' + to_json(name.decode().lower())


def _strings(block: Block, column: Column) -> Part:
    packed = column.packed
    places = _at(block, packed.lengths), packed.lengths_width, _at(block, packed.ends), _at(block, packed.tails)
    return packed.width, _at(block, packed.codes), _at(block, packed.presence), packed.common, *places


def _integers(block: Block, column: Column) -> Part:
    packed = column.packed
    return packed.width, _at(block, packed.codes), _at(block, packed.presence), packed.base


def _at(block: Block, offset: int) -> int:
    return 0 if offset == NONE else block.address + offset


def _telling_apart(block: Block, column: Column | None) -> Part | None:
    if column is None:
        return CONSTANT, b""
    if column.packed.form == Form.FLOATS:
        return None
    # The prefix tells an empty string, or a zero, from none.
    if column.packed.form == Form.STRINGS:
        return HEX, b"=", b"", _strings(block, column)
    return NUMBER, b"=", _integers(block, column)


def _keys(block: Block, columns: _Columns, fields: Sequence[int], rows: Longs) -> list[bytes]:
    """What tells the values of these partition fields apart, a row each; fields by their places in the tuple."""
    if not fields:
        return [b""] * len(rows)
    parts: list[Part] = []
    for field in fields:
        # By what they are written as, not by value: 0.0 == -0.0.
        parts += (CONSTANT, b";"), columns.partition[field] or (CHOICE, _float_keys(block, field, rows))
    return write(rows, tuple(parts), block.rows, b",").split(b",")


def _float_keys(block: Block, field: int, rows: Longs) -> list[bytes]:
    column = block.partition_columns[field]
    assert column is not None
    return [repr(column.key(row)).encode() for row in rows.tolist()]


Texts = Callable[[Longs], list[str | None]]
"""Reads many rows at once; None for a row that has nothing."""


class _Statistics:
    """Writes column statistics: counts as numbers, bounds as hex (REST spec, `CountMap` and `ValueMap`)."""

    def __init__(self, block: Block, columns: tuple[int, ...]) -> None:
        known = [column for column in columns if column in block.columns]
        self._maps: list[tuple[str, list[tuple[str, Texts]]]] = [
            (wire, [(str(column), _counts(block.count_column(name, column))) for column in known])
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


def _counts(column: Column | None) -> Texts:
    if column is None:
        return lambda rows: [None] * len(rows)
    return lambda rows: [None if count == MISSING else str(count) for count in longs_at(column, rows).tolist()]


def _bounds(block: Block, side: str, column_id: int) -> Texts | None:
    """None where the block has no bounds of this column."""
    column, kind = block.bound_column(side, column_id), block.kind(column_id)
    if column is None or kind is None:
        return None
    dtype = _DTYPES.get(kind)
    if dtype is None and not kind.startswith("decimal"):
        parts = ((HEX, b"=", b"", _strings(block, column)),)
        return lambda rows: [
            f'"{text[1:]}"' if text else None for text in write(rows, parts, block.rows, b",").decode().split(",")
        ]
    if dtype is None:
        return lambda rows: [_bound(block, side, column_id, kind, row) for row in rows.tolist()]
    read_at = doubles_at if kind in FLOATS else longs_at

    def read(rows: Longs) -> list[str | None]:
        numbers = read_at(column, rows).astype(dtype)
        size = 2 * numbers.itemsize
        digits = numbers.tobytes().hex().upper()
        there = present_at(column, rows).tolist()
        return [f'"{digits[at * size : (at + 1) * size]}"' if known else None for at, known in enumerate(there)]

    return read


def _bound(block: Block, side: str, column_id: int, kind: str, row: int) -> str | None:
    value = block.bound(side, column_id, row)
    return None if value is None else f'"{encode(kind, value).hex().upper()}"'


class _Residuals:
    """The residual of each file as JSON, written once for all that share it."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._whole: bytes | None = None
        self._by_key: dict[tuple[object, ...], bytes] = {}
        self._written: dict[int, tuple[Expression, bytes]] = {}

    def part(self, block: Block, columns: _Columns, rows: Longs) -> Part:
        """Those of rows of the block."""
        deciding = self._scan.deciding(block.spec_id)
        if not deciding:
            if self._whole is None:
                self._whole = self._text(self._scan.bound)
            return CONSTANT, self._whole
        stored = block.partition_fields
        fields = [place for place, (field_id, _) in enumerate(stored) if field_id in deciding]
        kind = (block.spec_id, stored)
        found = []
        for row, key in zip(rows.tolist(), _keys(block, columns, fields, rows), strict=True):
            text = self._by_key.get((*kind, key))
            if text is None:
                if len(self._by_key) >= _RESIDUALS_MAX:
                    self._by_key.clear()
                residual = self._scan.residual_in(block.spec_id, stored, block.partition(row))
                text = self._by_key[*kind, key] = self._text(residual)
            found.append(text)
        return CHOICE, found

    def _text(self, residual: Expression) -> bytes:
        # By identity: partitions share residuals, and a long list of values takes long to compare or to hash.
        known = self._written.get(id(residual))
        if known is None:
            if len(self._written) >= _RESIDUALS_MAX:
                self._written.clear()
            told = nameable(residual, self._scan.metadata.current_schema)
            known = self._written[id(residual)] = (residual, to_json(expression_json(told)))
        return known[1]


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


Fields = tuple[_Field, ...]


class _Partitions:
    """Partition tuples as JSON, in the order and the types of the table's spec, which a manifest's may lag behind."""

    def __init__(self, metadata: TableMetadata, dialect: Dialect) -> None:
        self._metadata = metadata
        self._dialect = dialect
        self._kinds: dict[tuple[object, ...], tuple[Fields, MemoryCache[bytes, bytes]]] = {}

    def texts(self, block: Block, columns: _Columns, rows: Longs) -> list[bytes]:
        """`,"partition":[…]` of rows of the block; empty where this client could not read it."""
        fields, known = self._kind(block)
        keys = _keys(block, columns, range(len(columns.partition)), rows)
        found = []
        for row, key in zip(rows.tolist(), keys, strict=True):
            text = known.get(key)
            if text is None:
                text = _fragment(fields, block.partition(row), self._dialect).encode()
                known.put(key, text, len(key) + len(text))
            found.append(text)
        return found

    def _kind(self, block: Block) -> tuple[Fields, MemoryCache[bytes, bytes]]:
        kind = (block.spec_id, block.partition_fields)
        found = self._kinds.get(kind)
        if found is None:
            fields = self._fields(block)
            found = self._kinds[kind] = (fields, _known_texts(block.partition_fields, fields, self._dialect))
        return found

    def _fields(self, block: Block) -> Fields:
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
                target = _target(field.transform, source.type)
                fields.append(_Field(position, kind, target, base_name(target) not in self._dialect.unreadable))
        return tuple(fields)


@lru_cache(maxsize=256)
def _target(transform: str, kind: str) -> str:
    return result_type(canonical(transform), kind)


@lru_cache(maxsize=_KINDS_MAX)
def _known_texts(stored: tuple[tuple[int, str], ...], fields: Fields, dialect: Dialect) -> MemoryCache[bytes, bytes]:
    """Texts by what tells partitions apart, of all answers that spell them alike."""
    return MemoryCache(_PARTITION_BYTES)


def _fragment(fields: Fields, values: tuple[Value | None, ...], dialect: Dialect) -> str:
    texts = []
    for field in fields:
        value = None if field.position < 0 else values[field.position]
        if "null" in dialect.unreadable if value is None else not field.readable:
            return ""
        texts.append("null" if value is None else _value(field.stored, field.target, value, dialect))
    return f',"partition":[{",".join(texts)}]'


def _value(kind: str, target: str, value: Value, dialect: Dialect) -> str:
    if isinstance(value, float):
        return _float_text(target, value)
    promoted = _promoted(kind, target, value)
    as_number = dialect.numbers_for_times and target in _INT_LIKE
    return to_json(promoted if as_number else encode_json(target, promoted)).decode()


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
