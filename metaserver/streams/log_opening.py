"""Opens the configured log when it is first needed, because most servers have no stream tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from seamark.cache.single_flight import SingleFlight
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, ConfigError, LogUnavailable
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.log.kafka.address import KafkaAddress, parse_address
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits
from seamark.metaserver.log.kafka.topics import TopicSource
from seamark.metaserver.log.port import StreamLog
from seamark.metaserver.log.segments import SegmentLimits, open_segment_log
from seamark.metaserver.settings.fleet import READ
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry
from seamark.metaserver.streams.stream_properties import ENABLED, is_stream_table

if TYPE_CHECKING:
    from seamark.metaserver.log.kafka import client, topic_reads
else:
    client = LazyModule("seamark.metaserver.log.kafka.client")  # Servers without Kafka do not need its library.
    topic_reads = LazyModule("seamark.metaserver.log.kafka.topic_reads")


class LogElsewhere(LogUnavailable):
    """Raised if another process uses the log, or this process has a different log.

    So this process has no rows of stream tables from the log, and has returned none to readers.
    """


def check_has_no_stream(entry: Entry, metadata: TableMetadata, error: LogElsewhere) -> None:
    """Check that a commit does not depend on rows in a log that this process does not have.

    The server with that log may have acknowledged rows that wait for a flush, and accepts more rows. This process can
    neither flush these rows, nor stop appends while the commit runs.

    Args:
        entry: The table.
        metadata: The metadata of the table.
        error: The error with which this process failed to open the stream of the table.

    Raises:
        BadRequest: The table is a stream table.
    """
    if is_stream_table(metadata):
        raise BadRequest(
            f"Cannot change rows or the schema of the stream table {format_path(entry.namespace, entry.name)} on this "
            "server, because another server may have rows of it that wait for a flush; send the statement to the "
            "server that has its log, or keep the log in Kafka (stream_log). If the log is lost, set the property "
            f"{ENABLED} of the table to false first ({error.message})"
        )


class LogSource:
    """Opens the log of this process. An instance belongs to one event loop.

    Attributes:
        is_shared: Whether other processes append to the log as well.
        groups_max: The number of groups of appends that the log writes concurrently.
    """

    def __init__(
        self,
        stack: AsyncExitStack,
        open_log: Callable[[], AbstractAsyncContextManager[StreamLog]],
        exists: Callable[[], bool],
        *,
        address: KafkaAddress | None,
    ) -> None:
        self._stack = stack
        self._open_log = open_log
        self._exists = exists
        self._address = address
        self.is_shared = address is not None
        self.groups_max = 1 if address is None else KafkaLimits().groups_max
        self._opening: SingleFlight[str, StreamLog] = SingleFlight()
        self._log: StreamLog | None = None

    @property
    def exists(self) -> bool:
        """Whether the log is open, or an earlier process has left a log. If not, no rows are waiting in this log."""
        return self._log is not None or self._exists()

    async def open(self) -> StreamLog:
        """Open the log, or return the open log. Concurrent calls share the result or the error.

        Raises:
            LogElsewhere: Another process uses the log.
            LogUnavailable: The disk fails, or Kafka does not answer.
        """
        if self._log is None:
            await self._opening.run("log", self._enter_log)
        assert self._log is not None
        return self._log

    async def _enter_log(self) -> StreamLog:
        if self._log is None:
            try:
                self._log = await self._stack.enter_async_context(self._open_log())
            except ConfigError as error:  # Another process has the folder of the log open.
                raise LogElsewhere(error.message) from None
        return self._log

    def open_topics(self) -> AbstractAsyncContextManager[TopicSource]:
        """Open the input topics in the cluster of the log.

        Raises:
            LogUnavailable: A property of the client is invalid.
        """
        assert self._address is not None
        return topic_reads.open_topics(self._address)

    def find_input_topic(self, uuid: str) -> str | None:
        """Return the name of the input topic of a table, or None if the log is in files."""
        return None if self._address is None else self._address.find_input_topic(uuid)


@asynccontextmanager
async def open_log_source(settings: Settings, clock: Clock) -> AsyncIterator[LogSource]:
    """Create the source of the log. When the context ends, close the log if it is open.

    Raises:
        ConfigError: The settings of a log in Kafka are invalid.
    """
    folder = settings.home / "streams"
    address = None
    if settings.stream_log:
        address = parse_address(settings.stream_log, settings.stream_log_client_properties)

    def open_log() -> AbstractAsyncContextManager[StreamLog]:
        if address is not None:
            return client.open_kafka_log(address, clock, _make_kafka_limits(settings), maintains=settings.role != READ)
        if settings.role == READ:
            raise LogElsewhere(
                "This server has the role read, and the log of rows is in files of another server: readers see rows "
                "after their flush. Keep the log in Kafka (stream_log), so that they see rows at once"
            )
        if settings.workers > 1:
            raise LogElsewhere(
                f"This server has {settings.workers} workers, and one process owns the log of streams; set workers to "
                "1, or keep the log in Kafka (stream_log)"
            )
        return open_segment_log(folder, clock, _make_segment_limits(settings))

    async with AsyncExitStack() as stack:

        def has_log() -> bool:
            """Return whether a log in Kafka is configured, or this server may open its log in files, which exists."""
            return address is not None or (settings.role != READ and folder.exists())

        yield LogSource(stack, open_log, has_log, address=address)


def _make_segment_limits(settings: Settings) -> SegmentLimits:
    return SegmentLimits(
        retention_ms=1000 * settings.stream_log_retention_s,
        retention_bytes=settings.stream_log_retention_bytes,
        waiting_bytes_max=settings.stream_log_waiting_bytes,
        producers_max=settings.stream_log_producers_limit,
    )


def _make_kafka_limits(settings: Settings) -> KafkaLimits:
    return KafkaLimits(
        retention_ms=1000 * settings.stream_log_retention_s,
        retention_bytes=settings.stream_log_retention_bytes,
        waiting_bytes_max=settings.stream_log_waiting_bytes,
        producers_max=settings.stream_log_producers_limit,
    )
