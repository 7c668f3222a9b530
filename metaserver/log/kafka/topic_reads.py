"""Reads the input topics of stream tables with confluent-kafka. No call blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from seamark.formats.runtime.errors import LogUnavailable
from seamark.metaserver.log.kafka.address import KafkaAddress
from seamark.metaserver.log.kafka.topics import InputTopic, TopicMessage

MESSAGES_MAX = 500
"""The maximum number of messages that are read at a time."""
_THREADS = 4
_TIMEOUT_S = 10.0
"""The maximum time of a request to the cluster."""
_READ_AHEAD_KB = 4 << 10
"""The maximum size of the messages that a consumer fetches in advance."""
_IDLE_S, _IDLE_S_MAX = 0.02, 0.25
"""The first and the maximum pause of a consumer that finds no message."""
_NO_TOPIC_ERRORS = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}
_NO_MESSAGE_ERRORS = _NO_TOPIC_ERRORS | {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}
_CONSUMER_PROPERTIES = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "check.crcs": True,
    "queued.max.messages.kbytes": _READ_AHEAD_KB,
}
"""Additional properties of consumers.

The library requires a group, but the group is not used, because the code assigns the partitions explicitly.
"""
T = TypeVar("T")
_log = structlog.get_logger("seamark.streams")


class KafkaTopics:
    """A `TopicSource` that uses librdkafka. Open it with `open_topics`."""

    def __init__(self, address: KafkaAddress) -> None:
        self._address = address
        self._client_properties: dict[str, Any] = {
            **address.properties,
            "bootstrap.servers": address.servers,
            "log_level": 0,
        }
        self._admin = AdminClient({**self._client_properties})
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kafka-topics")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def make_topic_name(self, uuid: str) -> str:
        return self._address.find_input_topic(uuid)

    async def list_topics(self) -> dict[str, InputTopic]:
        prefix = self._address.find_input_topic("")
        cluster_metadata = await self.run(partial(self._admin.list_topics, timeout=_TIMEOUT_S))
        names = [name for name in cluster_metadata.topics if name.startswith(prefix)]
        if not names:
            return {}
        topics: dict[str, InputTopic] = {}
        for name, future in self._admin.describe_topics(TopicCollection(names)).items():
            description = await self._await_description(future)
            if description is not None:
                topic = InputTopic(name, str(description.topic_id), len(description.partitions))
                topics[name.removeprefix(prefix)] = topic
        return topics

    @asynccontextmanager
    async def open(self, topic: InputTopic, offsets: Mapping[int, int]) -> AsyncIterator[_Consumer]:
        consumer = _Consumer(
            self, topic, Consumer({**self._client_properties, **_CONSUMER_PROPERTIES, "group.id": self._address.prefix})
        )
        try:
            await self.run(partial(consumer.begin, offsets))
            yield consumer
        finally:
            await asyncio.get_running_loop().run_in_executor(None, consumer.close)

    async def _await_description(self, future: Future[T]) -> T | None:
        """Return the description of a topic, or None if the topic was deleted or this server may not read it.

        Raises:
            LogUnavailable: Kafka does not answer, or refuses the request.
        """
        try:
            # The client library itself cancels its request after `_TIMEOUT_S`. If it does not, this longer limit ends
            # the wait.
            async with asyncio.timeout(2 * _TIMEOUT_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise LogUnavailable(f"Kafka at {self._address.servers} did not answer; retry later") from None
        except KafkaException as error:
            reason = error.args[0]
            expected_codes = _NO_TOPIC_ERRORS | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
            if isinstance(reason, KafkaError) and reason.code() in expected_codes:
                return None
            raise self.make_unavailable_error(reason) from error

    async def run(self, work: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and turn an error of the client library into LogUnavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except KafkaException as error:
            raise self.make_unavailable_error(error.args[0]) from error

    def make_unavailable_error(self, reason: object) -> LogUnavailable:
        """Return the error for a failed call."""
        text = reason.str() if isinstance(reason, KafkaError) else str(reason)
        return LogUnavailable(f"Kafka at {self._address.servers} does not serve an input topic ({text}); retry later")


class _Consumer:
    """An implementation of `TopicConsumer`."""

    def __init__(self, topics: KafkaTopics, topic: InputTopic, consumer: Consumer) -> None:
        self._topics = topics
        self._topic = topic
        self._consumer = consumer
        self._lock = threading.Lock()
        """A lock, because a thread may still be reading when the consumer is closed."""
        self._is_closed = False
        self._idle_s = _IDLE_S

    def begin(self, offsets: Mapping[int, int]) -> None:
        """Start reading at these offsets, or at the first message that Kafka still has. The call blocks."""
        with self._lock:
            self._consumer.assign([self._find_start(partition, offset) for partition, offset in offsets.items()])

    def _find_start(self, partition: int, offset: int) -> TopicPartition:
        """Return the position of the first existing message of a partition at or after an offset.

        If messages between the offset and this position are missing, or if the partition ends before the offset, the
        server logs a warning. The offset 0 means that nothing was read yet, so no warning follows.
        """
        first, end = self._consumer.get_watermark_offsets(
            TopicPartition(self._topic.name, partition), timeout=_TIMEOUT_S
        )
        start = min(max(offset, first), end)
        if offset and start != offset:
            _log.warning(
                "messages of an input topic are missing",
                topic=self._topic.name,
                partition=partition,
                offset=offset,
                first=first,
                end=end,
            )
        return TopicPartition(self._topic.name, partition, start)

    async def read(self) -> Sequence[TopicMessage]:
        messages = await self._topics.run(self._consume)
        if messages:
            self._idle_s = _IDLE_S
        else:
            await asyncio.sleep(self._idle_s)
            self._idle_s = min(2 * self._idle_s, _IDLE_S_MAX)
        return messages

    def _consume(self) -> list[TopicMessage]:
        messages: list[TopicMessage] = []
        with self._lock:
            for message in [] if self._is_closed else self._consumer.consume(MESSAGES_MAX, 0):
                error = message.error()
                if error is None:
                    messages.append(_to_message(message))
                # The client library itself raises errors with a negative code, such as a lost connection.
                elif error.code() in _NO_MESSAGE_ERRORS or not (error.retriable() or error.code() < 0):
                    # Kafka has removed the next messages, or the topic was deleted. `begin` finds the next existing
                    # message.
                    raise self._topics.make_unavailable_error(error)
                else:
                    _log.info("an input topic is not read", topic=self._topic.name, error=error.str())
        return messages

    def close(self) -> None:
        """Close the connections to the cluster. The call blocks."""
        with self._lock:
            self._is_closed = True
            self._consumer.close()


def _to_message(message: Message) -> TopicMessage:
    partition, offset, value = message.partition(), message.offset(), message.value()
    assert partition is not None
    assert offset is not None
    header_items = cast("Sequence[tuple[str, object]]", message.headers() or ())
    headers = {name: content for name, content in header_items if isinstance(content, bytes)}
    return TopicMessage(partition, offset, value.encode() if isinstance(value, str) else value, headers)


@asynccontextmanager
async def open_topics(address: KafkaAddress) -> AsyncIterator[KafkaTopics]:
    """Open the input topics of a cluster.

    Raises:
        LogUnavailable: A property of the client is invalid.
    """
    try:
        topics = KafkaTopics(address)
    except KafkaException as error:
        raise LogUnavailable(
            f"The client of Kafka does not accept its properties ({error.args[0]}); correct the file of "
            "stream_log_client_properties, then restart the server"
        ) from error
    try:
        yield topics
    finally:
        topics.close()
