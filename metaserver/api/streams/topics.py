"""Serves the name of the input topic of a stream table."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.streams.stream_properties import check_stream_table


class StreamTopic(msgspec.Struct, frozen=True):
    """The input topic of a stream table."""

    topic: Annotated[
        str,
        doc(
            "The name of the input topic in the Kafka cluster of the log. If the topic exists, the rows of its "
            "messages are appended to the table."
        ),
    ]


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/stream/topic",
    "loadStreamTopic",
    "Return the name of the Kafka topic to which producers write rows of a stream table directly",
    tags=("streams",),
    answers=(
        ResponseSpec(200, "The name of the topic, which may not exist", StreamTopic),
        ResponseSpec(400, "The table is not a stream table, or the log is not in Kafka"),
        ResponseSpec(404, "The table does not exist"),
    ),
)
async def load_stream_topic(call: Call) -> StreamTopic:
    """Return the name of the input topic of a stream table."""
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    check_stream_table(loaded_table.metadata, format_path(call.namespace, call.name))
    topic = call.components.streams.find_input_topic(loaded_table.entry.uuid)
    if topic is None:
        raise BadRequest(
            "The log of this server is in files, so tables have no topics; keep the log in Kafka (setting "
            "stream_log), or append rows over HTTP"
        )
    return StreamTopic(topic)
