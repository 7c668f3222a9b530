"""Reads rows of the log for continuous readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from seamark.metaserver.log.port import Shard, ShardState, StreamLog
from seamark.metaserver.streams.row_files import RowSlice


class ReadRows(NamedTuple):
    """Rows that were read from the log.

    Attributes:
        slices: The rows, grouped by shard. Within a shard, they have the order of the log.
        kinds: The kinds of the rows of each slice, one byte for each row. They are empty if all rows are inserts.
        offsets: The offset after the last read row, by shard.
    """

    slices: list[RowSlice]
    kinds: list[bytes]
    offsets: dict[int, int]

    @property
    def rows(self) -> int:
        return sum(row_slice.rows for row_slice in self.slices)

    @property
    def size_bytes(self) -> int:
        """The size of the batches of the log that contain the rows. A batch counts for each of its slices."""
        return sum(len(row_slice.payload) for row_slice in self.slices)


async def read_log(
    log: StreamLog,
    table_uuid: str,
    ranges: Mapping[int, tuple[int, int]],
    *,
    limit_bytes: int,
    count_bytes: Callable[[int], None] = lambda size_bytes: None,
) -> ReadRows:
    """Read rows from the start of each range.

    Args:
        log: The log.
        table_uuid: The table.
        ranges: By shard, the offset of the first row and the offset after the last row.
        limit_bytes: The total size at which no further batch is read. At least one batch is read.
        count_bytes: Called with the size in bytes of each batch that the result keeps in memory. It may raise an error,
            which ends the read.

    Raises:
        OffsetOutOfRange: The log has removed the rows in the meantime.
    """
    rows = ReadRows([], [], {})
    share_bytes = max(1, limit_bytes // max(1, len(ranges)))
    size_bytes = 0

    def count_rows(number: int) -> int:
        start, end = ranges[number]
        return end - start

    # Read the shard with the most rows first, so that every shard is read eventually, even if batches exceed their
    # shares.
    for number in sorted(ranges, key=count_rows, reverse=True):
        if rows.slices and size_bytes >= limit_bytes:
            break
        start, end = ranges[number]
        shard, offset, remaining_bytes = Shard(table_uuid, number), start, share_bytes
        while offset < end and remaining_bytes > 0:
            for record in await log.read(shard, offset, limit_bytes=remaining_bytes, end=end):
                stop = min(record.end, end)
                first = offset - record.offset
                rows.slices.append(RowSlice(record.batch.payload, first, stop - offset))
                rows.kinds.append(record.batch.kinds[first : stop - record.offset])
                count_bytes(record.batch.size_bytes)
                size_bytes += record.batch.size_bytes
                remaining_bytes -= record.batch.size_bytes
                offset = stop
        rows.offsets[number] = offset
    return rows


def read_shard_states(log: StreamLog, table_uuid: str, numbers: Iterable[int]) -> dict[int, ShardState]:
    """Return the state of each shard of a table. A shard without rows starts and ends at the offset 0.

    Args:
        log: The log.
        table_uuid: The UUID of the table.
        numbers: The numbers of the shards.
    """
    states = {shard.number: state for shard, state in log.list_shards(table_uuid).items()}
    return {number: states.get(number) or ShardState(0, 0, 0, 0) for number in numbers}
