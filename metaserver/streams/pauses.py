"""Pauses of stream tables. A paused table refuses rows, but its flushes continue. A pause is a table property."""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import RetryLater

PAUSED = "seamark.stream.paused"
"""The table property of a paused table. Its value is the reason of the pause."""
REASON_CHARACTERS_MAX = 500
_RETRY_S = 5


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

    def __init__(self) -> None:
        self._updated_ms: dict[str, int] = {}
        """The time of the metadata with the pause, by the UUID of the table."""

    def record(self, table_uuid: str, metadata: TableMetadata) -> None:
        """Record that this server has paused a table."""
        self._updated_ms[table_uuid] = metadata.last_updated_ms

    def forget(self, table_uuid: str) -> None:
        """Record that this server has resumed a table."""
        self._updated_ms.pop(table_uuid, None)

    def check(self, table_uuid: str, metadata: TableMetadata, subject: str) -> None:
        """Check that a table accepts rows.

        Args:
            table_uuid: The table.
            metadata: The metadata that the request has read.
            subject: The name of the table, for the message.

        Raises:
            StreamPaused: The table is paused.
        """
        reason = read_pause(metadata)
        paused_ms = self._updated_ms.get(table_uuid)
        if reason is None and paused_ms is not None:
            if metadata.last_updated_ms > paused_ms:  # Another server has resumed the table.
                del self._updated_ms[table_uuid]
            else:
                reason = "the topic was paused while the request was read"
        if reason is not None:
            raise StreamPaused(
                f"{subject} is paused and takes no rows ({reason}); send them again after "
                f"`seamark stream resume {subject}`",
                _RETRY_S,
            )
