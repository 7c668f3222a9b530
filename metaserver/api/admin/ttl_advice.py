"""The route that finds columns of old partitions that no query reads, and the bytes that their removal would free.

The advice for a column begins at the smallest age of partitions that no recent query has read. The reads come from
`catalog/column_usage.py`. The confidence is the share of the reads that named their columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
from sqlglot import Tokenizer, TokenType

from seamark.formats.iceberg.metadata.column_ttl import TimeColumn, explain_retention, find_time_columns
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.packing import MISSING, Longs
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.indexes.index_state import load_view
from seamark.metaserver.catalog.column_usage import DAY_MS
from seamark.metaserver.catalog.plans.plan_views import quote_identifier
from seamark.metaserver.planner.lookup.lookup import FoundFiles, RequestedColumn, find_files_by_prefix
from seamark.metaserver.planner.lookup.partition_times import find_partition_ends_ms, group_by_block
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import EVERY_COLUMN, NAMED_COLUMNS, UNKNOWN_COLUMNS, ColumnReads

AGES_D = (7, 14, 30, 60, 90, 180, 365, 730, 1825)
"""The ages of partitions that advice can name, in days."""
UNREAD_DAYS, UNREAD_DAYS_MAX = 30, 3650
"""The default and the maximum of the query parameter `unread-days`."""
_UNREAD_DAYS_DIGITS_MAX = 5


class ColumnAdvice(msgspec.Struct, frozen=True, rename="kebab"):
    """A column that no query reads in partitions above a certain age.

    Attributes:
        older_than_days: The minimum age of the partitions in days.
        days_unread: The days since the last read of the column in partitions of at least this age, or since the
            first read of the table.
        size_in_bytes: The stored bytes of the column in these partitions.
        statement: The statement that drops the column in these partitions.
        policy: The entry of the policy that removes the values of the column at this age.
    """

    column: str
    older_than_days: int
    days_unread: int
    files: int
    partitions: int
    size_in_bytes: int
    statement: str
    policy: str


class TtlAdvice(msgspec.Struct, frozen=True, rename="kebab"):
    """The advice for a table.

    Attributes:
        reads: The number of reads that the server has seen.
        reads_with_columns: The number of these reads that named their columns.
        confidence: The share of the reads that named their columns.
        days: The days since the first read.
        reason: The reason why there is no advice for the table.
    """

    reads: int
    reads_with_columns: int
    confidence: float
    days: int
    advice: tuple[ColumnAdvice, ...]
    reason: str = ""


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/ttl-advice",
    "adviseTtl",
    "List columns that no query reads in old partitions, with statements that drop them in these partitions",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The columns, with the largest column first", TtlAdvice),
        ResponseSpec(400, "unread-days is not a number, or is out of range"),
        ResponseSpec(404, "No such table"),
    ),
)
async def advise_ttl(call: Call) -> TtlAdvice:
    """List columns that no query reads in old partitions, with statements that drop them in these partitions."""
    catalog = call.components.catalog
    unread_days = _parse_unread_days(call.query.get("unread-days", str(UNREAD_DAYS)))
    loaded_table = await catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    reads = (
        await catalog.column_usage.flush_and_list_table_reads(loaded_table.entry.uuid)
        if catalog.column_usage.is_on
        else []
    )
    view = await load_view(call, loaded_table.metadata, loaded_table.metadata.current_snapshot_id)
    advisor = _Advisor(loaded_table.metadata, view, reads, call.components.clock.now_ms(), (*call.namespace, call.name))
    return await asyncio.to_thread(advisor.advise, unread_days, is_on=catalog.column_usage.is_on)


def _parse_unread_days(text: str) -> int:
    if not text.isdecimal() or len(text) > _UNREAD_DAYS_DIGITS_MAX or not 1 <= int(text) <= UNREAD_DAYS_MAX:
        raise BadRequest(f"unread-days is {text[:40]!r}; it must be a number from 1 to {UNREAD_DAYS_MAX}")
    return int(text)


@dataclass(frozen=True)
class _Advisor:
    """Computes the advice for one table."""

    metadata: TableMetadata
    view: TableView
    reads: Sequence[ColumnReads]
    now_ms: int
    table: tuple[str, ...]

    def advise(self, unread_days: int, *, is_on: bool) -> TtlAdvice:
        """Return the advice for columns that no query has read for `unread_days`, or the reason why there is none."""
        reads_with_columns, reads_without_columns = self._count_reads(NAMED_COLUMNS), self._count_reads(UNKNOWN_COLUMNS)
        first_day = min((column_read.first_day for column_read in self.reads), default=self.today)
        days = self.today - first_day
        time_columns = find_time_columns(self.metadata, self.metadata.default_spec)
        reason = ""
        if not is_on:
            reason = "the setting column_usage_days is 0, so no reads are counted"
        elif not reads_with_columns + reads_without_columns:
            reason = "the server has not seen a read of this table yet"
        elif days < unread_days:
            days_text = "1 day" if days == 1 else f"{days} days"
            reason = f"reads are counted for {days_text}, which is less than unread-days, {unread_days}"
        elif len(time_columns) != 1:
            reason = "the table is not partitioned by one time column, so its partitions have no age"
        advice = () if reason else tuple(self._advise_columns(time_columns[0], unread_days, first_day))
        confidence = (
            reads_with_columns / (reads_with_columns + reads_without_columns)
            if reads_with_columns + reads_without_columns
            else 0.0
        )
        sorted_advice = tuple(sorted(advice, key=lambda proposal: -proposal.size_in_bytes))
        return TtlAdvice(
            reads_with_columns + reads_without_columns,
            reads_with_columns,
            round(confidence, 3),
            days,
            sorted_advice,
            reason,
        )

    @property
    def today(self) -> int:
        return self.now_ms // DAY_MS

    def _count_reads(self, column_id: int) -> int:
        return sum(column_read.reads for column_read in self.reads if column_read.column_id == column_id)

    def _advise_columns(self, time: TimeColumn, unread_days: int, first_day: int) -> Iterator[ColumnAdvice]:
        """Yield the advice for each column, for the smallest age of partitions in which no query reads the column.

        A read of a nested column, and a read of all columns, which has the id `EVERY_COLUMN`, are also reads of the
        column. Columns that the table must keep get no advice.
        """
        files, schema = find_files_by_prefix(self.view), self.metadata.current_schema
        ends_ms = self._find_partition_ends_ms(files.list_entry_ids())
        for field in schema.fields:
            if explain_retention(self.metadata, field):
                continue
            sizes = _measure_column(files, schema, field.id)
            related_ids = {field.id, EVERY_COLUMN, *_find_columns_inside(schema, field.id)}
            for age_d in AGES_D:
                before_ms = self._find_boundary_ms(time, age_d)
                is_old = (ends_ms != MISSING) & (ends_ms <= before_ms) & (sizes > 0)
                last_day = max(
                    (
                        column_read.last_day
                        for column_read in self.reads
                        if column_read.column_id in related_ids and column_read.oldest_age_d >= age_d
                    ),
                    default=first_day,
                )
                if not is_old.any():
                    break
                if self.today - last_day >= unread_days:
                    condition = f"{_quote_identifier(time.name)} < {_write_literal(time, before_ms)}"
                    name = ".".join(map(_quote_identifier, self.table))
                    yield ColumnAdvice(
                        field.name,
                        age_d,
                        self.today - last_day,
                        int(is_old.sum()),
                        len(np.unique(ends_ms[is_old])),
                        int(sizes[is_old].sum()),
                        f"ALTER TABLE {name} PARTITION ({condition}) DROP COLUMNS ({_quote_identifier(field.name)})",
                        f"{_quote_policy_name(field.name)}: {age_d} days",
                    )
                    break

    def _find_partition_ends_ms(self, rows: Longs) -> Longs:
        """Return the end of each file's partition in milliseconds, or MISSING if the partition has no time.

        Args:
            rows: The numbers of the files in the view, which is the list of the snapshot's files in blocks.
        """
        ends_by_block = []
        for block_number, block_rows in group_by_block(self.view, rows):
            ends = find_partition_ends_ms(self.view, block_number, block_rows, self.metadata)
            ends_by_block.append(np.full(len(block_rows), MISSING, dtype=np.int64) if ends is None else ends)
        return np.concatenate(ends_by_block) if ends_by_block else np.empty(0, dtype=np.int64)

    def _find_boundary_ms(self, time: TimeColumn, age_d: int) -> int:
        """Return the time before which partitions must end to have this age, in milliseconds.

        The time is a boundary of partitions in each spec that partitions by the column. So it is the start of a day,
        or of a month or year if a spec has partitions of this length.
        """
        boundary = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.now_ms) - timedelta(days=age_d)
        boundary = boundary.replace(hour=0, minute=0, second=0, microsecond=0)
        transforms = {
            field.transform
            for spec in self.metadata.partition_specs
            for field in find_time_columns(self.metadata, spec)
        }
        if "month" in transforms or "year" in transforms:
            boundary = boundary.replace(day=1)
        if "year" in transforms:
            boundary = boundary.replace(month=1)
        return int(boundary.timestamp()) * 1000


def _find_columns_inside(schema: Schema, column_id: int) -> set[int]:
    """Return the ids of the columns that are nested in a column."""
    return {
        field.id
        for field in schema.index.by_id.values()
        if column_id in {ancestor.id for ancestor in schema.list_ancestors(field)}
    }


def _measure_column(files: FoundFiles, schema: Schema, column_id: int) -> Longs:
    """Return the bytes of the column in each file, int64[files]; 0 if they are unknown, or if all values are null."""
    size_bytes = np.zeros(files.file_count, dtype=np.int64)
    rows = files.read_longs("record_count")
    for leaf_id in {column_id, *_find_columns_inside(schema, column_id)}:
        leaf = schema.index.by_id[leaf_id]
        if isinstance(leaf.type, str):
            stats = files.find_statistics(RequestedColumn(leaf_id, leaf.type))
            sizes = np.maximum(stats.counts("column_sizes"), 0)
            size_bytes += np.where(stats.counts("null_value_counts") == rows, 0, sizes)
    return size_bytes


def _quote_identifier(name: str) -> str:
    """Return a name as an identifier of SQL, in quotes unless it is an ordinary name of ASCII characters.

    Reserved words and names of types, such as `date`, are quoted.
    """
    is_plain = name.isascii() and name.isidentifier()
    if is_plain and [token.token_type for token in Tokenizer().tokenize(name)] == [TokenType.VAR]:
        return name
    return quote_identifier(name)


def _quote_policy_name(name: str) -> str:
    """Return a column name as in a policy: in quotes if it has a character that separates parts of a policy."""
    return name if not set(name) & set(':=," \t') else '"' + name.replace('"', '""') + '"'


def _write_literal(time: TimeColumn, at_ms: int) -> str:
    """Return the SQL literal of a time in milliseconds, in the type of a time column."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    if time.kind == "date":
        return f"DATE '{moment.date().isoformat()}'"
    return f"TIMESTAMP '{moment:%Y-%m-%d %H:%M:%S}'"
