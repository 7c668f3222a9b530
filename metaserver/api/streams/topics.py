"""The route that names the input topic of a stream table."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.formats.protocol.wire import show
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.streams.stream_properties import check_stream_table


class StreamTopic(msgspec.Struct, frozen=True):
    topic: Annotated[
        str,
        doc(
            "The name of the input topic in the Kafka cluster of the log. If the topic exists, the table gets the rows "
            "of its messages."
        ),
    ]


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/stream/topic",
    "loadStreamTopic",
    "Return the name of the topic to which Kafka producers write rows of a stream table themselves",
    tags=("streams",),
    answers=(
        ResponseSpec(200, "The name of the topic, which need not exist", StreamTopic),
        ResponseSpec(400, "The table is no stream table, or the log is not in Kafka"),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_stream_topic(call: Call) -> StreamTopic:
    loaded = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded.entry is not None
    check_stream_table(loaded.metadata, show(call.namespace, call.name))
    topic = call.components.streams.find_input_topic(loaded.entry.uuid)
    if topic is None:
        raise BadRequest(
            "The log of this server is in files, so tables have no topics; keep it in Kafka (stream_log), or append "
            "rows over HTTP"
        )
    return StreamTopic(topic)
