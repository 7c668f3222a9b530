"""The port to Kafka, with the operations that the log needs. `client.py` and a simulation implement it."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from seamark.formats.runtime.errors import LogUnavailable
from seamark.metaserver.log.port import Shard


class NewRecord(NamedTuple):
    """A record to write to the partition of a shard."""

    shard: Shard
    value: bytes


class JournalRange(NamedTuple):
    """The offset of the journal's first record, and the offset after its last record."""

    start: int
    end: int


class JournalListener(Protocol):
    """Receives the records of the journal, the topic that orders all appends, on the event loop."""

    def receive(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Receive the next records, each as Kafka's offset and its value."""

    def restart(self, start: int) -> None:
        """Continue at the record `start`. Earlier records were deleted before they could be received."""


class Broker(Protocol):
    """A Kafka cluster with the topics of one log. Every method raises LogUnavailable if the cluster does not answer."""

    @property
    def identity(self) -> str:
        """The identity of the log, which depends on the cluster, the prefix and the journal."""

    async def create_partitions(self, shards: Iterable[Shard]) -> None:
        """Create missing topics and partitions of the shards."""

    async def write(self, records: Sequence[NewRecord]) -> Sequence[int | LogUnavailable]:
        """Write records durably. Return, for each, Kafka's offset or the error.

        A record with an error may be stored, but the journal never refers to it.
        """

    def write_journal(self, value: bytes) -> Awaitable[None]:
        """Start writing a record to the journal. The records have the order of the calls.

        Returns:
            An awaitable for the end of the write. It raises CommitUnknown if it is unknown whether the record is
            stored.
        """

    async def read(self, shard: Shard, records: Sequence[int]) -> Mapping[int, bytes]:
        """Return the records of a shard at these offsets of Kafka, by offset.

        Raises:
            OffsetOutOfRange: A record was deleted.
        """

    async def read_journal_range(self) -> JournalRange:
        """Return the current range of the journal, which includes all records that were written before the call."""

    async def delete_records(self, end_offsets: Mapping[Shard, int]) -> None:
        """Delete the records of each shard before an offset of Kafka."""

    async def delete_journal(self, offset_before: int) -> None:
        """Delete the records of the journal before an offset."""

    async def delete_stream(self, stream: str) -> None:
        """Delete the topic of a stream, if it exists."""

    def follow_journal(self, start: int, listener: JournalListener) -> None:
        """Pass all records of the journal from `start` on to the listener, until the broker is closed."""
