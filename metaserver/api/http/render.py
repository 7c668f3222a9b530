"""Answers with table or view metadata: assembled from cached bytes, identified by ETags, and compressed once.

The metadata of a table with 10,000 snapshots are 8 MB of JSON. They are not encoded for each answer: the document of
their immutable location is cached, and the small remainder is appended. The ETag covers all values on which the answer
depends (location, snapshot mode, settings of storage and planning), so equal tags mean equal answers. The tag is weak,
because the answer may be gzipped. The tag is computed before metadata are read, so a 304 needs only a lookup of the
pointer.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast

from aiohttp import web

from seamark.cache.single_flight import SingleFlight
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.table_json import encode_refs_view, encode_table
from seamark.formats.protocol.wire import AFTER_HEADER, FRESH_HEADER, encode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.parameters.plan_audience import HEADER
from seamark.metaserver.api.http.parameters.requests import make_table_path
from seamark.metaserver.catalog.documents import SnapshotMode
from seamark.metaserver.catalog.plans.plan_tables import LoadedPlan
from seamark.metaserver.catalog.values import LoadedTable, LoadedView
from seamark.metaserver.objects.credentials import VendedKeys
from seamark.metaserver.objects.storages import SERVER_STORAGES, compute_access_stamp, compute_keys_stamp
from seamark.metaserver.objects.vending import SIGNING
from seamark.metaserver.planner.plan.plan_writer import TESTS_NAN
from seamark.metaserver.planner.scan.request import has_ambiguous_names
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import TABLE, NamespacePath, PlanSnapshot
from seamark.metaserver.streams.fresh_snapshots import log_current_snapshot

GZIPS: web.AppKey[SingleFlight[str, bytes]] = web.AppKey("gzips")
"""The single flight that lets concurrent readers of a new snapshot share one compression."""
DELEGATION = "X-Iceberg-Access-Delegation"
GZIP_FROM_BYTES = 16_384
"""The minimum size in bytes of an answer that is compressed.

A smaller answer fits into a few packets, so compression takes more time than it saves.
"""
PLANNING_MODE = "scan-planning-mode"
"""The key of the planning mode.

Iceberg Java reads it in a table's `config`, and PyIceberg reads it in `/v1/config`.
"""
PLANNING_PROPERTY = "seamark.scan-planning-mode"
CACHE_PINNED = "seamark.cache.pinned"
"""The property of a table whose objects the objects gateway pins in its cache."""
_PLANNERS = ("server", "client")
_MODES = ("all", "refs")
_REVISION = "2"
"""The revision of the code that renders a metadata file. It is part of the ETag.

Clients must not reuse answers of older revisions, which may contain properties that are now left out.
"""
_VARY = f"Accept-Encoding, {DELEGATION}, {HEADER}, {FRESH_HEADER}, {AFTER_HEADER}"
_SNAPSHOTS = b'"snapshots":['
"""The text before the snapshots in a metadata document.

Quotes in strings are escaped, so only the field name matches.
"""


def read_snapshot_mode(call: Call) -> SnapshotMode:
    """Return the value of the query parameter `snapshots`.

    Raises:
        BadRequest: The value is not a snapshot mode.
    """
    mode = call.query.get("snapshots", "all")
    if mode not in _MODES:
        raise BadRequest(f"snapshots is {mode[:40]!r}; it must be all or refs")
    return cast(SnapshotMode, mode)


async def compute_table_etag(
    call: Call,
    metadata_location: str,
    namespace: NamespacePath,
    name: str,
    mode: SnapshotMode,
    plan_snapshots: Sequence[PlanSnapshot] = (),
    *,
    of_name: str | None = None,
) -> str:
    """Return the ETag of the answer that `make_table_answer` would return.

    Args:
        call: The request.
        metadata_location: The location of the metadata file.
        namespace: The namespace of the table.
        name: The name of the table.
        mode: The snapshots that the answer contains.
        plan_snapshots: The plan snapshots that are added to the answer.
        of_name: For a plan table, the name of the planned table, whose rights apply.
    """
    settings = call.components.settings
    path = make_table_path(namespace, name, settings.prefix)
    access = compute_access_stamp(settings, call.headers.get(DELEGATION))
    stamp = await _compute_grant_stamp(call, Securable(namespace, TABLE, of_name or name))
    config = (settings.scan_planning_mode, *access, *stamp)
    ids = ",".join(str(plan.id) for plan in plan_snapshots)
    compute_etag = _compute_plan_etag if plan_snapshots else _make_etag
    return compute_etag(_REVISION, metadata_location, mode, path, *config, ids)


@lru_cache(maxsize=8192)
def _make_etag(*parts: str | bool) -> str:
    """Return a weak ETag of an answer that depends on these values."""
    return f'W/"{hashlib.sha256(encode_json(parts)).hexdigest()[:32]}"'


def _compute_plan_etag(*parts: str | bool) -> str:
    """Compute an ETag without the cache of `_make_etag`, because each statement has different plans."""
    return _make_etag.__wrapped__(*parts)


def answer_not_modified(call: Call, etag: str) -> web.Response | None:
    """Return a 304 if the client already has the current answer (If-None-Match, RFC 9110, 13.1.2), otherwise None."""
    header = call.headers.get("If-None-Match")
    if header is None:
        return None
    # If-None-Match compares tags weakly, so the mark W/ is ignored.
    client_tags = {tag.strip().removeprefix("W/") for tag in header.split(",")}
    if "*" in client_tags or etag.removeprefix("W/") in client_tags:
        return web.Response(status=304, headers={"ETag": etag, "Vary": _VARY})
    return None


async def make_table_answer(
    call: Call,
    loaded_table: LoadedTable,
    namespace: NamespacePath,
    name: str,
    mode: SnapshotMode = "all",
    *,
    compress: bool = True,
    plan_snapshots: Sequence[PlanSnapshot] = (),
) -> web.Response:
    """Return a LoadTableResult of a table.

    A staged table is not committed yet. Its answer has no metadata location and no ETag.

    `compress` is False for answers that are requested only once. `plan_snapshots` are snapshots that consist of the
    files of a plan, and are added to the snapshots of the table.
    """
    is_staged = loaded_table.entry is None
    snapshots = loaded_table.metadata.snapshots_by_id
    plan_snapshots = [plan for plan in plan_snapshots if plan.id not in snapshots]
    etag = ""
    if loaded_table.entry is not None:
        # Compute the tag before the storage credentials, so that these are never older than the tag.
        etag = await compute_table_etag(
            call, loaded_table.entry.metadata_location, namespace, name, mode, plan_snapshots
        )
    uuid = loaded_table.metadata.table_uuid or "" if loaded_table.entry is None else loaded_table.entry.uuid
    config, credentials = await build_access_config(
        call, uuid, loaded_table.metadata, namespace, name, staged=is_staged
    )
    if loaded_table.entry is not None:
        config = {**config, PLANNING_MODE: choose_planning_mode(call.components.settings, loaded_table.metadata)}
    tail = _encode_tail(config, credentials)
    if loaded_table.entry is None:
        return _make_json_response(b'{"metadata":' + encode_table(loaded_table.metadata) + tail + b"}", {})
    location = loaded_table.entry.metadata_location
    return await _answer_with_location(
        call, location, loaded_table.metadata, mode, tail, etag, compress=compress, plan_snapshots=plan_snapshots
    )


async def answer_fresh_read(
    call: Call,
    loaded_table: LoadedTable,
    namespace: NamespacePath,
    name: str,
    mode: SnapshotMode,
    *,
    plan_snapshots: Sequence[PlanSnapshot] = (),
) -> web.Response:
    """Return a LoadTableResult whose current snapshot is fresh: it also has stream rows that no commit has added yet.

    `plan_snapshots` are snapshots that consist of the files of a scan plan. They are added to the table's snapshots.
    The answer is not cached, because the next answer probably has a different snapshot.
    """
    entry, metadata = loaded_table.entry, loaded_table.metadata
    assert entry is not None
    config, credentials = await build_access_config(call, entry.uuid, metadata, namespace, name)
    tail = _encode_tail(
        {**config, PLANNING_MODE: choose_planning_mode(call.components.settings, metadata)}, credentials
    )
    metadata = log_current_snapshot(metadata)
    document = encode_refs_view(metadata) if mode == "refs" else encode_table(metadata)
    plan_snapshots = [plan for plan in plan_snapshots if plan.id not in metadata.snapshots_by_id]
    if plan_snapshots:
        document = _add_snapshots(document, plan_snapshots)
    head = b'{"metadata-location":' + encode_json(entry.metadata_location) + b',"metadata":'
    return _make_json_response(b"".join((head, document, tail, b"}")), {"Vary": _VARY, "Cache-Control": "no-store"})


async def make_plan_answer(call: Call, loaded_plan: LoadedPlan, mode: SnapshotMode) -> web.Response:
    """Return a LoadTableResult of a plan table.

    The plan table has the storage of the planned table, and the client plans its scans.

    If the filter of the plan tests for NaN and the server plans the table, the server also plans the plan table.
    Otherwise, Iceberg's Java library would leave out the files and row groups in which only NaN matches.
    """
    plan, table = loaded_plan.plan, loaded_plan.table
    assert plan.name is not None
    assert table.entry is not None
    etag = await compute_table_etag(call, plan.location, plan.namespace, plan.name, mode, of_name=plan.of_name)
    config, credentials = await build_access_config(
        call, table.entry.uuid, table.metadata, plan.namespace, plan.of_name
    )
    tests_nan = TESTS_NAN in loaded_plan.metadata.properties
    planned_by = choose_planning_mode(call.components.settings, table.metadata) if tests_nan else "client"
    tail = _encode_tail({**config, PLANNING_MODE: planned_by}, credentials)
    return await _answer_with_location(call, plan.location, loaded_plan.metadata, mode, tail, etag)


def _encode_tail(config: dict[str, str], credentials: list[dict[str, object]]) -> bytes:
    """Return the JSON of an answer after the metadata: the config and the credentials."""
    tail = b',"config":' + encode_json(config)
    return tail + b',"storage-credentials":' + encode_json(credentials) if credentials else tail


async def _answer_with_location(
    call: Call,
    location: str,
    metadata: TableMetadata,
    mode: SnapshotMode,
    tail: bytes,
    etag: str,
    *,
    compress: bool = True,
    plan_snapshots: Sequence[PlanSnapshot] = (),
) -> web.Response:
    """Return a LoadTableResult, assembled from the cached document and the encoded remainder.

    Args:
        call: The request.
        location: The location of the metadata file.
        metadata: The metadata.
        mode: The snapshots that the answer contains.
        tail: The JSON after the metadata, with the config and the credentials.
        etag: The ETag of the answer.
        compress: Whether a large answer is compressed if the client accepts gzip.
        plan_snapshots: The plan snapshots that are added to the answer.
    """
    document = call.components.catalog.documents.render(location, metadata, mode)
    if plan_snapshots:
        document = _add_snapshots(document, plan_snapshots)
    headers = {"ETag": etag, "Vary": _VARY}
    head = b'{"metadata-location":' + encode_json(location) + b',"metadata":'
    if compress and len(document) >= GZIP_FROM_BYTES and accepts_gzip(call.headers):
        body = await _compress_answer(call, etag, (head, document, tail, b"}"))
        return _make_json_response(body, {**headers, "Content-Encoding": "gzip"})
    return _make_json_response(b"".join((head, document, tail, b"}")), headers)


def _add_snapshots(document: bytes, plan_snapshots: Sequence[PlanSnapshot]) -> bytes:
    """Return the JSON document with plan snapshots before its first snapshot.

    The bytes are changed without parsing them. A document without a list of snapshots is returned unchanged.
    """
    head, separator, tail = document.partition(_SNAPSHOTS)
    if not separator:
        return document
    plan_json = ",".join(plan.snapshot for plan in plan_snapshots).encode()
    return b"".join((head, separator, plan_json, b"" if tail.startswith(b"]") else b",", tail))


def choose_planning_mode(settings: Settings, metadata: TableMetadata) -> str:
    """Return which side plans scans of the table: `server` or `client`.

    The first of these rules that applies decides:

    1. The property of the table names the side.
    2. The client plans tables whose columns have swapped names since the newest snapshot, until the next snapshot,
       because the filter of a client does not say which of the two columns a name means.
    3. The setting of the server names the side.
    4. The client plans tables of format version 3. A scan task has no field for sequence numbers and row ids, and an
       update that copies rows without them would assign a new id to each row (apache/iceberg#17319).
    5. The server plans all other tables.
    """
    mode = metadata.properties.get(PLANNING_PROPERTY, "").lower()
    if mode in _PLANNERS:
        return mode
    if has_ambiguous_names(metadata):
        return "client"
    if settings.scan_planning_mode in _PLANNERS:
        return settings.scan_planning_mode
    return "client" if metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION else "server"


async def make_commit_answer(
    call: Call, loaded_table: LoadedTable, namespace: NamespacePath, name: str
) -> web.Response:
    """Return a CommitTableResponse with the ETag of a load after the commit.

    The REST specification requires that it has no `config`. The answer is not compressed, because the answers of two
    commits differ, so the compressed bytes could not be reused.
    """
    assert loaded_table.entry is not None
    location = loaded_table.entry.metadata_location
    etag = await compute_table_etag(call, location, namespace, name, "all")
    return _make_json_response(_render_with_location(call, loaded_table), {"ETag": etag, "Vary": _VARY})


def answer_unregistered(call: Call, loaded_table: LoadedTable) -> web.Response:
    """Return the answer with the metadata of a table that was removed from the catalog."""
    return _make_json_response(_render_with_location(call, loaded_table), {})


def make_view_answer(call: Call, loaded_view: LoadedView) -> web.Response:
    """Return the answer with a view and its metadata."""
    location = loaded_view.entry.metadata_location
    document = call.components.catalog.documents.view_document(location, loaded_view.metadata)
    return _make_json_response(
        b'{"metadata-location":' + encode_json(location) + b',"metadata":' + document + b',"config":{}}', {}
    )


async def build_access_config(
    call: Call,
    table_uuid: str,
    metadata: TableMetadata,
    namespace: NamespacePath,
    name: str,
    delegation: str | None = None,
    *,
    staged: bool = False,
) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Return the `config` and the `storage-credentials` of a table. Both are empty for a table on local files.

    Args:
        delegation: The kind of access that the client requests. If it is None, the header of the request states it.
        staged: Whether the table is staged, so that it is not in the catalog yet.

    Returns:
        The config and the credentials. Both are empty if the caller may not read the table.
    """
    securable = Securable(namespace) if staged else Securable(namespace, TABLE, name)
    if not await call.may(securable, "loadCredentials"):
        return {}, []
    may_write = await call.may(securable, "updateTable")
    settings, location = call.components.settings, metadata.location
    table = parse_location(location, "The table's location")
    if table.is_local:
        return {}, []
    sign_path = make_table_path(namespace, name, settings.prefix) + "/sign"
    if staged:  # The server cannot look up a staged table to sign a request, so the URL contains a token for it.
        sign_path += f"?stage={call.components.catalog.staging.issue(namespace, name, location)}"
    delegation_mode = delegation or call.headers.get(DELEGATION)

    def issue_keys() -> VendedKeys:
        principal_name = call.principal.name
        is_pinned = metadata.properties.get(CACHE_PINNED, "").lower() == "true"
        keys = call.components.gateway_keys
        return keys.issue(
            table_uuid,
            location,
            writable=may_write,
            principal_name=principal_name,
            pinned=is_pinned,
            staged=staged,
            namespace=namespace,
        )

    storage = SERVER_STORAGES[table.scheme]
    if storage.compute_keys_stamp(settings, call.components.clock.now_ms()) is not None:
        # The cloud storage checks these keys, and does not know which table owns a location.
        if not staged:
            await call.components.catalog.check_owned(table_uuid, location)
        elif not location.endswith(table_uuid.replace("-", "")):
            # Another table could be created at the location of the client's choice before this table is created.
            delegation_mode = SIGNING
    return await storage.grant_client_access(
        settings,
        table,
        delegation=delegation_mode,
        sign_path=sign_path,
        refresh_path="" if staged else make_table_path(namespace, name, settings.prefix) + "/credentials",
        vend=issue_keys,
        may_write=lambda: may_write,
    )


async def _compute_grant_stamp(call: Call, securable: Securable) -> tuple[str | bool, ...]:
    """Return the values besides the table on which the storage keys in an answer depend.

    The values are a part of the ETag, so that a client loads the table again when its keys or rights change. The keys
    of the gateway belong to one principal, so they also depend on its name. Clouds issue the same keys to all
    principals with the same rights.
    """
    components = call.components
    if not await call.may(securable, "loadCredentials"):
        return ("no keys",)
    cloud_stamp = compute_keys_stamp(components.settings, components.clock.now_ms())
    if components.settings.s3_client_access == "gateway":
        grant = call.principal.name, await call.may(securable, "updateTable"), components.gateway_keys.stamp()
        return *grant, cloud_stamp
    return (await call.may(securable, "updateTable"), cloud_stamp) if cloud_stamp else ()


def _render_with_location(call: Call, loaded_table: LoadedTable) -> bytes:
    """Return the JSON of a table's metadata and of their location."""
    assert loaded_table.entry is not None
    location = loaded_table.entry.metadata_location
    document = call.components.catalog.documents.render(location, loaded_table.metadata, "all")
    return b"".join((b'{"metadata-location":', encode_json(location), b',"metadata":', document, b"}"))


async def _compress_answer(call: Call, etag: str, parts: tuple[bytes, ...]) -> bytes:
    """Return the compressed answer from the cache, or compress it once for all concurrent readers."""
    cache = call.components.catalog.documents.cache
    body = cache.get(("gzip", etag))
    if isinstance(body, bytes):
        return body

    async def compress() -> bytes:
        # Level 1 is four times as fast as the default level, and gives 10 % more bytes. Use a thread, because zlib
        # releases the GIL.
        body = await asyncio.to_thread(lambda: gzip.compress(b"".join(parts), 1, mtime=0))
        cache.put(("gzip", etag), body, len(body))
        return body

    return await call.app[GZIPS].run(etag, compress)


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """Return whether the client accepts a gzipped answer."""
    for coding in headers.get("Accept-Encoding", "").split(","):
        name, _, weight = coding.partition(";")
        if name.strip().lower() in ("gzip", "x-gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _make_json_response(body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(body=body, headers=headers, content_type="application/json")
