"""Sending of events to a stream of NATS JetStream, by nats-py.

The format is CloudEvents 1.0, structured content mode (cloudevents/spec, nats-protocol-binding 3.2). The subject of an
event is `<subject>.<kind>.<action>`, such as `seamark.table.commit`. The id of a message is the id of its event, so the
stream drops an event that it receives again within its duplicate window.

Events are sent one at a time, because a later event must not be in the stream before an earlier event.
"""

from __future__ import annotations

from collections.abc import Sequence

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client

from seamark.metaserver.timeline.addresses import EventSubject
from seamark.metaserver.timeline.delivery import SEND_TIMEOUT_S, NotDelivered
from seamark.metaserver.timeline.events import CONTENT_TYPE, Event

_CONNECT_TIMEOUT_S = 5
_log = structlog.get_logger("seamark.events")


class NatsTarget:
    """An `EventTarget` for NATS. Each failure closes the connection, and the next call connects again."""

    kind = "nats"
    events_max = 1

    def __init__(self, address: EventSubject) -> None:
        self._address = address
        self._client: Client | None = None
        self.place = address.shown
        self.name = f"events:nats:{address.subject}"

    async def send(self, events: Sequence[Event]) -> None:
        """Publish events, each after the stream has confirmed the previous event.

        Raises:
            NotDelivered: No stream has confirmed an event.
        """
        try:
            client = self._client or await self._connect()
            stream = client.jetstream(timeout=SEND_TIMEOUT_S)
            for event in events:
                headers = {"Content-Type": CONTENT_TYPE, "Nats-Msg-Id": event.message_id}
                subject = f"{self._address.subject}.{event.instant.kind.value}.{event.instant.action}"
                await stream.publish(subject, event.body, headers=headers)
        except nats.js.errors.NoStreamResponseError:
            await self._disconnect()
            raise NotDelivered(f"no stream of JetStream has the subject {self._address.subject}.>") from None
        except (nats.errors.Error, TimeoutError, OSError) as error:
            await self._disconnect()
            raise NotDelivered(str(error) or type(error).__name__) from error
        except (KeyError, TypeError, ValueError) as error:
            # A subscriber without a stream has answered.
            await self._disconnect()
            raise NotDelivered(f"the answer is not from JetStream: {error!r}") from error

    async def _connect(self) -> Client:
        client = Client()
        await client.connect(
            servers=list(self._address.servers),
            allow_reconnect=False,
            connect_timeout=_CONNECT_TIMEOUT_S,
            error_cb=_log_error,
            name="seamark",
        )
        self._client = client
        return client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._disconnect()


async def _log_error(error: Exception) -> None:
    _log.info("nats", message=str(error) or type(error).__name__)
