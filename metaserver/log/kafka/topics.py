"""The port to the input topics of stream tables, to which other programs write. `topic_reads.py` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol


class InputTopic(NamedTuple):
    """An input topic.

    Attributes:
        name: Its name.
        id: The id that Kafka gave it. A topic that is deleted and created again has another id.
        partitions: The number of its partitions.
    """

    name: str
    id: str
    partitions: int


class TopicMessage(NamedTuple):
    """A message of an input topic.

    Attributes:
        offset: Kafka's offset in the partition.
        value: The value, or None for a tombstone.
        headers: The headers. If a name occurs several times, the last value counts.
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
            LogUnavailable: Kafka has removed the next messages, the topic is deleted, or this server may not read it.
        """


class TopicSource(Protocol):
    """The input topics in a cluster.

    Every method may raise LogUnavailable if the cluster does not answer.
    """

    def make_topic_name(self, uuid: str) -> str:
        """Return the name of the input topic of a table."""

    async def list_topics(self) -> dict[str, InputTopic]:
        """Return the input topics that exist, by the UUID of the table."""

    def open(self, topic: InputTopic, offsets: Mapping[int, int]) -> AbstractAsyncContextManager[TopicConsumer]:
        """Read a topic from the offset of each partition, or from the first message that Kafka still has."""
