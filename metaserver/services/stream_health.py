"""The problems of a stream table: late or blocked flushes, a pause, a waiting topic, full memory, a full disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.services.proposer import Problem
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.streams.pauses import read_pause
from seamark.metaserver.streams.stream_counts import HIDDEN_ERROR
from seamark.metaserver.streams.streams import Streams

_LATE_AFTER_INTERVALS = 3
"""The minimum age of the oldest row, in flush intervals, at which the flushes of a table count as late."""
_LATE_MS_MIN = 5_000
"""The minimum age of the oldest row at which flushes count as late, for tables with short intervals."""
_MEMORY_ALERT_FRACTION = 0.5
_DISK_ALERT_FRACTION = 0.95
"""The used fractions of the memory for rows and of the disk of the log above which a problem is reported."""


def find_stream_problems(
    table_uuid: str,
    metadata: TableMetadata,
    streams: Streams,
    settings: Settings,
    now_ms: int,
    *,
    shows_errors: bool,
) -> Iterator[Problem]:
    """Yield the problems of the stream of a table on this server.

    Args:
        table_uuid: The UUID of the table.
        metadata: The metadata of a table that has, or had, rows in the log.
        streams: The streams of the server.
        settings: The settings of the server.
        now_ms: The time.
        shows_errors: Whether the problems contain the errors of flushes and topics, which may name the table's files.
    """
    reason = read_pause(metadata)
    if reason is not None:
        yield Problem("paused stream", f"the table takes no rows: {reason}", "writers of rows are refused")
    report = streams.report_flushes(table_uuid)
    if report is not None and not shows_errors:
        report = report.without_error()
    if report is not None and report.is_blocked:
        yield Problem(
            "blocked flush",
            f"the waiting rows cannot be added to the table's files: {report.error}",
            "the rows stay in the log, and engines that plan by themselves do not see them; change the table as the "
            "message says",
        )
    elif report is not None and report.oldest_ms is not None:
        late_ms = max(_LATE_MS_MIN, _LATE_AFTER_INTERVALS * report.interval_ms)
        age_ms = now_ms - report.oldest_ms
        if age_ms > late_ms:
            error_text = f"; the last flush failed: {report.error}" if report.failures else ""
            yield Problem(
                "late flush",
                f"the oldest row waits for {age_ms / 1000:.0f} s, the interval is {report.interval_ms / 1000:g} "
                f"s{error_text}",
                "engines that plan by themselves do not see these rows, and they take memory and disk",
            )
    waiting_error = streams.topic_counts.waiting.get(table_uuid)
    if waiting_error is not None:
        waiting_error = waiting_error if shows_errors else HIDDEN_ERROR
        yield Problem(
            "waiting topic",
            f"the messages of the input topic wait: {waiting_error}",
            "Kafka removes messages after the retention of the topic, even if they were not read",
        )
    lost_count = streams.topic_counts.lost[table_uuid]
    if lost_count:
        yield Problem(
            "lost messages",
            f"{lost_count:,} messages of the input topic were not appended, because Kafka lost messages and used their "
            "offsets again",
            "delete the input topic and create it again, and send these messages again",
        )
    if streams.size_bytes > _MEMORY_ALERT_FRACTION * settings.stream_memory_bytes:
        yield Problem(
            "full stream memory",
            f"rows of all stream tables take {streams.size_bytes:,} of {settings.stream_memory_bytes:,} bytes",
            "writers get 429 until flushes catch up; raise stream_memory_bytes if this lasts",
        )
    yield from _find_disk_problems(settings.home)


def _find_disk_problems(folder: Path) -> Iterator[Problem]:
    """Yield a problem if the disk of the log is nearly full."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return  # The log reports failures of its disk itself.
    if usage.used > _DISK_ALERT_FRACTION * usage.total:
        yield Problem(
            "full log disk",
            f"the disk of the log has {usage.free:,} of {usage.total:,} bytes free",
            "a full disk refuses all rows; make room, or lower stream_log_retention_bytes",
        )
