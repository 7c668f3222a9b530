"""The time to live of columns: their values are removed from old partitions.

The age of a row is the age of its value in the time column. The table is partitioned by this column: by its day, month,
year or hour, or by the value itself. A partition has expired for a column if all times that it can contain are older
than the age. A partition that is only partly old is not changed, and rows without a time never expire. Times without a
zone are UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Field, StructType, Type
from seamark.formats.iceberg.types.transforms import IDENTITY, UNITS_PER_DAY, find_start_of_month
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest

COLUMNS = "seamark.column-ttl.columns"
TIME_COLUMN = "seamark.column-ttl.time-column"
DROPPED_COLUMNS = "dropped-columns"
"""The key in the summary of a snapshot that lists the columns that its new files do not have."""
COLUMNS_MAX = 1000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
_TIMESTAMP_TYPES = frozenset({"timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})
_TRANSFORMS = frozenset({IDENTITY, "year", "month", "day", "hour"})
_ENTRY = re.compile(r'\s*+("(?:[^"]++|"")++"|[^\s:=,"][^:=,"]*+)\s*+[:=]([^,]*+)')
_SHOWN_MAX = 200
_AGE = re.compile(r"(\d{1,6})\s*(h|hours?|d|days?|w|weeks?|y|years?)", re.IGNORECASE)
_HOURS_PER_UNIT = {"h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class TtlPolicy:
    """The ages after which the values of columns expire.

    Attributes:
        ages_h: The age in hours, by column.
        time_column: The name of the time column. None if the table is partitioned by only one time column.
    """

    ages_h: Mapping[str, int]
    time_column: str | None = None

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> TtlPolicy | None:
        """Return the policy in a table's properties, or None if the property `seamark.column-ttl.columns` is not set.

        Raises:
            BadRequest: A property has an invalid value.
        """
        text = properties.get(COLUMNS, "").strip()
        if not text:
            return None
        ages_h: dict[str, int] = {}
        for name, age in _parse_entries(text):
            hours = _parse_hours(age)
            if not name or hours is None or name in ages_h:
                raise BadRequest(
                    f"{COLUMNS} is {text[:_SHOWN_MAX]!r}; it must list different columns with their ages, such as "
                    'payload: 90 days, ext: 1y, or be a JSON object such as {"payload": "90d"}'
                )
            ages_h[name] = hours
        if len(ages_h) > COLUMNS_MAX:
            raise BadRequest(f"{COLUMNS} lists {len(ages_h):,} columns; the limit is {COLUMNS_MAX:,}")
        return TtlPolicy(ages_h, properties.get(TIME_COLUMN, "").strip() or None)

    def list_rules(self, metadata: TableMetadata, now_ms: int) -> list[TtlRule]:
        """Return the rules that apply at the time `now_ms`, one for each different age.

        The rule of an age selects the rows that are older, and lists the columns that have expired in them: those with
        this age or a lower age. For example, if `a` expires after 30 days and `b` after 90 days, the rule of 90 days
        lists `a` and `b`, and the rule of 30 days lists `a`. The rules with the highest ages are first, because their
        partitions lose the most columns.

        Raises:
            BadRequest: The table is not partitioned by a time column; or it is partitioned by several, and the policy
                names none of them.
        """
        time_column = self._find_time_column(metadata)
        rules = []
        for age_h in sorted(set(self.ages_h.values()), reverse=True):
            columns = tuple(column for column, age in self.ages_h.items() if age <= age_h)
            # Limit the age to the time since 1970, because an earlier time could be outside the range of dates.
            oldest_kept_time = _EPOCH + timedelta(milliseconds=now_ms) - timedelta(hours=min(age_h, now_ms // HOUR_MS))
            rules.append(
                TtlRule(
                    columns,
                    {
                        "type": "lt",
                        "term": time_column.name,
                        "value": _to_time_literal(time_column.kind, oldest_kept_time),
                    },
                    age_h,
                )
            )
        return rules

    def _find_time_column(self, metadata: TableMetadata) -> TimeColumn:
        """Return the time column of the table's partitions that the policy names, or the only time column.

        If several fields have this column as their source, the first field is used.

        Raises:
            BadRequest: The table is not partitioned by such a column, or by several, and the policy names none of them.
        """
        time_columns = find_time_columns(metadata, metadata.default_spec)
        if self.time_column is not None:
            time_columns = [column for column in time_columns if column.name == self.time_column]
            if not time_columns:
                raise BadRequest(
                    f"{TIME_COLUMN} is {self.time_column!r}, but the table is not partitioned by its day, "
                    "month, year or hour"
                )
        elif len({column.column_id for column in time_columns}) != 1:
            names = ", ".join(column.name for column in time_columns)
            reason = f"by several: {names}" if time_columns else "by no time column"
            raise BadRequest(
                f"Columns expire by the time column of the table's partitions, but the table is partitioned {reason}"
                + (f"; set {TIME_COLUMN}" if time_columns else "")
            )
        return time_columns[0]


def explain_retention(metadata: TableMetadata, field: Field) -> str:
    """Return the reason why the values of a column and of its inner columns are never removed from files.

    The reason is a predicate that follows the column's name. It is empty if the values can be removed.
    """
    if field.required:
        return "is required"
    if field.initial_default is not None:
        return "has a default, which readers would see instead of null"
    column_ids = {field.id, *_list_ids_within(field.type)}
    if column_ids & set(metadata.current_schema.identifier_field_ids):
        return "is in the table's identifier fields"
    if any(column_ids & set(term.sources) for spec in metadata.partition_specs for term in spec.fields):
        return "is the source of a partition field"
    # All sort orders count, because a file keeps the id of the order in which it was sorted.
    if any(column_ids & set(term.sources) for order in metadata.sort_orders for term in order.fields):
        return "is in a sort order of the table"
    return ""


def _list_ids_within(kind: Type) -> Iterator[int]:
    """Yield the ids of the fields of a struct, and of the structs inside it."""
    if isinstance(kind, StructType):
        for field in kind.fields:
            yield field.id
            yield from _list_ids_within(field.type)


class TimeColumn(NamedTuple):
    """A time column of type `kind` and its partition field, which has the transform `transform`."""

    name: str
    column_id: int
    kind: str
    partition_field_id: int
    transform: str

    def to_ms(self, value: int) -> int:
        """Convert a value of the column to milliseconds since the epoch."""
        return value * DAY_MS // UNITS_PER_DAY[self.kind]


def find_time_columns(metadata: TableMetadata, spec: PartitionSpec) -> list[TimeColumn]:
    """Return the time columns by which a spec partitions the table, if the current schema contains them."""
    time_columns = []
    for field in spec.fields:
        column = metadata.current_schema.column(field.sources[0]) if len(field.sources) == 1 else None
        if column is None or field.transform not in _TRANSFORMS or not isinstance(column.type, str):
            continue
        kind = get_base_name(column.type)
        if kind == "date" or kind in _TIMESTAMP_TYPES:
            time_columns.append(TimeColumn(column.name, column.id, kind, field.field_id or 0, field.transform))
    return time_columns


def compute_partition_end_ms(time: TimeColumn, value: int) -> int:
    """Return the time at which a partition ends, in milliseconds since the epoch.

    A partition by the column itself contains one day, or one time.

    Args:
        time: The time column and its partition field.
        value: The value of the partition field, in its own unit, such as days since 1970.
    """
    match time.transform:
        case "hour":
            return (value + 1) * HOUR_MS
        case "day":
            return (value + 1) * DAY_MS
        case "month" | "year":
            months = value + 1 if time.transform == "month" else 12 * (value + 1)
            return find_start_of_month(months) * DAY_MS
    return time.to_ms(value + 1 if time.kind == "date" else value)


@dataclass(frozen=True)
class TtlRule:
    """A rule: some columns have expired in the partitions that an expression selects.

    Attributes:
        columns: The names of the columns.
        where: An expression of the REST specification that all rows of the partitions satisfy.
        age_h: The age in hours after which the columns expire.
    """

    columns: tuple[str, ...]
    where: dict[str, Any]
    age_h: int


def _parse_entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the age of each entry, or empty texts for an invalid entry.

    The text is a JSON object, or a list such as `payload: 90 days, "a b": 1y`. Quotes are doubled in quoted names.
    """
    if text.startswith("{"):
        try:
            ttl_by_column = convert_json(text, dict[str, str])
        except msgspec.MsgspecError:
            yield "", ""
            return
        yield from ttl_by_column.items() if ttl_by_column else [("", "")]
        return
    position = 0
    while position <= len(text):
        match = _ENTRY.match(text, position)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            yield "", ""
            return
        name, age = match.groups()
        yield (name[1:-1].replace('""', '"') if name.startswith('"') else name.rstrip()), age
        position = match.end() + 1


def _parse_hours(age: str) -> int | None:
    """Return an age such as `90 days` in hours, or None if it is invalid or zero."""
    match = _AGE.fullmatch(age.strip())
    if match is None or not int(match[1]):
        return None
    return int(match[1]) * _HOURS_PER_UNIT[match[2][0].lower()]


def _to_time_literal(kind: str, time: datetime) -> str:
    """Return a time as single-value JSON of the type `kind`."""
    if kind == "date":
        return time.date().isoformat()
    text = time.replace(tzinfo=None).isoformat(timespec="microseconds")
    return f"{text}+00:00" if kind.startswith("timestamptz") else text
