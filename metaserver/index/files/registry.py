"""The index files of tables, as the pointer store lists them: what a plan may use, what a merge replaces.

The rule: the list comes with a version that the table's entry carries, so a plan that has read the pointer knows
whether what is kept here is still so, and asks nothing more. A list that is newer than the entry does no harm: an index
file describes immutable data files, so it is right for every snapshot that holds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import CommitUnknown
from seamark.metaserver.store.port import (
    Entry,
    ForgetIndexFile,
    IndexFileState,
    Operation,
    PointerStore,
    QuarantineIndexFile,
    RegisteredIndexFile,
    ReplaceIndexFiles,
)

_BUDGET_BYTES = 32 << 20
_BYTES_A_FILE = 1024
"""Memory of one row: three texts of some 150 bytes, and the struct."""


class IndexFiles:
    """A table's index files at one index version. Nothing in it changes."""

    def __init__(self, version: int, files: Sequence[RegisteredIndexFile]) -> None:
        self.version = version
        self.files = tuple(files)
        """In every state, oldest first."""
        live: dict[str, list[RegisteredIndexFile]] = {}
        for file in self.files:
            if file.state is IndexFileState.LIVE:
                live.setdefault(file.definition, []).append(file)
        self._live = {definition: tuple(some) for definition, some in live.items()}

    def live(self, definition_id: str) -> tuple[RegisteredIndexFile, ...]:
        """Those that plans may use, oldest first."""
        return self._live.get(definition_id, ())

    @property
    def definitions(self) -> tuple[str, ...]:
        """Ids of the definitions that have live files, whether or not the table still has them."""
        return tuple(self._live)


class Registry:
    """Read-through, one flight per table and version, bounded by bytes."""

    def __init__(self, store: PointerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cache: MemoryCache[tuple[str, int], IndexFiles] = MemoryCache(_BUDGET_BYTES)
        self._flights: SingleFlight[tuple[str, int], IndexFiles] = SingleFlight()

    async def files(self, entry: Entry) -> IndexFiles:
        """Of the table that the entry leads to: as of its index version, or newer."""
        if entry.index_version == 0:
            return IndexFiles(0, ())
        key = (entry.uuid, entry.index_version)
        cached = self._cache.get(key)
        return cached if cached is not None else await self._flights.run(key, lambda: self._fetch(key))

    async def _fetch(self, key: tuple[str, int]) -> IndexFiles:
        uuid, version = key
        files = IndexFiles(version, await self._store.index_files(uuid))
        self._cache.put(key, files, _BYTES_A_FILE * (1 + len(files.files)))
        return files

    async def replace(
        self, uuid: str, definition_id: str, *, add: Sequence[RegisteredIndexFile], remove: Sequence[str] = ()
    ) -> int:
        """Adds live files and supersedes those at `remove`, in one transaction. The table's new index version.

        CommitConflict unless all of `remove` are live; NoSuchTable when the table has no name any more. Said again
        with the same `add`, it changes nothing, so a lost reply is settled by asking once more.
        """
        operation = ReplaceIndexFiles(uuid, definition_id, tuple(add), tuple(remove), self._clock.now_ms())
        try:
            return await self._change(operation)
        except CommitUnknown:
            if not add:
                raise
            return await self._change(operation)

    async def quarantine(self, uuid: str, location: str, reason: str) -> int:
        """Plans use it no more. NotFound if it is not registered."""
        return await self._change(QuarantineIndexFile(uuid, location, reason, self._clock.now_ms()))

    async def forget(self, uuid: str, location: str) -> int:
        """After its file was deleted. CommitConflict if it is live."""
        return await self._change(ForgetIndexFile(uuid, location, self._clock.now_ms()))

    async def _change(self, operation: Operation) -> int:
        results = await self._store.transact([operation])
        version: int = results[0]
        return version
