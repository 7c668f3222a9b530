"""Tests of the log in segment files."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import (
    ConfigError,
    LogUnavailable,
    OffsetOutOfRange,
    StreamRemoved,
    TooManyRequests,
)
from seamark.metaserver.log.compaction import rewrite_segment
from seamark.metaserver.log.port import Shard, StreamProducer
from seamark.metaserver.log.segments import SegmentLimits, SegmentLog, open_segment_log, open_segments
from tests.log.contract import (
    LIMIT_BYTES,
    OTHER,
    A,
    B,
    DurableLogContract,
    Opener,
    StreamLogContract,
    build_batch,
    read_all,
    read_texts,
)
from tests.log.disk import DirectRunner, SimulatedDisk, copy_disk
from tests.log.written_rows import LIMITS, SHARDS, AcknowledgedAppend, check_rows
from tests.seeds import first_seed, mark_fast

REPO = Path(__file__).parents[2]
SMALL_SEGMENTS = SegmentLimits(segment_bytes=1024)


class TestSegmentLog(StreamLogContract, DurableLogContract):
    @pytest.fixture
    async def log(self, opener: Opener) -> AsyncIterator[SegmentLog]:
        async with opener() as log:
            yield log

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return partial(open_segment_log, tmp_path / "log", SystemClock(), SegmentLimits())


class TestSmallSegments(TestSegmentLog):
    """The contract's tests with segments of a few records. Reads cross segments and use index files."""

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return partial(open_segment_log, tmp_path / "log", SystemClock(), SMALL_SEGMENTS)


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 20), 1))
async def test_no_acknowledged_row_is_lost_when_the_writer_is_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged_appends: list[AcknowledgedAppend] = []
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.log.written_rows", str(tmp_path / "log")],
            stdout=subprocess.PIPE,
            cwd=REPO,
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(rng.choice((1, 10, 300, 1500)))]
        writer.send_signal(signal.SIGKILL)
        lines += writer.communicate()[0].splitlines(keepends=True)
        acknowledged_appends += [
            msgspec.json.decode(line, type=AcknowledgedAppend) for line in lines if line.endswith(b"\n")
        ]
        async with open_segment_log(tmp_path / "log", SystemClock(), LIMITS) as log:
            records = {shard: await read_all(log, shard) for shard in SHARDS}
            check_rows(records, acknowledged_appends, dict.fromkeys(SHARDS, 0))


async def test_waiting_appends_share_one_sync(tmp_path: Path) -> None:
    async with open_segment_log(tmp_path, SystemClock(), SegmentLimits()) as log:
        shards = [Shard(f"table-{number}", 0) for number in range(500)]
        await asyncio.gather(*(log.append({shard: build_batch("x")}) for shard in shards))
        assert log.syncs <= 3


async def test_appends_beyond_the_limit_of_waiting_bytes_are_refused(tmp_path: Path) -> None:
    async with open_segment_log(tmp_path, SystemClock(), SegmentLimits(waiting_bytes_max=1000)) as log:
        answers = await asyncio.gather(
            *(log.append({A: build_batch("x" * 400)}) for _ in range(5)), return_exceptions=True
        )
        assert [isinstance(answer, TooManyRequests) for answer in answers] == [False, False, True, True, True]
        await log.append({A: build_batch("x" * 2000)})


async def test_second_process_cannot_open_the_folder(tmp_path: Path) -> None:
    async with open_segment_log(tmp_path, SystemClock(), SMALL_SEGMENTS):
        with pytest.raises(ConfigError, match="Another process"):
            async with open_segment_log(tmp_path, SystemClock(), SMALL_SEGMENTS):
                pass
    async with open_segment_log(tmp_path, SystemClock(), SMALL_SEGMENTS):
        pass


async def test_segment_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    async with open_segment_log(tmp_path / "log", SystemClock(), SMALL_SEGMENTS) as log:
        for number in range(20):
            await log.append({A: build_batch(f"{number}" * 50)})
        await log.store_indexes()
    files = [tmp_path / "log", *(tmp_path / "log").iterdir()]
    assert len(files) > 5
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


async def test_many_opens_leave_no_descriptor_open(tmp_path: Path) -> None:
    first_count = None
    for _ in range(20):
        async with open_segment_log(tmp_path, SystemClock(), SMALL_SEGMENTS) as log:
            await log.append({A: build_batch("x" * 300)})
        count = len(os.listdir("/proc/self/fd"))
        first_count = first_count or count
        assert count <= first_count


async def test_a_waiting_reader_is_refused_when_the_log_closes(tmp_path: Path) -> None:
    async with open_segment_log(tmp_path, SystemClock(), SMALL_SEGMENTS) as log:
        waiting_task = asyncio.ensure_future(log.wait({A: 0}, 60))
        await asyncio.sleep(0.01)
    with pytest.raises(LogUnavailable):
        await waiting_task


async def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogUnavailable, match="does not open"):
        async with open_segment_log(tmp_path / "file" / "log", SystemClock(), SMALL_SEGMENTS):
            pass


# -- retention: a simulated disk and clock ---------------------------------------------------------------------------


def open_log(disk: SimulatedDisk, clock: SimulatedClock, **limits):
    return open_segments(disk, DirectRunner(), clock, SegmentLimits(segment_bytes=1024, **limits))


def copy_without_indexes(disk: SimulatedDisk) -> SimulatedDisk:
    disk_copy = copy_disk(disk)
    for name in [name for name in disk_copy.files if name.endswith(".index")]:
        del disk_copy.files[name]
    return disk_copy


async def fill_log(log: SegmentLog, count: int = 20) -> None:
    for number in range(count):
        await log.append({A: build_batch(f"{number:3}" * 30, 10), B: build_batch("y")})


async def test_released_rows_are_removed_by_age_and_unreleased_rows_are_kept() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock, retention_ms=1000, trim_interval_s=3600) as log:
        await fill_log(log)
        await log.release({A: 200, B: 20})
        assert await log.trim() == 0
        clock.advance(2000)
        await log.append({A: build_batch("new", 10), B: build_batch("y")})
        await log.trim()
        state = log.list_shards()[A]
        assert (state.start, state.watermark, state.released) == (200, 210, 200)
        assert state.size_bytes == len("new")
        assert log.list_shards()[B].start == 20
        with pytest.raises(OffsetOutOfRange, match="has the rows 200 to 210"):
            await log.read(A, 199, limit_bytes=LIMIT_BYTES)
        assert [record.offset for record in await read_all(log, A, 200)] == [200]
        states = log.list_shards()
    async with open_log(disk, clock, retention_ms=1000, trim_interval_s=3600) as log:
        assert log.list_shards() == states


async def test_unreleased_rows_are_kept_beyond_every_limit() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock, retention_ms=1000, retention_bytes=1, trim_interval_s=3600) as log:
        await fill_log(log)
        clock.advance(2000)
        size_bytes = log.size_bytes
        await log.release({A: 200})
        assert await log.trim() == 0
        assert [record.batch.payload for record in await read_all(log, B)] == [b"y"] * 20
        assert log.size_bytes < size_bytes / 2, "the released rows of the other table are removed"
        assert log.list_shards()[A].start > 150
        states = log.list_shards()
        await log.store_indexes()
        for remaining_disk in (copy_disk(disk), copy_without_indexes(disk)):
            async with open_log(remaining_disk, clock, retention_bytes=1, trim_interval_s=3600) as other_log:
                assert {**other_log.list_shards(), A: states[A]} == {**states, B: other_log.list_shards()[B]}
                assert [record.batch.payload for record in await read_all(other_log, B)] == [b"y"] * 20
        await log.release({B: 10})
        assert await log.trim() > 0
        assert 0 < log.list_shards()[B].start <= 10
    async with open_log(disk, clock, retention_ms=1, drops_unreleased=True, trim_interval_s=3600) as log:
        clock.advance(2000)
        assert await log.trim() > 0
        assert log.list_shards()[B].start > 15


class InterruptedRunner(DirectRunner):
    """Runs another task before one of the accesses to the disk.

    Attributes:
        accesses_before: The number of accesses that run before the interruption.
        interruption: The other task, or None if there is none or it has run.
    """

    accesses_before = 0
    interruption: Callable[[], Awaitable[None]] | None = None

    async def read(self, work):
        if self.interruption is not None:
            self.accesses_before -= 1
            if self.accesses_before < 0:
                interruption, self.interruption = self.interruption, None
                await interruption()
        return work()


@pytest.mark.parametrize("has_index_file", [False, True], ids=["index in memory", "index in a file"])
@pytest.mark.parametrize("accesses_before", range(3))
async def test_reader_gets_the_right_rows_while_its_segment_is_rewritten(
    accesses_before: int, has_index_file: bool
) -> None:
    disk, clock, runner = SimulatedDisk(), SimulatedClock(1), InterruptedRunner()
    limits = SegmentLimits(segment_bytes=4096, retention_ms=1000, retention_bytes=1, trim_interval_s=3600)
    rng = random.Random(accesses_before)
    async with open_segments(disk, runner, clock, limits) as log:
        for number in range(60):
            shards = [shard for shard in (A, B, OTHER) if rng.random() < 0.7] or [B]
            await log.append(
                {shard: build_batch(f"{number:3}" * rng.choice((1, 30)), 1 + number % 3) for shard in shards}
            )
        if has_index_file:
            await log.store_indexes()
        expected = {record.offset: record for record in await read_all(log, B)}
        clock.advance(2000)

        async def rewrite() -> None:
            await log.release({A: log.list_shards()[A].watermark, OTHER: log.list_shards()[OTHER].watermark // 2})
            await log.trim()
            await log.store_indexes()

        for offset in expected:
            log._loaded.clear()
            runner.accesses_before, runner.interruption = accesses_before, rewrite
            records = await log.read(B, offset, limit_bytes=2000)
            assert records
            assert records == [expected[record.offset] for record in records]
            assert records[0].offset == offset
            if runner.interruption is None:
                break
        assert [record.offset for record in await read_all(log, B)] == list(expected)


@pytest.mark.parametrize("has_index_file", [False, True], ids=["index in memory", "index in a file"])
async def test_reader_gets_the_right_rows_before_the_log_notices_that_a_segment_was_replaced(
    has_index_file: bool,
) -> None:
    """The disk already has the new segment, while the log still has the positions of the old segment."""
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    was_reached, may_continue = asyncio.Event(), asyncio.Event()

    class HeldRunner(DirectRunner):
        """Holds the end of the first rewrite of a segment until the test lets it continue."""

        is_active = False

        async def read(self, work):
            result = work()
            if self.is_active and work.func is rewrite_segment:
                was_reached.set()
                await may_continue.wait()
            return result

    runner = HeldRunner()
    limits = SegmentLimits(segment_bytes=4096, retention_ms=1000, retention_bytes=1, trim_interval_s=3600)
    async with open_segments(disk, runner, clock, limits) as log:
        for number in range(60):  # All frames have the same length, so a moved frame begins where another frame began.
            await log.append({A if number % 2 else B: build_batch(f"{number:3}")})
        if has_index_file:
            await log.store_indexes()
        expected = await read_all(log, B)
        clock.advance(2000)
        await log.release({A: 30})
        runner.is_active = True
        trim_task = asyncio.create_task(log.trim())
        await was_reached.wait()
        read_task = asyncio.create_task(log.read(B, 3, limit_bytes=1))
        for _ in range(10):  # Enough turns of the event loop for the read to reach the disk
            await asyncio.sleep(0)
        runner.is_active = False
        may_continue.set()
        await trim_task
        assert await read_task == [expected[3]]
        assert await read_all(log, B) == expected


async def test_released_rows_are_removed_by_size() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock, retention_bytes=3000, trim_interval_s=3600) as log:
        await fill_log(log, 100)
        await log.release({A: 1000, B: 100})
        await log.trim()
        assert 1024 < log.size_bytes <= 3000 + 1024
        assert sum(len(file.visible) for file in disk.files.values()) < 8000


async def test_segments_with_rows_of_a_removed_stream_are_deleted() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock, retention_bytes=1, retention_ms=1000, trim_interval_s=3600) as log:
        await fill_log(log)
        await log.remove(A.stream)
        assert await log.trim() > 1
        with pytest.raises(StreamRemoved):
            await log.append({A: build_batch("x")})
        clock.advance(5000)
        # Each append begins a new segment. The log deletes the old segment, and forgets its producer.
        for _ in range(3):
            await log.append({OTHER: build_batch("x" * 1000)})
            clock.advance(10)
            await log.release({OTHER: 99})
            await log.trim()
        # Then the removed stream accepts appends again, from offset 0.
        answer = await log.append({A: build_batch("x")})
        assert answer.positions[0].offset == 0
        assert await read_texts(log, A) == ["x"]
        clock.advance(1)
    async with open_log(disk, clock) as log:
        assert await read_texts(log, A) == ["x"]


async def test_log_without_appends_also_removes_old_rows() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock, retention_ms=1000, trim_interval_s=3600) as log:
        await log.append({A: build_batch("old")})
        await log.release({A: 1})
        clock.advance(5000)
        await log.append({B: build_batch("new")})
        await log.trim()
        assert log.list_shards()[A].start == 1


async def test_producers_are_forgotten_after_the_retention() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock, retention_ms=1000, producers_max=2, trim_interval_s=3600) as log:
        for name in ("p", "q"):
            await log.append({A: build_batch("x" * 400)}, StreamProducer(name, 0))
        with pytest.raises(TooManyRequests):
            await log.append({A: build_batch("x")}, StreamProducer("r", 0))
        clock.advance(5000)
        await log.append({A: build_batch("x" * 900)})
        await log.append({A: build_batch("x")}, StreamProducer("r", 0))
        assert log.find_producer("p") is None


async def test_positions_of_idle_producers_are_forgotten_but_their_sequences_are_kept() -> None:
    disk, clock = SimulatedDisk(), SimulatedClock(1)
    async with open_log(disk, clock) as log:
        await log.append({A: build_batch("x" * 500)}, StreamProducer("p", 0))
        clock.advance(3_600_000)
        await log.append({A: build_batch("x" * 900)})
        repeated_answer = await log.append({A: build_batch("x" * 500)}, StreamProducer("p", 0))
        assert (repeated_answer.duplicate, repeated_answer.positions) == (True, ())
        await log.append({A: build_batch("y")}, StreamProducer("p", 1))


# -- a real full disk ------------------------------------------------------------------------------------------------

FULL_DISK = """
import asyncio, sys
from pathlib import Path
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import LogFull
from seamark.metaserver.log.port import Batch, Shard
from seamark.metaserver.log.segments import SegmentLimits, open_segment_log

async def main(folder):
    shard, stored = Shard("t", 0), 0
    limits = SegmentLimits(segment_bytes=256 << 10, trim_interval_s=3600)
    async with open_segment_log(folder / "log", SystemClock(), limits) as log:
        try:
            for _ in range(1000):
                await log.append({shard: Batch(1, bytes(10_000))})
                stored += 1
        except LogFull:
            pass
        assert log.read_watermarks([shard]) == {shard: stored}, stored
        (folder / "ballast").unlink()
        await log.append({shard: Batch(1, b"last")})
    async with open_segment_log(folder / "log", SystemClock(), limits) as log:
        assert log.read_watermarks([shard]) == {shard: stored + 1}
        assert (await log.read(shard, stored, limit_bytes=1))[0].batch.payload == b"last"
    print(stored)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_log_on_a_full_file_system_refuses_appends_and_recovers(tmp_path: Path) -> None:
    # When the file system is full, the script deletes the file `ballast`, so that a further append has room.
    script = f"mount -t tmpfs -o size=3m tmpfs {tmp_path} && head -c 1000000 /dev/zero > {tmp_path}/ballast && exec "
    script += f'{sys.executable} -c "$0" {tmp_path}'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, FULL_DISK]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        # This container cannot mount a file system. The kernel's limit on the size of a file fails a write in the same
        # way.
        limited_command = f'ulimit -f 100; {sys.executable} -c "$0" {tmp_path}'
        (tmp_path / "ballast").touch()
        result = subprocess.run(
            ["sh", "-c", limited_command, FULL_DISK], cwd=REPO, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    # The script prints the number of appends before the disk was full.
    assert 50 < int(result.stdout) < 1000
