"""Encodes partition tuples as JSON, in the form that each client can parse.

PyIceberg 0.12 deviates from the specification: it cannot parse nulls in `partition`, and does not convert strings to
dates there (`ClientDialect`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.transforms import values_type
from seamark.formats.iceberg.types.types import base_name
from seamark.formats.iceberg.types.values import Value, encode_json, promoted
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import encode_json as to_json
from seamark.formats.runtime.errors import Corrupt, NotAcceptable
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.answer.block_layout import BlockLayout, keys
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

_KINDS_MAX = 8
"""Combinations of manifest fields and client whose partition tuples are cached."""
_TEXTS_BYTES, _FIELD_BYTES = 1000, 300
_INT_LIKE = frozenset({"date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})


@dataclass(frozen=True)
class ClientDialect:
    """How to encode partition values for a client.

    PyIceberg copies them unchanged into identity-partitioned columns that a data file lacks (spec, "Column
    Projection"), so dates and times must be the integers of a manifest. A partition that it would misread (null or
    binary) is omitted: PyIceberg then fails if it needs the value.
    """

    numbers_for_times: bool = False
    unreadable: frozenset[str] = frozenset()
    """Types that the client cannot read, and "null"."""
    polls: bool = True
    """Fetches the result of a plan that was still running."""
    needs_residuals: bool = False
    """Fails, or counts rows wrongly, if a task has no residual; the specification uses the filter instead."""
    filters_by_residual: bool = False
    """Some programs filter rows by the residual alone; a weaker residual would return rows that do not match."""
    binds_residuals: bool = True
    """Binds residuals by name to the table's current schema."""
    orders_nan_above: bool = True
    """May order NaN above every number."""
    changes_files: bool = False
    """May rewrite or delete the planned files without a sign in the request (`api/plans/scan_requests.py`)."""


STANDARD = ClientDialect()
JAVA = ClientDialect(needs_residuals=True, filters_by_residual=True, changes_files=True)
PYICEBERG = ClientDialect(
    numbers_for_times=True,
    unreadable=frozenset({"null", "binary", "fixed"}),
    polls=False,
    needs_residuals=True,
    binds_residuals=False,
    orders_nan_above=False,
)


def dialect_of(user_agent: str, client_version: str = "") -> ClientDialect:
    """The dialect of a client. `client_version`: the header X-Client-Version, which Iceberg's Java client sends."""
    if user_agent.startswith("PyIceberg/"):
        return PYICEBERG
    is_java = user_agent.startswith("Apache-HttpClient/") or client_version.startswith("Apache Iceberg")
    return JAVA if is_java else STANDARD


class _Field(NamedTuple):
    """A field of a table's partition spec."""

    position: int
    """Position in the block's tuples; -1 if the field is null in all of them."""
    stored: str
    """The type in the block."""
    target: str
    """The type in the answer."""
    readable: bool
    """Whether the client can read values that are not null."""


Fields = tuple[_Field, ...]


_Encoding: TypeAlias = tuple[tuple[tuple[int, str], ...], Fields, ClientDialect]
"""The fields of a manifest's partitions, their encoding, and the client."""


class PartitionTexts:
    """Encodes partition tuples in the order and with the types of the table's current spec, which manifests may
    precede.
    """

    def __init__(self, metadata: TableMetadata, dialect: ClientDialect) -> None:
        # Not the metadata, which list all snapshots and would stay in memory with the view.
        self._schemas, self._specs = metadata.schemas, metadata.partition_specs
        self._schema_id, self._schema = metadata.current_schema_id, metadata.current_schema
        self._dialect = dialect
        self._kinds: dict[tuple[object, ...], Fields] = {}
        self.size_bytes = _TEXTS_BYTES
        """Without schemas and specs, which other metadata of the table share."""

    def matches(self, metadata: TableMetadata) -> bool:
        """Whether the texts are the same for other metadata."""
        return (
            self._schema_id == metadata.current_schema_id
            and self._schemas == metadata.schemas
            and self._specs == metadata.partition_specs
        )

    def texts(self, block: Block, columns: BlockLayout, rows: Longs, cache: PartitionTextCache) -> list[bytes]:
        """`,"partition":[…]` for rows of the block; empty if this client could not read it."""
        fields = self._fields(block)
        # The cache is not the instance's: instances live as long as views, of which there may be many.
        cached = cache.of_encoding((block.partition_fields, fields, self._dialect))
        texts = []
        partition_keys = keys(block, columns, range(len(columns.partition)), rows)
        for row, key in zip(rows.tolist(), partition_keys, strict=True):
            text = cached.get(key)
            if text is None:
                text = _fragment(fields, block.partition(row), self._dialect).encode()
                cached.put(key, text, len(key) + len(text))
            texts.append(text)
        return texts

    def _fields(self, block: Block) -> Fields:
        kind = (block.spec_id, block.partition_fields)
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = self._read_fields(block)
            # Again, as threads may do this at the same time.
            self.size_bytes = _TEXTS_BYTES + sum(_FIELD_BYTES * len(fields) for fields in list(self._kinds.values()))
        return found

    def _read_fields(self, block: Block) -> Fields:
        spec = next((spec for spec in self._specs if spec.spec_id == block.spec_id), None)
        if spec is None:
            raise Corrupt(
                f"The manifest {block.location} has the partition spec {block.spec_id}, which the table's metadata lack"
            )
        schema = self._schema
        stored = {field_id: (position, kind) for position, (field_id, kind) in enumerate(block.partition_fields)}
        fields = []
        for field in spec.fields:
            position, kind = stored.get(field.field_id or 0, (-1, ""))
            source = schema.column(field.sources[0]) if len(field.sources) == 1 else None
            if source is None or not isinstance(source.type, str):
                # Java assigns the type `unknown`, whose only value is null, to the field of a dropped column.
                fields.append(_Field(-1, kind, kind, True))
            else:
                target = values_type(field.transform, source.type)
                fields.append(_Field(position, kind, target, base_name(target) not in self._dialect.unreadable))
        return tuple(fields)


class _TextsOfView:
    """For answers to a view's plans, which nearly always have the same metadata."""

    def __init__(self) -> None:
        self.by_dialect: dict[ClientDialect, PartitionTexts] = {}

    @property
    def size_bytes(self) -> int:
        return sum([texts.size_bytes for texts in list(self.by_dialect.values())])


def partition_texts(scan: ScanPlan, dialect: ClientDialect) -> PartitionTexts:
    derived = scan.view.derived
    by_dialect = (derived.get(_TextsOfView) or derived.keep(_TextsOfView())).by_dialect
    found = by_dialect.get(dialect)
    if found is None or not found.matches(scan.metadata):
        found = by_dialect[dialect] = PartitionTexts(scan.metadata, dialect)
    return found


class PartitionTextCache:
    """Encoded partition tuples of all answers, within `budget_bytes`. 0 caches nothing."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_encoding: OrderedDict[_Encoding, MemoryCache[bytes, bytes]] = OrderedDict()

    def of_encoding(self, encoding: _Encoding) -> MemoryCache[bytes, bytes]:
        """Texts by partition key."""
        found = self._by_encoding.get(encoding)
        if found is None:
            found = self._by_encoding[encoding] = MemoryCache(self._budget_bytes // _KINDS_MAX, "partition-texts")
            if len(self._by_encoding) > _KINDS_MAX:
                self._by_encoding.popitem(last=False)
        self._by_encoding.move_to_end(encoding)
        return found


UNCACHED = PartitionTextCache(0)


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
    value = promoted(kind, target, value)
    as_number = dialect.numbers_for_times and target in _INT_LIKE
    return to_json(value if as_number else encode_json(target, value)).decode()


def _float_text(target: str, value: float) -> str:
    """JSON has no infinity, but parsers read numbers beyond the range of doubles as infinity. It has no NaN."""
    if math.isnan(value):
        raise NotAcceptable(
            "A file's partition value is NaN, which JSON cannot represent. Plan this table on the client: "
            "set its property seamark.scan-planning-mode to client"
        )
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return to_json(encode_json(target, value)).decode()
