"""Reads the data files of chosen tables into the pinned part of the cache as soon as a commit adds them.

The policy is the property `seamark.cache.preload` of a table or of its namespaces, with the value `footers` or `files`.
The property `seamark.cache.preload-filter`, an Iceberg expression in JSON, selects files, such as those of some
partitions. As for a client with the table's keys, only objects below a location that the table owns are read. A table
uses at most its share of the pinned part. Clients have priority: while their reads use much of the budget, nothing is
preloaded.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import NamedTuple

import structlog

from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, SeamarkError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.access.gateway_keys import ObjectGrant
from seamark.metaserver.catalog.documents import Documents
from seamark.metaserver.gateway.caching.caching import CachingBackend
from seamark.metaserver.gateway.caching.fetches import split_bucket_and_key
from seamark.metaserver.gateway.caching.written_once import find_written_once_kind
from seamark.metaserver.gateway.ownership import GrantChecker
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.s3_scope import Address, check_request
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.services.watch import TableWatch
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import Timeline

POLICY = "seamark.cache.preload"
FILTER = "seamark.cache.preload-filter"
_KINDS = ("footers", "files")
_FOOTER_BYTES = 64 << 10
"""The number of bytes to read at the end of a file. The cache stores the blocks that contain them."""
_TABLES_MAX = 1000
"""The maximum number of waiting tables, and the maximum number of tables whose preloaded files are remembered."""
_FILES_MAX = 10_000
_FILTER_CHARACTERS_MAX = 16_384
_PAUSE_S = 0.05
_log = structlog.get_logger("seamark.gateway")


class _Policy(NamedTuple):
    """The policy of a table.

    Attributes:
        kind: The part of each file to read: `footers` or `files`.
        filter_text: The filter that selects the files, as JSON, or an empty text for all files.
    """

    kind: str
    filter_text: str


class Preloading:
    """Preloads the files of tables. An instance belongs to one event loop.

    `budget_bytes` is the maximum number of preloaded bytes of one table.
    """

    def __init__(
        self,
        store: PointerStore,
        documents: Documents,
        planner: Planner,
        ownership: GrantChecker,
        backend: CachingBackend,
        clock: Clock,
        *,
        budget_bytes: int,
    ) -> None:
        self._store = store
        self._documents = documents
        self._planner = planner
        self._ownership = ownership
        self._backend = backend
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._waiting: OrderedDict[str, tuple[Entry, _Policy]] = OrderedDict()
        """The entry and the policy of each waiting table. Metadata are not kept, because they can be large."""
        self._has_waiting_tables = asyncio.Event()
        self._preloaded: OrderedDict[str, tuple[_Policy, dict[str, int]]] = OrderedDict()
        """The policy of each table, and the number of bytes that were read of each of its files."""

    async def follow(self, timeline: Timeline) -> None:
        """Follow the timeline until the task is cancelled, and queue each changed table that has a policy."""
        watch = TableWatch(self._store, timeline, self._documents.table, self._clock)
        await watch.follow(self._queue_table, await timeline.load_head())

    def _queue_table(self, entry: Entry, metadata: TableMetadata) -> float:
        """Queue the table if it has a policy for preloading.

        If more than `_TABLES_MAX` tables wait, the least recently queued table is dropped.

        Returns:
            The seconds until the table is examined again without a change: infinity, because only a change matters.
        """
        kind = metadata.properties.get(POLICY, "").lower()
        if kind in _KINDS:
            # A filter above the limit keeps one character too many, so that `_parse_filter` refuses it.
            filter_text = metadata.properties.get(FILTER, "")[: _FILTER_CHARACTERS_MAX + 1]
            self._waiting[entry.uuid] = (entry, _Policy(kind, filter_text))
            self._waiting.move_to_end(entry.uuid)
            while len(self._waiting) > _TABLES_MAX:
                self._waiting.popitem(last=False)
            self._has_waiting_tables.set()
        return float("inf")

    async def work(self) -> None:
        """Preload the queued tables, one table after another, until the task is cancelled."""
        while True:
            await self._has_waiting_tables.wait()
            self._has_waiting_tables.clear()
            while self._waiting:
                _, (entry, policy) = self._waiting.popitem(last=False)
                try:
                    await self._preload(entry, policy)
                except (SeamarkError, S3Error) as error:
                    _log.warning("table not preloaded", namespace=entry.namespace, table=entry.name, reason=str(error))

    async def _preload(self, entry: Entry, policy: _Policy) -> None:
        """Preload the files of one table. Files that were read for the same policy are not read again.

        At most `_FILES_MAX` files of the plan are considered. Preloading ends when the read bytes reach the budget of
        the table.

        Raises:
            SeamarkError, S3Error: The files cannot be planned or read.
        """
        kind, filter_text = policy
        metadata = await self._documents.peek(entry.metadata_location)
        holder = f"table {entry.uuid}"
        end_of_time = 1 << 60  # A preload has no keys that could expire.
        grant = ObjectGrant(
            table_uuid=entry.uuid,
            location=metadata.location,
            writable=False,
            principal_name=holder,
            expires_ms=end_of_time,
            pinned=True,
        )
        await self._ownership.check(grant)
        # Do not count the plan as a use of indexes.
        scan = await self._planner.bind_and_plan(metadata, ScanRequest(filter=_parse_filter(filter_text)))
        located_rows = [scan.view.locate(entry_id) for entry_id in scan.entry_ids[:_FILES_MAX].tolist()]
        paths = {block.read_text("file_path", local) or "": None for block, local in located_rows}
        old_policy, known_sizes = self._preloaded.pop(entry.uuid, (policy, {}))
        known_sizes = (
            {path: size for path, size in known_sizes.items() if path in paths} if old_policy == policy else {}
        )
        self._preloaded[entry.uuid] = policy, known_sizes
        while len(self._preloaded) > _TABLES_MAX:
            self._preloaded.popitem(last=False)
        table, used_bytes = parse_location(metadata.location), sum(known_sizes.values())
        for path in paths:
            if path in known_sizes:
                continue
            if used_bytes >= self._budget_bytes:
                _log.warning("the files of a table exceed its share of the cache", table=entry.name, bytes=used_bytes)
                return
            bucket, key = split_bucket_and_key(path)
            if find_written_once_kind(key) is None:
                continue
            check_request("GET", Address(bucket, key, {}), {}, None, table)
            while self._backend.is_busy:  # noqa: ASYNC110  the budget has no event
                await asyncio.sleep(_PAUSE_S)
            known_sizes[path] = await self._backend.preload(path, _FOOTER_BYTES if kind == "footers" else None, holder)
            used_bytes += known_sizes[path]


def _parse_filter(text: str) -> Expression:
    """Parse the filter of the policy. An empty text selects all files.

    Raises:
        BadRequest: The filter is too long, or is not an Iceberg expression in JSON.
    """
    if not text:
        return TRUE
    try:
        if len(text) > _FILTER_CHARACTERS_MAX:
            raise ValueError(f"the filter has more than {_FILTER_CHARACTERS_MAX:,} characters")
        return parse_expression(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{FILTER} is not an Iceberg expression in JSON: {error}") from None
