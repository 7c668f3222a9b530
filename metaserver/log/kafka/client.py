"""Implements the port to Kafka with confluent-kafka. No call blocks the event loop.

A thread handles the answers to the producer, another thread reads the journal, and several threads read rows. The
producer is idempotent and waits for all in-sync replicas, whose minimum number is a setting of Kafka.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import structlog
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewPartitions, NewTopic

from seamark.cache.single_flight import SingleFlight
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitUnknown, LogUnavailable, OffsetOutOfRange
from seamark.metaserver.log.kafka.address import KafkaAddress
from seamark.metaserver.log.kafka.broker import JournalListener, JournalRange, NewRecord
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog, open_log_over
from seamark.metaserver.log.port import Shard

READER_THREADS = 4
"""The number of threads that read rows."""
_TIMEOUT_S = 10.0
"""The maximum time of a request to the cluster."""
_ANSWER_S_MAX = 2 * _TIMEOUT_S
"""The maximum time of a wait for the client library, which itself cancels requests after `_TIMEOUT_S`."""
_PAUSE_S = 0.5
"""The pause after an unexpected error before the journal is read again."""
_POLL_S = 0.1
"""The time for which a thread waits for an event before it checks whether the broker is closed."""
_TOPIC_CHECK_S = 0.01
"""The interval at which a new topic is checked for leaders of all its partitions."""
_LEADER_CHECK_S = 0.05
"""The interval at which the journal is checked for a leader of its partition."""
_CONSUMED_MAX = 1000
"""The maximum number of records that are taken from a consumer at a time."""
_READ_AHEAD_KB = 16 << 10
"""The maximum size of the records that a consumer fetches in advance."""
_TOPIC_CONFIG = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""The configuration of topics. It disables Kafka's retention, because only `KafkaLog.trim` may delete rows."""
_UNKNOWN_OFFSET = -1
"""The offset of a stored record if the cluster does not return its offset."""
_REWRITES_MAX = 2
"""The maximum number of times that a record is written again because its offset is unknown."""
_NO_TOPIC_ERRORS = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}
_NO_LEADER_ERRORS = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
T = TypeVar("T")
_log = structlog.get_logger("seamark.log")


class _Writes:
    """The answers of Kafka to a list of records: an offset or an error for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._is_complete = asyncio.Event()
        self._loop = loop
        self._lock = threading.Lock()
        self._remaining_count = count
        self._answers: list[int | KafkaError | LogUnavailable | None] = [None] * count

    def receive_answer(self, index: int, error: KafkaError | None, message: Message) -> None:
        """Receive the answer to the record with this index. The thread of the producer calls this method.

        The offset is unknown if the cluster reports that an earlier attempt stored the record.
        """
        offset = message.offset()
        self._set_answer(index, error if error is not None else _UNKNOWN_OFFSET if offset is None else offset)

    def refuse(self, indexes: Iterable[int], error: LogUnavailable) -> None:
        """Set the error of records that the producer has not accepted."""
        for index in indexes:
            self._set_answer(index, error)

    def _set_answer(self, index: int, answer: int | KafkaError | LogUnavailable) -> None:
        """Set the answer to a record, unless it has an answer already."""
        with self._lock:
            if self._answers[index] is not None:
                return
            self._answers[index] = answer
            self._remaining_count -= 1
            is_last = not self._remaining_count
        if is_last:
            _call_on_loop(self._loop, self._is_complete.set)

    async def wait(self, timeout_s: float) -> list[int | KafkaError | LogUnavailable | None]:
        """Return the answer to each record, or None if there is no answer after `timeout_s`.

        Normally, the client library answers each record in time. The timeout ends the append if the library fails.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_complete.wait()
        with self._lock:
            return list(self._answers)


class KafkaBroker:
    """A `Broker` that uses librdkafka. Open it with `open_broker`."""

    def __init__(self, address: KafkaAddress, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._address = address
        self._clock = clock
        self._loop = loop
        self._client_properties: dict[str, Any] = {
            **address.properties,
            "bootstrap.servers": address.servers,
            "logger": _Logger(),
            # Appends wait for the connection, so try again sooner than the library does by default.
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
        }
        self._producer = self._make_producer()
        self._admin = AdminClient({**self._client_properties})
        # Use a separate client for deletions. After a request for a missing topic, a client finds no leader of a
        # partition for some time.
        self._deleting_admin = AdminClient({**self._client_properties})
        # The follower reads the journal from its last position on. It seldom changes its position, so its fetches may
        # wait longer for new records, which needs fewer requests.
        self._follower = self._make_consumer(fetch_wait_ms=500)
        # Do not use the follower of the journal: its connection answers no other request while a fetch waits.
        self._range_consumer = self._make_consumer()
        self._readers: queue.LifoQueue[Consumer] = queue.LifoQueue()
        self._open_readers: list[Consumer] = []
        self._threads = ThreadPoolExecutor(READER_THREADS + 1, thread_name_prefix="kafka-read")
        self._is_closing = threading.Event()
        self._producer_thread = threading.Thread(target=self._serve_producer, name="kafka-producer", daemon=True)
        self._follower_thread: threading.Thread | None = None
        self._partitions: dict[str, int] = {}
        """The number of partitions of the topics that this process has used."""
        self._creations: SingleFlight[tuple[str, int], int] = SingleFlight()
        """The tasks that create topics, so that the creation of one topic does not delay other topics."""
        self.identity = ""

    def _make_producer(self) -> Producer:
        return Producer(
            {
                **self._client_properties,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": int(_TIMEOUT_S * 1000),
                "queue.buffering.max.messages": 1_000_000,
            }
        )

    def _make_consumer(self, *, fetch_wait_ms: int = 5) -> Consumer:
        """Return a consumer.

        Args:
            fetch_wait_ms: The time for which the cluster delays the answer to a fetch that finds no records. The next
                assignment waits for this answer.
        """
        return Consumer(
            {
                **self._client_properties,
                "group.id": self._address.prefix,  # The library requires a group, which is not used.
                # The journal has all positions, so Kafka stores none. A missing record must be an error, not a gap.
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": fetch_wait_ms,
                "fetch.error.backoff.ms": 50,
                "queued.max.messages.kbytes": _READ_AHEAD_KB,
            }
        )

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and create the journal if it is missing.

        Raises:
            LogUnavailable: The cluster does not answer, or refuses this client.
        """
        self._producer_thread.start()
        # Do not use `list_topics`, which may create a missing topic with the default retention.
        cluster = await self._await_answer(self._admin.describe_cluster(request_timeout=_TIMEOUT_S))
        assert cluster is not None
        await self._create_topic(self._address.journal, 1)
        description = (await self._describe([self._address.journal]))[self._address.journal]
        self._partitions[self._address.journal] = 1
        self.identity = f"kafka/{cluster.cluster_id}/{self._address.prefix}/{description.topic_id}"

    def close(self) -> None:
        """End all threads. The method blocks."""
        self._is_closing.set()
        self._producer_thread.join()
        if self._follower_thread is not None:
            self._follower_thread.join()
        self._threads.shutdown()
        for consumer in (self._follower, self._range_consumer, *self._open_readers):
            consumer.close()
        self._producer.purge()
        self._producer.close()

    def _serve_producer(self) -> None:
        """Run the callbacks of written records until the client is closed. The method runs in its own thread."""
        while not self._is_closing.is_set():
            try:
                self._producer.poll(_POLL_S)
            except Exception:  # noqa: BLE001  if this thread ended, no write would end
                _log.exception("the delivery report of a record could not be handled")

    async def _run(self, work: Callable[[], T]) -> T:
        """Run a blocking call in a thread.

        After a timeout, the caller gets an error, but the call may still run in the thread.

        Raises:
            LogUnavailable: Kafka does not answer, or answers with an error.
        """
        try:
            async with asyncio.timeout(_ANSWER_S_MAX):
                return await self._loop.run_in_executor(self._threads, work)
        except TimeoutError:
            raise self._make_silence_error() from None
        except KafkaException as error:
            raise self._make_unavailable_error(error) from error

    def _make_unavailable_error(self, error: KafkaException) -> LogUnavailable:
        reason = error.args[0]
        text = reason.str() if isinstance(reason, KafkaError) else str(error)
        return LogUnavailable(f"Kafka at {self._address.servers} does not serve the log ({text}); retry later")

    def _make_silence_error(self) -> LogUnavailable:
        return LogUnavailable(f"Kafka at {self._address.servers} did not answer; retry later")

    # -- topics ------------------------------------------------------------------------------------------------------

    async def create_partitions(self, shards: Iterable[Shard]) -> None:
        counts: dict[str, int] = defaultdict(int)
        for shard in shards:
            topic = self._address.make_topic_name(shard.stream)
            counts[topic] = max(counts[topic], shard.number + 1)
        for topic, count in counts.items():
            if self._partitions.get(topic, 0) < count:
                self._partitions[topic] = await self._creations.run(
                    (topic, count), partial(self._create_topic, topic, count)
                )

    async def _create_topic(self, topic: str, count: int) -> int:
        """Create a topic with `count` partitions, or add missing partitions. Return the number of its partitions.

        Raises:
            LogUnavailable: Kafka does not answer or refuses the topic, or the partitions have no leaders in time.
        """
        description = (await self._describe([topic])).get(topic)
        if description is None:
            # The settings of Kafka determine the number of replicas.
            topic_futures = self._admin.create_topics([NewTopic(topic, count, config=_TOPIC_CONFIG)])
            await self._await_answer(topic_futures[topic], KafkaError.TOPIC_ALREADY_EXISTS)
        else:
            await self._check_config(topic)
            if len(description.partitions) < count:
                partition_futures = self._admin.create_partitions([NewPartitions(topic, count)])
                # Kafka answers INVALID_PARTITIONS if another replica has added the partitions.
                await self._await_answer(partition_futures[topic], KafkaError.INVALID_PARTITIONS)
        # Kafka answers before the partitions are usable, so wait until each has a leader.
        deadline_s = self._clock.monotonic() + _TIMEOUT_S
        while True:
            metadata = await self._run(partial(self._producer.list_topics, topic, timeout=_TIMEOUT_S))
            partitions = metadata.topics[topic].partitions.values()
            if len(partitions) >= count and all(partition.leader >= 0 for partition in partitions):
                return len(partitions)
            if self._clock.monotonic() > deadline_s:
                raise LogUnavailable(
                    f"Kafka did not create {count} partitions of the topic {topic} within {_TIMEOUT_S:g} s; retry later"
                )
            await asyncio.sleep(_TOPIC_CHECK_S)

    async def _check_config(self, topic: str) -> None:
        """Check that the settings of a topic do not make Kafka remove rows or journal records.

        Only the log may remove records, after their rows are in data files. Without the permission to read the
        settings, the method only logs a warning.

        Raises:
            LogUnavailable: The topic has a retention.
        """
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        config_future = self._admin.describe_configs([resource])[resource]
        config = await self._await_answer(config_future, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if config is None:
            _log.warning("the retention of a topic is not checked: no permission to describe it", topic=topic)
            return
        for name, value in _TOPIC_CONFIG.items():
            if config[name].value != value:
                raise LogUnavailable(
                    f"Kafka would remove rows of the topic {topic} that are in no data file: its {name} is "
                    f"{config[name].value}. Set it to {value}"
                )

    async def _describe(self, topics: Sequence[str]) -> dict[str, Any]:
        """Return the descriptions of the existing topics among `topics`, by name."""
        description_futures = self._admin.describe_topics(TopicCollection(list(topics)))
        answers = {
            topic: await self._await_answer(future, KafkaError.UNKNOWN_TOPIC_OR_PART)
            for topic, future in description_futures.items()
        }
        return {topic: answer for topic, answer in answers.items() if answer is not None}

    async def _await_answer(self, future: Future[T], *expected: int) -> T | None:
        """Return the answer to an administrative request, or None after one of the expected errors.

        Raises:
            LogUnavailable: Kafka does not answer, or answers with another error.
        """
        try:
            async with asyncio.timeout(_ANSWER_S_MAX):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise self._make_silence_error() from None
        except KafkaException as error:
            if isinstance(error.args[0], KafkaError) and error.args[0].code() in expected:
                return None
            raise self._make_unavailable_error(error) from error

    async def delete_stream(self, stream: str) -> None:
        topic = self._address.make_topic_name(stream)
        self._partitions.pop(topic, None)
        deletion_futures = self._admin.delete_topics([topic])
        await self._await_answer(deletion_futures[topic], KafkaError.UNKNOWN_TOPIC_OR_PART)

    async def delete_records(self, end_offsets: Mapping[Shard, int]) -> None:
        await self._delete_before(
            [
                TopicPartition(self._address.make_topic_name(shard.stream), shard.number, end)
                for shard, end in end_offsets.items()
            ]
        )

    async def delete_journal(self, offset_before: int) -> None:
        await self._delete_before([TopicPartition(self._address.journal, 0, offset_before)])

    async def _delete_before(self, positions: list[TopicPartition]) -> None:
        """Delete the records of each partition before the offset of its position.

        An error for a missing topic or for a record that was already deleted is ignored.
        """
        for future in self._deleting_admin.delete_records(positions).values():
            await self._await_answer(future, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.OFFSET_OUT_OF_RANGE)

    # -- writing -----------------------------------------------------------------------------------------------------

    async def write(self, records: Sequence[NewRecord]) -> Sequence[int | LogUnavailable]:
        answers = await self._write_once(records)
        # Write records with unknown offsets again. The journal never refers to their first copies.
        for _ in range(_REWRITES_MAX):
            unknown = [index for index, answer in enumerate(answers) if answer == _UNKNOWN_OFFSET]
            if not unknown:
                return answers
            new_answers = await self._write_once([records[index] for index in unknown])
            for index, answer in zip(unknown, new_answers, strict=True):
                answers[index] = answer
        error = LogUnavailable(f"Kafka at {self._address.servers} does not say where it stored the rows; retry later")
        return [error if answer == _UNKNOWN_OFFSET else answer for answer in answers]

    async def _write_once(self, records: Sequence[NewRecord]) -> list[int | LogUnavailable]:
        """Write records. Return, for each, its offset, which may be `_UNKNOWN_OFFSET`, or the error."""
        writes = _Writes(self._loop, len(records))
        indexes_by_shard: dict[Shard, list[int]] = defaultdict(list)
        for index, record in enumerate(records):
            indexes_by_shard[record.shard].append(index)
        # The producer accepts one list of messages for each partition.
        for shard, indexes in indexes_by_shard.items():
            messages = [
                {"value": records[index].value, "callback": partial(writes.receive_answer, index)} for index in indexes
            ]
            try:
                self._produce(self._address.make_topic_name(shard.stream), shard.number, messages)
            except LogUnavailable as error:
                writes.refuse(indexes, error)
        answers: list[int | LogUnavailable] = []
        for record, answer in zip(records, await writes.wait(_ANSWER_S_MAX), strict=True):
            if isinstance(answer, KafkaError):
                if answer.code() in _NO_TOPIC_ERRORS:  # Another process has deleted the topic.
                    self._partitions.pop(self._address.make_topic_name(record.shard.stream), None)
                answers.append(self._make_unavailable_error(KafkaException(answer)))
            elif answer is None:
                answers.append(self._make_silence_error())
            else:
                answers.append(answer)
        return answers

    def _produce(self, topic: str, partition: int, messages: list[dict[str, Any]]) -> None:
        """Pass messages to the producer.

        A missing topic is also removed from the known topics, so that the next append creates it again.

        Args:
            topic: The name of the topic.
            partition: The number of the partition.
            messages: The values, with a callback for each. The library adds the key `_error` to a message that it
                refuses.

        Raises:
            LogUnavailable: The producer does not accept them.
        """
        producer = self._producer
        try:
            accepted_count = producer.produce_batch(topic, messages, partition=partition)
        except (BufferError, KafkaException) as error:
            reason: object = error.args[0]
        else:
            if accepted_count == len(messages):
                return
            reason = next(message["_error"] for message in messages if "_error" in message)
        if isinstance(reason, KafkaError) and reason.code() in _NO_TOPIC_ERRORS:
            self._partitions.pop(topic, None)
        if isinstance(reason, KafkaError) and reason.code() == KafkaError._FATAL:
            # Replace a producer that can no longer preserve the order of its records.
            self._producer = self._make_producer()
            self._threads.submit(_end_producer, producer)
        raise LogUnavailable(f"The client of Kafka does not take the rows ({reason}); retry later")

    def write_journal(self, value: bytes) -> Awaitable[None]:
        writes = _Writes(self._loop, 1)
        self._produce(self._address.journal, 0, [{"value": value, "callback": partial(writes.receive_answer, 0)}])
        return self._await_confirmation(writes)

    async def _await_confirmation(self, writes: _Writes) -> None:
        (answer,) = await writes.wait(_ANSWER_S_MAX)
        if not isinstance(answer, int):
            reason = "no answer" if answer is None else answer
            raise CommitUnknown(
                f"Kafka at {self._address.servers} did not confirm the rows ({reason}): they may be stored or "
                "not. Repeat the request with the same sequence number"
            )

    # -- reading -----------------------------------------------------------------------------------------------------

    async def read(self, shard: Shard, records: Sequence[int]) -> Mapping[int, bytes]:
        return await self._run(
            partial(self._read, self._address.make_topic_name(shard.stream), shard.number, set(records))
        )

    def _read(self, topic: str, partition: int, wanted_offsets: set[int]) -> dict[int, bytes]:
        try:
            consumer = self._readers.get_nowait()
        except queue.Empty:
            consumer = self._make_consumer()
            self._open_readers.append(consumer)
        try:
            consumer.assign([TopicPartition(topic, partition, min(wanted_offsets))])
            try:
                return self._collect(consumer, topic, partition, wanted_offsets)
            finally:
                consumer.unassign()
        finally:
            self._readers.put(consumer)

    def _collect(self, consumer: Consumer, topic: str, partition: int, wanted_offsets: set[int]) -> dict[int, bytes]:
        """Return the records at these offsets from a consumer that begins at the first of them.

        Errors after which the library tries again are ignored until the timeout.

        Raises:
            OffsetOutOfRange: Kafka no longer has one of the records.
            KafkaException: Kafka answers with an error after which the library does not try again.
            LogUnavailable: The records did not arrive in time, or this process is closing the log.
        """
        values: dict[int, bytes] = {}
        deadline_s = self._clock.monotonic() + _TIMEOUT_S
        while len(values) < len(wanted_offsets):
            message = consumer.poll(_POLL_S)
            for record in [] if message is None else [message, *consumer.consume(_CONSUMED_MAX, 0)]:
                # Ignore messages of an earlier assignment. An error of the client has no topic.
                if record.topic() not in (topic, None) or record.partition() not in (partition, None):
                    continue
                if (error := record.error()) is not None:
                    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                        raise OffsetOutOfRange(f"The topic {topic} no longer has the record {min(wanted_offsets)}")
                    if not error.retriable() and error.code() != KafkaError._ALL_BROKERS_DOWN:
                        raise KafkaException(error)
                elif (offset := _read_offset(record)) in wanted_offsets:
                    values[offset] = record.value() or b""
            if self._clock.monotonic() > deadline_s or self._is_closing.is_set():
                raise LogUnavailable(f"Kafka did not answer a read of the topic {topic} within {_TIMEOUT_S:g} s")
        return values

    async def read_journal_range(self) -> JournalRange:
        return JournalRange(*await self._run(self._read_journal_range))

    def _read_journal_range(self) -> tuple[int, int]:
        """Return the range of the journal's offsets. Try again if a newly created partition has no leader yet."""
        partition = TopicPartition(self._address.journal, 0)
        deadline_s = self._clock.monotonic() + _TIMEOUT_S
        while True:
            try:
                start, end = self._range_consumer.get_watermark_offsets(partition, timeout=_TIMEOUT_S, cached=False)
            except KafkaException as error:
                has_no_leader = error.args[0].code() in _NO_LEADER_ERRORS
                if not has_no_leader or self._clock.monotonic() > deadline_s or self._is_closing.wait(_LEADER_CHECK_S):
                    raise
            else:
                return start, end

    def follow_journal(self, start: int, listener: JournalListener) -> None:
        self._follower_thread = threading.Thread(
            target=self._follow, args=(start, listener), name="kafka-journal", daemon=True
        )
        self._follower_thread.start()

    def _follow(self, start: int, listener: JournalListener) -> None:
        """Read the journal until the broker is closed. Errors do not end the thread, because appends wait for it.

        If the next record was deleted, the thread continues at the first existing record, and the listener starts
        again.
        """
        position, is_assigned = start, False
        while not self._is_closing.is_set():
            try:
                if not is_assigned:
                    self._follower.assign([TopicPartition(self._address.journal, 0, position)])
                    is_assigned = True
                next_position = self._pass_records(position, listener)
                if next_position is None:
                    position, is_assigned = self._find_journal_start(), False
                    _call_on_loop(self._loop, partial(listener.restart, position))
                else:
                    position = next_position
            except Exception as error:  # noqa: BLE001  without this thread no append would end
                is_expected = isinstance(error, KafkaException)
                _log.warning("the journal of the log is not read", error=str(error), exc_info=not is_expected)
                is_assigned = False
                self._is_closing.wait(_PAUSE_S)

    def _pass_records(self, position: int, listener: JournalListener) -> int | None:
        """Pass the next records to the listener, each exactly once.

        Returns:
            The offset after the last passed record, or None if the record at `position` was deleted.
        """
        message = self._follower.poll(_POLL_S)
        if message is None:
            return position
        records: list[tuple[int, bytes]] = []
        for record in [message, *self._follower.consume(_CONSUMED_MAX, 0)]:
            error = record.error()
            if error is None:
                # After an error, the consumer may return records that were already passed.
                if (offset := _read_offset(record)) >= position:
                    records.append((offset, record.value() or b""))
                    position = offset + 1
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                return None
            else:
                _log.warning("the journal of the log is not read", error=error.str())
        if records:
            _call_on_loop(self._loop, partial(listener.receive, records))
        return position

    def _find_journal_start(self) -> int:
        """Return the offset of the first record of the journal.

        Raises:
            KafkaException: The cluster does not answer.
        """
        start, _ = self._follower.get_watermark_offsets(TopicPartition(self._address.journal, 0), timeout=_TIMEOUT_S)
        return int(start)


def _call_on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Run `work` on an event loop from another thread, unless the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work)


def _read_offset(message: Message) -> int:
    """Return Kafka's offset of a message that was read without an error."""
    offset = message.offset()
    assert offset is not None
    return offset


def _end_producer(producer: Producer) -> None:
    """Discard the records of a producer, so that appends which wait for them fail."""
    producer.purge()
    producer.flush(_TIMEOUT_S)


class _Logger:
    """Passes the messages of the client library on to the server's log."""

    def log(self, level: int, message: str, *args: object) -> None:
        _log.info("kafka", message=message % args if args else message, level=level)


@asynccontextmanager
async def open_broker(address: KafkaAddress, clock: Clock) -> AsyncIterator[KafkaBroker]:
    """Connect to a cluster.

    Raises:
        LogUnavailable: The cluster does not answer, or a property of the client is invalid.
    """
    try:
        broker = KafkaBroker(address, clock, asyncio.get_running_loop())
    except KafkaException as error:
        raise LogUnavailable(
            f"The client of Kafka does not accept its properties ({error.args[0]}); correct the file of "
            "stream_log_client_properties, then restart the server"
        ) from error
    try:
        await broker.start()
        yield broker
    finally:
        await asyncio.to_thread(broker.close)


@asynccontextmanager
async def open_kafka_log(
    address: KafkaAddress, clock: Clock, limits: KafkaLimits, *, maintains: bool = True
) -> AsyncIterator[KafkaLog]:
    """Open the log in a cluster. Any number of processes may open it.

    Args:
        address: The address of the log.
        clock: The clock for times of records and for timeouts.
        limits: The maximum sizes, times and numbers of the log.
        maintains: Whether this process removes old rows, and writes the state of the log to the journal, so that a
            replica that starts need not read all earlier records.

    Raises:
        LogUnavailable: The cluster does not answer.
    """
    async with (
        open_broker(address, clock) as broker,
        open_log_over(broker, clock, limits, maintains=maintains) as log,
    ):
        yield log
