"""CloudEvents of instants (version 1.0, structured mode, JSON), as all targets receive them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.decoding import convert_attributes
from seamark.metaserver.store.model import EntryKind, Instant, InstantState

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"


@dataclass(frozen=True)
class Event:
    """An event in the form in which targets send it.

    Attributes:
        instant: The instant that the event describes.
        body: The CloudEvent in JSON.
        warehouse_id: The id of a further warehouse, or an empty text for the server's own warehouse.
    """

    instant: Instant
    body: bytes
    warehouse_id: str = ""

    @property
    def id(self) -> str:
        """The position of the instant, which is unique."""
        assert self.instant.position is not None
        return self.instant.position

    @property
    def message_id(self) -> str:
        """The text that is unique in all warehouses of a server, unlike a position."""
        return f"{self.warehouse_id}-{self.id}" if self.warehouse_id else self.id

    @property
    def key(self) -> str:
        """The text that is the same for all events of a table, view or function, even after a rename: its UUID.

        Namespaces have no UUID. Their key is the name.
        """
        return self.instant.uuid or "/".join(part for part in (*self.instant.namespace, self.instant.name) if part)


def make_event(instant: Instant, source: str, warehouse_id: str = "") -> Event:
    """Return the event of an instant. `source` names the catalog. `warehouse_id` is empty for the own warehouse."""
    return Event(instant, encode_json(build_cloud_event(instant, source)), warehouse_id)


def build_cloud_event(instant: Instant, source: str) -> dict[str, Any]:
    """Return the CloudEvent for an instant in its current state.

    An instant is the record of one action on the timeline, such as a commit. `source` identifies the catalog.
    """
    at_ms = instant.requested_ms if instant.completed_ms is None else instant.completed_ms
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": instant.position,
        "source": source,
        "type": f"io.seamark.{instant.kind.value}.{instant.action}.{instant.state.value}",
        "time": datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": convert_attributes(instant, InstantAnswer),
    }
    subject = "/".join(part for part in (*instant.namespace, instant.name) if part)
    return {**event, "subject": subject} if subject else event


class InstantAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """An instant in the form of answers and events. It has no fingerprint, which is internal."""

    id: Annotated[str, msgspec.Meta(extra_json_schema={"format": "uuid"})]
    position: Annotated[
        str, msgspec.Meta(description="Opaque position of the instant. Send it as `since` to continue from here.")
    ]
    action: Annotated[str, msgspec.Meta(examples=["create", "commit", "drop", "undrop", "purge", "rename"])]
    state: InstantState
    kind: EntryKind
    namespace: list[str]
    name: str
    uuid: str
    requested_ms: int
    completed_ms: int | None
    principal_name: str = msgspec.field(name="who")
    snapshot_id: int | None
    metadata_location: str | None
    summary: dict[str, Any]
