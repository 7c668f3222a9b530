"""The port to Kafka: the operations of a cluster that the log needs. `client.py` and a simulation implement it."""

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
    """The offsets of the journal's first record, and after its last record."""

    start: int
    end: int


class JournalListener(Protocol):
    """Receives the records of the journal, on the event loop."""

    def receive(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Take the next records: Kafka's offset and the value of each."""

    def restart(self, start: int) -> None:
        """Begin again at the record `start`: records before it were deleted before they were received."""


class Broker(Protocol):
    """A Kafka cluster, with the topics of one log.

    Every method may raise LogUnavailable: the cluster does not answer.
    """

    @property
    def identity(self) -> str:
        """The identity of the log, which depends on the cluster, the prefix and the journal."""

    async def create_partitions(self, shards: Iterable[Shard]) -> None:
        """Create the missing topics and partitions of shards."""

    async def write(self, records: Sequence[NewRecord]) -> Sequence[int | LogUnavailable]:
        """Write records durably; return Kafka's offset of each, or why it was not written.

        A record with an error may be there. No journal names it.
        """

    def write_journal(self, value: bytes) -> Awaitable[None]:
        """Begin to write a record to the journal; the order of the calls is the order of the records.

        Returns:
            The end of the write. It raises CommitUnknown if the record may be there or not.
        """

    async def read(self, shard: Shard, records: Sequence[int]) -> Mapping[int, bytes]:
        """Return records of a shard by Kafka's offset.

        Raises:
            OffsetOutOfRange: A record was deleted.
        """

    async def read_journal_range(self) -> JournalRange:
        """Return the present range of the journal. All records that were written before the call are in it."""

    async def delete_records(self, before: Mapping[Shard, int]) -> None:
        """Delete the records of shards before Kafka's offsets."""

    async def delete_journal(self, before: int) -> None:
        """Delete the records of the journal before an offset."""

    async def delete_stream(self, stream: str) -> None:
        """Delete the topic of a stream, if it exists."""

    def follow_journal(self, start: int, listener: JournalListener) -> None:
        """Give the listener all records of the journal from `start` on, until the broker is closed."""
