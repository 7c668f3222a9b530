"""How fast does a server append the rows of an input topic to its log in Kafka?

A Kafka producer writes messages with one row or with many rows, as JSON, Arrow or Avro. The server looks for topics
every few seconds, so the producer has usually ended when it finds the topic.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.report import OURS, Report, Row
from bench.streams.ducklake import COLUMNS
from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.streams.status import load_stream, load_stream_topic
from tests.services.kafka import Kafka, run_kafka_broker
from tests.services.seamark import Seamark

MESSAGES, QUICK_MESSAGES = 20_000, 200
ROWS = (1, 100)
"""The number of rows in a message."""
_AVRO_SCHEMA = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "name", "type": "string"},
            {"name": "value", "type": "double"},
        ],
    }
)
_ARROW_SCHEMA = pa.schema({"id": pa.int64(), "name": pa.string(), "value": pa.float64()})
_POLL_S = 0.05
"""The time in seconds between two checks of the stream's end."""
Rows = Sequence[Mapping[str, Any]]


def _encode_json(rows: Rows) -> bytes:
    return json.dumps(rows if len(rows) > 1 else rows[0]).encode()


def _encode_arrow(rows: Rows) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, _ARROW_SCHEMA) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=_ARROW_SCHEMA))
    return sink.getvalue()


def _encode_avro(rows: Rows) -> bytes:
    sink = io.BytesIO()
    fastavro.writer(sink, _AVRO_SCHEMA, rows)
    return sink.getvalue()


ENCODERS: dict[str, Callable[[Rows], bytes]] = {"JSON": _encode_json, "Arrow": _encode_arrow, "Avro": _encode_avro}


async def run(folder: Path, *, quick: bool = False) -> Report:
    messages = QUICK_MESSAGES if quick else MESSAGES
    report = Report("streams_topics", "How fast does a server take rows from its input topic?", peer="none")
    with run_kafka_broker(folder / "broker") as kafka:
        settings = {"SEAMARK_STREAM_LOG": f"kafka://{kafka.address}/{kafka.create_prefix()}"}
        with Seamark(folder / "home", env=settings) as server:
            client = SeamarkClient(server.base_url)
            create_namespace(client, "bench", {})
            for kind, encode in ENCODERS.items():
                for rows in ROWS:
                    count = messages if rows == 1 else messages // 10
                    name = f"{kind}_{rows}".lower()
                    rate = await asyncio.to_thread(_measure_topic, kafka, client, name, encode, count, rows)
                    case = f"{count:,} messages of {rows} rows, {kind}"
                    report.rows.append(Row(case, "appended", "rows/s", {OURS: round(rate)}, False))
    report.notes.append(
        "One broker, one server and one partition, on the same two cores. The time of the rate "
        "begins when the first rows are in the table. These rows are not counted."
    )
    return report


def _measure_topic(
    kafka: Kafka, client: SeamarkClient, name: str, encode: Callable[[Rows], bytes], messages: int, rows: int
) -> float:
    """Send messages to the topic, and return the rows per second that the server appends to the table."""
    schema = {"type": "struct", "fields": COLUMNS}
    create_table(client, ("bench", name), schema, properties={"seamark.stream.enabled": "true"})
    topic = load_stream_topic(client, ("bench", name))
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 5})
    for number in range(messages):
        first = number * rows
        values = [{"id": first + place, "name": f"name {first + place}", "value": 0.5} for place in range(rows)]
        producer.produce(topic, encode(values), partition=0)
        if not number % 1_000:
            producer.poll(0)
    producer.flush(60)
    return _measure_rows_per_s(client, name, messages * rows)


def _measure_rows_per_s(client: SeamarkClient, name: str, rows: int) -> float:
    """Wait until the stream of a table has `rows` rows, and return the rows per second."""
    first: tuple[float, int] | None = None
    while True:
        time.sleep(_POLL_S)
        try:
            durable = sum(shard["durable"] for shard in load_stream(client, ("bench", name))["shards"])
        except InvalidRequest:  # The server has not found the topic yet.
            continue
        now_s = time.perf_counter()
        if durable >= rows:
            begun_s, count = first or (now_s - _POLL_S, 0)
            return (durable - count) / (now_s - begun_s)
        first = first or (now_s, durable)
