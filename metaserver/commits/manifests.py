"""Manifests and manifest lists as commits need them: read, remembered for a while, asked which of them lists a file.

A commit on a table of a million files must not read them all, so of each manifest 8 bytes a file are kept: hashes of
paths, which tell where a file may be. What they point to is then read and compared; a hash alone decides nothing. What
this process has written itself it need not read back. Manifests never change, so nothing here is ever invalidated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cache.memory import MemoryCache
from cache.single_flight import SingleFlight
from metaserver.errors import BadRequest, Corrupt, ObjectMissing
from metaserver.gathering import gathered
from metaserver.iceberg.manifests.content_file import ContentFile
from metaserver.iceberg.manifests.manifest import ManifestFile, decode_manifest, decode_manifest_list
from metaserver.iceberg.manifests.writer import ManifestEntry, read_entries
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.index.blocks.block import Block, encode_block
from metaserver.index.kernels import _hash
from metaserver.index.keys.hashing import hash_key
from metaserver.objects.port import ObjectStore
from metaserver.planner.lookup.lookup import lookup
from metaserver.planner.view.view import TableView

T = TypeVar("T")
Hashes = npt.NDArray[np.uint64]
AT_ONCE = 16
"""Manifests of one commit that are read or decoded at a time."""
_SEED = 0
_LIST_BYTES = 1000
"""Memory of one entry of a manifest list, rounded up."""
_SHARES = 4
"""Of the budget, each is for one of: lists, manifests as they are, the same as blocks, hashes of names."""
_IN_THREAD_BYTES = 64 << 10
"""Larger manifests are decoded in a thread."""


class PathHashes(NamedTuple):
    """Of one manifest: hashes of the paths of its live files, and of those that its delete files refer to. Sorted."""

    paths: Hashes
    referenced: Hashes

    @property
    def size_bytes(self) -> int:
        return int(self.paths.nbytes + self.referenced.nbytes)


class Manifests:
    """Belongs to one event loop."""

    def __init__(self, objects: ObjectStore, *, budget_bytes: int, limit_bytes: int) -> None:
        """`limit_bytes`: of one manifest or manifest list."""
        self._objects = objects
        self._limit_bytes = limit_bytes
        self._lists: MemoryCache[str, tuple[ManifestFile, ...]] = MemoryCache(budget_bytes // _SHARES)
        self._data: MemoryCache[str, bytes] = MemoryCache(budget_bytes // _SHARES)
        self._blocks: MemoryCache[str, Block] = MemoryCache(budget_bytes // _SHARES)
        self._names: MemoryCache[str, PathHashes] = MemoryCache(budget_bytes // _SHARES)
        self._reading: SingleFlight[str, bytes] = SingleFlight()

    async def listed(self, snapshot: Snapshot | None) -> tuple[ManifestFile, ...]:
        """Those of a snapshot, in the order of its list. Corrupt naming the list."""
        if snapshot is None:
            return ()
        location = snapshot.manifest_list
        if location is None:
            raise BadRequest(
                f"Snapshot {snapshot.snapshot_id} has no manifest list, as early tables of format version 1; "
                "have an engine rewrite the table's manifests first"
            )
        kept = self._lists.get(location)
        if kept is None:
            data = await self._read(location, "manifest list")
            kept = await _maybe_in_thread(len(data), lambda: decode_manifest_list(data, location))
            self.remember_list(location, kept)
        return kept

    def remember_list(self, location: str, manifests: tuple[ManifestFile, ...]) -> None:
        """What was just written."""
        self._lists.put(location, manifests, len(manifests) * _LIST_BYTES)

    def remember(self, location: str, data: bytes, names: PathHashes) -> None:
        """A manifest that was just written."""
        self._data.put(location, data, len(data))
        self._names.put(location, names, names.size_bytes)

    async def data(self, manifest: ManifestFile) -> bytes:
        """The manifest as it is stored. Corrupt where it is not what its list says."""
        location = manifest.manifest_path
        kept = self._data.get(location)
        if kept is None:
            kept = await self._reading.run(location, lambda: self._read(location, "manifest"))
            self._data.put(location, kept, len(kept))
        if len(kept) < manifest.manifest_length:
            # Avro cannot tell: cut off between two of its blocks, it reads as a whole file.
            raise Corrupt(f"Manifest {location} has {len(kept)} bytes; its list says {manifest.manifest_length}")
        return kept

    async def entries(self, manifest: ManifestFile, metadata: TableMetadata) -> list[ManifestEntry]:
        """The live ones, whole. Corrupt naming the manifest."""
        data = await self.data(manifest)
        return await _maybe_in_thread(len(data), lambda: read_entries(data, manifest, metadata))

    async def blocks(self, manifests: Sequence[ManifestFile]) -> list[Block]:
        """Their live entries as columns. Corrupt naming a manifest."""

        async def one(manifest: ManifestFile) -> Block:
            # Writers of one table look at much the same files again and again.
            kept = self._blocks.get(manifest.manifest_path)
            if kept is None:
                data = await self.data(manifest)
                kept = await _maybe_in_thread(len(data), lambda: _block(data, manifest.manifest_path))
                self._blocks.put(manifest.manifest_path, kept, kept.size_bytes)
            if kept.spec_id != manifest.partition_spec_id or kept.content > manifest.content:
                raise Corrupt(
                    f"Manifest {manifest.manifest_path} is of another spec, or of deletes, than its list says"
                )
            return kept

        return await gathered([partial(one, manifest) for manifest in manifests], AT_ONCE)

    async def holding(
        self, manifests: Sequence[ManifestFile], paths: Iterable[str], *, referenced: bool = False
    ) -> list[ManifestFile]:
        """Those that may list a live file at one of the paths, or (`referenced`) a delete file that refers to one."""
        wanted = hashes_of(paths)
        if not len(wanted):
            return []
        names = [self._names.get(manifest.manifest_path) for manifest in manifests]
        unknown = [manifest for manifest, one in zip(manifests, names, strict=True) if one is None]
        if unknown:
            fresh = iter(await gathered([partial(self._names_of, manifest) for manifest in unknown], AT_ONCE))
            names = [next(fresh) if hashes is None else hashes for hashes in names]
        found = [hashes.referenced if referenced else hashes.paths for hashes in names if hashes is not None]
        return [manifest for manifest, mine in zip(manifests, found, strict=True) if _meet(mine, wanted)]

    def known_to_hold(self, manifests: Sequence[ManifestFile], paths: Iterable[str]) -> list[ManifestFile]:
        """As `holding`, of those manifests alone whose names are in memory."""
        wanted = hashes_of(paths)
        known = [(manifest, self._names.get(manifest.manifest_path)) for manifest in manifests]
        return [manifest for manifest, names in known if names is not None and _meet(names.paths, wanted)]

    async def _names_of(self, manifest: ManifestFile) -> PathHashes:
        kept = self._names.get(manifest.manifest_path)
        if kept is None:
            (block,) = await self.blocks([manifest])
            kept = _names(manifest, block)
            self._names.put(manifest.manifest_path, kept, kept.size_bytes)
        return kept

    async def _read(self, location: str, what: str) -> bytes:
        try:
            return await self._objects.read(location, limit_bytes=self._limit_bytes)
        except ObjectMissing:
            raise Corrupt(f"The {what} {location} is gone from storage") from None


def hashes_of(paths: Iterable[str]) -> Hashes:
    """uint64[n], sorted."""
    return np.sort(np.array([hash_key(path.encode(), _SEED) for path in paths], dtype=np.uint64))


def names_of(files: Sequence[ContentFile]) -> PathHashes:
    """Of a manifest that lists these files live."""
    return PathHashes(
        hashes_of({file.file_path for file in files}),
        hashes_of({file.referenced_data_file for file in files if file.referenced_data_file is not None}),
    )


def _meet(ordered: Hashes, wanted: Hashes) -> bool:
    """Whether two sorted arrays have a value in common."""
    if not len(ordered) or not len(wanted):
        return False
    return bool((ordered.take(ordered.searchsorted(wanted), mode="clip") == wanted).any())


def _block(data: bytes, location: str) -> Block:
    return Block(b"".join(encode_block(decode_manifest(data, location))))


def _names(manifest: ManifestFile, block: Block) -> PathHashes:
    found = lookup(TableView((manifest,), (block,)))
    hashed = []
    for name in ("file_path", "referenced_data_file"):
        texts = found.texts(name)
        hashes = _hash.hash_spans(texts.data, texts.ends, _SEED)
        hashed.append(np.unique(hashes[texts.present != 0]))
    return PathHashes(*hashed)


async def _maybe_in_thread(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _IN_THREAD_BYTES else await asyncio.to_thread(work)
