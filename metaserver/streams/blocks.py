"""Keeps in memory the rows of one shard that are durable in the log, and not yet in the table's files.

The log decides which rows exist. `catch_up` adds the rows up to a watermark: rows that appends of this process have
offered, and rows that it reads from the log. So the rows in memory are always a range without gaps that begins at the
flushed offset, and includes rows that other processes appended. The server needs no separate recovery when it starts.
"""

from __future__ import annotations

from collections import deque

from seamark.formats.runtime.errors import OffsetOutOfRange
from seamark.metaserver.log.port import Record, Shard, StreamLog
from seamark.metaserver.streams.row_files import RowSlice

READ_BYTES = 4 << 20
"""The number of bytes that `catch_up` reads from the log at a time."""


class ShardBlocks:
    """The rows of one shard in memory. An instance belongs to one event loop.

    Attributes:
        start: The offset of the first row in memory, which is the flushed offset.
        end: The offset after the last row in memory.
        size_bytes: The size of all rows, including rows after a gap.
        oldest_ms: The time at which the log received the oldest row, or None if there are no rows.
    """

    def __init__(self, log: StreamLog, shard: Shard, flushed_offset: int) -> None:
        self._log = log
        self._shard = shard
        self.start = self.end = flushed_offset
        self._records: deque[Record] = deque()
        """The records in ascending order and without a gap, from the record that contains `start` on."""
        self._early_records: dict[int, Record] = {}
        """The durable records after a gap, by offset. The rows before them are not in memory yet."""
        self.size_bytes = 0

    @property
    def oldest_ms(self) -> int | None:
        return self._records[0].time_ms if self._records else None

    def offer(self, record: Record) -> None:
        """Add a record that was just acknowledged.

        A record after a gap waits with the early records, until the rows between are known. A record that is already in
        memory is ignored.
        """
        if record.offset < self.end or record.offset in self._early_records:
            return
        self._early_records[record.offset] = record
        self.size_bytes += record.batch.size_bytes
        self._append_early_records()

    async def catch_up(self, watermark: int) -> None:
        """Add the rows up to `watermark`, an offset that the log has reached."""
        while self.end < watermark:
            first = self.end
            try:
                records = await self._log.read(self._shard, first, limit_bytes=READ_BYTES, end=watermark)
            except OffsetOutOfRange:
                # The rows were removed, but no call of `release` has moved the end meanwhile, so a repetition would
                # fail again.
                if self.end == first:
                    raise
                continue  # A flush has added these rows to the table's files, and the log has removed them.
            for record in records:
                # Check again, because another call or an append may have added the record meanwhile.
                if record.offset <= self.end < record.end:
                    self._records.append(record)
                    self.size_bytes += record.batch.size_bytes
                    self.end = record.end
            self._append_early_records()

    def _append_early_records(self) -> None:
        """Append the early records that follow the rows in memory without a gap, and drop those that are not needed."""
        while (record := self._early_records.pop(self.end, None)) is not None:
            self._records.append(record)
            self.end = record.end
        for offset in [offset for offset in self._early_records if offset < self.end]:
            self.size_bytes -= self._early_records.pop(offset).batch.size_bytes

    def list_slices(self, start: int, end: int) -> list[RowSlice]:
        """Return the rows from `start` to `end` (exclusive), in the order of the log.

        Raises:
            ValueError: The rows are not in memory.
        """
        if not self.start <= start <= end <= self.end:
            raise ValueError(
                f"rows {start} to {end} of {self._shard} are not in memory: {self.start} to {self.end} are"
            )
        slices = []
        for record in self._find_records(start, end):
            first, last = max(start, record.offset), min(end, record.end)
            start_row, end_row = first - record.offset, last - record.offset
            kinds = record.batch.kinds[start_row:end_row]
            slices.append(RowSlice(record.batch.payload, start_row, last - first, kinds))
        return slices

    def _find_records(self, start: int, end: int) -> list[Record]:
        """Return the records with rows from `start` to `end` (exclusive), in ascending order.

        The search starts with the last record, because readers mostly need the last rows.
        """
        records: list[Record] = []
        for record in reversed(self._records):
            if record.end <= start:
                break
            if max(start, record.offset) < min(end, record.end):
                records.append(record)
        records.reverse()
        return records

    def split(self, start: int, end: int, *, bytes_max: int) -> list[tuple[int, int]]:
        """Split the rows from `start` to `end` (exclusive) into consecutive ranges.

        Each range consists of whole batches of the log with at most `bytes_max`, or of a single larger batch. The first
        and the last range may begin or end inside a batch.
        """
        ranges: list[tuple[int, int]] = []
        first, size_bytes = start, 0
        for record in self._find_records(start, end):
            if size_bytes and size_bytes + record.batch.size_bytes > bytes_max:
                ranges.append((first, record.offset))
                first, size_bytes = record.offset, 0
            size_bytes += record.batch.size_bytes
        return [*ranges, (first, end)]

    def release(self, flushed_offset: int) -> None:
        """Remove the rows before `flushed_offset`, which are in the table's files."""
        if flushed_offset <= self.start:
            return
        while self._records and self._records[0].end <= flushed_offset:
            self.size_bytes -= self._records.popleft().batch.size_bytes
        self.start = flushed_offset
        if flushed_offset > self.end:  # Another process has flushed rows that are not in memory.
            self.end = flushed_offset
            self._append_early_records()

    def check_invariants(self) -> None:
        """Check that the rows have no gap, and that their size is correct. Only tests call this method."""
        next_offset = self._records[0].offset if self._records else self.start
        assert next_offset <= self.start, (next_offset, self.start)
        for record in self._records:
            assert record.offset == next_offset, (record.offset, next_offset)
            next_offset = record.end
        assert next_offset == self.end or not self._records, (next_offset, self.end)
        assert all(offset > self.end for offset in self._early_records)
        records = (*self._records, *self._early_records.values())
        assert self.size_bytes == sum(record.batch.size_bytes for record in records)
