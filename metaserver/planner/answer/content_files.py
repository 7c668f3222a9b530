"""Encoder of one block's content files as JSON: fields, partition tuples and statistics (REST spec, `ContentFile`).

The layout of a block's columns is in the form that `_answer.write` reads. The layout does not depend on the request. It
is built once and cached as long as the block exists.

Partition tuples are encoded in a form that the client can parse. PyIceberg 0.12 deviates from the specification: it
cannot parse nulls in `partition`, and does not convert strings to dates there (`ClientDialect`).

Column statistics are maps (REST spec, `CountMap` and `ValueMap`): counts are numbers, bounds are hexadecimal.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.transforms import compute_values_type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import (
    FLOATS,
    INTS,
    LONGS,
    Value,
    encode_json,
    encode_single_value,
    promote_value,
)
from seamark.formats.index.packing import MISSING, NONE, Form, Longs, PackedColumn
from seamark.formats.protocol.wire import encode_json as to_json
from seamark.formats.runtime.errors import Corrupt, NotAcceptable
from seamark.metaserver.index.blocks.block import Block, read_doubles_at, read_longs_at, read_present_at
from seamark.metaserver.planner.answer._answer import CHOICE, CONSTANT, HEX, ITEMS, NUMBER, TEXT, write
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

_CONTENTS = {MISSING: b"data", 0: b"data", 1: b"position-deletes", 2: b"equality-deletes"}
"""The JSON value of each content type of a manifest. Version 1 manifests do not have this field."""
_DELETE_NUMBERS = ("content_offset", "content_size_in_bytes")

Part = tuple[object, ...]
"""A part of the JSON text, in the format that `_answer.write` reads."""


class error_context:  # noqa: N801  each answer enters several of these contexts; a generator takes three times as long
    """A context manager that converts errors into `Corrupt` with the path of the block's manifest."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        self._block = block

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, (ValueError, KeyError)):
            raise Corrupt(f"The manifest {self._block.location} has an invalid entry: {error}") from None


class BlockLayout(NamedTuple):
    """The layout of a block's columns, and the text that all of its files share.

    A block has the files of a manifest in memory. A part is an instruction for the compiled writer: constant text, or
    the memory addresses of a column. The addresses are valid as long as the block exists.
    """

    opening: bytes
    content: Part | None
    """The content type of the block's files, or None if the files have different types."""
    path: Part
    format: Part | None
    """The format of the block's files, or None if the files have different formats."""
    optional: tuple[Part, ...]
    """The optional fields of the block's files.

    Inherited fields are not included, because they depend on the snapshot.
    """
    partition: tuple[Part | None, ...]
    """For each partition field, a part whose text is different for different values.

    The part is None for floats, which `_answer.write` does not support.
    """

    @property
    def size_bytes(self) -> int:
        return _measure_part(tuple(self))


def get_layout(block: Block) -> BlockLayout:
    """Return the layout of a block: what the compiled writer needs to write its files. The result is cached.

    Raises:
        Corrupt: A required column is missing; the message names the manifest.
    """
    layout = block.derived.get(BlockLayout)
    if layout is None:
        with error_context(block):
            layout = block.keep(_build_layout(block))
    return layout


def _measure_part(part: object) -> int:
    """Return the size of a part in bytes, including nested parts."""
    return sys.getsizeof(part) + (sum(map(_measure_part, part)) if isinstance(part, tuple) else 0)


def _build_layout(block: Block) -> BlockLayout:
    """Build the layout of a block.

    Raises:
        ValueError: A required column is missing.
    """
    path, format_, content = (
        block.find_text_column("file_path"),
        block.find_text_column("file_format"),
        _find_uniform_content(block),
    )
    if path is None:
        raise ValueError("file_path is null")
    if format_ is None:
        raise ValueError("file_format is null")
    return BlockLayout(
        b'{"spec-id":%d,"content":"' % block.spec_id,
        None if content is None else (CONSTANT, content),
        (TEXT, b'","file-path":"', b'"', encode_strings(block, path)),
        (CONSTANT, _encode_format(format_.packed.common)) if format_.packed.width == 0 else None,
        tuple(_list_optional_parts(block)),
        tuple(_make_partition_key_part(block, column) for column in block.partition_columns),
    )


def _find_uniform_content(block: Block) -> bytes | None:
    """Return the text for the content of all files of a block, or None if the files differ.

    Version 1 manifests have no column for the content. A packed column with the width 0 has the same value in all rows.
    """
    column = block.find_long_column("content")
    if column is None:
        return _CONTENTS[MISSING]
    uniform = column.packed.width == 0 and column.packed.presence == NONE
    return _CONTENTS[column.packed.base] if uniform else None


def encode_contents(block: Block, rows: Longs) -> list[bytes]:
    """Return the content type of each row's file, for blocks with several content types."""
    column = block.find_long_column("content")
    assert column is not None
    return [_CONTENTS[content] for content in read_longs_at(column, rows).tolist()]


def encode_formats(block: Block, rows: Longs) -> list[bytes]:
    """Return the file format of each row's file, with its JSON key.

    Raises:
        ValueError: A file has no format.
    """
    column = block.find_text_column("file_format")
    assert column is not None
    return [_encode_format(column.read_key(row)) for row in rows.tolist()]


def _list_optional_parts(block: Block) -> Iterator[Part]:
    """Yield the optional fields that the block has: numbers, lists, encryption key metadata and the referenced file."""
    is_data = block.content == 0
    for name in ("file_size_in_bytes", "record_count", "sort_order_id", *(() if is_data else _DELETE_NUMBERS)):
        if (column := block.find_long_column(name)) is not None:
            yield NUMBER, _encode_key(name), _encode_integers(block, column)
    for name in ("split_offsets",) if is_data else ("split_offsets", "equality_ids"):
        if (columns := block.list_columns(name)) is not None:
            sizes, values = columns
            yield (
                ITEMS,
                _encode_key(name) + b"[",
                b"]",
                _encode_integers(block, sizes),
                _encode_integers(block, values),
                values.rows,
            )
    if (metadata := block.find_text_column("key_metadata")) is not None:
        yield HEX, _encode_key("key_metadata") + b'"', b'"', encode_strings(block, metadata)
    if not is_data and (path := block.find_text_column("referenced_data_file")) is not None:
        yield TEXT, _encode_key("referenced_data_file") + b'"', b'"', encode_strings(block, path)


def _encode_key(name: str) -> bytes:
    return f',"{name.replace("_", "-")}":'.encode()


@lru_cache(maxsize=16)
def _encode_format(name: object) -> bytes:
    if not isinstance(name, bytes):
        raise ValueError("file_format is null")
    return b',"file-format":' + to_json(name.decode().lower())


def encode_strings(block: Block, column: PackedColumn) -> Part:
    """Return a packed column of strings in the form that the compiled writer reads."""
    packed_values = column.packed
    offsets = (
        _compute_address(block, packed_values.lengths),
        packed_values.lengths_width,
        _compute_address(block, packed_values.ends),
        _compute_address(block, packed_values.tails),
    )
    return (
        packed_values.width,
        _compute_address(block, packed_values.codes),
        _compute_address(block, packed_values.presence),
        packed_values.common,
        *offsets,
    )


def _encode_integers(block: Block, column: PackedColumn) -> Part:
    """Return a packed column of integers in the form that the compiled writer reads.

    Returns:
        The width of a code, the addresses of the codes and of the bits of present values, and the number that is added
        to each code. An address is 0 if the column has no such data.
    """
    packed_values = column.packed
    return (
        packed_values.width,
        _compute_address(block, packed_values.codes),
        _compute_address(block, packed_values.presence),
        packed_values.base,
    )


def _compute_address(block: Block, offset: int) -> int:
    return 0 if offset == NONE else block.address + offset


def _make_partition_key_part(block: Block, column: PackedColumn | None) -> Part | None:
    """Return the part of a partition tuple's key for one field, or None for floats, which the writer does not support.

    `column` is None if the field is null in all rows.
    """
    if column is None:
        return CONSTANT, b""
    if column.packed.form == Form.FLOATS:
        return None
    # The prefix distinguishes null from an empty string and from zero.
    if column.packed.form == Form.STRINGS:
        return HEX, b"=", b"", encode_strings(block, column)
    return NUMBER, b"=", _encode_integers(block, column)


def encode_keys(block: Block, columns: BlockLayout, fields: Sequence[int], rows: Longs) -> list[bytes]:
    """Return a key of these partition fields for each row. Rows with equal values have equal keys.

    No key contains a comma, so the keys of all rows are written at once and then divided.

    Args:
        block: The block.
        columns: The layout of the block.
        fields: Positions in the partition tuple.
        rows: The rows of the block.
    """
    if not fields:
        return [b""] * len(rows)
    parts: list[Part] = []
    for field in fields:
        # The keys are the written texts instead of the values, because 0.0 == -0.0.
        parts += (CONSTANT, b";"), columns.partition[field] or (CHOICE, _encode_float_keys(block, field, rows))
    return write(rows, tuple(parts), block.rows, b",").split(b",")


def _encode_float_keys(block: Block, field: int, rows: Longs) -> list[bytes]:
    column = block.partition_columns[field]
    assert column is not None
    return [repr(column.read_key(row)).encode() for row in rows.tolist()]


_NUMBERS_OF_COUNTS = {
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
"""Single-value serialisation of types with a fixed size (Iceberg spec, appendix D)."""

Texts = Callable[[Longs], list[str | None]]
"""A function that returns the text of each row, or None for rows without a value."""


class FileStats:
    """Encodes column statistics of one block's files: a JSON map of columns for each kind of counts and for bounds."""

    def __init__(self, block: Block, columns: tuple[int, ...]) -> None:
        stored_columns = [column for column in columns if column in block.columns]
        self._maps: list[tuple[str, list[tuple[str, Texts]]]] = [
            (
                json_name,
                [(str(column), _make_count_reader(block.find_count_column(name, column))) for column in stored_columns],
            )
            for json_name, name in _NUMBERS_OF_COUNTS.items()
        ]
        for side in ("lower", "upper"):
            bounds = [(str(column), _make_bound_reader(block, side, column)) for column in stored_columns]
            self._maps.append(
                (f"{side}-bounds", [(key, read_bounds) for key, read_bounds in bounds if read_bounds is not None])
            )

    def write(self, rows: Longs) -> list[bytes]:
        """Return `,"value-counts":{…},…` for each row; maps without keys are omitted."""
        maps = [_write_maps(name, columns, rows) for name, columns in self._maps if columns]
        return [text.encode() for text in map("".join, zip(*maps, strict=True))] if maps else [b""] * len(rows)


def _write_maps(name: str, columns: list[tuple[str, Texts]], rows: Longs) -> list[str]:
    keys = [key for key, _ in columns]
    values = zip(*(read_map(rows) for _, read_map in columns), strict=True)
    return [_write_map(name, keys, texts) for texts in values]


def _write_map(name: str, keys: list[str], texts: tuple[str | None, ...]) -> str:
    """Return the JSON of a map without its null values, or an empty text if all are null."""
    non_null_texts = [text for text in texts if text is not None]
    if not non_null_texts:
        return ""
    if len(non_null_texts) < len(keys):
        keys = [key for key, text in zip(keys, texts, strict=True) if text is not None]
    return f',"{name}":{{"keys":[{",".join(keys)}],"values":[{",".join(non_null_texts)}]}}'


def _make_count_reader(column: PackedColumn | None) -> Texts:
    """Return a function that reads the counts of a column as texts. A row without a count has None."""
    if column is None:
        return lambda rows: [None] * len(rows)
    return lambda rows: [None if count == MISSING else str(count) for count in read_longs_at(column, rows).tolist()]


def _make_bound_reader(block: Block, side: str, column_id: int) -> Texts | None:
    """Return a function that reads a column's lower or upper bounds as JSON, or None if the block has no such bounds.

    Bounds are hexadecimal bytes. The compiled writer writes those of strings and binary values, and NumPy converts
    numbers of a fixed size at once. Decimals are converted one by one.
    """
    column, kind = block.get_bound_column(side, column_id), block.find_kind(column_id)
    if column is None or kind is None:
        return None
    dtype = _DTYPES.get(kind)
    if dtype is None and not kind.startswith("decimal"):
        # The prefix `=` distinguishes an empty value from no value.
        parts = ((HEX, b"=", b"", encode_strings(block, column)),)
        return lambda rows: [
            f'"{text[1:]}"' if text else None for text in write(rows, parts, block.rows, b",").decode().split(",")
        ]
    if dtype is None:
        return lambda rows: [_write_bound(block, side, column_id, kind, row) for row in rows.tolist()]
    read_at = read_doubles_at if kind in FLOATS else read_longs_at

    def read(rows: Longs) -> list[str | None]:
        numbers = read_at(column, rows).astype(dtype)
        size = 2 * numbers.itemsize
        digits = numbers.tobytes().hex().upper()
        has_values = read_present_at(column, rows).tolist()
        return [
            f'"{digits[index * size : (index + 1) * size]}"' if has_value else None
            for index, has_value in enumerate(has_values)
        ]

    return read


def _write_bound(block: Block, side: str, column_id: int, kind: str, row: int) -> str | None:
    value = block.get_bound(side, column_id, row)
    return None if value is None else f'"{encode_single_value(kind, value).hex().upper()}"'


_ENCODINGS_MAX = 8
"""The maximum number of encodings (`_Encoding`) whose partition tuples are cached."""
_TEXTS_BYTES, _FIELD_BYTES = 1000, 300
"""The estimated memory of a `PartitionTexts` without its fields, and of one field."""
_INT_LIKE = frozenset({"date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})


@dataclass(frozen=True)
class ClientDialect:
    """The form of partition values and residuals that a client can read.

    PyIceberg copies partition values unchanged into identity-partitioned columns that a data file lacks (spec, "Column
    Projection"), so dates and times must be the integers of a manifest. A partition that PyIceberg would misread (null
    or binary) is omitted: PyIceberg then fails if it needs the value.
    """

    numbers_for_times: bool = False
    unreadable: frozenset[str] = frozenset()
    """The types that the client cannot read. "null" represents null values."""
    polls: bool = True
    """Whether the client requests the plan again if the server's first answer is that planning is still running."""
    needs_residuals: bool = False
    """Whether the client fails, or counts rows wrongly, if a task has no residual.

    The specification says that a client uses its filter if a task has no residual.
    """
    filters_by_residual: bool = False
    """Whether some programs that use this client have the residual as their only filter.

    With a weaker residual, these programs would return rows that do not match.
    """
    binds_residuals: bool = True
    """Whether the client binds residuals to the table's current schema by name."""
    orders_nan_above: bool = True
    """Whether the client may order NaN above every number."""
    changes_files: bool = False
    """Whether the client may rewrite or delete planned files, although the request does not state it.

    See `api/plans/scan_requests.py`.
    """


STANDARD_DIALECT = ClientDialect()
JAVA_DIALECT = ClientDialect(needs_residuals=True, filters_by_residual=True, changes_files=True)
PYICEBERG_DIALECT = ClientDialect(
    numbers_for_times=True,
    unreadable=frozenset({"null", "binary", "fixed"}),
    polls=False,
    needs_residuals=True,
    binds_residuals=False,
    orders_nan_above=False,
)


def choose_dialect(user_agent: str, client_version: str = "") -> ClientDialect:
    """Return the dialect of a client.

    Args:
        user_agent: The header User-Agent.
        client_version: The header X-Client-Version, which Iceberg's Java client sends.
    """
    if user_agent.startswith("PyIceberg/"):
        return PYICEBERG_DIALECT
    is_java = user_agent.startswith("Apache-HttpClient/") or client_version.startswith("Apache Iceberg")
    return JAVA_DIALECT if is_java else STANDARD_DIALECT


class _Field(NamedTuple):
    """A field of a table's partition spec."""

    position: int
    """The position of the field in the block's tuples; -1 if the field is null in all tuples."""
    stored: str
    """The type of the values in the block."""
    target: str
    """The type of the values in the JSON."""
    readable: bool
    """Whether the client can read values that are not null."""


Fields = tuple[_Field, ...]


_Encoding: TypeAlias = tuple[tuple[tuple[int, str], ...], Fields, ClientDialect]
"""The key of cached texts: the partition fields of a manifest, their encoding, and the client."""


class PartitionTexts:
    """Encodes partition tuples in the order and with the types of the table's current spec.

    Manifests may be older than this spec.
    """

    def __init__(self, metadata: TableMetadata, dialect: ClientDialect) -> None:
        # Do not reference the metadata. They list all snapshots, and would stay in memory as long
        # as the view.
        self._schemas, self._specs = metadata.schemas, metadata.partition_specs
        self._schema_id, self._schema = metadata.current_schema_id, metadata.current_schema
        self._dialect = dialect
        self._fields_by_spec: dict[tuple[object, ...], Fields] = {}
        self.size_bytes = _TEXTS_BYTES
        """The size excludes schemas and specs, which are shared with other metadata of the table."""

    def matches(self, metadata: TableMetadata) -> bool:
        """Return whether the encoded JSON of partition tuples is also valid for a plan with `metadata`."""
        return (
            self._schema_id == metadata.current_schema_id
            and self._schemas == metadata.schemas
            and self._specs == metadata.partition_specs
        )

    def write_texts(self, block: Block, columns: BlockLayout, rows: Longs, cache: PartitionTextCache) -> list[bytes]:
        """Return `,"partition":[…]` for rows of the block.

        The texts are empty if this client could not read the tuples.
        """
        fields = self._list_fields(block)
        # The cache is not part of the instance, because many views may exist, each with its own instance.
        texts_by_key = cache.get_texts_by_key((block.partition_fields, fields, self._dialect))
        texts = []
        partition_keys = encode_keys(block, columns, range(len(columns.partition)), rows)
        for row, key in zip(rows.tolist(), partition_keys, strict=True):
            text = texts_by_key.get(key)
            if text is None:
                text = _encode_partition(fields, block.partition(row), self._dialect).encode()
                texts_by_key.put(key, text, len(key) + len(text))
            texts.append(text)
        return texts

    def _list_fields(self, block: Block) -> Fields:
        """Return the partition fields of a block."""
        spec = (block.spec_id, block.partition_fields)
        fields = self._fields_by_spec.get(spec)
        if fields is None:
            fields = self._fields_by_spec[spec] = self._read_fields(block)
            # Sum over a copy of the values, because another thread may add an item at the same time.
            cached_fields = list(self._fields_by_spec.values())
            self.size_bytes = _TEXTS_BYTES + sum(_FIELD_BYTES * len(fields_of_spec) for fields_of_spec in cached_fields)
        return fields

    def _read_fields(self, block: Block) -> Fields:
        """Return the fields of the block's partition spec, with their positions in the tuples of the block.

        Raises:
            Corrupt: The metadata do not contain the partition spec of the block's manifest.
        """
        spec = next((spec for spec in self._specs if spec.spec_id == block.spec_id), None)
        if spec is None:
            raise Corrupt(
                f"The manifest {block.location} has the partition spec {block.spec_id}, which the table's metadata lack"
            )
        schema = self._schema
        stored_fields = {field_id: (position, kind) for position, (field_id, kind) in enumerate(block.partition_fields)}
        fields = []
        for field in spec.fields:
            # Without a stored field, the values are null, which the position -1 means.
            position, kind = stored_fields.get(field.field_id or 0, (-1, ""))
            source = schema.column(field.sources[0]) if len(field.sources) == 1 else None
            if source is None or not isinstance(source.type, str):
                # Java assigns the type `unknown`, whose only value is null, to the field of a dropped column.
                fields.append(_Field(position=-1, stored=kind, target=kind, readable=True))
            else:
                target = compute_values_type(field.transform, source.type)
                fields.append(_Field(position, kind, target, get_base_name(target) not in self._dialect.unreadable))
        return tuple(fields)


class _TextsOfView:
    """The encoded partition tuples that plans of the same files share.

    The files are in a view, which holds the decoded manifests of a snapshot in memory. Nearly all plans of a view have
    the same metadata.
    """

    def __init__(self) -> None:
        self.by_dialect: dict[ClientDialect, PartitionTexts] = {}

    @property
    def size_bytes(self) -> int:
        return sum([texts.size_bytes for texts in list(self.by_dialect.values())])


def get_partition_texts(scan: ScanPlan, dialect: ClientDialect) -> PartitionTexts:
    """Return the cache with the encoded JSON of partition tuples for a plan.

    Plans with the same view and metadata share one object.
    """
    derived_values = scan.view.derived
    by_dialect = (derived_values.get(_TextsOfView) or derived_values.keep(_TextsOfView())).by_dialect
    texts = by_dialect.get(dialect)
    if texts is None or not texts.matches(scan.metadata):
        texts = by_dialect[dialect] = PartitionTexts(scan.metadata, dialect)
    return texts


class PartitionTextCache:
    """The cache of encoded partition tuples for all answers, with at most `budget_bytes`.

    A budget of 0 disables the cache.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_encoding: OrderedDict[_Encoding, MemoryCache[bytes, bytes]] = OrderedDict()

    def get_texts_by_key(self, encoding: _Encoding) -> MemoryCache[bytes, bytes]:
        """Return the texts by partition key, for one combination of partition fields and client dialect.

        Only the `_ENCODINGS_MAX` most recently used combinations are kept.
        """
        texts = self._by_encoding.get(encoding)
        if texts is None:
            texts = self._by_encoding[encoding] = MemoryCache(self._budget_bytes // _ENCODINGS_MAX, "partition-texts")
            if len(self._by_encoding) > _ENCODINGS_MAX:
                self._by_encoding.popitem(last=False)
        self._by_encoding.move_to_end(encoding)
        return texts


UNCACHED_TEXTS = PartitionTextCache(0)


def _encode_partition(fields: Fields, values: tuple[Value | None, ...], dialect: ClientDialect) -> str:
    """Return the JSON of a partition tuple, or an empty text if the client cannot read a value."""
    texts = []
    for field in fields:
        value = None if field.position < 0 else values[field.position]
        is_readable = "null" not in dialect.unreadable if value is None else field.readable
        if not is_readable:
            return ""
        texts.append("null" if value is None else _encode_value(field.stored, field.target, value, dialect))
    return f',"partition":[{",".join(texts)}]'


def _encode_value(kind: str, target: str, value: Value, dialect: ClientDialect) -> str:
    """Return the JSON of a partition value in its current type.

    Args:
        kind: The type of the value in the manifest.
        target: The type in the current schema, to which `kind` may have been promoted.
        value: The value.
        dialect: Whether the client reads dates and times as integers.
    """
    if isinstance(value, float):
        return _encode_float(target, value)
    value = promote_value(kind, target, value)
    as_number = dialect.numbers_for_times and target in _INT_LIKE
    return to_json(value if as_number else encode_json(target, value)).decode()


def _encode_float(target: str, value: float) -> str:
    """Encode a float as JSON.

    JSON has neither infinity nor NaN. For infinity, the text is a number beyond the range of doubles, which parsers
    read as infinity.

    Raises:
        NotAcceptable: The value is NaN.
    """
    if math.isnan(value):
        raise NotAcceptable(
            "A file's partition value is NaN, which JSON cannot represent. Plan this table on the client: "
            "set its property seamark.scan-planning-mode to client"
        )
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return to_json(encode_json(target, value)).decode()
