"""Tests of a log with damaged files. It truncates a torn tail, and never loses acknowledged rows without an error."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import CommitUnknown, Corrupt, LogFull, LogUnavailable
from seamark.metaserver.log.frames import HEADER_BYTES
from seamark.metaserver.log.port import Batch, StreamProducer
from seamark.metaserver.log.segments import SegmentLimits, open_segments
from tests.log.contract import OTHER, A, B, build_batch, read_texts
from tests.log.disk import DirectRunner, SimulatedDisk, SimulatedFile, copy_disk

LIMITS = SegmentLimits(segment_bytes=4096, trim_interval_s=3600)


def open_log(disk: SimulatedDisk, limits: SegmentLimits = LIMITS):
    return open_segments(disk, DirectRunner(), SimulatedClock(1), limits)


async def write_records(count: int, limits: SegmentLimits = LIMITS) -> tuple[SimulatedDisk, list[int]]:
    """Return (disk, end of each record) of a process that was killed after it wrote `count` records.

    A record has a row of stream A and two rows of another stream.
    """
    disk = SimulatedDisk()
    record_ends = []
    async with open_log(disk, limits) as log:
        for number in range(count):
            await log.append(
                {A: build_batch(f"row {number}"), OTHER: build_batch("x" * 40, rows=2)}, StreamProducer("p", number)
            )
            record_ends.append(log._writer.position)
        disk_copy = copy_disk(disk)
    return disk_copy, record_ends


def find_last_segment(disk: SimulatedDisk) -> SimulatedFile:
    return disk.files[max(name for name in disk.files if name.endswith(".segment"))]


async def test_record_torn_at_any_byte_is_removed_and_earlier_records_remain() -> None:
    disk, record_ends = await write_records(3)
    data = find_last_segment(disk).visible
    _, second_end, third_end = record_ends
    # A cut that removes only zeros leaves the record complete, because the rest of the file has zeros too.
    last_byte_end = len(data[: third_end - HEADER_BYTES].rstrip(b"\0"))
    for cut_end in range(second_end, last_byte_end):
        for tail in (b"", bytes(len(data) - cut_end)):
            disk_copy = copy_disk(disk)
            find_last_segment(disk_copy).visible[:] = data[:cut_end] + tail
            async with open_log(disk_copy) as log:
                assert log.read_watermarks([A, OTHER]) == {A: 2, OTHER: 4}, cut_end
                assert log.find_producer("p").sequence == 1
                await log.append({A: build_batch("row 2")}, StreamProducer("p", sequence=2))
                assert await read_texts(log, A) == ["row 0", "row 1", "row 2"]
            async with open_log(disk_copy) as log:
                assert await read_texts(log, A) == ["row 0", "row 1", "row 2"]


async def test_a_flipped_bit_is_detected_or_changes_no_row() -> None:
    disk, (*_, last_end) = await write_records(3)
    noticed_count = 0
    for position in range(last_end):
        disk_copy = copy_disk(disk)
        find_last_segment(disk_copy).visible[position] ^= 1 << position % 8
        intact_copy = copy_disk(disk_copy)
        try:
            async with open_log(disk_copy) as log:
                assert await read_texts(log, A) == ["row 0", "row 1", "row 2"], position
                assert log.find_producer("p").sequence == 2
        except Corrupt:
            noticed_count += 1
            contents = {name: file.visible for name, file in disk_copy.files.items()}
            assert contents == {name: file.visible for name, file in intact_copy.files.items()}
    assert noticed_count > last_end // 2


async def test_flipped_bit_in_a_complete_segment_is_detected_at_the_start_or_by_the_reader() -> None:
    limits = SegmentLimits(segment_bytes=700, trim_interval_s=3600)
    rows = [f"row {number}" for number in range(12)]
    # At the start, the log checks the bytes of a segment only if it has unreleased rows.
    for released_offset in (0, 12):
        disk = SimulatedDisk()
        async with open_log(disk, limits) as log:
            for number, row in enumerate(rows):
                await log.append({A: build_batch(row)}, StreamProducer("p", number))
                await log.release({A: released_offset})
            await log.store_indexes()
        names = [name for name in disk.files if name.endswith(".segment")]
        assert len(names) > 2  # The damaged segment is neither the first nor the last.
        successful_starts = 0
        _, damaged_name, *_ = names
        for position in range(len(disk.files[damaged_name].visible)):
            disk_copy = copy_disk(disk)
            disk_copy.files[damaged_name].visible[position] ^= 1 << position % 8
            with suppress(Corrupt):
                async with open_log(disk_copy, limits) as log:
                    successful_starts += 1
                    assert await read_texts(log, A) == rows, position
        # If all rows are released, most of the 700 damaged copies of the segment start. Otherwise few start.
        assert (successful_starts > 300) is bool(released_offset)


async def test_a_damaged_or_missing_index_file_is_written_again() -> None:
    limits = SegmentLimits(segment_bytes=700, trim_interval_s=3600)
    disk = SimulatedDisk()
    async with open_log(disk, limits) as log:
        for number in range(12):
            await log.append({A: build_batch(f"row {number}"), B: build_batch("y", 3)})
        await log.store_indexes()
    rows = [f"row {number}" for number in range(12)]
    name = next(name for name in disk.files if name.endswith(".index"))
    for position in range(len(disk.files[name].visible)):
        disk_copy = copy_disk(disk)
        disk_copy.files[name].visible[position] ^= 1 << position % 8
        async with open_log(disk_copy, limits) as log:
            assert await read_texts(log, A) == rows, position
    damaged_copy = copy_disk(disk)
    del damaged_copy.files[name]
    async with open_log(damaged_copy, limits) as log:
        assert await read_texts(log, A) == rows
        await log.store_indexes()
        assert await read_texts(log, A) == rows
    assert damaged_copy.files[name].visible == disk.files[name].visible


async def test_retention_stops_before_a_damaged_segment_and_keeps_the_sizes() -> None:
    disk = SimulatedDisk()
    limits = SegmentLimits(segment_bytes=2000, retention_ms=1, retention_bytes=1, trim_interval_s=3600)
    clock = SimulatedClock(1)
    async with open_segments(disk, DirectRunner(), clock, limits) as log:
        for _ in range(30):
            await log.append({A: build_batch("a" * 50), OTHER: build_batch("b" * 50)})
        clock.advance(1000)
        await log.release({A: 30})
        disk.files[min(name for name in disk.files if name.endswith(".segment"))].visible[1000] ^= 1
        sizes = {shard: state.size_bytes for shard, state in log.list_shards().items()}
        for _ in range(2):
            with pytest.raises(Corrupt):
                await log.trim()
        assert {shard: state.size_bytes for shard, state in log.list_shards().items()} == sizes


async def test_missing_segment_is_detected() -> None:
    disk, _ = await write_records(60, SegmentLimits(segment_bytes=1500, trim_interval_s=3600))
    names = [name for name in disk.files if name.endswith(".segment")]
    assert len(names) > 3
    for name in names[1:-1]:
        damaged_copy = copy_disk(disk)
        del damaged_copy.files[name]
        with pytest.raises(Corrupt, match="Restore it from a copy"):
            async with open_log(damaged_copy):
                pass


async def test_copied_or_renamed_segment_is_refused() -> None:
    """The checksums of a segment file are valid only under its own name."""
    disk, _ = await write_records(60, SegmentLimits(segment_bytes=1500, trim_interval_s=3600))
    first_segment, second_segment, *_ = (name for name in disk.files if name.endswith(".segment"))
    disk.files[second_segment].visible[:] = disk.files[first_segment].visible
    for name in [name for name in disk.files if name.endswith(".index")]:
        del disk.files[name]
    with pytest.raises(Corrupt, match="damaged record at byte 0"):
        async with open_log(disk):
            pass


async def test_log_on_a_full_disk_refuses_appends_until_space_is_free() -> None:
    disk = SimulatedDisk()
    disk.free_bytes = 10_000
    async with open_log(disk) as log:
        acknowledged_rows = 0
        with suppress(LogFull):
            for _ in range(1000):
                await log.append({A: build_batch("x" * 500)}, StreamProducer("p", acknowledged_rows))
                acknowledged_rows += 1
        assert 5 < acknowledged_rows < 1000
        with pytest.raises(LogFull, match="make room"):
            await log.append({A: build_batch("x" * 500)}, StreamProducer("p", acknowledged_rows))
        assert log.read_watermarks([A]) == {A: acknowledged_rows}
        async with open_log(copy_disk(disk)) as other_log:
            assert other_log.read_watermarks([A]) == {A: acknowledged_rows}
        disk.free_bytes = 1 << 30
        await log.append({A: build_batch("y")}, StreamProducer("p", acknowledged_rows))
        assert (await read_texts(log, A))[-2:] == ["x" * 500, "y"]
    async with open_log(disk) as log:
        assert log.read_watermarks([A]) == {A: acknowledged_rows + 1}


async def test_a_write_that_fills_the_disk_leaves_no_partial_record() -> None:
    disk = SimulatedDisk()
    async with open_log(disk) as log:
        await log.append({A: build_batch("first")})
        for failing_write in range(2):
            writes = iter(range(100))

            def fail(operation: str, failing_write: int = failing_write, writes=writes) -> None:
                if operation == "write" and next(writes) == failing_write:
                    raise OSError(errno.ENOSPC, "No space left on device")

            disk.on_operation = fail
            with pytest.raises(LogFull):
                await log.append({A: build_batch("second" * 100), B: build_batch("z")})
            disk.on_operation = lambda operation: None
            async with open_log(copy_disk(disk)) as other_log:
                assert other_log.read_watermarks([A, B]) == {A: 1, B: 0}
        await log.append({A: build_batch("third")})
        assert await read_texts(log, A) == ["first", "third"]


async def test_after_a_failed_sync_the_log_refuses_until_it_is_opened_again() -> None:
    disk = SimulatedDisk()

    def fail(operation: str) -> None:
        if operation == "sync":
            raise OSError(errno.EIO, "Input/output error")

    async with open_log(disk) as log:
        await log.append({A: build_batch("first")}, StreamProducer("p", sequence=0))
        disk.on_operation = fail
        with pytest.raises(CommitUnknown, match="same sequence number"):
            await log.append({A: build_batch("second")}, StreamProducer("p", sequence=1))
        disk.on_operation = lambda operation: None
        for refused_call in (log.append({A: build_batch("x")}), log.read(A, 0, limit_bytes=1), log.wait({A: 9}, 1)):
            with pytest.raises(LogUnavailable, match="restart the server"):
                await refused_call
        with pytest.raises(LogUnavailable):
            log.read_watermarks([A])
    # After the failed sync, the kernel has dropped these pages.
    disk.files[next(iter(disk.files))].unsynced_changes.clear()
    async with open_log(disk) as log:
        await log.append({A: build_batch("second")}, StreamProducer("p", sequence=1))
        assert await read_texts(log, A) == ["first", "second"]
    for file in disk.files.values():
        assert file.durable == file.visible, (
            "all bytes that the log returns are durable, although an earlier sync failed"
        )


async def test_large_append_gets_a_separate_segment() -> None:
    disk = SimulatedDisk()
    async with open_log(disk) as log:
        await log.append({A: build_batch("first")})
        await log.append({A: Batch(1, bytes(20_000))})
        await log.append({A: build_batch("last")})
        assert [len(text) for text in await read_texts(log, A)] == [5, 20_000, 4]
    async with open_log(disk) as log:
        assert [len(text) for text in await read_texts(log, A)] == [5, 20_000, 4]


async def test_an_unexpected_failure_leaves_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    async with open_log(disk) as log:
        await log.append({A: build_batch("first")})
        monkeypatch.setattr(log._writer, "write", lambda frames: 1 / 0)
        waiting_task = asyncio.ensure_future(log.wait({A: 1}, 60))
        answers = await asyncio.gather(*(log.append({A: build_batch("x")}) for _ in range(3)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {CommitUnknown}
        for refused_call in (log.append({A: build_batch("x")}), waiting_task):
            with pytest.raises(LogUnavailable, match="restart the server"):
                await refused_call
    async with open_log(disk) as log:
        assert await read_texts(log, A) == ["first"]


async def test_foreign_files_in_the_folder_are_not_changed() -> None:
    disk, _ = await write_records(3)
    for name in ("notes.segment", "1.index", "lost+found", "00000000000000000001.segment.bak"):
        disk.create(name, b"mine")
    async with open_log(disk) as log:
        assert await read_texts(log, A) == ["row 0", "row 1", "row 2"]
    assert disk.files["notes.segment"].visible == b"mine"


async def test_an_index_file_of_an_earlier_log_is_not_used() -> None:
    disk = SimulatedDisk()
    async with open_log(disk) as log:
        for number in range(100):
            await log.append({A: build_batch(f"old {number}")})
        await log.store_indexes()
    for name in [name for name in disk.files if name.endswith(".segment")]:
        del disk.files[name]
    for _ in range(2):
        async with open_log(disk) as log:
            await log.append({A: build_batch("new")})
    async with open_log(disk) as log:
        assert await read_texts(log, A) == ["new", "new"]


async def test_segment_with_only_sessions_is_closed_when_it_is_full() -> None:
    disk = SimulatedDisk()
    async with open_log(disk) as log:
        for _ in range(200):
            await log.fence("p")
        assert log.find_producer("p").epoch == 200
    assert len([name for name in disk.files if name.endswith(".segment")]) > 2
    async with open_log(disk) as log:
        assert log.find_producer("p").epoch == 200
