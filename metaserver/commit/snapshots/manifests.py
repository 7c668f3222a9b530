"""Reads and caches manifests and manifest lists for commits, and finds the manifests that list a file.

A commit to a table of a million files must not read all manifests. Therefore the cache contains an 8-byte hash of the
path of each file. The hashes select the manifests that may list a file. These manifests are then read, and the paths
are compared, so a decision never depends on a hash alone. Manifests that this process writes are added to the cache.
Manifests are immutable, so entries of the cache are never invalidated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.manifests.content_file import ContentFile
from seamark.formats.iceberg.manifests.manifest import (
    DecodedManifest,
    ManifestFile,
    decode_manifest,
    decode_manifest_list,
)
from seamark.formats.iceberg.manifests.writer import (
    DELETED,
    ManifestEntry,
    decode_listed,
    list_removals,
    read_live_entries,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.index.kernels import _hash
from seamark.formats.index.keys.hashing import hash_key
from seamark.formats.runtime.errors import BadRequest, Corrupt, ObjectMissing
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.objects.port import ObjectReader
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.settings.settings import Settings

T = TypeVar("T")
Hashes = npt.NDArray[np.uint64]
CheckPaths = Callable[[Iterable[str]], Awaitable[None]]
"""A function that raises Forbidden for a path to which the table may not refer."""
MANIFESTS_CONCURRENT_MAX = 16
"""The maximum number of manifests of one commit that are read or decoded concurrently."""
_SEED = 0
_COMBINED_HASHES_MAX = 20_000
"""The maximum number of hashes that are copied together for one search."""
_CACHES_PER_BUDGET = 4
"""The number of caches: manifest lists, encoded manifests, decoded blocks and hashes. They share the budget equally."""
_ENTRY_BYTES = 2048
_ENTRY_FACTOR = 16
"""Estimates of the memory of a fully decoded manifest: bytes for each entry, and bytes for each encoded byte.

The encoded bytes are included because column metrics take much memory.
"""
_IN_LOOP_ENTRIES_MAX = 2_000
"""The maximum number of entries that are processed in the event loop. A thread processes more entries."""
_IN_LOOP_BYTES_MAX = 64 << 10
"""The maximum size of a manifest that is decoded in the event loop. A thread decodes larger manifests."""


class PathHashes(NamedTuple):
    """The sorted hashes of the paths in one manifest. They show without a read that a manifest does not list a path.

    Attributes:
        paths: The hashes of the paths of its live files.
        referenced: The hashes of the paths of data files to which its delete files refer.
    """

    paths: Hashes
    referenced: Hashes

    @property
    def size_bytes(self) -> int:
        return int(self.paths.nbytes + self.referenced.nbytes)


class ChangeMemory:
    """Counts the memory that the decoded manifests of one change take, and enforces a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._held_keys: set[tuple[str, str]] = set()

    def hold(self, key: tuple[str, str], size_bytes: int) -> None:
        """Count an object that the change keeps in memory. An object with a known key is not counted again.

        Raises:
            BadRequest: The change exceeds the limit.
        """
        if key in self._held_keys:
            return
        self._held_keys.add(key)
        self._size_bytes += size_bytes
        self.check(0)

    def check(self, more_bytes: int) -> None:
        """Check that the change may use `more_bytes` of additional memory.

        Raises:
            BadRequest: The change would exceed the limit.
        """
        if self._size_bytes + more_bytes > self._limit_bytes:
            raise BadRequest(
                f"The change needs more than {self._limit_bytes:,} bytes of decoded manifests; split it, or compute it "
                "again from the current snapshot"
            )


class Manifests:
    """Cached access to manifests. An instance belongs to one event loop."""

    def __init__(self, objects: ObjectReader, *, budget_bytes: int, limit_bytes: int) -> None:
        """Open empty caches.

        Args:
            objects: Reads files from the storage.
            budget_bytes: The memory of all caches together.
            limit_bytes: The maximum size of one manifest or manifest list.
        """
        self._objects = objects
        self._limit_bytes = limit_bytes
        self._lists: MemoryCache[str, tuple[ManifestFile, ...]] = MemoryCache(
            budget_bytes // _CACHES_PER_BUDGET, "commits"
        )
        self._data: MemoryCache[str, bytes] = MemoryCache(budget_bytes // _CACHES_PER_BUDGET, "commits")
        self._blocks: MemoryCache[str, Block] = MemoryCache(budget_bytes // _CACHES_PER_BUDGET, "commits")
        self._path_hashes: MemoryCache[str, PathHashes] = MemoryCache(budget_bytes // _CACHES_PER_BUDGET, "commits")
        self._reads: SingleFlight[str, bytes] = SingleFlight()
        self._unwritten_lists: dict[str, tuple[ManifestFile, ...]] = {}
        self._unwritten: dict[str, bytes] = {}
        """The manifests that are being written, by location. The caches could evict them before they are stored."""
        self._check_paths: CheckPaths | None = None
        self._memory: ChangeMemory | None = None

    @staticmethod
    def from_settings(objects: ObjectReader, settings: Settings, divisor: int = 1) -> Manifests:
        """Open caches with a part of `commit_memory_bytes`: the setting divided by `divisor`."""
        budget_bytes = settings.commit_memory_bytes // divisor
        return Manifests(objects, budget_bytes=budget_bytes, limit_bytes=settings.plan_manifest_limit_bytes)

    def with_checks(self, check_paths: CheckPaths, limit_bytes: int | None) -> Manifests:
        """Return a reader with the same caches for one change.

        Args:
            check_paths: Called with the location of each manifest list before it is read, and with the paths of the
                manifests that it lists.
            limit_bytes: The memory limit of the change for decoded manifests. A change that needs more memory gets a
                BadRequest. None means that the caller has its own limit.
        """
        reader = copy(self)
        reader._check_paths = check_paths
        reader._memory = None if limit_bytes is None else ChangeMemory(limit_bytes)
        return reader

    async def read_list(self, snapshot: Snapshot | None) -> tuple[ManifestFile, ...]:
        """Return the manifests of a snapshot, in the order of its manifest list.

        Raises:
            Forbidden: The table may not refer to a file.
            BadRequest: The snapshot has no manifest list.
            Corrupt: The manifest list cannot be read. The message contains its location.
        """
        if snapshot is None:
            return ()
        location = snapshot.manifest_list
        if location is None:
            raise BadRequest(
                f"Snapshot {snapshot.snapshot_id} has no manifest list, as in early tables of format version 1; "
                "rewrite the table's manifests with an engine first"
            )
        return await self.read_list_at(location)

    async def read_list_at(self, location: str) -> tuple[ManifestFile, ...]:
        """Return the manifests in the manifest list at a location. The errors are the same as for `read_list`."""
        if self._check_paths is not None:
            await self._check_paths([location])
        manifest_list = self._lists.get(location)
        if manifest_list is None:
            manifest_list = self._unwritten_lists.get(location)
        if manifest_list is None:
            data = await self._read(location, "manifest list")
            manifest_list = await _run_by_size(len(data), lambda: decode_manifest_list(data, location))
            self.remember_list(location, manifest_list)
        if self._check_paths is not None:
            await self._check_paths(manifest.manifest_path for manifest in manifest_list)
        return manifest_list

    def hold(self, location: str, content: bytes | tuple[ManifestFile, ...]) -> None:
        """Keep a manifest, or the manifests of a manifest list, in memory until `release`.

        The file is not stored yet, so it could not be read again after the caches have dropped it.
        """
        if isinstance(content, bytes):
            self._unwritten[location] = content
        else:
            self._unwritten_lists[location] = content

    def release(self, location: str) -> None:
        """Release a file that `hold` keeps. Call this after the file has been written."""
        self._unwritten.pop(location, None)
        self._unwritten_lists.pop(location, None)

    def remember_list(self, location: str, manifests: tuple[ManifestFile, ...]) -> None:
        """Add a manifest list to the cache after it was written."""
        self._lists.put(location, manifests, measure_object_bytes(manifests))

    def remember(self, location: str, data: bytes, path_hashes: PathHashes) -> None:
        """Add a manifest to the cache after it was written."""
        self._data.put(location, data, len(data))
        self._path_hashes.put(location, path_hashes, path_hashes.size_bytes)

    async def read_encoded(self, manifest: ManifestFile) -> bytes:
        """Return the encoded manifest.

        Raises:
            Corrupt: The file is shorter than its manifest list states.
        """
        location = manifest.manifest_path
        data = self._data.get(location)
        if data is None:
            data = self._unwritten.get(location)
        if data is None:
            data = await self._reads.run(location, lambda: self._read(location, "manifest"))
            self._data.put(location, data, len(data))
        if len(data) < manifest.manifest_length:
            # Decoding does not detect an Avro file that is truncated between two blocks.
            raise Corrupt(f"Manifest {location} has {len(data)} bytes; its list states {manifest.manifest_length}")
        return data

    async def read_entries(self, manifest: ManifestFile, metadata: TableMetadata) -> list[ManifestEntry]:
        """Return the live entries, fully decoded.

        Raises:
            Corrupt: The manifest cannot be decoded. The message names it.
        """
        data = await self.read_encoded(manifest)
        manifest_rows = await _run_by_size(len(data), lambda: decode_listed(data, manifest))
        # Check the memory before creating the entries, because a small file may contain millions of entries.
        if self._memory is not None:
            size_bytes = manifest_rows.rows * _ENTRY_BYTES + len(data) * _ENTRY_FACTOR
            self._memory.hold(("entries", manifest.manifest_path), size_bytes)
        return await _run_by_size(len(data), lambda: read_live_entries(manifest_rows, manifest, metadata))

    async def decode(self, manifest: ManifestFile) -> DecodedManifest:
        """Return the live entries as columns, without packing them into a block.

        Raises:
            Corrupt: The manifest cannot be decoded. The message names it.
        """
        data = await self.read_encoded(manifest)
        manifest_rows = await _run_by_size(len(data), lambda: decode_listed(data, manifest))
        if self._memory is not None:
            self._memory.hold(("decoded", manifest.manifest_path), len(manifest_rows.heap))
        return manifest_rows

    async def read_removals(self, manifest: ManifestFile, metadata: TableMetadata) -> list[ManifestEntry]:
        """Return the entries with the status DELETED: files that the snapshot of the manifest has removed.

        Raises:
            Corrupt: The manifest cannot be decoded. The message names it.
        """
        data = await self.read_encoded(manifest)
        manifest_rows = await _run_by_size(len(data), lambda: decode_listed(data, manifest, with_deleted=True))
        if self._memory is not None:
            self._memory.check(manifest_rows.rows * _ENTRY_BYTES)
            removed_count = int((manifest_rows.longs["status"] == DELETED).sum())
            self._memory.hold(("removals", manifest.manifest_path), removed_count * _ENTRY_BYTES)
        return await _run_by_size(len(data), lambda: list_removals(manifest_rows, manifest, metadata))

    async def read_blocks(self, manifests: Sequence[ManifestFile]) -> list[Block]:
        """Return the live entries of each manifest as a block.

        Raises:
            Corrupt: A manifest cannot be decoded. The message names it.
        """
        return await self._decode_blocks(manifests, self._memory)

    async def _decode_blocks(self, manifests: Sequence[ManifestFile], memory: ChangeMemory | None) -> list[Block]:
        """Decode manifests into blocks. A block has the live entries of one manifest as columns.

        Args:
            memory: Counts the memory of the change that keeps the blocks, or None.

        Raises:
            Corrupt: A manifest is damaged, or contradicts its manifest list.
            BadRequest: The change needs too much memory.
        """

        async def read_block(manifest: ManifestFile) -> Block:
            # Cache the block, because the writers of a table read mostly the same manifests.
            block = self._blocks.get(manifest.manifest_path)
            if block is None:
                data = await self.read_encoded(manifest)
                block = await _run_by_size(len(data), lambda: _decode_to_block(data, manifest.manifest_path))
                self._blocks.put(manifest.manifest_path, block, block.size_bytes)
            # Refuse delete files (content 1) in a manifest that is listed as a manifest of data files (content 0).
            differs = block.spec_id != manifest.partition_spec_id or block.content > manifest.content
            if block.rows and differs:
                raise Corrupt(
                    f"The spec or the content of manifest {manifest.manifest_path} differs from its manifest list"
                )
            if memory is not None:
                memory.hold(("block", manifest.manifest_path), block.size_bytes)
            return block

        return await gather([partial(read_block, manifest) for manifest in manifests], MANIFESTS_CONCURRENT_MAX)

    async def find_listing_manifests(
        self, manifests: Sequence[ManifestFile], paths: Collection[str], *, referenced: bool = False
    ) -> list[ManifestFile]:
        """Return the manifests that may list a live file at one of the paths.

        Hashes of paths are compared. Two paths may have the same hash, so a returned manifest need not list the path.

        Args:
            referenced: Whether to return the manifests that may list a delete file which refers to one of the paths.
        """
        searched_hashes = await run_by_count(len(paths), partial(hash_paths, paths))
        if not len(searched_hashes):
            return []
        hashes_of_manifests = [self._path_hashes.get(manifest.manifest_path) for manifest in manifests]
        uncached_manifests = [
            manifest for manifest, hashes in zip(manifests, hashes_of_manifests, strict=True) if hashes is None
        ]
        if uncached_manifests:
            work = [partial(self._read_path_hashes, manifest) for manifest in uncached_manifests]
            new_hashes = iter(await gather(work, MANIFESTS_CONCURRENT_MAX))
            hashes_of_manifests = [next(new_hashes) if hashes is None else hashes for hashes in hashes_of_manifests]
        candidates = [
            hashes.referenced if referenced else hashes.paths for hashes in hashes_of_manifests if hashes is not None
        ]
        return await _find_listing_manifests(list(zip(manifests, candidates, strict=True)), searched_hashes)

    async def find_listing_manifests_in_cache(
        self, manifests: Sequence[ManifestFile], paths: Collection[str]
    ) -> list[ManifestFile]:
        """Return the manifests that may list one of the paths. Only manifests with cached path hashes are searched."""
        searched_hashes = await run_by_count(len(paths), partial(hash_paths, paths))
        hashes_by_manifest = [(manifest, self._path_hashes.get(manifest.manifest_path)) for manifest in manifests]
        return await _find_listing_manifests(
            [(manifest, hashes.paths) for manifest, hashes in hashes_by_manifest if hashes is not None],
            searched_hashes,
        )

    async def _read_path_hashes(self, manifest: ManifestFile) -> PathHashes:
        path_hashes = self._path_hashes.get(manifest.manifest_path)
        if path_hashes is None:
            # The block is not counted, because only its hashes stay in memory.
            (block,) = await self._decode_blocks([manifest], None)
            path_hashes = _compute_path_hashes(manifest, block)
            self._path_hashes.put(manifest.manifest_path, path_hashes, path_hashes.size_bytes)
        return path_hashes

    async def _read(self, location: str, description: str) -> bytes:
        try:
            return await self._objects.read(location, limit_bytes=self._limit_bytes)
        except ObjectMissing:
            raise Corrupt(f"The {description} {location} is missing in storage") from None


def hash_paths(paths: Iterable[str]) -> Hashes:
    """Return the sorted hashes of the paths as uint64[n]."""
    return np.sort(np.array([hash_key(path.encode(), _SEED) for path in paths], dtype=np.uint64))


def hash_file_paths(files: Sequence[ContentFile]) -> PathHashes:
    """Return the hashes of a manifest with these live files."""
    return PathHashes(
        hash_paths({file.file_path for file in files}),
        hash_paths({file.referenced_data_file for file in files if file.referenced_data_file is not None}),
    )


async def _find_listing_manifests(
    candidates: Sequence[tuple[ManifestFile, Hashes]], searched_hashes: Hashes
) -> list[ManifestFile]:
    """Return the manifests that have at least one of the searched hashes."""

    if not candidates or not len(searched_hashes):
        return []
    total = sum(len(hashes) for _, hashes in candidates)

    def find() -> list[ManifestFile]:
        # Usually no manifest has any of the searched hashes. Searching the hashes of all manifests together takes as
        # long as searching the hashes of one manifest.
        searches_together = total <= _COMBINED_HASHES_MAX and len(candidates) > 1
        if searches_together and not _has_any(np.concatenate([hashes for _, hashes in candidates]), searched_hashes):
            return []
        return [manifest for manifest, hashes in candidates if _intersects(hashes, searched_hashes)]

    compared_hashes = sum(min(len(hashes), len(searched_hashes)) for _, hashes in candidates)
    return await run_by_count(compared_hashes + len(candidates), find)


def _intersects(left: Hashes, right: Hashes) -> bool:
    """Return whether two sorted arrays have a common value."""
    smaller, larger = (left, right) if len(left) <= len(right) else (right, left)
    if not len(smaller):
        return False
    return _has_any(smaller, larger)


def _has_any(values: Hashes, sorted_hashes: Hashes) -> bool:
    """Return whether one of the values is in `sorted_hashes`, which is sorted and not empty.

    The search gives the position of each value. At the end of the array, the position is clipped to the last hash.
    """
    return bool((sorted_hashes.take(sorted_hashes.searchsorted(values), mode="clip") == values).any())


def _decode_to_block(data: bytes, location: str) -> Block:
    return Block(b"".join(encode_block(decode_manifest(data, location))))


def _compute_path_hashes(manifest: ManifestFile, block: Block) -> PathHashes:
    files = find_files_by_prefix(TableView((manifest,), (block,)))
    hash_lists = []
    for name in ("file_path", "referenced_data_file"):
        texts = files.read_texts(name)
        hashes = _hash.hash_spans(texts.data, texts.ends, _SEED)
        hash_lists.append(np.unique(hashes[texts.present != 0]))
    return PathHashes(*hash_lists)


async def run_by_count(entries: int, work: Callable[[], T]) -> T:
    """Run `work`, which must be pure, and return its result. For many entries, the work runs in a thread.

    A change may add or remove hundreds of thousands of files, and the event loop must not be blocked for more than a
    few milliseconds.

    Args:
        entries: The number of manifest entries that the work processes.
    """
    return work() if entries <= _IN_LOOP_ENTRIES_MAX else await asyncio.to_thread(work)


async def _run_by_size(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _IN_LOOP_BYTES_MAX else await asyncio.to_thread(work)
