"""The columnar block: the live entries of one manifest as packed columns, in one piece of memory.

The rule it keeps: a block says what its manifest says, no more. Sequence numbers and row ids that a manifest leaves to
be inherited stay missing here (the manifest list gives them), so that a block depends on its manifest alone and is
valid for every snapshot that lists it. A bound that cannot be read is left out: a missing bound prunes nothing.

Memory, little-endian: `SMB1`, the directory's length (uint32), the directory (MessagePack), zeros up to a multiple of
64, then the arrays; the directory's offsets count from there. It may be a mapped file: only touched pages are resident.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from metaserver.errors import BadRequest, Corrupt
from metaserver.iceberg.expressions import Value
from metaserver.iceberg.manifest import DecodedManifest, PartitionValues
from metaserver.iceberg.partition import PartitionSpec
from metaserver.iceberg.schema import Schema
from metaserver.iceberg.transforms import result_type
from metaserver.iceberg.types import canonical_primitive
from metaserver.index import _pack
from metaserver.index.packing import (
    ALIGNMENT,
    MISSING,
    Bytes,
    Column,
    Form,
    Longs,
    Packed,
    Spans,
    Writer,
    form_of,
    pack_bounds,
    pack_doubles,
    pack_longs,
    pack_spans,
    value_of,
)

_MAGIC = b"SMB1"
VERSION = 2
"""Of the layout and of what is put into it; part of every key, so that a block of another version is never read."""

COUNTS = ("value_counts", "null_value_counts", "nan_value_counts", "column_sizes")
_NONE, _ALL, _SOME = 0, 1, 2
_DELETE_COLUMNS = {2147483546: "string", 2147483545: "long"}
"""`file_path` and `pos` of position delete files, which no schema has (Iceberg spec, "Reserved Field IDs")."""


class ColumnEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One column with statistics. The last four say of how many rows something is known: 0 none, 1 all, 2 some."""

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
    """Immutable. `size_bytes` is the memory it occupies, the mapped file included."""

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_columns",
        "_directory",
        "_memory",
        "address",
        "partition_columns",
        "size_bytes",
    )

    def __init__(self, memory: memoryview | bytes) -> None:
        """Reads what `encode_block` wrote. Corrupt when it is something else."""
        data = np.frombuffer(memory, dtype=np.uint8)
        if data[:4].tobytes() != _MAGIC or len(data) < 8:
            raise Corrupt("A cached block does not begin as one")
        size = int.from_bytes(data[4:8].tobytes(), "little")
        try:
            self._directory = msgspec.msgpack.decode(data[8 : 8 + size].tobytes(), type=_Directory)
        except msgspec.DecodeError as error:
            raise Corrupt(f"The directory of a cached block cannot be read: {error}") from None
        self._memory = data
        self._arrays = data[_aligned(8 + size) :]
        self.size_bytes = len(data)
        self.address = int(self._arrays.__array_interface__["data"][0])
        """Of the arrays, for kernels."""
        self._columns = {entry.column_id: entry for entry in self._directory.columns}
        self.partition_columns = tuple(self._column(entry.values) for entry in self._directory.partition)

    def __repr__(self) -> str:
        return f"<Block {self.location}: {self.rows} rows, {self.size_bytes} bytes>"

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

    def _column(self, packed: Packed | None) -> Column | None:
        return None if packed is None else Column(self._arrays, packed, self.rows)

    def long_column(self, name: str) -> Column | None:
        """Packed; None where no row has a value."""
        return self._column(self._directory.longs.get(name))

    def longs(self, name: str) -> Longs:
        """int64[rows] of status, snapshot_id, sequence_number, …; MISSING where null."""
        column = self.long_column(name)
        return np.full(self.rows, MISSING, dtype=np.int64) if column is None else column.longs()

    def long(self, name: str, row: int) -> int | None:
        column = self.long_column(name)
        key = None if column is None else column.key(row)
        assert key is None or isinstance(key, int)
        return key

    def text_column(self, name: str) -> Column | None:
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

    def list_of(self, name: str, row: int) -> list[int] | None:
        """split_offsets or equality_ids."""
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None:
            return None
        counts = Column(self._arrays, entry.counts, self.rows).longs()
        if counts[row] == MISSING:
            return None
        if entry.values is None:
            return []
        start = int(np.maximum(counts[:row], 0).sum())
        values = Column(self._arrays, entry.values, entry.total).longs()
        return [int(value) for value in values[start : start + int(counts[row])]]

    def lists_of(self, name: str) -> list[list[int] | None]:
        """As `list_of`, of every row."""
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None:
            return [None] * self.rows
        counts = Column(self._arrays, entry.counts, self.rows).longs()
        values = [] if entry.values is None else Column(self._arrays, entry.values, entry.total).longs().tolist()
        ends = np.cumsum(np.maximum(counts, 0)).tolist()
        sizes = counts.tolist()
        return [None if size == MISSING else values[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def list_columns(self, name: str) -> tuple[Longs, Longs, Longs] | None:
        """(sizes int64[rows], MISSING where null; ends int64[rows]; values) of a list's columns: a row has the values
        from its end less its size up to its end. None where no row has a list."""
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None or entry.values is None:
            return None
        sizes = Column(self._arrays, entry.counts, self.rows).longs()
        return sizes, np.cumsum(np.maximum(sizes, 0)), Column(self._arrays, entry.values, entry.total).longs()

    @property
    def partition_fields(self) -> tuple[tuple[int, str], ...]:
        """(partition field id, type) in the order of the partition tuple."""
        return tuple((entry.field_id, entry.kind) for entry in self._directory.partition)

    def partition(self, row: int) -> tuple[Value | None, ...]:
        return tuple(
            _value(column, entry.kind, row)
            for column, entry in zip(self.partition_columns, self._directory.partition, strict=True)
        )

    def partition_column(self, field_id: int) -> tuple[str, Packed | None] | None:
        """(type, packed values or None when all are null); None where the block's spec lacks the field."""
        for entry in self._directory.partition:
            if entry.field_id == field_id:
                return entry.kind, entry.values
        return None

    def entry(self, column_id: int) -> ColumnEntry | None:
        return self._columns.get(column_id)

    def kind(self, column_id: int) -> str | None:
        """The column's type in the manifest's own schema."""
        entry = self._columns.get(column_id)
        return None if entry is None else entry.kind

    def count(self, name: str, column_id: int) -> Longs:
        """int64[rows] of value_counts, null_value_counts, nan_value_counts or column_sizes; MISSING where absent."""
        entry = self._columns.get(column_id)
        column = None if entry is None else self._column(entry.counts[COUNTS.index(name)])
        return np.full(self.rows, MISSING, dtype=np.int64) if column is None else column.longs()

    def count_at(self, name: str, column_id: int, row: int) -> int | None:
        entry = self._columns.get(column_id)
        column = None if entry is None else self._column(entry.counts[COUNTS.index(name)])
        key = None if column is None else column.key(row)
        assert key is None or isinstance(key, int)
        return key

    def bound_column(self, side: str, column_id: int) -> Column | None:
        """`side` is "lower" or "upper"."""
        entry = self._columns.get(column_id)
        return None if entry is None else self._column(entry.lower if side == "lower" else entry.upper)

    def bound(self, side: str, column_id: int, row: int) -> Value | None:
        column = self.bound_column(side, column_id)
        return None if column is None else _value(column, self._columns[column_id].kind, row)

    def column_at(self, packed: Packed) -> Column:
        """Read access to a packed column of this block."""
        return Column(self._arrays, packed, self.rows)


def _value(column: Column | None, kind: str, row: int) -> Value | None:
    key = None if column is None else column.key(row)
    if column is None or key is None:
        return None
    return value_of(Form(column.packed.form), kind, key)


def _aligned(size: int) -> int:
    return size + (-size % ALIGNMENT)


def encode_block(decoded: DecodedManifest) -> list[bytes | memoryview]:
    """The block's memory, in pieces to be joined. Corrupt when the manifest's header makes no sense."""
    schema, spec = _schema_of(decoded), _spec_of(decoded)
    writer = Writer()
    longs = _some({name: _pack_present(writer, values) for name, values in decoded.longs.items()})
    directory = _Directory(
        location=decoded.location,
        rows=decoded.rows,
        content=1 if decoded.metadata.get("content") == "deletes" else 0,
        spec_id=spec.spec_id,
        longs=longs,
        texts=_some(
            {
                name: pack_spans(writer, Spans(decoded.heap, spans.starts, spans.lengths), absent_low=True)
                for name, spans in decoded.texts.items()
            }
        ),
        lists={name: _pack_list(writer, *given) for name, given in decoded.lists.items()},
        partition=_pack_partition(writer, decoded, schema, spec),
        columns=tuple(_pack_columns(writer, decoded, schema, longs.get("record_count"))),
    )
    head = msgspec.msgpack.encode(directory)
    prefix = _MAGIC + len(head).to_bytes(4, "little") + head
    return [prefix + b"\0" * (-len(prefix) % ALIGNMENT), *writer.buffers]


def _some(columns: dict[str, Packed | None]) -> dict[str, Packed]:
    return {name: packed for name, packed in columns.items() if packed is not None}


def _pack_present(writer: Writer, values: Longs) -> Packed | None:
    return pack_longs(writer, values, absent_low=True)


def _pack_list(writer: Writer, counts: npt.NDArray[np.int32], values: Longs) -> _ListEntry:
    wide = np.where(counts < 0, MISSING, counts.astype(np.int64))
    return _ListEntry(_pack_present(writer, wide), _pack_present(writer, values), len(values))


def _schema_of(decoded: DecodedManifest) -> Schema:
    try:
        schema = msgspec.json.decode(_normal(decoded.metadata["schema"]), type=Schema)
        _ = schema.index
    except (KeyError, ValueError, BadRequest, msgspec.DecodeError) as error:
        raise Corrupt(f"The schema in the header of manifest {decoded.location} cannot be read: {error}") from None
    return schema


def _normal(text: str) -> bytes:
    """The schema's JSON with its tag: old writers left `type` out."""
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


def _pack_partition(
    writer: Writer, decoded: DecodedManifest, schema: Schema, spec: PartitionSpec
) -> tuple[_PartitionEntry, ...]:
    fields = {field.field_id: field for field in spec.fields}
    packed = []
    for values in decoded.partition:
        field = fields.get(values.field_id)
        kind = None
        if field is not None and len(field.sources) == 1:
            source = schema.column(field.sources[0])
            primitive = None if source is None else _primitive(source.type)
            if primitive is not None:
                kind = result_type(field.transform, primitive)
        if kind is None or not _holds(values, kind):
            kind = _avro_kind(values)
        packed.append(_PartitionEntry(values.field_id, kind, _pack_values(writer, decoded.heap, values, kind)))
    return tuple(packed)


def _holds(values: PartitionValues, kind: str) -> bool:
    """Whether what Avro stored can be values of the Iceberg type."""
    form = form_of(kind)
    if values.doubles is not None:
        return form is Form.FLOATS
    if values.spans is not None:
        return form is Form.STRINGS or kind.startswith("decimal")
    if form is not Form.INTEGERS or kind.startswith("decimal"):
        return False
    # A date that was promoted to a timestamp counts days in older files.
    return values.type != "int" or kind in ("int", "long", "date")


def _avro_kind(values: PartitionValues) -> str:
    """The Iceberg type by what Avro says alone (Iceberg spec, appendix A); for sources that the schema lost."""
    if values.type == "int" and values.logical == "date":
        return "date"
    return {"boolean": "boolean", "int": "int", "long": "long", "float": "float", "double": "double"}.get(
        values.type, "string" if values.type == "string" else "binary"
    )


def _pack_values(writer: Writer, heap: Bytes, values: PartitionValues, kind: str) -> Packed | None:
    if values.longs is not None:
        return pack_longs(writer, values.longs, values.valid, absent_low=True)
    if values.doubles is not None:
        assert values.valid is not None
        return pack_doubles(writer, values.doubles, values.valid, absent_low=True)
    assert values.spans is not None
    spans = Spans(heap, values.spans.starts, values.spans.lengths)
    return pack_bounds(writer, kind, spans, absent_low=True)


def _pack_columns(
    writer: Writer, decoded: DecodedManifest, schema: Schema, record_count: Packed | None
) -> Sequence[ColumnEntry]:
    ids = {column_id for by_id in decoded.counts.values() for column_id in by_id}
    ids |= {column_id for by_id in decoded.bounds.values() for column_id in by_id}
    entries = []
    for column_id in sorted(ids):
        kind = _kind_of(schema, column_id)
        if kind is None:
            continue
        entries.append(_pack_column(writer, decoded, column_id, kind, record_count))
    return entries


def _kind_of(schema: Schema, column_id: int) -> str | None:
    """None for a column that the schema lacks, and one without statistics that could be read."""
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
        return None  # a type of a later format version: nothing is known of its order


def _pack_column(
    writer: Writer, decoded: DecodedManifest, column_id: int, kind: str, record_count: Packed | None
) -> ColumnEntry:
    rows = decoded.rows
    values, nulls, nans, sizes = (_counts_of(decoded, name, column_id) for name in COUNTS)
    if record_count is not None and _pack.same(values, decoded.longs["record_count"]):
        packed_values: Packed | None = record_count  # so it is but inside lists and maps
    else:
        packed_values = _pack_present(writer, values)
    nulls_only, nans_only, no_nulls, no_nans = _pack.relate(values, nulls, nans)
    return ColumnEntry(
        column_id,
        kind,
        pack_bounds(writer, kind, _spans(decoded, "lower_bounds", column_id), absent_low=True),
        pack_bounds(writer, kind, _spans(decoded, "upper_bounds", column_id), absent_low=False),
        (packed_values, _pack_present(writer, nulls), _pack_present(writer, nans), _pack_present(writer, sizes)),
        _how_many(nulls_only, rows),
        _how_many(nans_only, rows),
        _how_many(no_nulls, rows),
        _how_many(no_nans, rows),
    )


def _counts_of(decoded: DecodedManifest, name: str, column_id: int) -> Longs:
    """int64[rows], MISSING where the manifest says nothing, or what cannot be."""
    given = decoded.counts.get(name, {}).get(column_id)
    if given is None:
        return np.full(decoded.rows, MISSING, dtype=np.int64)
    return _pack.scatter(given[0], given[1], decoded.rows)


def _spans(decoded: DecodedManifest, name: str, column_id: int) -> Spans:
    given = decoded.bounds.get(name, {}).get(column_id)
    if given is not None and len(given[0]) == decoded.rows:
        return Spans(decoded.heap, given[1], given[2])
    starts = np.zeros(decoded.rows, dtype=np.int64)
    lengths = np.full(decoded.rows, -1, dtype=np.int32)
    if given is not None:
        rows, given_starts, given_lengths = given
        starts[rows] = given_starts
        lengths[rows] = given_lengths
    return Spans(decoded.heap, starts, lengths)


def _how_many(count: int, rows: int) -> int:
    return _NONE if count == 0 else _ALL if count == rows else _SOME
