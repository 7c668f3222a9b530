"""Positions of continuous reads, and the decision which rows a reader reads next. The functions are pure.

A position contains the last snapshot that a reader has read, and the offset up to which it has read each shard of the
log. The summary of a flush contains the offsets of its rows, so a row that was read from the log is not read again
after its flush. The snapshots after a position are read in their order:

- Flush: rows before the offsets of the position were already read. The remaining rows are read from the log. If the log
  has removed them, and no row of the snapshot was read before, the files of the snapshot are read.
- Append of a different writer: its files are read.
- Rewrite of files, such as a compaction: nothing is read.
- Any other snapshot has removed rows. The read is refused, or skips the snapshot if `skips_changes` is true.

Offsets are valid only for one log. A flush from a different log, such as the log before a rebuild, is read like an
append of a different writer. A position with offsets of a different log is refused.

After the last snapshot, the reader reads the rows of the log that are not flushed yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias
from uuid import UUID

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.replacement import is_replace
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import FLUSH_LOG, FLUSH_OFFSETS, FLUSH_TABLE
from seamark.formats.runtime.errors import BadRequest, OffsetOutOfRange
from seamark.metaserver.log.port import Shard, ShardState
from seamark.metaserver.store.operations import FlushedRange

_VERSION = "2"
_FIRST_VERSION = "1"
"""The version of positions that do not contain the hash of a log."""
_HASH_CHARACTERS = 16
"""The number of hexadecimal digits of the hash of a log."""
_NONE = "none"
_SCAN = "scan"
"""The mode in a token if the reader must still read all rows of the snapshot."""
_AFTER = "after"
"""The mode in a token if the reader continues after the snapshot."""
_SHARDS_MAX = 1 << 10
"""The maximum number of offsets in a position."""
_NUMBER_END = 1 << 63
"""The numbers in a position are less than this number."""
_CLOCKS_DIFFER_MS_MAX = 600_000
"""The maximum difference between the clocks of two servers."""
_OPERATION, _APPEND = "operation", "append"


class ReadPosition(msgspec.Struct, frozen=True):
    """The rows that a continuous reader has read.

    Attributes:
        table_uuid: The table.
        snapshot_id: The last read snapshot, or None before the first snapshot.
        offsets: The offset of the next row of each shard. For a missing shard, it is 0.
        is_scan: Whether the reader must still read all rows of `snapshot_id`, before it reads later rows.
        log: The hash of the log to which the offsets belong, or "" if it is unknown.
    """

    table_uuid: str
    snapshot_id: int | None
    offsets: tuple[int, ...]
    is_scan: bool = False
    log: str = ""

    def get_offset(self, shard: int) -> int:
        """Return the offset of the next row of a shard."""
        return self.offsets[shard] if shard < len(self.offsets) else 0

    def advance(self, offsets: Mapping[int, int]) -> ReadPosition:
        """Return the position with later offsets of some shards. Earlier offsets in `offsets` are ignored."""
        count = max(len(self.offsets), *(shard + 1 for shard in offsets), 0)
        new_offsets = tuple(max(self.get_offset(shard), offsets.get(shard, 0)) for shard in range(count))
        return msgspec.structs.replace(self, offsets=new_offsets)

    def encode(self) -> str:
        """Encode the position as a token.

        A position without a log gets the first version of the format, which earlier servers wrote.
        """
        snapshot = _NONE if self.snapshot_id is None else str(self.snapshot_id)
        offsets = "-".join(map(str, self.offsets))
        mode = _SCAN if self.is_scan else _AFTER
        if not self.log:
            return ".".join((_FIRST_VERSION, self.table_uuid, snapshot, offsets, mode))
        return ".".join((_VERSION, self.table_uuid, snapshot, offsets, mode, self.log))


def parse_position(token: str, table_uuid: str) -> ReadPosition:
    """Decode the position in a token.

    Raises:
        BadRequest: The token was not issued for the table.
    """
    parts = token.split(".")
    try:
        version, uuid_text, snapshot, offset_texts, mode, *log = parts
        uuid = str(UUID(uuid_text))
        offsets = tuple(_parse_number(text) for text in offset_texts.split("-")) if offset_texts else ()
        position = ReadPosition(
            uuid,
            None if snapshot == _NONE else _parse_number(snapshot),
            offsets,
            is_scan=mode == _SCAN,
            log=_parse_hash(version, log),
        )
        if mode not in (_SCAN, _AFTER) or len(offsets) > _SHARDS_MAX:
            raise ValueError
    except ValueError:
        raise BadRequest(
            f"The position {token[:100]!r} was not issued by this server; begin at earliest, latest, a snapshot or a "
            "time"
        ) from None
    if uuid != table_uuid:
        raise BadRequest(
            f"The position is of the table {uuid}, and the name refers to the table {table_uuid} now: the table was "
            "dropped and created again. Begin at earliest, latest, a snapshot or a time"
        )
    return position


def _parse_number(text: str) -> int:
    number = int(text)
    if not (text.isascii() and text.isdecimal() and number < _NUMBER_END):
        raise ValueError
    return number


def _parse_hash(version: str, parts: Sequence[str]) -> str:
    """Return the hash of the log in a position, or "" for a position without a log.

    The conversion from hexadecimal and back raises ValueError for text that is not a hash.

    Args:
        version: The version of the token.
        parts: The parts of the token after the mode.
    """
    if (version, len(parts)) == (_FIRST_VERSION, 0):
        return ""
    if (version, len(parts)) != (_VERSION, 1) or len(parts[0]) != _HASH_CHARACTERS:
        raise ValueError
    return bytes.fromhex(parts[0]).hex()


def hash_log(identity: str) -> str:
    """Return a short hash of a log's identity, for positions and summaries of flushes."""
    return hashlib.sha256(identity.encode()).hexdigest()[:_HASH_CHARACTERS]


def encode_ranges(ranges: Iterable[FlushedRange]) -> str:
    """Encode the rows of a flush as the value of `FLUSH_OFFSETS`."""
    return ",".join(f"{flushed_range.shard}:{flushed_range.start}-{flushed_range.end}" for flushed_range in ranges)


def parse_ranges(snapshot: Snapshot, table: ReaderTableState) -> tuple[FlushedRange, ...] | None:
    """Return the rows that a flush of this table has added, or None if the snapshot is not such a flush.

    The summary is compared with the database, because the metadata file may be a copy of another table's file, or a
    client may have written the summary. Rows beyond the flushed offsets in the database were never flushed. The summary
    of a flush by an earlier version of the server contains neither the table nor the log.

    Args:
        snapshot: A snapshot of the table.
        table: The table, with the flushed offsets in the database.
    """
    if FLUSH_OFFSETS.encode() not in bytes(snapshot.summary):
        return None
    summary = snapshot.build_summary_map()
    text = summary.get(FLUSH_OFFSETS)
    if text is None or summary.get(FLUSH_TABLE, table.metadata.table_uuid) != table.metadata.table_uuid:
        return None
    if summary.get(FLUSH_LOG, table.log_hash) != table.log_hash:
        return None  # The rows belong to an earlier log, as before a rebuild.
    try:
        ranges = []
        for part in text.split(","):
            shard, _, offsets = part.partition(":")
            start, _, end = offsets.partition("-")
            ranges.append(FlushedRange(_parse_number(shard), _parse_number(start), _parse_number(end)))
    except ValueError:
        return None  # A client has written the summary.
    is_flushed = all(
        flushed_range.start <= flushed_range.end <= table.flushed.get(flushed_range.shard, 0)
        for flushed_range in ranges
    )
    return tuple(ranges) if is_flushed else None


def find_returning_offsets(
    metadata: TableMetadata, identity: str, shards: Mapping[Shard, ShardState], received_ms: Mapping[int, int]
) -> dict[int, int]:
    """Return the offset of each shard below which a table that returns to the catalog has its rows in files.

    A table returns if it is registered after its last name was dropped. The database has then forgotten its flushed
    offsets. They are determined from two sources: the released offsets in the log, which may be too low, and the
    summaries of flushes, which may have expired.

    After a removal of the stream, its offsets begin at 0 again. So a flush from before the time at which the log
    received the first unreleased row is ignored.

    Args:
        metadata: The metadata of the table.
        identity: The identity of the log.
        shards: The shards of the table in the log.
        received_ms: The time at which the log received the first unreleased row of a shard, for shards with such rows.
    """
    offsets = {shard.number: find_released_offset(state) for shard, state in shards.items()}
    watermarks = {shard.number: state.watermark for shard, state in shards.items()}
    table = ReaderTableState(metadata, watermarks, {}, hash_log(identity))
    for snapshot in metadata.snapshots if received_ms else ():  # If all rows are released, the log is sufficient.
        for flushed_range in parse_ranges(snapshot, table) or ():
            shard = flushed_range.shard  # A client may have written an empty range of any shard.
            if shard in received_ms and snapshot.timestamp_ms >= received_ms[shard] - _CLOCKS_DIFFER_MS_MAX:
                offsets[shard] = max(offsets[shard], flushed_range.end)
    return offsets


def find_released_offset(state: ShardState) -> int:
    """Return the offset below which the log knows that all rows of a shard are in files."""
    return max(state.start, state.released)


class FilesStep(NamedTuple):
    """A step of a continuous reader that reads files.

    Attributes:
        snapshot_id: The snapshot whose files are read.
        parent_id: The parent of the snapshot, if only the files that it has added are read. Otherwise None.
        is_scan: Whether all rows of the snapshot are read.
        position: The position after this step.
    """

    snapshot_id: int
    parent_id: int | None
    is_scan: bool
    position: ReadPosition


class LogRows(NamedTuple):
    """A step of a continuous reader that reads rows of the log.

    Attributes:
        ranges: For each shard with rows, the offset of the first row and the offset after the last row.
        position: The position before this step. Snapshots before it whose rows the reader already has from the log, or
            that added no rows, are skipped.
    """

    ranges: Mapping[int, tuple[int, int]]
    position: ReadPosition


class End(NamedTuple):
    """A step of a continuous reader without rows: the reader has read everything, up to `position`."""

    position: ReadPosition


Step: TypeAlias = FilesStep | LogRows | End


class ReaderTableState(NamedTuple):
    """The state of a table at one moment, from which the next step is chosen.

    Attributes:
        flushed: The flushed offset of each shard, at the current snapshot of `metadata`.
        shards: The state of each shard in the log.
        log_hash: The hash of the identity of the log, or "" if the table has no stream.
    """

    metadata: TableMetadata
    flushed: Mapping[int, int]
    shards: Mapping[int, ShardState]
    log_hash: str = ""


def choose_next_step(
    position: ReadPosition, table: ReaderTableState, *, until: ReadPosition | None = None, skips_changes: bool = False
) -> Step:
    """Return the next step of a reader at `position`.

    Args:
        position: The position of the reader.
        table: The table.
        until: The position at which the reader stops, or None.
        skips_changes: Whether to skip snapshots that have removed rows, instead of raising an error.

    Raises:
        BadRequest: Rows were removed, or a snapshot is not an ancestor of the current snapshot.
        OffsetOutOfRange: The log has removed the next rows, and no files contain exactly these rows.
    """
    if until is not None:
        _check_log(until, table)
    _check_log(position, table)
    position = msgspec.structs.replace(position, log=table.log_hash)
    if position.is_scan and position.snapshot_id is not None:  # A new reader first reads all rows of a snapshot.
        return _make_scan_step(position.snapshot_id, position, table)
    position = msgspec.structs.replace(position, is_scan=False)
    # Read the rows that flushes have added from the log as long as it has them, and other rows from files. So collect
    # ranges of the log until a snapshot must be read from files. `position` is the position before these ranges, and
    # `next_position` the position after them.
    ranges: dict[int, tuple[int, int]] = {}
    next_position = position
    for snapshot in _list_snapshots_after(position, table, until):
        flushed_ranges = parse_ranges(snapshot, table)
        unread_ranges = None
        if flushed_ranges is not None:
            unread_ranges = _find_unread_ranges_in_log(next_position, flushed_ranges, table.shards)
        if unread_ranges is not None:
            ranges |= {
                unread_range.shard: (position.get_offset(unread_range.shard), unread_range.end)
                for unread_range in unread_ranges
            }
            next_position = next_position.advance(
                {unread_range.shard: unread_range.end for unread_range in unread_ranges}
            )
        elif ranges:  # The next request reads this snapshot.
            return LogRows(ranges, position)
        else:
            position_after = msgspec.structs.replace(next_position, snapshot_id=snapshot.snapshot_id)
            step = _make_files_step(position_after, snapshot, flushed_ranges, skips_changes)
            if isinstance(step, FilesStep):
                return step
            next_position = step
        if not ranges:  # The snapshot has no unread rows, so the position moves past it.
            position = next_position = msgspec.structs.replace(next_position, snapshot_id=snapshot.snapshot_id)
    if until is None or until.snapshot_id == table.metadata.current_snapshot_id:
        if not ranges:
            position = next_position = _skip_rolled_back(position, table.flushed, skips_changes)
        elif any(next_position.get_offset(shard) < offset for shard, offset in table.flushed.items()):
            return LogRows(ranges, position)  # The next request reports the rollback.
    # No snapshot remains, so add the rows of the log that are not flushed yet.
    for shard, (_, end) in _find_unflushed(next_position, table.shards, until).items():
        ranges[shard] = (position.get_offset(shard), end)
    return LogRows(ranges, position) if ranges else End(position)


def _check_log(position: ReadPosition, table: ReaderTableState) -> None:
    """Check that the offsets of a position belong to the table's log.

    Raises:
        BadRequest: The offsets belong to a different log.
    """
    # A position without a log is from an earlier server. A position that has only zero offsets is valid for any log.
    if position.log and position.log != table.log_hash and any(position.offsets):
        raise BadRequest(
            "The position has offsets of another log: the table has got a new log since, for example by a rebuild. "
            "Begin at earliest, latest or a snapshot"
        )


def _make_scan_step(snapshot_id: int, position: ReadPosition, table: ReaderTableState) -> FilesStep:
    """Return the step that reads all rows of a snapshot, with which a new reader begins.

    Raises:
        OffsetOutOfRange: The snapshot has expired.
    """
    if table.metadata.snapshot(snapshot_id) is None:
        raise OffsetOutOfRange(
            f"Snapshot {snapshot_id}, whose rows were being read, has expired; begin again at earliest"
        )
    return FilesStep(snapshot_id, None, True, msgspec.structs.replace(position, is_scan=False))


def _list_snapshots_after(
    position: ReadPosition, table: ReaderTableState, until: ReadPosition | None
) -> list[Snapshot]:
    """Return the snapshots after a position, up to `until` or the current snapshot, the oldest first.

    Raises:
        BadRequest: The position is not in the history of the current snapshot.
        OffsetOutOfRange: Snapshots after the position have expired.
    """
    metadata = table.metadata
    end_id = metadata.current_snapshot_id if until is None else until.snapshot_id
    snapshots: list[Snapshot] = []
    visited_ids: set[int] = set()
    snapshot_id = end_id
    while snapshot_id is not None and snapshot_id != position.snapshot_id and snapshot_id not in visited_ids:
        snapshot = metadata.snapshot(snapshot_id)
        if snapshot is None:
            if position.snapshot_id is not None and metadata.snapshot(position.snapshot_id) is not None:
                break  # The position is in a different branch of the history.
            raise OffsetOutOfRange(
                f"Snapshot {snapshot_id} has expired, and the reader has not read it; begin again at earliest, latest "
                "or a snapshot of the table"
            )
        visited_ids.add(snapshot_id)
        snapshots.append(snapshot)
        snapshot_id = snapshot.parent_snapshot_id
    if snapshot_id != position.snapshot_id:
        raise BadRequest(
            f"Snapshot {position.snapshot_id} of the position is not an ancestor of snapshot {end_id}: the table was "
            "rolled back or replaced. Begin again at earliest, latest or a snapshot of the table"
        )
    return snapshots[::-1]


def _skip_rolled_back(position: ReadPosition, starts: Mapping[int, int], skips_changes: bool) -> ReadPosition:
    """Return the position after rows that were flushed, and then removed by a rollback.

    Args:
        position: The position of the reader.
        starts: The offset of each shard from which on rows still exist.
        skips_changes: Whether to skip removed rows, instead of raising an error.

    Raises:
        BadRequest: A rollback has removed rows, and the reader does not skip changes.
    """
    later_starts = {shard: start for shard, start in starts.items() if position.get_offset(shard) < start}
    if not later_starts:
        return position
    if not skips_changes:
        shard, start = next(iter(later_starts.items()))
        raise BadRequest(
            f"The rows {position.get_offset(shard)} to {start} of shard {shard} were flushed, and a rollback has "
            "removed them. Skip such changes with skip-changes=true, or begin at the current snapshot"
        )
    return position.advance(later_starts)


def _find_unread_ranges_in_log(
    position: ReadPosition, ranges: Sequence[FlushedRange], shards: Mapping[int, ShardState]
) -> list[FlushedRange] | None:
    """Return the unread ranges of a flush, or None if the log does not have all of their rows.

    A reader can read these ranges from the log instead of the files.

    Args:
        position: The position of the reader.
        ranges: The rows that the flush has added.
        shards: The state of each shard in the log.
    """
    if any(position.get_offset(flushed_range.shard) < flushed_range.start for flushed_range in ranges):
        return None  # A rollback has removed rows before this flush.
    unread_ranges = [
        flushed_range for flushed_range in ranges if position.get_offset(flushed_range.shard) < flushed_range.end
    ]
    for flushed_range in unread_ranges:
        state = shards.get(flushed_range.shard)
        if (
            state is None
            or not state.start <= position.get_offset(flushed_range.shard)
            or state.watermark < flushed_range.end
        ):
            return None
    return unread_ranges


def _make_files_step(
    position_after: ReadPosition, snapshot: Snapshot, flushed_ranges: Sequence[FlushedRange] | None, skips_changes: bool
) -> FilesStep | ReadPosition:
    """Return the step that reads the files of a snapshot, or the position after the snapshot if nothing is read.

    Args:
        position_after: The position of the reader, whose last snapshot is `snapshot`.
        snapshot: The snapshot.
        flushed_ranges: The ranges of a flush whose rows are not all in the log, or None for any other snapshot.
        skips_changes: Whether to skip snapshots that have removed rows, instead of raising an error.

    Raises:
        BadRequest: The snapshot, or a rollback before it, has removed rows.
        OffsetOutOfRange: The log has removed the rows, and some rows of the files were read before.
    """
    files = FilesStep(snapshot.snapshot_id, snapshot.parent_snapshot_id, False, position_after)
    operation = snapshot.build_summary_map().get(_OPERATION, "unknown")
    if flushed_ranges is not None:
        if operation != _APPEND:
            raise OffsetOutOfRange(
                f"The log has removed rows that snapshot {snapshot.snapshot_id} has flushed, and its files do not "
                "state which rows they replace; begin again at earliest"
            )
        position = _skip_rolled_back(
            position_after,
            {flushed_range.shard: flushed_range.start for flushed_range in flushed_ranges},
            skips_changes,
        )
        for flushed_range in flushed_ranges:
            if position.get_offset(flushed_range.shard) != flushed_range.start:
                raise OffsetOutOfRange(
                    f"The log has removed rows before the offset {flushed_range.end} of shard {flushed_range.shard}, "
                    "and the files of "
                    f"snapshot {snapshot.snapshot_id} also have rows that were read before. To read these rows again, "
                    f"begin at snapshot:{snapshot.parent_snapshot_id or 0}; to skip its unread rows, begin at "
                    f"snapshot:{snapshot.snapshot_id}. A longer stream_log_retention_s keeps rows for slow readers"
                )
        return files._replace(
            position=position.advance({flushed_range.shard: flushed_range.end for flushed_range in flushed_ranges})
        )
    if is_replace(snapshot):
        return position_after
    if operation == _APPEND:
        return files
    if skips_changes:
        return position_after
    raise BadRequest(
        f"Snapshot {snapshot.snapshot_id} (operation {operation}) has removed or replaced rows, and a continuous read "
        "returns only new rows. Skip such snapshots with skip-changes=true, or begin after it at "
        f"snapshot:{snapshot.snapshot_id}"
    )


def _find_unflushed(
    position: ReadPosition, shards: Mapping[int, ShardState], until: ReadPosition | None
) -> dict[int, tuple[int, int]]:
    """Return the ranges of rows in the log after a position, up to `until` or the end of the log.

    Raises:
        BadRequest: The position belongs to a different log.
        OffsetOutOfRange: The log has removed some of the rows.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for shard, state in sorted(shards.items()):
        start = position.get_offset(shard)
        end = state.watermark if until is None else min(state.watermark, until.get_offset(shard))
        if start > state.watermark:
            raise BadRequest(
                f"The position has the offset {start} of shard {shard}, and the log ends at {state.watermark}; it is a "
                "position of another log. Begin at earliest, latest or a snapshot"
            )
        if start >= end:
            continue
        if start < state.start:
            raise OffsetOutOfRange(
                f"The log has removed the row {start} of shard {shard}; begin again at earliest, latest or a snapshot"
            )
        ranges[shard] = (start, end)
    return ranges


# Positions at which readers start


def find_earliest_position(table_uuid: str, table: ReaderTableState) -> ReadPosition:
    """Return the start position of a reader that reads the current rows first, and then all later rows.

    The reader reads the rows of the current snapshot from files, so the offsets begin after the flushed rows.
    """
    start = ReadPosition(table_uuid, table.metadata.current_snapshot_id, (), is_scan=True, log=table.log_hash)
    return start.advance(table.flushed)


def find_latest_position(table_uuid: str, table: ReaderTableState) -> ReadPosition:
    """Return the position after all current rows."""
    start = ReadPosition(table_uuid, table.metadata.current_snapshot_id, (), log=table.log_hash).advance(table.flushed)
    return start.advance({shard: state.watermark for shard, state in table.shards.items()})


def find_position_after_snapshot(table_uuid: str, table: ReaderTableState, snapshot_id: int | None) -> ReadPosition:
    """Return the position after all rows of a snapshot.

    Args:
        table_uuid: The UUID of the table.
        table: The table.
        snapshot_id: The snapshot, or None for the position before the first snapshot.

    Raises:
        BadRequest: The snapshot is not an ancestor of the current snapshot.
        OffsetOutOfRange: Snapshots after it have expired.
    """
    if snapshot_id is not None and table.metadata.snapshot(snapshot_id) is None:
        raise BadRequest(f"The table has no snapshot {snapshot_id}, or it has expired; begin at one of its snapshots")
    start = ReadPosition(table_uuid, snapshot_id, (), log=table.log_hash)
    offsets = dict(table.flushed)
    # Go back from the newest flush. Each flush after the snapshot began where the rows of the earlier snapshots end.
    for snapshot in reversed(_list_snapshots_after(start, table, None)):
        for flushed_range in parse_ranges(snapshot, table) or ():
            offsets[flushed_range.shard] = min(
                offsets.get(flushed_range.shard, flushed_range.start), flushed_range.start
            )
    return start.advance(offsets)


def find_snapshot_at(table: ReaderTableState, time_ms: int) -> int | None:
    """Return the last snapshot in the current history that was committed before `time_ms`, or None if all are later.

    Raises:
        OffsetOutOfRange: The snapshot has expired.
    """
    snapshot = table.metadata.current_snapshot
    while snapshot is not None and snapshot.timestamp_ms >= time_ms:
        parent_id = snapshot.parent_snapshot_id
        if parent_id is None:
            return None
        snapshot = table.metadata.snapshot(parent_id)
        if snapshot is None:
            raise OffsetOutOfRange(f"The snapshots before the time {time_ms} have expired; begin at earliest or later")
    return None if snapshot is None else snapshot.snapshot_id


def move_to_time(position: ReadPosition, shards: Mapping[int, ShardState], offsets: Mapping[int, int]) -> ReadPosition:
    """Move a position past the rows that the log received before a time.

    Args:
        position: The position of the last snapshot before the time.
        shards: The state of each shard in the log.
        offsets: For each shard, the offset of the first row in the log that was received at or after the time. If it is
            the first row in the log, removed rows may also be from after the time, so the shard's position does not
            change.
    """
    # If `offset` is the first row in the log, the removed rows before it may be later than the time. Then use it only
    # if the position does not need these rows.
    moved_offsets = {
        shard: offset
        for shard, offset in offsets.items()
        if offset > shards[shard].start or shards[shard].start <= position.get_offset(shard)
    }
    return position.advance(moved_offsets)
