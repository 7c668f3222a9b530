"""Converts rows to the port's values and back, and defines the lists of columns for both directions.

A list of columns has the order of the struct's fields, because decoding is positional. A namespace is one TEXT: its
levels are joined by U+001F, which no level may contain, so that the order of the texts is the order of the levels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.store.model import (
    AccessToken,
    AuditRecord,
    DroppedEntry,
    Entry,
    EntryKind,
    Grant,
    IdempotencyRecord,
    IndexFileState,
    Instant,
    InstantState,
    MetricsReport,
    Namespace,
    NamespacePath,
    PlanJoin,
    ProducerState,
    RegisteredIndexFile,
    StoredPlanTable,
    StoredWarehouse,
)
from seamark.metaserver.store.sql.statement import Row, format_placeholders

T = TypeVar("T", bound=msgspec.Struct)


def pack(path: NamespacePath) -> str:
    return NAMESPACE_SEPARATOR.join(path)


def unpack(text: str) -> NamespacePath:
    return tuple(text.split(NAMESPACE_SEPARATOR)) if text else ()


def make_range_end(packed_path: str) -> str:
    """Return the end of the range that contains a packed path and all paths below it, and no other path.

    The paths below continue with the separator, which sorts before all characters of names. U+10FFFF is the greatest
    code point.
    """
    return f"{packed_path}{NAMESPACE_SEPARATOR}\U0010ffff"


def pack_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def get_name_space(kind: EntryKind) -> str:
    """Return the scope in which names of this kind are unique. Tables and views share a scope."""
    return "function" if kind is EntryKind.FUNCTION else "relation"


class ColumnCoding(NamedTuple):
    """The conversions between the value of a field and the form in which a column stores it."""

    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any]


def _make_json_coding(description: str, kind: Any = Any) -> ColumnCoding:
    def decode(text: str) -> Any:
        try:
            return convert_json(text, kind)
        except msgspec.DecodeError as error:
            raise Corrupt(f"The database's {description} is not JSON: {error}") from None

    return ColumnCoding(decode, pack_json)


def _make_enum_coding(kind: type[Enum], description: str) -> ColumnCoding:
    members = {member.value: member for member in kind}

    def decode(text: str) -> Enum:
        try:
            return members[text]
        except KeyError:
            raise Corrupt(f"The database contains {description} {text!r}") from None

    return ColumnCoding(decode, attrgetter("value"))


class StructColumns(Generic[T]):
    """The columns that store a struct, in the order of its fields. `str` returns the list of columns in SQL.

    Args:
        struct: The type of the values.
        sql: The columns or expressions of fields whose columns do not have the name of the field.
        omitted_fields: The fields that are not stored. They must be the last fields of the struct.
        codings: The conversions of fields that are stored in a different form.
    """

    def __init__(
        self,
        struct: type[T],
        *,
        sql: Mapping[str, str] | None = None,
        omitted_fields: Collection[str] = (),
        **codings: ColumnCoding,
    ) -> None:
        """Compute the SQL text of the columns, and the positions of the fields that need a conversion."""
        fields = [field for field in struct.__struct_fields__ if field not in omitted_fields]
        self._struct = struct
        self._text = ", ".join((sql or {}).get(field, field) for field in fields)
        """The list of columns in SQL."""
        self._coded = [(fields.index(field), coding) for field, coding in codings.items()]
        """The position and the conversion of each field that is stored in a different form."""
        self._values = attrgetter(*fields)
        self.column_count = len(fields)
        self.placeholders = format_placeholders(len(fields))
        """The placeholders in SQL for the values that `encode` returns."""

    def __str__(self) -> str:
        return self._text

    def decode(self, row: Row) -> T:
        values = list(row)
        for position, coding in self._coded:
            values[position] = coding.decode(values[position])
        return self._struct(*values)

    def encode(self, value: T) -> tuple[Any, ...]:
        values = list(self._values(value))
        for position, coding in self._coded:
            values[position] = coding.encode(values[position])
        return tuple(values)


_NAMESPACE = ColumnCoding(unpack, pack)
_PLAN_JOINS = _make_json_coding("joined tables of a plan", tuple[PlanJoin, ...])
JOINED_TABLES = ColumnCoding(
    lambda text: None if text is None else _PLAN_JOINS.decode(text),
    lambda tables: None if tables is None else _PLAN_JOINS.encode(tables),
)
_WHO = {"principal_name": "who"}
"""The column `who` stores the name of a principal."""
_make_entry_columns = partial(
    StructColumns, Entry, kind=_make_enum_coding(EntryKind, "an entry of unknown kind"), namespace=_NAMESPACE
)
_make_instant_columns = partial(
    StructColumns,
    Instant,
    sql=_WHO,
    state=_make_enum_coding(InstantState, "an instant in unknown state"),
    kind=_make_enum_coding(EntryKind, "an entry of unknown kind"),
    namespace=_NAMESPACE,
    summary=_make_json_coding("instant summary"),
)

NAMESPACE = StructColumns(Namespace, path=_NAMESPACE, properties=_make_json_coding("namespace properties"))
ENTRY: StructColumns[Entry] = _make_entry_columns(omitted_fields=("index_version", "flushed"))
NAMED: StructColumns[Entry] = _make_entry_columns(
    sql={
        "index_version": "coalesce((SELECT version FROM index_versions WHERE uuid = entries.uuid), 0)",
        "flushed": "coalesce((SELECT {join_offsets} FROM stream_offsets WHERE uuid = entries.uuid), '')",
    }
)
"""The columns for reads of entries by name, with subqueries for the index version and the flushed offsets."""
DROPPED = f"id, {ENTRY}, purge, dropped_ms, expires_ms, who"
DROPPED_COLUMN_COUNT = len(DROPPED.split(","))
INSTANT: StructColumns[Instant] = _make_instant_columns()
NEW_INSTANT: StructColumns[Instant] = _make_instant_columns(omitted_fields=("position",))
"""The columns of a new instant, without the position, which the database sets."""
IDEMPOTENCY = StructColumns(IdempotencyRecord)
METRICS = StructColumns(MetricsReport, sql=_WHO, namespace=_NAMESPACE, report=_make_json_coding("metrics report"))
TOKEN = StructColumns(AccessToken)
INDEX_FILE = StructColumns(
    RegisteredIndexFile,
    sql={"files": "file_count", "rows": "row_count"},
    state=_make_enum_coding(IndexFileState, "an index file in unknown state"),
)
PRODUCER = StructColumns(ProducerState)
PLAN_TABLE = StructColumns(
    StoredPlanTable,
    sql={"plan_snapshot_id": "shown_id", "snapshot_or_fingerprint": "shown", "joined_tables": "joined"},
    namespace=_NAMESPACE,
    files=_make_json_coding("files of a plan table", tuple[str, ...]),
    joined_tables=JOINED_TABLES,
)
GRANT = StructColumns(Grant, namespace=_NAMESPACE, deny=ColumnCoding(bool, int))
AUDIT = StructColumns(AuditRecord, sql=_WHO)
WAREHOUSE = StructColumns(StoredWarehouse, sql=_WHO, settings=_make_json_coding("settings of a warehouse"))


def decode_dropped(row: Row) -> DroppedEntry:
    dropped_id, *entry_values, purge, dropped_ms, expires_ms, principal_name = row
    return DroppedEntry(dropped_id, ENTRY.decode(entry_values), bool(purge), dropped_ms, expires_ms, principal_name)


def decode_retained(row: Row) -> DroppedEntry:
    return msgspec.structs.replace(decode_dropped(row), is_retained=True)


def encode_dropped(dropped_entry: DroppedEntry, entry: Entry) -> tuple[Any, ...]:
    return (
        dropped_entry.id,
        *ENTRY.encode(entry),
        int(dropped_entry.purge),
        dropped_entry.dropped_ms,
        dropped_entry.expires_ms,
        dropped_entry.principal_name,
    )
