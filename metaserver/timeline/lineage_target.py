"""Sending of OpenLineage events of jobs to the URL of `openlineage_url`, by HTTP POST, one event in each request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.errors import RetryLater, SeamarkError
from seamark.metaserver.settings.settings import redact_url
from seamark.metaserver.store.model import EntryKind, Instant
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.delivery import SEND_TIMEOUT_S, NotDelivered
from seamark.metaserver.timeline.events import Event
from seamark.metaserver.timeline.lineage import CatalogName, list_run_events, remove_columns

LoadMetadata = Callable[[str], Awaitable[TableMetadata]]
BODY_BYTES_MAX = 4 << 20
"""The maximum size in bytes of a body with the columns of the table. A larger event is sent without them."""
_REFUSAL_STATUSES = (400, 413, 422)
"""The statuses with which a receiver refuses an event as invalid or too large. The event is not sent again."""
_TOO_LARGE_STATUS = 413
_URL_DIGEST_DIGITS = 32
_log = structlog.get_logger("seamark.lineage")


class LineageTarget:
    """An `EventTarget` for an OpenLineage endpoint, such as that of Marquez."""

    kind = "openlineage"
    events_max = 1

    def __init__(
        self,
        url: str,
        api_key: str,
        catalog: CatalogName,
        store: PointerStore,
        load_metadata: LoadMetadata,
        session: aiohttp.ClientSession,
    ) -> None:
        """Create a target.

        Args:
            url: The URL to which run events are posted.
            api_key: The bearer token of the requests, or an empty text for none.
            catalog: The name of the catalog in events.
            store: The database of the catalog.
            load_metadata: Reads the metadata of a table.
            session: Sends the requests.
        """
        self._url = url
        self._headers = {"Content-Type": "application/json", "User-Agent": "seamark"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._catalog = catalog
        self._store = store
        self._load_metadata = load_metadata
        self._session = session
        self.place = redact_url(url)  # The address for logs, without secrets.
        # The URL may contain a secret, so it must not be in the database.
        self.name = "openlineage:" + hashlib.sha256(url.encode()).hexdigest()[:_URL_DIGEST_DIGITS]

    async def send(self, events: Sequence[Event]) -> None:
        """Post OpenLineage run events for recorded actions (instants). Instants that are not about jobs are skipped.

        An event that the receiver refuses as invalid is skipped. An event that is too large is sent without columns.

        Raises:
            NotDelivered: The receiver does not answer, or answers with an error that is possibly temporary.
        """
        for event in events:
            if not list_run_events(event.instant, None, self._catalog):
                continue
            metadata = await self._find_metadata(event.instant)
            for run_event in list_run_events(event.instant, metadata, self._catalog):
                await self.send_run_event(run_event)

    async def send_run_event(self, run_event: dict[str, Any]) -> None:
        """Post a run event. If it exceeds a limit of this server or of the receiver, send it without columns.

        Raises:
            NotDelivered: The receiver does not answer, or answers with an error that is possibly temporary.
        """
        # An event can have many columns, so do not encode it in the event loop.
        body, run_id = await asyncio.to_thread(encode_json, run_event), run_event["run"]["runId"]
        if len(body) > BODY_BYTES_MAX or await self._post(body, run_id) == _TOO_LARGE_STATUS:
            await self._post(encode_json(remove_columns(run_event)), run_id)

    async def _find_metadata(self, instant: Instant) -> TableMetadata | None:
        """Return the metadata of an instant's table, or None if the table or its metadata file is gone or damaged.

        If the instant names no metadata file, the current file of the table is read.

        Raises:
            NotDelivered: The storage or the database does not answer. The event is sent later, because without metadata
                it would name a different dataset: the table's name instead of its location.
        """
        try:
            location = instant.metadata_location
            if location is None:
                entry = await self._store.load_entry(EntryKind.TABLE, instant.namespace, instant.name)
                if entry is None or entry.uuid != instant.uuid:
                    return None
                location = entry.metadata_location
            return await self._load_metadata(location)
        except RetryLater as error:
            raise NotDelivered(f"the metadata cannot be read: {error.message}") from None
        except SeamarkError as error:
            _log.warning("a lineage event has no schema", instant=instant.id, error=error.message)
            return None

    async def _post(self, body: bytes, run_id: str) -> int:
        """Post an event. Return the status, which is a success or a refusal.

        Raises:
            NotDelivered: The receiver does not answer, or answers with another status.
        """
        try:
            # Do not follow redirects, which would send the key to a host that is not configured.
            async with self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as answer:
                if answer.status in _REFUSAL_STATUSES:
                    _log.error("a lineage event was refused", instant=run_id, status=answer.status, bytes=len(body))
                elif not 200 <= answer.status < 300:
                    raise NotDelivered(f"status {answer.status}")
                return answer.status
        except TimeoutError:
            raise NotDelivered(f"no answer within {SEND_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotDelivered(type(error).__name__) from None

    async def close(self) -> None:
        """Do nothing, because the session belongs to all targets."""
