"""The columnar block: the live entries of one manifest as packed columns, in one buffer.

A block contains only what its manifest states. Inherited sequence numbers and row ids stay missing here (the manifest
list defines them), so that a block depends on its manifest alone and is valid for every snapshot that lists it. An
unreadable bound is omitted: a missing bound prunes nothing.

Memory, little-endian: `SMB1`, the directory's length (uint32), the directory (MessagePack), zeros up to a multiple of
64, then the arrays; the directory's offsets start there. It may be a mapped file, of which only touched pages are
resident.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seamark.metaserver.errors import BadRequest, Corrupt
from seamark.metaserver.iceberg.manifests.manifest import DecodedManifest, PartitionFieldValues
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.types.reserved import DELETED_PATH, DELETED_POSITION
from seamark.metaserver.iceberg.types.schema import Schema
from seamark.metaserver.iceberg.types.transforms import result_type
from seamark.metaserver.iceberg.types.types import canonical_primitive
from seamark.metaserver.iceberg.types.values import Value
from seamark.metaserver.index.blocks.derived import BlockMemory, Derived, K
from seamark.metaserver.index.blocks.packing import (
    ALIGNMENT,
    MISSING,
    NONE,
    Form,
    Longs,
    Packed,
    PackedColumn,
    form_of,
    source_of,
    value_of,
)
from seamark.metaserver.index.kernels._pack import SOURCES, Packer

_MAGIC = b"SMB1"
VERSION = 2
"""Version of the layout and the content; part of every key, so that a block of another version is never read."""

COUNTS = ("value_counts", "null_value_counts", "nan_value_counts", "column_sizes")
_DELETE_COLUMNS = {DELETED_PATH: "string", DELETED_POSITION: "long"}
"""`file_path` and `pos` of position delete files, which are not in schemas (Iceberg spec, "Reserved Field IDs")."""


class ColumnEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One column with statistics. The last four fields state for how many rows a property holds: 0 none, 1 all, 2
    some.
    """

    column_id: int
    kind: str
    lower: Packed | None
    upper: Packed | None
    counts: tuple[Packed | None, Packed | None, Packed | None, Packed | None]
    nulls_only: int
    """Rows whose values are all null."""
    nans_only: int
    no_nulls: int
    no_nans: int


class _PartitionEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    field_id: int
    kind: str
    values: Packed | None
    """None: null in every row."""


class _ListEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    counts: Packed | None
    values: Packed | None
    total: int


class _Directory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    location: str
    rows: int
    content: int
    spec_id: int
    longs: dict[str, Packed]
    texts: dict[str, Packed]
    lists: dict[str, _ListEntry]
    partition: tuple[_PartitionEntry, ...]
    columns: tuple[ColumnEntry, ...]


class Block:
    """Immutable, but for `derived`, which holds what others compute from it; `keep` adds to it."""

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_columns",
        "_directory",
        "_memory",
        "address",
        "derived",
        "memory",
        "partition_columns",
        "partition_fields",
    )

    def __init__(self, memory: memoryview | bytes) -> None:
        """Reads the output of `encode_block`. Corrupt for other bytes."""
        data = np.frombuffer(memory, dtype=np.uint8)
        if data[:4].tobytes() != _MAGIC or len(data) < 8:
            raise Corrupt("A cached block does not start with its magic bytes")
        size = int.from_bytes(data[4:8].tobytes(), "little")
        try:
            self._directory = msgspec.msgpack.decode(data[8 : 8 + size].tobytes(), type=_Directory)
        except msgspec.DecodeError as error:
            raise Corrupt(f"The directory of a cached block cannot be read: {error}") from None
        self._memory = data
        self._arrays = data[_aligned(8 + size) :]
        self.memory = BlockMemory(len(data))
        self.derived = Derived()
        self.address = int(self._arrays.__array_interface__["data"][0])
        """The address of the arrays, for kernels."""
        self._columns = {entry.column_id: entry for entry in self._directory.columns}
        self.partition_columns = tuple([self._column(entry.values) for entry in self._directory.partition])
        self.partition_fields = tuple([(entry.field_id, entry.kind) for entry in self._directory.partition])
        """(partition field id, type) in the order of the partition tuple."""

    def __repr__(self) -> str:
        return f"<Block {self.location}: {self.rows} rows, {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Memory, including a mapped file and what is derived."""
        return self.memory.size_bytes

    def keep(self, value: K) -> K:
        """Keeps a derived value of constant size as long as the block lives. The first of its type stays."""
        kept = self.derived.keep(value)
        if kept is value:
            self.memory.add(value.size_bytes)
        return kept

    @property
    def location(self) -> str:
        return self._directory.location

    @property
    def rows(self) -> int:
        return self._directory.rows

    @property
    def content(self) -> int:
        """0: data files, 1: delete files."""
        return self._directory.content

    @property
    def spec_id(self) -> int:
        return self._directory.spec_id

    @property
    def columns(self) -> tuple[int, ...]:
        """Ids of the columns with statistics."""
        return tuple(self._columns)

    def _column(self, packed: Packed | None) -> PackedColumn | None:
        return None if packed is None else PackedColumn(self._arrays, packed, self.rows)

    def long_column(self, name: str) -> PackedColumn | None:
        """The packed column; None if no row has a value."""
        return self._column(self._directory.longs.get(name))

    def longs(self, name: str) -> Longs:
        """int64[rows] of status, snapshot_id, sequence_number, …; MISSING for null."""
        column = self.long_column(name)
        return np.full(self.rows, MISSING, dtype=np.int64) if column is None else column.longs()

    def long(self, name: str, row: int) -> int | None:
        column = self.long_column(name)
        key = None if column is None else column.key(row)
        assert key is None or isinstance(key, int)
        return key

    def text_column(self, name: str) -> PackedColumn | None:
        return self._column(self._directory.texts.get(name))

    def raw(self, name: str, row: int) -> bytes | None:
        """file_path, file_format, key_metadata or referenced_data_file, as bytes."""
        column = self.text_column(name)
        key = None if column is None else column.key(row)
        assert key is None or isinstance(key, bytes)
        return key

    def text(self, name: str, row: int) -> str | None:
        raw = self.raw(name, row)
        return None if raw is None else raw.decode("utf-8", "replace")

    def lists_of(self, name: str) -> list[list[int] | None]:
        """split_offsets or equality_ids of every row."""
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None:
            return [None] * self.rows
        counts = PackedColumn(self._arrays, entry.counts, self.rows).longs()
        values = [] if entry.values is None else PackedColumn(self._arrays, entry.values, entry.total).longs().tolist()
        ends = np.cumsum(np.maximum(counts, 0)).tolist()
        sizes = counts.tolist()
        return [None if size == MISSING else values[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def list_columns(self, name: str) -> tuple[PackedColumn, PackedColumn] | None:
        """The packed columns (sizes, one per row; concatenated values) of split_offsets or equality_ids.

        None if no row has a value.
        """
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None or entry.values is None:
            return None
        return PackedColumn(self._arrays, entry.counts, self.rows), PackedColumn(
            self._arrays, entry.values, entry.total
        )

    def partition(self, row: int) -> tuple[Value | None, ...]:
        return tuple(
            _value(column, entry.kind, row)
            for column, entry in zip(self.partition_columns, self._directory.partition, strict=True)
        )

    def partition_column(self, field_id: int) -> tuple[str, Packed | None] | None:
        """(type, packed values or None if all are null); None if the block's spec lacks the field."""
        for entry in self._directory.partition:
            if entry.field_id == field_id:
                return entry.kind, entry.values
        return None

    def entry(self, column_id: int) -> ColumnEntry | None:
        return self._columns.get(column_id)

    def kind(self, column_id: int) -> str | None:
        """The column's type in the manifest's schema."""
        entry = self._columns.get(column_id)
        return None if entry is None else entry.kind

    def count(self, name: str, column_id: int) -> Longs:
        """int64[rows] of value_counts, null_value_counts, nan_value_counts or column_sizes; MISSING if absent."""
        column = self.count_column(name, column_id)
        return np.full(self.rows, MISSING, dtype=np.int64) if column is None else column.longs()

    def count_column(self, name: str, column_id: int) -> PackedColumn | None:
        """The packed column; None if no row has a count."""
        entry = self._columns.get(column_id)
        return None if entry is None else self._column(entry.counts[COUNTS.index(name)])

    def bound_column(self, side: str, column_id: int) -> PackedColumn | None:
        """`side` is "lower" or "upper"."""
        entry = self._columns.get(column_id)
        return None if entry is None else self._column(entry.lower if side == "lower" else entry.upper)

    def bound(self, side: str, column_id: int, row: int) -> Value | None:
        column = self.bound_column(side, column_id)
        return None if column is None else _value(column, self._columns[column_id].kind, row)

    def column_at(self, packed: Packed) -> PackedColumn:
        """Read access to a packed column of this block."""
        return PackedColumn(self._arrays, packed, self.rows)


def longs_at(column: PackedColumn, rows: Longs) -> Longs:
    """The values of `PackedColumn.longs` for some rows: int64[len(rows)]."""
    packed = column.packed
    if packed.width == 0:
        values = np.full(len(rows), packed.base, dtype=np.int64)
    else:
        codes = column.array(packed.codes, f"<u{packed.width}", column.rows)[rows].astype(np.uint64)
        values = (codes + np.uint64(packed.base & 0xFFFFFFFFFFFFFFFF)).view(np.int64)
    if packed.presence != NONE:
        values[~present_at(column, rows)] = MISSING
    return values


def doubles_at(column: PackedColumn, rows: Longs) -> npt.NDArray[np.float64]:
    """The values of `PackedColumn.doubles` for some rows: float64[len(rows)]."""
    packed = column.packed
    return column.array(packed.codes, f"<f{packed.width}", column.rows)[rows].astype(np.float64)


def present_at(column: PackedColumn, rows: Longs) -> npt.NDArray[np.bool_]:
    """The values of `PackedColumn.present` for some rows: bool[len(rows)]."""
    if column.packed.presence == NONE:
        return np.ones(len(rows), dtype=np.bool_)
    bits = column.array(column.packed.presence, "<u1", (column.rows + 7) // 8)
    return np.asarray(bits[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).view(np.bool_)


def _value(column: PackedColumn | None, kind: str, row: int) -> Value | None:
    key = None if column is None else column.key(row)
    if column is None or key is None:
        return None
    return value_of(Form(column.packed.form), kind, key)


def _aligned(size: int) -> int:
    return size + (-size % ALIGNMENT)


def encode_block(decoded: DecodedManifest) -> list[bytes | memoryview]:
    """The block's memory, as pieces to concatenate. Corrupt if the manifest's header is invalid."""
    schema, spec = _schema_of(decoded), _spec_of(decoded)
    packer = Packer(decoded.heap, decoded.rows)
    longs = {name: packer.longs(values, absent_low=True) for name, values in decoded.longs.items()}
    texts = {
        name: packer.bounds(SOURCES["spans"], spans.starts, spans.lengths, absent_low=True)
        for name, spans in decoded.texts.items()
    }
    lists = {name: _add_list(packer, *columns) for name, columns in decoded.lists.items()}
    partition = [_add_partition(packer, values, schema, spec) for values in decoded.partition]
    columns = _add_columns(packer, decoded, schema, longs["record_count"])
    arrays = packer.pack()
    # In the order of the fields of `_Directory` and its parts, whose tuples have this layout.
    directory = (
        decoded.location,
        decoded.rows,
        1 if decoded.metadata.get("content") == "deletes" else 0,
        spec.spec_id,
        _present(packer, longs),
        _present(packer, texts),
        {
            name: (packer.packed(counts), packer.packed(values), len(decoded.lists[name][1]))
            for name, (counts, values) in lists.items()
        },
        tuple((field_id, kind, packer.packed(number)) for field_id, kind, number in partition),
        tuple((column_id, kind, *packer.entry(number)) for column_id, kind, number in columns),
    )
    head = msgspec.msgpack.encode(directory)
    prefix = _MAGIC + len(head).to_bytes(4, "little") + head
    return [prefix + b"\0" * (-len(prefix) % ALIGNMENT), memoryview(arrays)]


def _present(packer: Packer, numbers: dict[str, int]) -> dict[str, object]:
    columns = {name: packer.packed(number) for name, number in numbers.items()}
    return {name: packed for name, packed in columns.items() if packed is not None}


def _add_list(packer: Packer, counts: npt.NDArray[np.int32], values: Longs) -> tuple[int, int]:
    wide = np.where(counts < 0, MISSING, counts.astype(np.int64))
    return packer.longs(wide, absent_low=True), packer.longs(values, absent_low=True)


def _schema_of(decoded: DecodedManifest) -> Schema:
    try:
        return _schema(decoded.metadata["schema"])
    except (KeyError, ValueError, BadRequest, msgspec.DecodeError) as error:
        raise Corrupt(f"The schema in the header of manifest {decoded.location} cannot be read: {error}") from None


@lru_cache(maxsize=16)
def _schema(text: str) -> Schema:
    """Cached, because the manifests of a snapshot share few schemas."""
    schema = msgspec.json.decode(_normal(text), type=Schema)
    _ = schema.index
    return schema


def _normal(text: str) -> bytes:
    """The schema's JSON with its tag: old writers omitted `type`."""
    value = json.loads(text)
    if isinstance(value, dict):
        value.setdefault("type", "struct")
    return msgspec.json.encode(value)


def _spec_of(decoded: DecodedManifest) -> PartitionSpec:
    try:
        fields = msgspec.json.decode(decoded.metadata["partition-spec"], type=Any)
        if isinstance(fields, dict):
            fields = fields["fields"]
        spec_id = int(decoded.metadata.get("partition-spec-id", "0"))
        return msgspec.convert({"spec-id": spec_id, "fields": fields}, type=PartitionSpec)
    except (KeyError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise Corrupt(
            f"The partition spec in the header of manifest {decoded.location} cannot be read: {error}"
        ) from None


def _add_partition(
    packer: Packer, values: PartitionFieldValues, schema: Schema, spec: PartitionSpec
) -> tuple[int, str, int]:
    """(field id, type, job of the packer)."""
    field = next((field for field in spec.fields if field.field_id == values.field_id), None)
    kind = None
    if field is not None and len(field.sources) == 1:
        source = schema.column(field.sources[0])
        primitive = None if source is None else _primitive(source.type)
        if primitive is not None:
            kind = result_type(field.transform, primitive)
    if kind is None or not _is_stored_as(values, kind):
        kind = _avro_kind(values)
    return values.field_id, kind, _add_values(packer, values, kind)


def _is_stored_as(values: PartitionFieldValues, kind: str) -> bool:
    """Whether the stored Avro type can represent values of the Iceberg type."""
    form = form_of(kind)
    if values.doubles is not None:
        return form is Form.FLOATS
    if values.spans is not None:
        return form is Form.STRINGS or kind.startswith("decimal")
    if form is not Form.INTEGERS or kind.startswith("decimal"):
        return False
    # A date that was promoted to a timestamp counts days in older files.
    return values.type != "int" or kind in ("int", "long", "date")


def _avro_kind(values: PartitionFieldValues) -> str:
    """The Iceberg type of an Avro type (Iceberg spec, appendix A), for source columns that no schema has."""
    if values.type == "int" and values.logical == "date":
        return "date"
    return {"boolean": "boolean", "int": "int", "long": "long", "float": "float", "double": "double"}.get(
        values.type, "string" if values.type == "string" else "binary"
    )


def _add_values(packer: Packer, values: PartitionFieldValues, kind: str) -> int:
    if values.longs is not None:
        return packer.longs(values.longs, values.valid, absent_low=True)
    if values.doubles is not None:
        return packer.doubles(values.doubles, values.valid, absent_low=True)
    assert values.spans is not None
    return packer.bounds(source_of(kind), values.spans.starts, values.spans.lengths, absent_low=True)


def _add_columns(
    packer: Packer, decoded: DecodedManifest, schema: Schema, record_count: int
) -> list[tuple[int, str, int]]:
    """(column id, type, number) of each column with statistics."""
    counts = [decoded.counts.get(name, {}) for name in COUNTS]
    lower, upper = decoded.bounds.get("lower_bounds", {}), decoded.bounds.get("upper_bounds", {})
    columns = []
    for column_id in sorted(set().union(*counts, lower, upper)):
        kind = _kind_of(schema, column_id)
        if kind is not None:
            values, nulls, nans, sizes = (by_id.get(column_id) for by_id in counts)
            of_column = (values, nulls, nans, sizes)
            number = packer.column(source_of(kind), of_column, lower.get(column_id), upper.get(column_id), record_count)
            columns.append((column_id, kind, number))
    return columns


def _kind_of(schema: Schema, column_id: int) -> str | None:
    """None for a column that the schema lacks, or without readable statistics."""
    column = schema.column(column_id)
    if column is None:
        return _DELETE_COLUMNS.get(column_id)
    return _primitive(column.type)


def _primitive(of: object) -> str | None:
    if not isinstance(of, str):
        return None
    try:
        return canonical_primitive(of)
    except BadRequest:
        return None  # a type of a later format version, with an unknown order
