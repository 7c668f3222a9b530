"""Sending of events to a topic of Apache Kafka, by confluent-kafka.

The format is CloudEvents 1.0, structured content mode (cloudevents/spec, kafka-protocol-binding 3.3). The key of a
record is the UUID of the table, so all events of a table are in one partition, in their order.

The producer is idempotent, waits for all in-sync replicas, and stops at the first record that fails. Each failure
replaces the producer. Otherwise a record of a failed call could arrive after a record of a later call, without its
predecessors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.timeline.addresses import EventTopic
from seamark.metaserver.timeline.delivery import SEND_TIMEOUT_S, NotDelivered
from seamark.metaserver.timeline.events import CONTENT_TYPE, Event

_POLL_S = 0.1
"""The time for which the thread waits for confirmations before it checks whether the target is closed."""
_HEADERS: list[tuple[str, str | bytes | None]] = [("content-type", CONTENT_TYPE.encode())]


class KafkaTarget:
    """An `EventTarget` for Kafka. The producer belongs to a thread, so that no call blocks the event loop."""

    kind = "kafka"
    events_max = 100

    def __init__(self, address: EventTopic, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._producer: Producer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-events")
        self._is_closing = threading.Event()
        self.place = f"kafka://{address.servers}/{address.topic}"
        self.name = f"events:kafka:{address.topic}"

    async def send(self, events: Sequence[Event]) -> None:
        """Append events to the topic.

        Raises:
            NotDelivered: Kafka did not confirm all events in time.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, events)

    def _send(self, events: Sequence[Event]) -> None:
        """Send events in the thread of the producer, and wait for their confirmations.

        After a failure, the producer is replaced, so that it does not send the remaining events later.

        Raises:
            NotDelivered: An event failed, or not all events were confirmed in time. Some of them may have been
                delivered.
        """
        confirmed_count = 0
        failure: KafkaError | None = None

        def take_answer(error: KafkaError | None, _: Message) -> None:
            nonlocal confirmed_count, failure
            if error is None:
                confirmed_count += 1
            else:
                failure = failure or error

        try:
            producer = self._producer or self._make_producer()
            for event in events:
                producer.produce(
                    self._address.topic, event.body, key=event.key, headers=_HEADERS, on_delivery=take_answer
                )
            deadline_s = self._clock.monotonic() + SEND_TIMEOUT_S
            while confirmed_count < len(events) and failure is None:
                if self._is_closing.is_set() or self._clock.monotonic() > deadline_s:
                    break
                producer.poll(_POLL_S)
        except (BufferError, KafkaException) as error:
            self._replace_producer()
            raise NotDelivered(str(error.args[0])) from error
        if confirmed_count < len(events):
            self._replace_producer()
            raise NotDelivered(failure.str() if failure else f"no confirmation within {SEND_TIMEOUT_S:g} s")

    def _make_producer(self) -> Producer:
        """Create a producer that stops at the first record that fails."""
        settings: dict[str, Any] = {
            **self._address.properties,
            "bootstrap.servers": self._address.servers,
            "acks": "all",
            "enable.idempotence": True,
            # The producer stops at the first record that fails, and never gives up a record because of its age.
            "enable.gapless.guarantee": True,
            "message.timeout.ms": 0,
            # A topic that does not exist is reported after this time, in milliseconds.
            "topic.metadata.propagation.max.ms": 3000,
            "linger.ms": 0,
            "reconnect.backoff.max.ms": 1000,
            "log_level": 0,
        }
        self._producer = Producer(settings)
        return self._producer

    def _replace_producer(self) -> None:
        """Drop the records of the producer. The next call creates another producer."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(_POLL_S)

    async def close(self) -> None:
        """Drop unconfirmed events, and end the thread."""
        self._is_closing.set()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._replace_producer)
        self._thread.shutdown()
