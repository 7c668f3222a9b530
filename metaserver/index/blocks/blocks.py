"""Loader of the blocks of manifests. It reads them through the cache tiers, decodes them once, and shares them.

`live_bytes` is the memory of all live blocks of this process, including derived values. This module does not reference
blocks. Views reference them (`metaserver/planner`), and a block is freed with the last view of a snapshot that lists
its manifest. So `live_bytes` is the memory in use, and the owner of the views can limit it to the budget.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from seamark.cache.stack import Stack
from seamark.formats.iceberg.manifests.manifest import DecodedList, ManifestFile, decode_list
from seamark.formats.runtime.errors import Corrupt, ObjectMissing
from seamark.metaserver.index.blocks.block import VERSION, Block, BlockMemory
from seamark.metaserver.index.blocks.decoding import Decoders
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.runtime.gathering import gather

T = TypeVar("T")

_OPENED_TOGETHER_MIN = 8
"""The minimum number of blocks on the local disk that are opened together in a thread."""


class Blocks:
    """Loads blocks.

    An instance belongs to one event loop.
    """

    def __init__(
        self,
        objects: ObjectStore,
        stack: Stack[Block],
        executor: ThreadPoolExecutor,
        decoders: Decoders,
        *,
        stored_objects: ObjectStore,
        manifests_in_flight: int,
        limit_bytes: int,
    ) -> None:
        """Create a loader.

        Args:
            objects: The storage of manifests, possibly with caches.
            stack: The caches of blocks in memory and on the local disk.
            executor: The threads that decode manifest lists.
            decoders: Decodes manifests in threads or processes.
            stored_objects: The storage itself, without the caches that `objects` may have.
            manifests_in_flight: The number of manifests that are read or decoded concurrently.
            limit_bytes: The maximum size of a manifest or manifest list.
        """
        self._objects = objects
        self._stored_objects = stored_objects
        self._stack = stack
        self._executor = executor
        self._decoders = decoders
        self._limit_bytes = limit_bytes
        self._slots = asyncio.Semaphore(manifests_in_flight)
        self._alive: weakref.WeakValueDictionary[str, Block] = weakref.WeakValueDictionary()
        self._live_bytes = 0
        self._changes: deque[int] = deque()
        """Changes of the live memory in bytes: the growth of derived values, and the negative sizes of freed blocks.

        Any thread may append changes, because appending is atomic.
        """
        self._damaged_blocks: deque[tuple[str, weakref.ref[Block]]] = deque()
        """Damaged blocks, with their keys. Any thread may append them.

        A different block may be in use for the key of a damaged block.
        """
        self.decoded = 0
        """The number of manifests that were decoded since the start."""

    @property
    def live_bytes(self) -> int:
        while self._changes:
            self._live_bytes += self._changes.popleft()
        return self._live_bytes

    @property
    def live_blocks(self) -> int:
        return len(self._alive)

    @property
    def has_damaged(self) -> bool:
        """Whether a block was found damaged since the last `remove_damaged`."""
        return bool(self._damaged_blocks)

    def find_damaged(self) -> set[Block]:
        """Return the damaged blocks that are still in use."""
        return {block for _, reference in list(self._damaged_blocks) if (block := reference()) is not None}

    async def remove_damaged(self) -> None:
        """Remove damaged blocks from the caches, so that their manifests are decoded again."""
        while self._damaged_blocks:
            key, reference = self._damaged_blocks.popleft()
            # No other block has replaced the damaged block.
            if self._alive.get(key) in (None, reference()):
                self._alive.pop(key, None)
                await self._stack.remove(key)

    async def read_manifest_list(self, location: str, neighbour: DecodedList | None = None) -> DecodedList:
        """Return a manifest list.

        Args:
            location: The location of the file.
            neighbour: The decoded manifest list of a neighbouring snapshot, whose manifests the result may share.

        Raises:
            Corrupt: The file is missing or invalid.
        """

        async def decode(objects: ObjectStore) -> DecodedList:
            data = await self._read(location, "manifest list", objects)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, decode_list, data, location, neighbour)

        return await self._decode_with_retry(decode)

    def list_missing(self, manifests: Sequence[ManifestFile]) -> list[ManifestFile]:
        """Return the manifests whose blocks are not in memory."""
        return [manifest for manifest in manifests if _make_cache_key(manifest) not in self._alive]

    async def load(self, manifests: Sequence[ManifestFile]) -> list[Block]:
        """Return the blocks in the order of the manifests.

        Raises:
            Corrupt: A manifest is missing, damaged, or contradicts the manifest list; the message names it.
        """
        keys = [_make_cache_key(manifest) for manifest in manifests]
        blocks = {key: block for key in keys if (block := self._alive.get(key)) is not None}
        missing = {key: manifest for key, manifest in zip(keys, manifests, strict=True) if key not in blocks}
        if len(missing) >= _OPENED_TOGETHER_MIN:  # First open the blocks on the local disk together, which is faster.
            for key, block in zip(missing, await self._stack.get_stored_values(list(missing), Block), strict=True):
                if block is not None:
                    blocks[key] = self._register_in_use(key, block)
            missing = {key: manifest for key, manifest in missing.items() if key not in blocks}
        if missing:
            blocks.update(await self._load_missing_blocks(missing))
        return _check_blocks(manifests, [blocks[key] for key in keys])

    async def _load_missing_blocks(self, missing_manifests: Mapping[str, ManifestFile]) -> dict[str, Block]:
        """Return the blocks of manifests by key, from the disk or from the storage."""
        size_bytes = sum(manifest.manifest_length for manifest in missing_manifests.values())
        with self._decoders.expect_manifests(size_bytes):
            return dict(
                await gather([partial(self._load_block, key, manifest) for key, manifest in missing_manifests.items()])
            )

    async def _load_block(self, key: str, manifest: ManifestFile) -> tuple[str, Block]:
        """Return a key, and the block of its manifest from the disk or from the storage."""
        async with self._slots:
            block = await self._stack.get(key, lambda: self._fetch_block(manifest), Block)
        return key, self._register_in_use(key, block)

    def _register_in_use(self, key: str, block: Block) -> Block:
        """Make an opened block the block of its key, and count its memory until it is freed.

        Returns:
            The block with the same key that is already in use. If there is none, the given block.
        """
        block_in_use = self._alive.get(key)
        if block_in_use is not None:
            return block_in_use
        self._alive[key] = block
        block.on_damage = partial(self._damaged_blocks.append, (key, weakref.ref(block)))
        memory = block.memory
        memory.on_growth = self._changes.append
        self._live_bytes += memory.size_bytes
        weakref.finalize(block, _release_memory, self._changes, memory)
        return block

    async def _fetch_block(self, manifest: ManifestFile) -> bytes | memoryview:
        return await self._decode_with_retry(partial(self._decode_manifest, manifest))

    async def _decode_with_retry(self, decode: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """Return the result of `decode`.

        If the data are damaged, the cause may be a cache. So `decode` is called again with the storage itself.
        """
        try:
            return await decode(self._objects)
        except Corrupt:
            if self._stored_objects is self._objects:
                raise
            return await decode(self._stored_objects)

    async def _decode_manifest(self, manifest: ManifestFile, objects: ObjectStore) -> bytes | memoryview:
        """Read and decode a manifest, and return the memory of its block.

        Raises:
            Corrupt: The manifest is missing, damaged, or contradicts the manifest list.
        """
        location = manifest.manifest_path
        data = await self._read(location, "manifest", objects)
        if len(data) < manifest.manifest_length:
            # Avro does not detect a truncated file that ends between two of its blocks.
            raise Corrupt(
                f"Manifest {location} has {len(data)} bytes; its manifest list states {manifest.manifest_length}"
            )
        self.decoded += 1
        block_memory = await self._decoders.decode(data, location)
        # Check the block before it is cached. A wrong block in the cache would stay, but the next read may be right.
        _check_manifest(manifest, Block(block_memory))
        return block_memory

    async def _read(self, location: str, file_kind: str, objects: ObjectStore) -> bytes:
        """Read a file of the table.

        Raises:
            Corrupt: The file is missing.
        """
        try:
            return await objects.read(location, limit_bytes=self._limit_bytes)
        except ObjectMissing:
            # Do not raise NotFound: Java's client interprets a 404 as a missing plan or table.
            raise Corrupt.missing(file_kind, location) from None


def _release_memory(changes: deque[int], memory: BlockMemory) -> None:
    changes.append(-memory.size_bytes)


def _check_blocks(manifests: Sequence[ManifestFile], blocks: list[Block]) -> list[Block]:
    """Compare blocks with their manifests, and return the blocks.

    Raises:
        Corrupt: A manifest contradicts its manifest list.
    """
    for manifest, block in zip(manifests, blocks, strict=True):
        _check_manifest(manifest, block)
    return blocks


def _check_manifest(manifest: ManifestFile, block: Block) -> None:
    """Compare a manifest with its entry in the manifest list.

    Raises:
        Corrupt: The manifest and the entry have different partition specs or contents. Either of them may be wrong.
    """
    if not manifest.manifest_length or not block.rows:
        # The length is 0 if version 1 metadata list the manifest directly. Such an entry has no spec and no content.
        # A manifest without live files changes no answer, and DuckDB 1.5.5 states a wrong spec for such manifests.
        return
    if block.spec_id != manifest.partition_spec_id:
        raise Corrupt(
            f"Manifest {block.location} has partition spec {block.spec_id}; "
            f"its manifest list states {manifest.partition_spec_id}"
        )
    # If the header of a manifest states no content, its block has the content 0. So the content 0 in a block is also
    # accepted for a manifest of delete files.
    if block.content > manifest.content:
        raise Corrupt(f"Manifest {block.location} lists delete files; its manifest list states data files")


def _make_cache_key(manifest: ManifestFile) -> str:
    """Return the key of a manifest's block in the caches.

    It contains the version of the block format, so that a new version of the server reads no old blocks.
    """
    return f"block/{VERSION}/{manifest.manifest_path}?{manifest.manifest_length}"
