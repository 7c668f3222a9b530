"""The port to input topics, to which other programs write rows for stream tables. `topic_reads.py` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol


class InputTopic(NamedTuple):
    """An input topic.

    Attributes:
        name: The name of the topic.
        id: Kafka's id of the topic. If a topic is deleted and created again, it gets a new id.
        partitions: The number of partitions.
    """

    name: str
    id: str
    partitions: int


class TopicMessage(NamedTuple):
    """A message of an input topic.

    Attributes:
        offset: Kafka's offset in the partition.
        value: The value, or None for a tombstone.
        headers: The headers. If a name occurs several times, it has the last value.
    """

    partition: int
    offset: int
    value: bytes | None
    headers: Mapping[str, bytes]


class TopicConsumer(Protocol):
    """Reads one input topic."""

    async def read(self) -> Sequence[TopicMessage]:
        """Return the next messages, in the order of each partition. The result is empty if no message is waiting.

        Messages of aborted transactions are left out.

        Raises:
            LogUnavailable: Kafka has removed the next messages, the topic was deleted, or this server may not read it.
        """


class TopicSource(Protocol):
    """The input topics in a cluster. Every method raises LogUnavailable if the cluster does not answer."""

    def make_topic_name(self, uuid: str) -> str:
        """Return the name of the input topic of a table."""

    async def list_topics(self) -> dict[str, InputTopic]:
        """Return the existing input topics, by the UUID of the table."""

    def open(self, topic: InputTopic, offsets: Mapping[int, int]) -> AbstractAsyncContextManager[TopicConsumer]:
        """Open a topic for reading from an offset of each partition, or from the first message that Kafka still has."""
