"""Reads the input topic of one table, and appends the rows of each message to the log exactly once.

The log has a producer for each partition of the topic. The sequence number of an append is Kafka's offset of its last
message. So the log stores the position together with the rows, and a process that takes over continues after the last
message whose rows are in the log. A process first begins a session of the producers (`StreamLog.fence`), after which
the log refuses appends of the previous process.

A message never blocks later messages. If the log cannot accept rows now, the intake waits and repeats the append. If
the rows of several messages are refused, they are appended message by message. A message that is refused alone becomes
a dead letter, or is skipped with a warning in the server's log. After an unexpected error, messages are refused only
after minutes of repeated attempts. After a lack of memory or an error of the operating system, they are never refused,
because the messages have not caused it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    BadRequest,
    NoSuchTable,
    ProducerFenced,
    RetryLater,
    SeamarkError,
    StreamRemoved,
    TooLarge,
)
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.log.kafka.topics import InputTopic, TopicMessage, TopicSource
from seamark.metaserver.log.port import Acknowledgement, Batch, StreamLog, make_topic_producer_name
from seamark.metaserver.streams.appends import TableRows, TopicProducer
from seamark.metaserver.streams.incoming.dead_letters import DeadLetter, DeadLetters, pack_letters
from seamark.metaserver.streams.incoming.prepared_rows import PreparedRows, RowPreparation
from seamark.metaserver.streams.incoming.rows import RejectedRow
from seamark.metaserver.streams.row_files import RowFiles
from seamark.metaserver.streams.stream_counts import TopicCounts
from seamark.metaserver.streams.stream_properties import check_stream_table, read_shard_count
from seamark.metaserver.streams.stream_table import RunInThread
from seamark.metaserver.streams.topics.messages import MessageRun, divide_messages, make_rejected_row, read_messages

ENVELOPE = "seamark.stream.topic-envelope"
"""The table property for the envelope of JSON messages.

With the value `debezium`, messages are changes of rows. Without the property, messages are rows.
"""
_RETRY_S, _RETRY_S_MAX = 0.1, 5.0
"""The first and the maximum pause before an append is repeated."""
_UNEXPECTED_S_MAX = 300.0
"""The duration of unexpected errors after which the messages of a run are appended one by one."""
_log = structlog.get_logger("seamark.streams")


class TopicTables(Protocol):
    """The stream tables, as `TopicIntake` uses them."""

    async def load(self, uuid: str) -> tuple[LoadedTable, DeadLetters | None]:
        """Return a table, and its dead-letter table or None. An unusable dead-letter table is ignored.

        Raises:
            NoSuchTable: No name refers to the table.
        """

    async def append(self, appends: Sequence[TableRows], producer: TopicProducer) -> Acknowledgement:
        """Append all rows to the tables, or none. See `Streams.append` for errors."""


class TopicIntake:
    """Reads the input topic of one table. An instance belongs to one event loop."""

    def __init__(
        self,
        uuid: str,
        topic: InputTopic,
        log: StreamLog,
        tables: TopicTables,
        row_files: RowFiles,
        clock: Clock,
        counts: TopicCounts,
        *,
        rows_max: int,
        run_in_thread: RunInThread = asyncio.to_thread,
    ) -> None:
        """Create an intake, which reads the input topic of a table and appends its messages to the log.

        Args:
            uuid: The UUID of the stream table.
            topic: The input topic of the table.
            log: The log of stream tables, to which the rows are appended.
            tables: The stream tables.
            row_files: Conforms and packs rows.
            clock: The clock.
            counts: Counts messages and rows.
            rows_max: The maximum number of rows of an append.
            run_in_thread: Runs the decoding of messages in a thread.
        """
        self._uuid = uuid
        self._topic = topic
        self._log = log
        self._tables = tables
        self._row_files = row_files
        self._clock = clock
        self._rows_max = rows_max
        self._counts = counts
        self._run_in_thread = run_in_thread
        self._epochs: dict[int, int] = {}
        """The epoch of the log's producer for each partition. The log refuses appends with an earlier epoch."""
        self._starts: dict[int, int] = {}
        """The offset after the last appended message of each partition at the start of the session."""

    async def run(self, source: TopicSource) -> None:
        """Append the rows of the topic until the task is cancelled.

        The sequence number of a producer is the offset of the last appended message. So the log knows where to
        continue, and refuses messages that were appended before.

        Raises:
            ProducerFenced: Another process now reads the topic.
            NoSuchTable: The table was dropped.
            RetryLater: The table is not a stream table at present, or Kafka does not answer.
        """
        await self._load()
        partitions = range(self._topic.partitions)
        states = await asyncio.gather(*(self._log.fence(self._make_producer_name(number)) for number in partitions))
        self._epochs = {number: state.epoch for number, state in enumerate(states)}
        self._starts = offsets = {number: state.sequence + 1 for number, state in enumerate(states)}
        _log.info("reading an input topic", topic=self._topic.name, offsets=offsets)
        self._counts.waiting.pop(self._uuid, None)
        async with source.open(self._topic, offsets) as consumer:
            while True:
                messages = await consumer.read()
                messages_by_partition: defaultdict[int, list[TopicMessage]] = defaultdict(list)
                for message in messages:
                    messages_by_partition[message.partition].append(message)
                for partition, messages_of_partition in messages_by_partition.items():
                    await self._append_messages(partition, messages_of_partition)

    async def _append_messages(self, partition: int, messages: Sequence[TopicMessage]) -> None:
        """Append the rows of the messages of one partition.

        Messages with offsets that the log already had at the start of the session are reported and skipped. Kafka gives
        an offset again only after it has lost messages (`_report_lost`). The other messages are divided into runs,
        whose rows are appended together.

        Raises:
            ProducerFenced: Another process now reads the topic.
            NoSuchTable: The table was dropped.
            StreamRemoved: The stream of the table was removed from the log.
            RetryLater: The table accepts no rows now.
        """
        loaded_table, _ = await self._load()
        lost_messages = [message for message in messages if message.offset < self._starts[partition]]
        self._report_lost(partition, lost_messages)
        runs = divide_messages(messages[len(lost_messages) :], loaded_table.metadata, rows_max=self._rows_max)
        while (run := await self._run_in_thread(partial(next, runs, None))) is not None:
            await self._append_until_stored(partition, run)
        self._counts.messages += len(messages)

    async def _append_until_stored(self, partition: int, run: MessageRun) -> None:
        """Append the rows of a run. Repeat the append until the log accepts or refuses the rows.

        Raises:
            ProducerFenced: Another process now reads the topic.
            NoSuchTable: The table was dropped.
            StreamRemoved: The stream of the table was removed from the log.
            RetryLater: The log has not accepted the position of a rejected message.
        """
        pause_s, failing_since_s = _RETRY_S, None
        while True:
            try:
                await self._append(partition, run)
            except (ProducerFenced, NoSuchTable, StreamRemoved):
                raise
            except (BadRequest, TooLarge) as error:
                await self._append_one_by_one(partition, run, error.message)
                return
            except SeamarkError as error:
                self._counts.waiting[self._uuid] = error.message
                _log.info("rows of a topic wait", topic=self._topic.name, error=error.message, pause_s=pause_s)
            except Exception as error:  # noqa: BLE001  no message may stop the messages after it
                _log.exception("messages of a topic cannot be appended", topic=self._topic.name, partition=partition)
                self._counts.waiting[self._uuid] = f"an unexpected error ({type(error).__name__})"
                now_s = self._clock.monotonic()
                # The message does not cause a MemoryError or an OSError. After such an error, the time until messages
                # are appended one by one begins again.
                if failing_since_s is None or isinstance(error, MemoryError | OSError):
                    failing_since_s = now_s
                elif now_s - failing_since_s >= _UNEXPECTED_S_MAX:
                    await self._append_one_by_one(partition, run, "an unexpected error; the log of the server has it")
                    return
            else:
                self._counts.waiting.pop(self._uuid, None)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S_MAX)

    async def _append_one_by_one(self, partition: int, run: MessageRun, reason: str) -> None:
        """Append the rows of a refused run message by message. If the run has only one message, reject the message.

        A rejected message becomes a dead letter. If the dead-letter table refuses it as well, it is skipped, and only
        its position is recorded.

        Args:
            partition: The number of the partition.
            run: The refused messages.
            reason: The reason of the refusal, for the dead letter.

        Raises:
            ProducerFenced: Another process now reads the topic.
            NoSuchTable: The table was dropped.
            StreamRemoved: The stream of the table was removed from the log.
            RetryLater: The log has not accepted the position of a rejected message.
        """
        if len(run.messages) > 1:
            loaded_table, _ = await self._load()
            for message in run.messages:
                read_run = partial(read_messages, [message], loaded_table.metadata, rows_max=self._rows_max)
                await self._append_until_stored(partition, await self._run_in_thread(read_run))
        elif run.row_count:
            (message,) = run.messages
            await self._append_until_stored(
                partition, MessageRun([message], rejected=[make_rejected_row(message, reason)])
            )
        elif run.rejected:  # The dead-letter table does not accept the message.
            self._report_skipped(run.messages[0], reason)
            await self._append_until_stored(partition, MessageRun(run.messages))
        else:
            raise RetryLater(reason)

    async def _load(self) -> tuple[LoadedTable, DeadLetters | None]:
        """Return the table, and its dead-letter table or None.

        Raises:
            NoSuchTable: The table was dropped.
            RetryLater: The table accepts no rows now, so its messages must wait.
        """
        try:
            loaded_table, dead_letters = await self._tables.load(self._uuid)
            check_stream_table(loaded_table.metadata, self._topic.name)
        except BadRequest as error:
            raise RetryLater(error.message) from None
        return loaded_table, dead_letters

    async def _append(self, partition: int, run: MessageRun) -> None:
        """Append the rows of a run, and its rejected rows to the dead-letter table, in one append.

        If the dead-letter table does not accept the rejected rows, the rows that fit are appended without them. The
        offset of the last message is the sequence number of the append, even if there are no rows. An append that the
        log already has is not counted again.

        Raises:
            NoSuchTable: The table was dropped.
            RetryLater: The table accepts no rows now.
            SeamarkError: The log refuses the append. `Streams.append` describes the errors.
        """
        loaded_table, dead_letters = await self._load()
        is_envelope = loaded_table.metadata.properties.get(ENVELOPE) == "debezium"
        preparation = RowPreparation(
            loaded_table.metadata, self._row_files, read_shard_count(loaded_table), is_envelope, rejects_rows=True
        )
        rows = PreparedRows(0, None, [])
        if run.batches:
            rows = await self._run_in_thread(partial(preparation.prepare_arrow, run.batches))
        elif run.rows:
            rows = await self._run_in_thread(partial(preparation.prepare_json, run.rows))
        appends = [] if rows.batches is None else [TableRows(loaded_table, rows.batches)]
        rejected_rows = [*run.rejected, *rows.rejected]
        if rejected_rows and dead_letters is not None:
            try:
                appends.append(TableRows(dead_letters.loaded, self._pack(dead_letters, rejected_rows, partition)))
            except BadRequest as error:  # Still append the rows that fit.
                _log.warning("a dead-letter table is not used", topic=self._topic.name, error=error.message)
                dead_letters = None
        producer = TopicProducer(self._make_producer_name(partition), run.messages[-1].offset, self._epochs[partition])
        acknowledgement = await self._tables.append(appends, producer)
        if acknowledgement.duplicate:
            return
        self._counts.rows += rows.row_count
        self._counts.rejected += len(rejected_rows)
        if rejected_rows and dead_letters is None:
            self._report_skipped(run.messages[-1], rejected_rows[0].reason, len(rejected_rows))

    def _pack(self, dead_letters: DeadLetters, rejected_rows: Sequence[RejectedRow], partition: int) -> Batch:
        letters = [DeadLetter(dead_letters.stream_table_name, row) for row in rejected_rows]
        producer = f"{self._topic.name}/{partition}"
        return pack_letters(dead_letters, letters, self._row_files, now_ms=self._clock.now_ms(), producer=producer)

    def _report_skipped(self, message: TopicMessage, reason: str, count: int = 1) -> None:
        _log.warning(
            "rows of a topic do not fit, and are skipped",
            topic=self._topic.name,
            partition=message.partition,
            offset=message.offset,
            count=count,
            reason=reason,
        )

    def _report_lost(self, partition: int, messages: Sequence[TopicMessage]) -> None:
        """Report messages with offsets before the position in the log at the start of the session.

        The consumer reads such messages only if the partition ends before this position. Then Kafka has probably lost
        messages, for example in an unclean leader election, and gives their offsets to new messages. The messages are
        not appended, because a new leader may also report an end that is too low for a short time. In this case, the
        log already has them.
        """
        if messages:
            self._counts.lost[self._uuid] += len(messages)
            _log.error(
                "messages of a topic are not appended: Kafka has used their offsets before",
                topic=self._topic.name,
                partition=partition,
                first=messages[0].offset,
                last=messages[-1].offset,
                position=self._starts[partition],
            )

    def _make_producer_name(self, partition: int) -> str:
        return make_topic_producer_name(self._uuid, self._topic.id, partition)
