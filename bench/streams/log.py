"""How fast does the log acknowledge rows, and how long does it take to open after a kill?

`python -m bench.streams.log FOLDER BYTES ROWS ROW_BYTES` fills a log for the second question, and waits to be killed.

The peer is the disk alone: one writer without checksums or offsets writes the same bytes to one file, and calls
fdatasync after each batch. It runs before each case, on the same disk.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.report import OURS, Report, Row
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import TooManyRequests
from seamark.metaserver.log.port import Batch, Shard
from seamark.metaserver.log.segments import SegmentLimits, SegmentLog, open_segment_log

BARE = "bare fdatasync"
ROWS = (1, 10, 1000, 10_000)
ROW_BYTES = (100, 1000)
WRITERS = (1, 8, 64)
SECONDS, QUICK_SECONDS = 2.0, 0.1
RECOVERED_BYTES, QUICK_RECOVERED_BYTES = 1 << 30, 4 << 20
SMALL_ROWS, QUICK_SMALL_ROWS = 300_000, 3000
GOAL_RECOVERY_S, GOAL_CORE_MIB, GOAL_SMALL_ROWS = 5, 20, 15_000
LIMITS = SegmentLimits()


@dataclass
class AppendMeasurements:
    """The measurements of acknowledged batches.

    Attributes:
        latencies_s: The seconds of each batch.
        seconds: The time of the whole run.
        cpu_s: The CPU time of the whole run.
        syncs: The number of syncs of the disk.
    """

    latencies_s: list[float]
    seconds: float
    cpu_s: float
    syncs: int

    def compute_quantile_ms(self, share: float) -> float:
        """Return the latency in ms that a fraction `share` of the batches does not exceed."""
        sorted_latencies_s = sorted(self.latencies_s)
        return 1000 * sorted_latencies_s[min(len(sorted_latencies_s) - 1, int(share * len(sorted_latencies_s)))]

    @property
    def rate(self) -> float:
        """The batches per second."""
        return len(self.latencies_s) / self.seconds


async def run(folder: Path, *, quick: bool = False) -> Report:
    seconds = QUICK_SECONDS if quick else SECONDS
    report = Report("streams_log", "How fast does the log acknowledge rows?", peer="one writer with a bare fdatasync")
    smallest = measure_bare_disk(folder, 1, seconds)
    report.bounds = {
        "fdatasync of this disk after a write of 1 byte": f"{smallest.rate:,.0f} a second, p50 "
        f"{smallest.compute_quantile_ms(0.5):.2f} ms, p99 {smallest.compute_quantile_ms(0.99):.2f} ms",
    }
    for row_bytes, rows in itertools.product(ROW_BYTES, ROWS):
        disk = measure_bare_disk(folder, rows * row_bytes, seconds)
        for writers in WRITERS:
            measurements = await measure_appends(folder, rows, row_bytes, writers, seconds)
            _add_rows(
                report, f"{rows:,} rows of {row_bytes:,} B, {writers} writers", rows, row_bytes, measurements, disk
            )
    await _measure_small_batches(report, folder, QUICK_SMALL_ROWS if quick else SMALL_ROWS)
    for rows, row_bytes in ((10, 1000), (1000, 1000)):
        await _measure_recovery(report, folder, rows, row_bytes, QUICK_RECOVERED_BYTES if quick else RECOVERED_BYTES)
    report.notes += [
        f"Each writer appends to a table of its own and waits for each answer; {seconds:g} s a case.",
        "CPU is that of the whole process, the writers included. Rows are opaque bytes here: the cost of Arrow and "
        "JSON is not in these figures.",
        "A writer that the log refuses, because too many bytes wait, tries again after 10 ms.",
        "Recovery: from the start of opening to the first read, after kill -9; the files are in the page cache.",
    ]
    return report


def _add_rows(
    report: Report, case: str, rows: int, row_bytes: int, measurements: AppendMeasurements, disk: AppendMeasurements
) -> None:
    mib = rows * row_bytes / 2**20
    add = report.rows.append
    rates = {OURS: measurements.rate * rows, BARE: disk.rate * rows}
    add(Row(case, "acknowledged", "rows/s", rates, lower_is_better=False, peer=BARE))
    add(
        Row(
            case,
            "acknowledged bytes",
            "MiB/s",
            {OURS: measurements.rate * mib, BARE: disk.rate * mib},
            lower_is_better=False,
            peer=BARE,
        )
    )
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
        add(
            Row(
                case,
                name,
                "ms",
                {OURS: measurements.compute_quantile_ms(share), BARE: disk.compute_quantile_ms(share)},
                peer=BARE,
            )
        )
    add(
        Row(
            case,
            "batches a sync",
            "batches",
            {OURS: len(measurements.latencies_s) / max(1, measurements.syncs)},
            lower_is_better=False,
        )
    )
    mib_per_cpu_s = measurements.rate * mib * measurements.seconds / measurements.cpu_s
    goal = GOAL_CORE_MIB if rows >= 1000 else None
    add(Row(case, "bytes a second of CPU", "MiB/s", {OURS: mib_per_cpu_s}, lower_is_better=False, goal=goal))


def measure_bare_disk(folder: Path, size_bytes: int, seconds: float) -> AppendMeasurements:
    """Write batches of `size_bytes` to one file for `seconds`, and sync each batch, without a log."""
    path = folder / "bare"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(descriptor, 0, LIMITS.segment_bytes)
        os.fsync(descriptor)
        data, position, latencies = os.urandom(size_bytes), 0, []
        started_s, cpu = time.perf_counter(), time.process_time()
        while (call_began_s := time.perf_counter()) - started_s < seconds:
            os.pwrite(descriptor, data, position)
            os.fdatasync(descriptor)
            latencies.append(time.perf_counter() - call_began_s)
            position = position + size_bytes if position + 2 * size_bytes <= LIMITS.segment_bytes else 0
        return AppendMeasurements(latencies, time.perf_counter() - started_s, time.process_time() - cpu, len(latencies))
    finally:
        os.close(descriptor)
        path.unlink()


async def measure_appends(folder: Path, rows: int, row_bytes: int, writers: int, seconds: float) -> AppendMeasurements:
    """Append batches with several writers for `seconds`, and return the measurements."""
    batch = Batch(rows, os.urandom(rows * row_bytes))
    latencies: list[float] = []
    async with open_segment_log(folder / "log", SystemClock(), LIMITS) as log:
        started_s, cpu = time.perf_counter(), time.process_time()

        async def write(shard: Shard) -> None:
            while (call_began_s := time.perf_counter()) - started_s < seconds:
                while True:
                    try:
                        await log.append({shard: batch})
                        break
                    except TooManyRequests:
                        await asyncio.sleep(0.01)
                latencies.append(time.perf_counter() - call_began_s)

        await asyncio.gather(*(write(Shard(f"table-{number}", 0)) for number in range(writers)))
        appends = AppendMeasurements(latencies, time.perf_counter() - started_s, time.process_time() - cpu, log.syncs)
    shutil.rmtree(folder / "log")
    return appends


async def _measure_small_batches(report: Report, folder: Path, rows: int) -> None:
    """Measure the acknowledged rows per second with the batches of DuckLake's benchmark, which have ten rows.

    In the first case, one writer sends its next batch after each answer. In the second case, 64 writers do so at the
    same time.
    """
    batch = Batch(10, os.urandom(10 * 50))
    for writers in (1, 64):
        async with open_segment_log(folder / "log", SystemClock(), LIMITS) as log:
            started_s = time.perf_counter()
            await _append_all(log, batch, rows // 10, writers)
            rate = rows / (time.perf_counter() - started_s)
        shutil.rmtree(folder / "log")
        case = f"{rows:,} rows in batches of ten, {writers} unanswered"
        report.rows.append(Row(case, "acknowledged", "rows/s", {OURS: rate}, False, goal=GOAL_SMALL_ROWS))


async def _append_all(log: SegmentLog, batch: Batch, count: int, writers: int) -> None:
    batch_numbers = iter(range(count))

    async def write() -> None:
        for _ in batch_numbers:
            await log.append({Shard("table", 0): batch})

    await asyncio.gather(*(write() for _ in range(writers)))


async def _measure_recovery(report: Report, folder: Path, rows: int, row_bytes: int, size_bytes: int) -> None:
    """Measure the time to open a log whose process was killed."""
    argv = [sys.executable, "-m", "bench.streams.log", str(folder / "log"), str(size_bytes), str(rows), str(row_bytes)]
    filler = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert filler.stdout is not None
    stored_count = int(filler.stdout.readline())
    filler.send_signal(signal.SIGKILL)
    filler.communicate()
    started_s = time.perf_counter()
    async with open_segment_log(folder / "log", SystemClock(), LIMITS) as log:
        shard = Shard("table-0", 0)
        first = await log.read(shard, 0, limit_bytes=1)
        took = time.perf_counter() - started_s
        assert first[0].offset == 0
        assert sum(state.watermark for state in log.list_shards().values()) >= stored_count * rows
        size = log.size_bytes
    shutil.rmtree(folder / "log")
    case = f"recovery of {size / 2**20:,.0f} MiB in {stored_count:,} batches of {rows:,} rows of {row_bytes:,} B"
    report.rows.append(Row(case, "until the first read", "s", {OURS: took}, goal=GOAL_RECOVERY_S))


async def _fill_log(folder: Path, size_bytes: int, rows: int, row_bytes: int) -> None:
    """Fill a log, print the number of its batches, and wait to be killed."""
    batch = Batch(rows, os.urandom(rows * row_bytes))
    async with open_segment_log(folder, SystemClock(), LIMITS) as log:
        count = 0
        while log.size_bytes < size_bytes:
            shards = [Shard(f"table-{number}", 0) for number in range(64)]
            await asyncio.gather(*(log.append({shard: batch}) for shard in shards))
            count += len(shards)
        print(count, flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(_fill_log(Path(sys.argv[1]), *map(int, sys.argv[2:])))
