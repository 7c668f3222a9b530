"""Cached table and view metadata by location: decoded, as JSON, or as JSON with only the referenced snapshots.

Files at a location are immutable, so the cache needs no invalidation; entries are evicted by a byte budget. A table's
writers can overwrite its metadata files nevertheless. The name of a file that the server wrote therefore contains the
digest of its content (`name_suffix`), and a file with other content is not read.

Properties that control clients (`steers_client`) are refused when they are set. Older metadata, or metadata from
another catalog, may contain them. They are left out here, so that no answer and no later metadata file contains them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import re
import zlib
from typing import Any, Literal, TypeVar

import msgspec

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import BadRequest, Forbidden, NotFound, ObjectMissing
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import without_client_properties
from seamark.metaserver.iceberg.metadata.table_json import decode_table, encode_table, gunzip, refs_view
from seamark.metaserver.iceberg.views.view import ViewMetadata, decode_view, encode_view
from seamark.metaserver.objects.port import ObjectStore

SnapshotMode = Literal["all", "refs"]
T = TypeVar("T")

_DECODED_PER_BYTE = 3
"""Memory of decoded metadata per byte of JSON, measured at 10,000 snapshots and rounded up."""
_METADATA_LIMIT_BYTES = 1 << 28
_RECHECK_S = 30.0
"""How long a metadata file that was seen on remote storage is assumed to exist. Local files are checked each time."""
_SEEN_LIMIT = 100_000
_DIGEST_CHARACTERS = 40
_NAMED = re.compile(r"\.([0-9a-f]{40})(?:\.gz)?\.(?:metadata|function)\.json\Z")


class Documents:
    """A read-through cache with one concurrent read per location, bounded by `budget_bytes`."""

    def __init__(self, objects: ObjectStore, clock: Clock, *, budget_bytes: int) -> None:
        self._objects = objects
        self._clock = clock
        self._cache: MemoryCache[tuple[str, str], Any] = MemoryCache(budget_bytes)
        self._flights: SingleFlight[tuple[str, str], Any] = SingleFlight()
        self._seen: dict[str, float] = {}

    @property
    def cache(self) -> MemoryCache[tuple[str, str], Any]:
        """The cache, for metrics."""
        return self._cache

    async def table(self, location: str) -> TableMetadata:
        """NotFound when the file is missing, Corrupt when it is no table metadata."""
        cached = self._cache.get(("table", location))
        if isinstance(cached, TableMetadata):
            return cached
        metadata = await self._flights.run(("table", location), lambda: self._fetch_table(location))
        assert isinstance(metadata, TableMetadata)
        return metadata

    async def view(self, location: str) -> ViewMetadata:
        cached = self._cache.get(("view", location))
        if isinstance(cached, ViewMetadata):
            return cached
        data = await self._read_json(location)
        metadata = _served(decode_view(data, location))
        self._cache.put(("view", location), metadata, len(data) * _DECODED_PER_BYTE)
        return metadata

    async def stored_properties(self, location: str) -> dict[str, str]:
        """The properties in the metadata file, including those that are not served. BadRequest when the file has no
        valid properties."""
        try:
            return _PROPERTIES.decode(await self._read_json(location)).properties or {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadRequest(f"{location} is not a metadata file of a table or view") from None

    async def raw(self, location: str) -> bytes:
        """The content of the file."""
        cached = self._cache.get(("raw", location))
        if isinstance(cached, bytes):
            return cached
        data = await self._read(location)
        self._cache.put(("raw", location), data, len(data))
        return data

    async def document(self, location: str, mode: SnapshotMode) -> bytes:
        """JSON of the table metadata: complete, or with only the snapshots that branches and tags refer to."""
        cached = self._cache.get((mode, location))
        if isinstance(cached, bytes):
            return cached
        metadata = await self.table(location)
        return self.render(location, metadata, mode)

    def render(self, location: str, metadata: TableMetadata, mode: SnapshotMode) -> bytes:
        """Like `document`, from decoded metadata."""
        cached = self._cache.get((mode, location))
        if isinstance(cached, bytes):
            return cached
        data = refs_view(metadata) if mode == "refs" else encode_table(metadata)
        self._cache.put((mode, location), data, len(data))
        return data

    def view_document(self, location: str, metadata: ViewMetadata) -> bytes:
        cached = self._cache.get(("view-json", location))
        if isinstance(cached, bytes):
            return cached
        data = encode_view(metadata)
        self._cache.put(("view-json", location), data, len(data))
        return data

    async def ensure_exists(self, location: str) -> None:
        """NotFound when the metadata file is missing: the cache must not serve a table whose file is gone."""
        local = location.startswith("file:")
        now = self._clock.monotonic()
        if not local and now - self._seen.get(location, -_RECHECK_S) < _RECHECK_S:
            return
        if not await self._objects.exists(location):
            self._seen.pop(location, None)
            raise _missing(location)
        if not local:
            if len(self._seen) >= _SEEN_LIMIT:
                self._seen.clear()
            self._seen[location] = now

    def remember_table(self, location: str, metadata: TableMetadata, document: bytes) -> None:
        """Caches metadata after its write."""
        self._cache.put(("table", location), metadata, len(document) * _DECODED_PER_BYTE)
        self._cache.put(("all", location), document, len(document))

    def forget(self, location: str) -> None:
        """Evicts a file after its deletion."""
        self._seen.pop(location, None)

    async def _fetch_table(self, location: str) -> TableMetadata:
        data = await self._read_json(location)
        metadata = _served(decode_table(data, location))
        self._cache.put(("table", location), metadata, len(data) * _DECODED_PER_BYTE)
        return metadata

    async def _read_json(self, location: str) -> bytes:
        """Decompressed, because the size of the JSON determines the size of the cache entry."""
        data = await self._read(location)
        with contextlib.suppress(zlib.error):  # the decoder reports the fault
            return gunzip(data)
        return data

    async def _read(self, location: str) -> bytes:
        try:
            data = await self._objects.read(location, limit_bytes=_METADATA_LIMIT_BYTES)
        except ObjectMissing:
            raise _missing(location) from None
        named = _NAMED.search(location)
        if named is not None and named[1] != await asyncio.to_thread(_digest, data):
            raise Forbidden(
                f"The metadata file {location} was overwritten: its content does not match the digest in its name. "
                "Restore the file, or register another metadata file"
            )
        return data


class _Properties(msgspec.Struct):
    properties: dict[str, str] | None = None


_PROPERTIES = msgspec.json.Decoder(_Properties)
M = TypeVar("M", TableMetadata, ViewMetadata)


def _served(metadata: M) -> M:
    properties = without_client_properties(metadata.properties)
    if len(properties) == len(metadata.properties):
        return metadata
    return msgspec.structs.replace(metadata, properties=properties)


def _missing(location: str) -> NotFound:
    # The message of Iceberg Java's readers, which clients match on.
    return NotFound(f"Failed to open input stream for file: {location}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def name_suffix(data: bytes, kind: str = ".metadata.json") -> str:
    """The end of the name of a file with this content: the digest and `kind`. It is where PyIceberg and Trino expect
    the name of a codec, which they ignore."""
    return f".{_digest(data)}{kind}"


def is_named_by_content(location: str) -> bool:
    """Whether the location has `name_suffix`, so that a change of the file is detected."""
    return _NAMED.search(location) is not None


def compress(codec: str, document: bytes) -> tuple[bytes, str]:
    """The bytes to store and the file suffix, by table property write.metadata.compression-codec (none or gzip)."""
    match codec.lower():
        case "none" | "":
            return document, name_suffix(document)
        case "gzip":
            packed = gzip.compress(document, 1, mtime=0)
            return packed, name_suffix(packed, ".gz.metadata.json")
        case other:
            raise BadRequest(f"write.metadata.compression-codec is {other!r}; supported: none, gzip")
