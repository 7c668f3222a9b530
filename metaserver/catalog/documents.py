"""A cache of table and view metadata by location.

The cache contains metadata in decoded form, as JSON, and as JSON with only the referenced snapshots. It is limited by a
number of bytes.

Metadata files are immutable, so entries are never invalidated. However, a table's writers are able to overwrite its
metadata files. Therefore the name of a file that the server wrote contains the digest of its content
(`choose_file_suffix`), and the server refuses a file with other content.

Requests must not set properties that control clients (`configures_client`). Older metadata, or metadata
from another catalog, may contain such properties. This module removes them, so that no answer and no later
metadata file contains them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import re
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.metadata.metadata import TableMetadata, add_schemes
from seamark.formats.iceberg.metadata.properties import remove_client_properties
from seamark.formats.iceberg.metadata.table_json import (
    GZIP_MAGIC,
    decode_table,
    decompress_if_gzip,
    encode_refs_view,
    encode_table,
)
from seamark.formats.iceberg.views.view import ViewMetadata, decode_view, encode_view
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, Forbidden, NotFound, ObjectMissing, RetryLater, TooLarge
from seamark.metaserver.access.principal import get_current_principal
from seamark.metaserver.catalog.large_requests import LARGE_BYTES, index_columns
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.runtime.large_metadata import LARGE_METADATA_BYTES, LargeMetadata, TooMuchMemory
from seamark.metaserver.runtime.staleness import get_current_staleness

SnapshotMode = Literal["all", "refs"]
T = TypeVar("T")

_TABLE_BYTES, _COLUMN_BYTES = 2000, 340
"""The memory of decoded table metadata, and of each column of a schema, in addition to twice the size of the JSON.

Summaries of snapshots refer to the JSON, and other fields take about as much memory as their JSON (measured,
`tests/server/test_memory_account.py`).
"""
METADATA_BYTES_MAX = 1 << 28
"""The maximum size of a metadata file."""
_LARGE_IN_USE_MIN = 1 << 30
"""The smallest limit of the memory of large metadata that requests use at the same time, in bytes."""
_LARGE_BUDGET_FACTOR = 4
"""The limit of this memory as a multiple of the budget of the cache, if it is above `_LARGE_IN_USE_MIN`."""
_PACKED_IN_LOOP_BYTES = 16 << 10
"""The maximum size of a gzip file that is decompressed on the event loop."""
_RECHECK_S = 30.0
"""The time after a check for which the server assumes that a metadata file still exists on remote storage.

Local files are checked for each request.
"""
_SEEN_LOCATIONS_MAX = 100_000
_DIGEST_CHARACTERS = 40
_DIGEST_SUFFIX = re.compile(r"\.([0-9a-f]{40})(?:\.gz)?\.(?:metadata|function)\.json\Z")
"""Matches the end of a file name with the digest of the file's content, in hexadecimal."""


class Documents:
    """A read-through cache of at most `budget_bytes`, with at most one concurrent read of a location."""

    def __init__(
        self, objects: ObjectStore, clock: Clock, *, budget_bytes: int, stored_objects: ObjectStore | None = None
    ) -> None:
        """Create the cache of metadata documents.

        Args:
            objects: The storage from which the documents are read.
            clock: The clock.
            budget_bytes: The maximum size of the cached documents.
            stored_objects: The storage without the caches that `objects` may have. The default is `objects`.
        """
        self._objects = objects
        self._sources = (objects,) if stored_objects is None or stored_objects is objects else (objects, stored_objects)
        self._clock = clock
        self._cache: MemoryCache[tuple[str, str], Any] = MemoryCache(budget_bytes, "metadata")
        # A request can use large metadata after the cache has evicted them. So the limit for the metadata that requests
        # of one principal use is larger than the cache.
        self._large = LargeMetadata(max(_LARGE_IN_USE_MIN, _LARGE_BUDGET_FACTOR * budget_bytes))
        self._principal_by_large_document: dict[tuple[str, str], str] = {}
        """For each large document in the cache, by its key, the principal whose request caused it to be cached."""
        self._fetches: SingleFlight[tuple[str, str], Any] = SingleFlight()
        self._seen_times: dict[str, float] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}

    @property
    def cache(self) -> MemoryCache[tuple[str, str], Any]:
        return self._cache

    async def table(self, location: str) -> TableMetadata:
        """Return the metadata of a table.

        Raises:
            NotFound: The file is missing.
            Corrupt: The file contains no table metadata.
            TooMuchMemory: The current principal uses too much memory for large metadata.
        """
        cached_value = self._cache.get(("table", location))
        if isinstance(cached_value, TableMetadata):
            return cached_value
        try:
            metadata = await self._fetches.run(("table", location), lambda: self._fetch_table(location))
        except TooMuchMemory as error:
            if error.principal == get_current_principal():
                raise
            # The other request that has begun this read may not use more memory, but the caller may.
            metadata = await self._fetch_table(location)
        assert isinstance(metadata, TableMetadata)
        return metadata

    async def peek(self, location: str, limit_bytes: int = METADATA_BYTES_MAX) -> TableMetadata:
        """Return the metadata of a table without caching them.

        Callers that read the metadata of many tables use it. In the cache, these metadata would evict the documents
        that requests need.

        Args:
            limit_bytes: The maximum size of a file that is not cached, and of its decompressed content.

        Raises:
            NotFound: The file is missing.
            Corrupt: The file contains no table metadata.
            TooLarge: The file exceeds the limit.
            TooMuchMemory: The current principal uses too much memory for large metadata.
        """
        cached_value = self._cache.get(("table", location))
        if isinstance(cached_value, TableMetadata):
            return cached_value
        return (await self._read_table(location, limit_bytes))[0]

    async def view(self, location: str) -> ViewMetadata:
        cached_value = self._cache.get(("view", location))
        if isinstance(cached_value, ViewMetadata):
            return cached_value
        data = await self._read_json(location)
        metadata = _drop_client_properties(decode_view(data, location))
        self._cache.put(("view", location), metadata, measure_object_bytes(metadata))
        return metadata

    async def read_unregistered_table(self, location: str, limit_bytes: int) -> TableMetadata:
        """Return the metadata in a file to which no table refers yet, without caching them.

        The metadata contain the properties that clients do not see. The file is read from the storage itself, so the
        result is never that of a file that no longer exists.

        Args:
            limit_bytes: The maximum size of the file, and of its decompressed content.

        Raises:
            NotFound: The file is missing.
            Corrupt: The file contains no table metadata.
            TooLarge: The file exceeds the limit.
        """
        data = await self._read_unregistered(location, limit_bytes)
        if len(data) <= LARGE_BYTES:
            return _decode_stored_table(data, location)
        return await asyncio.to_thread(_decode_stored_table, data, location)

    async def read_unregistered_view(self, location: str, limit_bytes: int) -> ViewMetadata:
        """Return the metadata in a file to which no view refers yet, from the storage and without caching them."""
        data = await self._read_unregistered(location, limit_bytes)
        return await asyncio.to_thread(decode_view, data, location)

    async def _read_unregistered(self, location: str, limit_bytes: int) -> bytes:
        data = await self._read(location, self._sources[-1:], limit_bytes)
        return await _decompress_by_size(data, location, limit_bytes)

    async def peek_view(self, location: str, limit_bytes: int = METADATA_BYTES_MAX) -> ViewMetadata:
        """Return the metadata of a view without caching them, so that they evict no documents that requests need."""
        cached_value = self._cache.get(("view", location))
        if isinstance(cached_value, ViewMetadata):
            return cached_value
        data = await self._read_json(location, limit_bytes)
        return await asyncio.to_thread(lambda: _drop_client_properties(decode_view(data, location)))

    async def read_stored_properties(self, location: str) -> dict[str, str]:
        """Return all properties in the metadata file, including those that clients do not see.

        Raises:
            BadRequest: The file has no valid properties.
        """
        try:
            data = await self._read_json(location)
            if len(data) <= LARGE_BYTES:
                return convert_json(data, _Properties).properties or {}
            return (await asyncio.to_thread(convert_json, data, _Properties)).properties or {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadRequest(f"{location} is not a metadata file of a table or view") from None

    async def read_raw(self, location: str) -> bytes:
        """Return the content of the file."""
        cached_value = self._cache.get(("raw", location))
        if isinstance(cached_value, bytes):
            return cached_value
        data = await self._read(location)
        self._cache.put(("raw", location), data, len(data))
        return data

    async def render_document(self, location: str, mode: SnapshotMode) -> bytes:
        """Return the JSON of the table metadata, either complete or only with the snapshots of branches and tags."""
        cached_value = self._cache.get((mode, location))
        if isinstance(cached_value, bytes):
            return cached_value
        metadata = await self.table(location)
        return self.render(location, metadata, mode)

    def render(self, location: str, metadata: TableMetadata, mode: SnapshotMode) -> bytes:
        """Return the JSON of decoded metadata, as `render_document` does."""
        cached_value = self._cache.get((mode, location))
        if isinstance(cached_value, bytes):
            return cached_value
        data = encode_refs_view(metadata) if mode == "refs" else encode_table(metadata)
        self._cache.put((mode, location), data, len(data))
        return data

    def view_document(self, location: str, metadata: ViewMetadata) -> bytes:
        cached_value = self._cache.get(("view-json", location))
        if isinstance(cached_value, bytes):
            return cached_value
        data = encode_view(metadata)
        self._cache.put(("view-json", location), data, len(data))
        return data

    async def ensure_exists(self, location: str) -> None:
        """Check that the metadata file exists, because a request for a table with a missing file must fail.

        A local file is checked each time. Other storages are checked again only after `_RECHECK_S`.

        Raises:
            NotFound: The file is missing.
        """
        if location.startswith("file:"):
            if not await self._objects.exists(location):
                raise _make_missing_error(location)
            return
        now_s = self._clock.monotonic()
        seen_s = self._seen_times.get(location)
        if seen_s is None or now_s - seen_s >= _RECHECK_S:
            await self._wait_for_check(location, seen_s)
        elif now_s - seen_s >= _RECHECK_S / 2:
            # Start the next check early, so that requests for a table in use never wait for the storage.
            self._get_or_start_check(location)

    async def _wait_for_check(self, location: str, seen_s: float | None) -> None:
        """Wait until the file was checked in the storage. If the request allows stale answers, wait only a short time.

        Args:
            seen_s: The monotonic time of the last successful check, or None.
        """
        staleness, check = get_current_staleness(), self._get_or_start_check(location)
        if staleness is not None and seen_s is not None:
            await asyncio.wait((check,), timeout=staleness.wait_s)
            age_s = self._clock.monotonic() - seen_s
            is_unavailable = not check.done() or isinstance(check.exception(), RetryLater)
            if is_unavailable and staleness.allows(age_s):
                staleness.record_age(age_s)
                return
        await asyncio.shield(check)

    def _get_or_start_check(self, location: str) -> asyncio.Task[None]:
        """Return the running task that checks whether the file exists, or start it."""
        task = self._checks.get(location)
        if task is None:
            task = self._checks[location] = asyncio.create_task(self._check_exists(location), name="document-exists")
            task.add_done_callback(lambda finished_task: self._finish_check(location, finished_task))
        return task

    async def _check_exists(self, location: str) -> None:
        began_s = self._clock.monotonic()
        if not await self._objects.exists(location):
            self._seen_times.pop(location, None)
            raise _make_missing_error(location)
        if len(self._seen_times) >= _SEEN_LOCATIONS_MAX:
            self._seen_times.clear()
        self._seen_times[location] = began_s

    def _finish_check(self, location: str, task: asyncio.Task[None]) -> None:
        del self._checks[location]
        if not task.cancelled():
            # Mark the error as retrieved, because no request may be waiting.
            task.exception()

    async def close(self) -> None:
        for task in tuple(self._checks.values()):
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def remember_table(self, location: str, metadata: TableMetadata, document: bytes) -> None:
        """Add metadata to the cache after they were written to storage."""
        self._cache.put(("table", location), metadata, estimate_memory(metadata, len(document)))
        self._cache.put(("all", location), document, len(document))

    def forget(self, location: str) -> None:
        """Forget that the file was seen, because it was deleted. The next request checks the storage."""
        self._seen_times.pop(location, None)

    async def _fetch_table(self, location: str) -> TableMetadata:
        """Read the metadata of a table, cache them, and return them."""
        metadata, json_bytes = await self._read_table(location, METADATA_BYTES_MAX)
        key = ("table", location)
        # The principals of large metadata are recorded, because `_evict_large` must find the metadata of one principal.
        if self._cache.put(key, metadata, estimate_memory(metadata, json_bytes)) and json_bytes > LARGE_METADATA_BYTES:
            cached_keys = {
                cached_key: principal
                for cached_key, principal in self._principal_by_large_document.items()
                if cached_key in self._cache
            }
            self._principal_by_large_document = {**cached_keys, key: get_current_principal()}
        return metadata

    async def _read_table(self, location: str, limit_bytes: int) -> tuple[TableMetadata, int]:
        """Return the metadata of a table, and the size of its JSON.

        Large metadata are read one after the other, and their memory is counted for the current principal.

        Raises:
            TooMuchMemory: The current principal uses too much memory for large metadata.
            TooLarge: The file exceeds the limit.
        """
        if limit_bytes <= LARGE_METADATA_BYTES:
            return await self._read_and_decode(location, limit_bytes)
        with contextlib.suppress(TooLarge):
            return await self._read_and_decode(location, LARGE_METADATA_BYTES)
        principal = get_current_principal()
        # Hold the queue until the decoder ends, because its thread continues after the request is cancelled.
        read = partial(self._read_and_decode, location, limit_bytes)
        metadata, json_bytes = await self._large.queue.run_to_end(principal, read)
        size_bytes = estimate_memory(metadata, json_bytes)
        if not self._large.has_room(principal, size_bytes):
            self._evict_large(principal)
        self._large.count(metadata, principal, size_bytes)
        return metadata, json_bytes

    async def _read_and_decode(self, location: str, limit_bytes: int) -> tuple[TableMetadata, int]:
        data = await self._read_json(location, limit_bytes)
        return await _decode_table(data, location), len(data)

    def _evict_large(self, principal: str) -> None:
        """Evict large metadata that requests of a principal have caused to be cached."""
        for key in [key for key, user in self._principal_by_large_document.items() if user == principal]:
            del self._principal_by_large_document[key]
            self._cache.discard(key)

    async def _read_json(self, location: str, limit_bytes: int = METADATA_BYTES_MAX) -> bytes:
        """Return the decompressed JSON. Its size determines the size of the cache entry.

        Raises:
            NotFound: The file is missing.
            Forbidden: The content does not match the digest in the name of the file.
        """
        data = await self._read(location, limit_bytes=limit_bytes)
        # A short gzip file may contain more than a limit that the caller sets, so decompress only up to this limit.
        if limit_bytes < METADATA_BYTES_MAX:
            return await _decompress_by_size(data, location, limit_bytes)
        with contextlib.suppress(zlib.error):  # The decoder reports the error.
            return (
                decompress_if_gzip(data)
                if len(data) <= _PACKED_IN_LOOP_BYTES
                else await asyncio.to_thread(decompress_if_gzip, data)
            )
        return data

    async def _read(
        self, location: str, sources: Sequence[ObjectStore] | None = None, limit_bytes: int = METADATA_BYTES_MAX
    ) -> bytes:
        """Return the content of a metadata file. If the file's name has a digest, check the content.

        Raises:
            NotFound: The file is missing.
            Forbidden: The content does not match the digest, in the storage either.
        """
        digest_match = _DIGEST_SUFFIX.search(location)
        # A cached copy may be damaged. If it does not match the digest, read the storage itself.
        for objects in sources or self._sources:
            try:
                data = await objects.read(location, limit_bytes=limit_bytes)
            except ObjectMissing:
                raise _make_missing_error(location) from None
            if digest_match is None or digest_match[1] == await _compute_digest_by_size(data):
                break
        else:
            raise Forbidden(
                f"The metadata file {location} was overwritten: its content does not match the digest in its name. "
                "Restore the file, or register another metadata file"
            )
        return data


class _Properties(msgspec.Struct):
    properties: dict[str, str] | None = None


M = TypeVar("M", TableMetadata, ViewMetadata)


async def _decode_table(data: bytes, location: str) -> TableMetadata:
    """Decode table metadata, in a thread if it is long.

    The columns of long metadata are indexed here as well. Those of short metadata are indexed by the first plan,
    because this takes little time.
    """

    def decode() -> TableMetadata:
        return _drop_client_properties(_decode_stored_table(data, location))

    return decode() if len(data) <= LARGE_BYTES else await asyncio.to_thread(lambda: index_columns(decode()))


def _decode_stored_table(data: bytes, location: str) -> TableMetadata:
    """Decode table metadata with all properties.

    If the location is a path without a scheme, as some writers of local tables write it, add the scheme `file:`.
    """
    metadata = decode_table(data, location)
    return add_schemes(metadata) if metadata.location.startswith("/") else metadata


async def _decompress_by_size(data: bytes, location: str, limit_bytes: int) -> bytes:
    """Return the content of a gzip file, or other `data` unchanged, as `_decompress_within` does."""
    if len(data) <= _PACKED_IN_LOOP_BYTES or not data.startswith(GZIP_MAGIC):
        return _decompress_within(data, location, limit_bytes)
    return await asyncio.to_thread(_decompress_within, data, location, limit_bytes)


def _decompress_within(data: bytes, location: str, limit_bytes: int) -> bytes:
    """Return the content of a gzip file, or `data` if it is not a gzip file.

    Raises:
        TooLarge: The content has more bytes than the limit.
    """
    try:
        content = decompress_if_gzip(data, limit_bytes)
    except zlib.error:
        content = data  # The decoder reports the error.
    # The content may be a gzip file itself. The decoder would decompress it too, and without the limit.
    if limit_bytes < METADATA_BYTES_MAX and content.startswith(GZIP_MAGIC):
        raise TooLarge(f"{location} contains more than {limit_bytes:,} bytes, or is damaged")
    return content


def _drop_client_properties(metadata: M) -> M:
    properties = remove_client_properties(metadata.properties)
    if len(properties) == len(metadata.properties):
        return metadata
    return msgspec.structs.replace(metadata, properties=properties)


def estimate_memory(metadata: TableMetadata, json_bytes: int) -> int:
    """Return the approximate memory in bytes of decoded table metadata.

    The error is less than 10 %. `json_bytes` is the size of the decompressed JSON. The JSON counts twice: the object
    keeps a part of it as text, and the decoded fields take about the same memory. The other terms were measured.
    """
    columns = sum(len(schema.fields) for schema in metadata.schemas)
    return _TABLE_BYTES + 2 * json_bytes + _COLUMN_BYTES * columns


def _make_missing_error(location: str) -> NotFound:
    # Iceberg Java's readers use this message, and clients compare error messages with it.
    return NotFound(f"Failed to open input stream for file: {location}")


async def _compute_digest_by_size(data: bytes) -> str:
    """Return the digest of a file. For a small file, starting a thread would take longer than the digest."""
    return _compute_digest(data) if len(data) <= LARGE_BYTES else await asyncio.to_thread(_compute_digest, data)


def _compute_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def choose_file_suffix(data: bytes, kind: str = ".metadata.json") -> str:
    """Return the end of a file name: the digest of the content, and `kind`.

    PyIceberg and Trino expect the name of a codec in place of the digest. They ignore other text there.
    """
    return f".{_compute_digest(data)}{kind}"


def is_named_by_content(location: str) -> bool:
    """Return whether the file name ends with a digest of the content, so that a change of the file is detected."""
    return _DIGEST_SUFFIX.search(location) is not None


def compress_document(codec: str, document: bytes) -> tuple[bytes, str]:
    """Return a tuple of the bytes to store and the suffix of the file name.

    `codec` is the value of the table property write.metadata.compression-codec, which is `none` or `gzip`. An empty
    text means `none`.

    Raises:
        BadRequest: The codec is not supported.
    """
    match codec.lower():
        case "none" | "":
            return document, choose_file_suffix(document)
        case "gzip":
            compressed = gzip.compress(document, 1, mtime=0)
            return compressed, choose_file_suffix(compressed, ".gz.metadata.json")
        case other:
            raise BadRequest(f"write.metadata.compression-codec is {other!r}; supported: none, gzip")
