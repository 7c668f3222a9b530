"""Partition tuples as JSON, as clients read them.

What clients insist on, beyond the specification: PyIceberg 0.12 has no parser for nulls in `partition`, and takes
strings that stand for dates there for strings (`ClientDialect`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

from cache.memory import MemoryCache
from metaserver.errors import Corrupt, NotAcceptable
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.transforms import values_type
from metaserver.iceberg.types.types import base_name
from metaserver.iceberg.types.values import MICROS_PER_DAY, NANOS_PER_MICRO, Value, encode_json
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.packing import Longs
from metaserver.planner.answer.block_layout import BlockLayout, keys
from metaserver.planner.scan.scan import Scan
from metaserver.planner.view.view import TableView
from metaserver.wire import encode_json as to_json

_PARTITION_BYTES = 4 << 20
"""Partition tuples that are kept as text, for each kind of manifest and client, of which `_KINDS_MAX` are kept."""
_KINDS_MAX = 8
_INT_LIKE = frozenset({"date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})


@dataclass(frozen=True)
class ClientDialect:
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
    needs_residuals: bool = False
    """Fails, or counts rows wrongly, where a task has no residual; the standard takes the filter in its place."""
    filters_by_residual: bool = False
    """Some programs filter rows by the residual alone, so that a weaker one would give them rows that do not match."""
    binds_residuals: bool = True
    """Binds a residual by name, to the table's current schema. Other clients may."""


STANDARD = ClientDialect()
JAVA = ClientDialect(needs_residuals=True, filters_by_residual=True)
PYICEBERG = ClientDialect(
    numbers_for_times=True,
    unreadable=frozenset({"null", "binary", "fixed"}),
    comes_back=False,
    needs_residuals=True,
    binds_residuals=False,
)


def dialect_of(user_agent: str, client_version: str = "") -> ClientDialect:
    """`client_version` is the header X-Client-Version, which Iceberg's Java client sends."""
    if user_agent.startswith("PyIceberg/"):
        return PYICEBERG
    is_java = user_agent.startswith("Apache-HttpClient/") or client_version.startswith("Apache Iceberg")
    return JAVA if is_java else STANDARD


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


class PartitionTexts:
    """Partition tuples as JSON, in the order and the types of the table's spec, which a manifest's may lag behind."""

    def __init__(self, metadata: TableMetadata, dialect: ClientDialect) -> None:
        self._metadata = metadata
        self._dialect = dialect
        self._kinds: dict[tuple[object, ...], Fields] = {}

    def are_of(self, metadata: TableMetadata) -> bool:
        """Whether they would be the same of other metadata."""
        mine = self._metadata
        return (
            mine.current_schema_id == metadata.current_schema_id
            and mine.schemas == metadata.schemas
            and mine.partition_specs == metadata.partition_specs
        )

    def texts(self, block: Block, columns: BlockLayout, rows: Longs) -> list[bytes]:
        """`,"partition":[…]` of rows of the block; empty where this client could not read it."""
        fields = self._fields(block)
        # Not held here: these live as long as views, of which there may be many.
        known = _known_texts(block.partition_fields, fields, self._dialect)
        found = []
        told_apart = keys(block, columns, range(len(columns.partition)), rows)
        for row, key in zip(rows.tolist(), told_apart, strict=True):
            text = known.get(key)
            if text is None:
                text = _fragment(fields, block.partition(row), self._dialect).encode()
                known.put(key, text, len(key) + len(text))
            found.append(text)
        return found

    def _fields(self, block: Block) -> Fields:
        kind = (block.spec_id, block.partition_fields)
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = self._read_fields(block)
        return found

    def _read_fields(self, block: Block) -> Fields:
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
                target = values_type(field.transform, source.type)
                fields.append(_Field(position, kind, target, base_name(target) not in self._dialect.unreadable))
        return tuple(fields)


_SPELT: WeakKeyDictionary[TableView, dict[ClientDialect, PartitionTexts]] = WeakKeyDictionary()
"""For the answers to a view's plans, almost all of which are of the same metadata."""


def partition_texts(scan: Scan, dialect: ClientDialect) -> PartitionTexts:
    by_dialect = _SPELT.get(scan.view)
    if by_dialect is None:
        by_dialect = _SPELT[scan.view] = {}
    found = by_dialect.get(dialect)
    if found is None or not found.are_of(scan.metadata):
        found = by_dialect[dialect] = PartitionTexts(scan.metadata, dialect)
    return found


@lru_cache(maxsize=_KINDS_MAX)
def _known_texts(
    stored: tuple[tuple[int, str], ...], fields: Fields, dialect: ClientDialect
) -> MemoryCache[bytes, bytes]:
    """Texts by what tells partitions apart, of all answers that spell them alike."""
    return MemoryCache(_PARTITION_BYTES)


def _fragment(fields: Fields, values: tuple[Value | None, ...], dialect: ClientDialect) -> str:
    texts = []
    for field in fields:
        value = None if field.position < 0 else values[field.position]
        if "null" in dialect.unreadable if value is None else not field.readable:
            return ""
        texts.append("null" if value is None else _value(field.stored, field.target, value, dialect))
    return f',"partition":[{",".join(texts)}]'


def _value(kind: str, target: str, value: Value, dialect: ClientDialect) -> str:
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
