"""Counters of a server's streams, and the state of the flushes of a table."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class StreamCounts:
    """Counts of appends and flushes since the start of the server, for metrics.

    Attributes:
        rows: The number of appended rows.
        size_bytes: The size of the appended rows in the log.
        refused: The number of refused appends, because the memory was full, the table was paused, or the log refused
            them.
        flushes: The number of flushes that added rows.
        flushed_rows: The number of rows that flushes added.
        failed_flushes: The number of failed flushes.
    """

    rows: int = 0
    size_bytes: int = 0
    refused: int = 0
    flushes: int = 0
    flushed_rows: int = 0
    failed_flushes: int = 0


@dataclass
class TopicCounts:
    """Counts of messages of input topics since the start of this process, for metrics.

    Attributes:
        messages: The number of read messages.
        rows: The number of appended rows.
        rejected: The number of rows and messages that did not fit.
        waiting: By the UUID of the table, the reason why messages of its topic are waiting now.
        lost: By the UUID of the table, the number of messages that were not appended because Kafka has used their
            offsets twice.
    """

    messages: int = 0
    rows: int = 0
    rejected: int = 0
    waiting: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)


HIDDEN_ERROR = "the error is shown to principals that may list the files of the table"
"""The text that replaces an error for principals that may not see it."""


class FlushReport(NamedTuple):
    """The state of the flushes of a table.

    Attributes:
        oldest_ms: The time at which the oldest row in memory was appended, or None if there are no rows.
        interval_ms: The age in milliseconds at which rows are flushed.
        failures: The number of failed flushes since the last successful flush.
        error: The message of the last failure.
        is_blocked: Whether later flushes will fail as well, because the waiting rows do not fit the table.
    """

    oldest_ms: int | None
    interval_ms: int
    failures: int
    error: str
    is_blocked: bool = False

    def without_error(self) -> FlushReport:
        """Return the report for a principal that may not see names of files, because they contain partition values."""
        return self._replace(error=HIDDEN_ERROR) if self.error else self


class FlushState:
    """The running flush of a table, its failures, and what determines the next flush."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.failures = 0
        """The number of failed flushes since the last successful flush."""
        self.error = ""
        """The message of the last failure."""
        self.is_blocked = False
        """Whether the last flush failed for a permanent reason."""
        self.not_before_s = 0.0
        """The time on a monotonic clock before which no flush is started, because the last flush has failed."""
        self.interval_ms: int | None = None
        """The flush interval in the table's properties, or None."""
        self.is_due = False
        """Whether to flush the table at the next check, even if its rows are young."""
        self.waiting_since_ms: int | None = None
        """The time at which this process first saw unflushed rows of another process, or None."""
