"""Pauses of stream tables. A paused table refuses rows, but its flushes continue. A pause is a table property."""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater

PAUSED = "seamark.stream.paused"
"""The table property of a paused table. Its value is the reason of the pause."""
REASON_CHARACTERS_MAX = 500
"""The maximum length of the reason of a pause."""
_RETRY_S = 5
"""The time after which a client may send refused rows again."""
_REMEMBERED_S = 60.0
"""The time for which a pause is remembered. No append takes longer from its last read of the metadata to its check."""


class StreamPaused(RetryLater):
    """Raised if a table is paused, which accepts no rows until it is resumed."""


def read_pause(metadata: TableMetadata) -> str | None:
    """Return the reason of the pause, or None if the table accepts rows."""
    return metadata.properties.get(PAUSED)


class Pauses:
    """The pauses that this server has set.

    They are checked in addition to the property, because a request may have read the metadata before the pause. Its
    rows must be refused as well, so that no rows are added to a drained table.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pauses: dict[str, tuple[int, float]] = {}
        """The time of the metadata with the pause, and the time of the clock, by the UUID of the table."""

    def record(self, table_uuid: str, metadata: TableMetadata) -> None:
        """Record that this server has paused a table.

        Requests that have read earlier metadata are then refused, too.
        """
        self._pauses[table_uuid] = (metadata.last_updated_ms, self._clock.monotonic())

    def forget(self, table_uuid: str) -> None:
        """Remove this server's record of a pause, because the server has resumed the table."""
        self._pauses.pop(table_uuid, None)

    def check(self, table_uuid: str, metadata: TableMetadata, subject: str) -> None:
        """Check that a table accepts rows.

        The metadata may be older than a pause by this server, so recorded pauses are checked as well.

        Args:
            table_uuid: The table.
            metadata: The metadata that the request has read.
            subject: The name of the table, for the message.

        Raises:
            StreamPaused: The table is paused.
        """
        reason = read_pause(metadata)
        if reason is None and table_uuid in self._pauses:
            paused_ms, recorded_s = self._pauses[table_uuid]
            # Newer metadata without the property mean that another server has resumed the table. A record that is old
            # is not needed, and would be wrong after the table is registered again with earlier metadata.
            if metadata.last_updated_ms > paused_ms or self._clock.monotonic() - recorded_s > _REMEMBERED_S:
                del self._pauses[table_uuid]
            else:
                reason = "the table was paused while the request was read"
        if reason is not None:
            raise StreamPaused(
                f"{subject} is paused and takes no rows ({reason}); send them again after "
                f"`seamark stream resume {subject}`",
                _RETRY_S,
            )
