"""A source of one input topic in memory, and encoders for test messages."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import fastavro
import pyarrow as pa

from seamark.metaserver.log.kafka.topics import InputTopic, TopicMessage

AVRO_SCHEMA = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"], "default": None}],
}


def encode_json(*rows: Mapping[str, Any]) -> bytes:
    return json.dumps(rows[0] if len(rows) == 1 else rows).encode()


def encode_arrow(*rows: Mapping[str, Any]) -> bytes:
    table, sink = pa.Table.from_pylist([dict(row) for row in rows]), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def encode_avro(*rows: Mapping[str, Any], schema: Mapping[str, Any] = AVRO_SCHEMA, codec: str = "deflate") -> bytes:
    sink = io.BytesIO()
    fastavro.writer(sink, fastavro.parse_schema(dict(schema)), rows, codec=codec)
    return sink.getvalue()


ENCODERS = (encode_json, encode_arrow, encode_avro)


class MemoryConsumer:
    """A `TopicConsumer` that reads a topic in memory."""

    def __init__(self, messages: Mapping[int, Sequence[TopicMessage]], offsets: Mapping[int, int]) -> None:
        self._messages = messages
        self._offsets = dict(offsets)

    async def read(self) -> Sequence[TopicMessage]:
        await asyncio.sleep(0)
        messages: list[TopicMessage] = []
        for partition, offset in self._offsets.items():
            # A read returns at most five messages of a partition.
            later_messages = [message for message in self._messages[partition] if message.offset >= offset][:5]
            if later_messages:
                self._offsets[partition] = later_messages[-1].offset + 1
            messages += later_messages
        return messages


class MemoryTopic:
    """A `TopicSource` with one input topic whose messages are in memory."""

    def __init__(self, partitions: int = 1) -> None:
        self.topic = InputTopic("seamark.in.t", "topic-1", partitions)
        self.messages: dict[int, list[TopicMessage]] = {number: [] for number in range(partitions)}
        self.openings = 0

    def send(self, value: bytes | None, *, partition: int = 0, headers: Mapping[str, bytes] | None = None) -> None:
        """Add a message. Every second offset is missing, as after transactions in Kafka."""
        messages = self.messages[partition]
        messages.append(TopicMessage(partition, 2 * len(messages), value, headers or {}))

    def make_topic_name(self, uuid: str) -> str:
        return self.topic.name

    async def list_topics(self) -> dict[str, InputTopic]:
        return {"t": self.topic}

    @asynccontextmanager
    async def open(self, topic: InputTopic, offsets: Mapping[int, int]) -> AsyncIterator[MemoryConsumer]:
        end_offsets = {number: messages[-1].offset + 1 if messages else 0 for number, messages in self.messages.items()}
        self.openings += 1
        yield MemoryConsumer(
            self.messages, {number: min(offset, end_offsets[number]) for number, offset in offsets.items()}
        )
