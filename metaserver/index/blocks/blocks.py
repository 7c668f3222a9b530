"""Blocks by manifest: read through the cache tiers, decoded once, shared by everyone who still uses them.

The rule it keeps: `live_bytes` is what the blocks alive in this process occupy, whoever holds them. Nothing here holds
a block: views do (`metaserver/planner`), and a block dies with the last view of a snapshot that lists its manifest. So
the account is of real memory, and the owner of the views can keep it within the budget.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cache.stack import Stack
from metaserver.errors import Corrupt, ObjectMissing
from metaserver.iceberg.manifests.manifest import ManifestFile, decode_manifest_list
from metaserver.index.blocks.block import VERSION, Block
from metaserver.index.blocks.decoding import Decoders
from metaserver.objects.port import ObjectStore


class Blocks:
    """Belongs to one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        stack: Stack[Block],
        executor: ThreadPoolExecutor,
        decoders: Decoders,
        *,
        under_way: int,
        limit_bytes: int,
    ) -> None:
        """`under_way`: manifests read or decoded at once; `limit_bytes`: of a manifest or manifest list."""
        self._objects = objects
        self._stack = stack
        self._executor = executor
        self._decoders = decoders
        self._limit_bytes = limit_bytes
        self._slots = asyncio.Semaphore(under_way)
        self._alive: weakref.WeakValueDictionary[str, Block] = weakref.WeakValueDictionary()
        self._gained = 0
        self._freed: deque[int] = deque()
        """Sizes of blocks that died; a finaliser may run in any thread, and appending is atomic."""
        self.decoded = 0
        """Manifests decoded since the start."""

    @property
    def live_bytes(self) -> int:
        while self._freed:
            self._gained -= self._freed.popleft()
        return self._gained

    @property
    def live_blocks(self) -> int:
        return len(self._alive)

    async def manifest_list(self, location: str) -> tuple[ManifestFile, ...]:
        """Corrupt when the file is gone, or is no manifest list."""
        data = await self._read(location, "manifest list")
        return await asyncio.get_running_loop().run_in_executor(self._executor, decode_manifest_list, data, location)

    def missing(self, manifests: Sequence[ManifestFile]) -> list[ManifestFile]:
        """Those whose blocks are not in this process's memory."""
        return [manifest for manifest in manifests if _key(manifest) not in self._alive]

    async def load(self, manifests: Sequence[ManifestFile]) -> list[Block]:
        """In the order given. Corrupt names a manifest that is gone or broken, or is not what its list says."""
        found = [self._alive.get(_key(manifest)) for manifest in manifests]
        absent = [manifest for manifest, block in zip(manifests, found, strict=True) if block is None]
        if not absent:
            return _agreeing(manifests, [block for block in found if block is not None])
        tasks: list[asyncio.Task[tuple[str, Block]]] = []
        try:
            size_bytes = sum(manifest.manifest_length for manifest in absent)
            with self._decoders.many(size_bytes):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._load_one(manifest)) for manifest in absent]
            loaded = dict(task.result() for task in tasks)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one of possibly many broken files is enough to say
        finally:
            # The error's traceback holds this frame, and a task the error: a cycle that would keep the others' blocks.
            tasks.clear()
        blocks = [
            block if block is not None else loaded[_key(manifest)]
            for manifest, block in zip(manifests, found, strict=True)
        ]
        return _agreeing(manifests, blocks)

    async def _load_one(self, manifest: ManifestFile) -> tuple[str, Block]:
        key = _key(manifest)
        async with self._slots:
            block = await self._stack.get(key, lambda: self._fetch(manifest), Block)
        known = self._alive.get(key)
        if known is not None:
            return key, known
        self._alive[key] = block
        self._gained += block.size_bytes
        weakref.finalize(block, self._freed.append, block.size_bytes)
        return key, block

    async def _fetch(self, manifest: ManifestFile) -> bytes | memoryview:
        location = manifest.manifest_path
        data = await self._read(location, "manifest")
        if len(data) < manifest.manifest_length:
            # Avro cannot tell: cut off between two of its blocks, it reads as a whole file.
            raise Corrupt(
                f"Manifest {location} has {len(data)} bytes; its manifest list says {manifest.manifest_length}"
            )
        self.decoded += 1
        packed = await self._decoders.decode(data, location)
        _check(manifest, Block(packed))  # before it is cached: storage may give the right bytes the next time
        return packed

    async def _read(self, location: str, what: str) -> bytes:
        try:
            return await self._objects.read(location, limit_bytes=self._limit_bytes)
        except ObjectMissing:
            # Not NotFound: to Java's client a 404 is a plan, or a table, that there is not.
            raise Corrupt(f"The {what} {location} is gone from storage") from None


def _agreeing(manifests: Sequence[ManifestFile], blocks: list[Block]) -> list[Block]:
    """The blocks. Corrupt where a manifest disagrees with its list."""
    for manifest, block in zip(manifests, blocks, strict=True):
        _check(manifest, block)
    return blocks


def _check(manifest: ManifestFile, block: Block) -> None:
    """Corrupt where the manifest has another partition spec, or another content, than its manifest list says: either
    could be wrong, and so would the plan."""
    if not manifest.manifest_length:
        return  # version 1 metadata names the manifest and says nothing about it
    if block.spec_id != manifest.partition_spec_id:
        raise Corrupt(
            f"Manifest {block.location} is of partition spec {block.spec_id}; "
            f"its manifest list says {manifest.partition_spec_id}"
        )
    if block.content > manifest.content:
        raise Corrupt(f"Manifest {block.location} lists delete files; its manifest list says data files")


def _key(manifest: ManifestFile) -> str:
    return f"block/{VERSION}/{manifest.manifest_path}?{manifest.manifest_length}"
