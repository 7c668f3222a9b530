"""The counters of a server's streams since its start, and the state of the flushes of a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class StreamCounts:
    """Counts since the start of the server, for metrics.

    Attributes:
        rows: The rows that were appended.
        size_bytes: Their bytes in the log.
        refused: The appends that were refused: the memory was full, the table was paused, or the log refused them.
        flushes: The flushes that added rows.
        flushed_rows: The rows that they added.
        failed_flushes: The flushes that failed.
    """

    rows: int = 0
    size_bytes: int = 0
    refused: int = 0
    flushes: int = 0
    flushed_rows: int = 0
    failed_flushes: int = 0


@dataclass
class TopicCounts:
    """Counts the messages that this process has read from input topics since its start, for metrics.

    Attributes:
        messages: The messages that were read.
        rows: The rows that were appended.
        rejected: The rows and messages that did not fit.
        waiting: Why the messages of a topic wait now, by the UUID of the table.
        lost: The messages that were not appended because Kafka has used their offsets twice, by the UUID of the table.
    """

    messages: int = 0
    rows: int = 0
    rejected: int = 0
    waiting: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)


HIDDEN_ERROR = "the error is shown to principals that may list the files of the table"
"""The text in place of an error for other principals."""


class FlushReport(NamedTuple):
    """The state of the flushes of a table.

    Attributes:
        oldest_ms: The time when the oldest row in memory was appended, or None if there are no rows.
        interval_ms: The age at which rows are flushed.
        failures: The flushes that have failed since the last successful flush.
        error: The message of the last failure.
        is_blocked: Whether the last flush failed because the table and its waiting rows do not fit each other, so that
            no later flush succeeds either.
    """

    oldest_ms: int | None
    interval_ms: int
    failures: int
    error: str
    is_blocked: bool = False

    def without_error(self) -> FlushReport:
        """Return the report for a reader who may not see the names of files, which contain values of partitions."""
        return self._replace(error=HIDDEN_ERROR) if self.error else self
