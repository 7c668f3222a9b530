"""The registry of the index files of tables in the pointer store. Plans use these files, and merges replace them.

Invariant: the version of a list of index files is also in the table's entry. So a plan that has read the entry knows
without a further request whether the cached list is current. A list that is newer than the entry is also correct: an
index file describes immutable data files, and is valid for every snapshot that contains them.
"""

from __future__ import annotations

from collections.abc import Sequence

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitUnknown
from seamark.metaserver.store.model import Entry, IndexFileState, RegisteredIndexFile
from seamark.metaserver.store.operations import ForgetIndexFile, Operation, QuarantineIndexFile, ReplaceIndexFiles
from seamark.metaserver.store.port import PointerStore

_BUDGET_BYTES = 32 << 20
"""The memory of the cached lists."""
_LIVE_BYTES = 8
"""The memory of an index file's reference in the tuple of live files."""


class IndexFiles:
    """The index files of a table at one index version. An instance is immutable."""

    def __init__(self, version: int, files: Sequence[RegisteredIndexFile]) -> None:
        self.version = version
        self.files = tuple(files)
        """The index files in all states, oldest first."""
        files_by_definition: dict[str, list[RegisteredIndexFile]] = {}
        for file in self.files:
            if file.state is IndexFileState.LIVE:
                files_by_definition.setdefault(file.definition, []).append(file)
        self._live = {definition: tuple(live_files) for definition, live_files in files_by_definition.items()}

    def list_live_files(self, definition_id: str) -> tuple[RegisteredIndexFile, ...]:
        """Return the files that plans may use, oldest first."""
        return self._live.get(definition_id, ())

    @property
    def definition_ids(self) -> tuple[str, ...]:
        """The ids of the definitions with live files. The table may have dropped some of these definitions."""
        return tuple(self._live)


class Registry:
    """Reads and changes the registry of index files.

    Lists of index files are cached, and concurrent reads of a table's version share one request.
    """

    def __init__(self, store: PointerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cache: MemoryCache[tuple[str, int], IndexFiles] = MemoryCache(_BUDGET_BYTES, "index-registry")
        self._flights: SingleFlight[tuple[str, int], IndexFiles] = SingleFlight()

    async def load_files(self, entry: Entry) -> IndexFiles:
        """Return the index files of the entry's table, at the index version of the entry or at a newer version."""
        if entry.index_version == 0:
            return IndexFiles(0, ())
        key = (entry.uuid, entry.index_version)
        cached_files = self._cache.get(key)
        if cached_files is not None:
            return cached_files
        return await self._flights.run(key, lambda: self._fetch_files(key))

    async def _fetch_files(self, key: tuple[str, int]) -> IndexFiles:
        uuid, version = key
        files = IndexFiles(version, await self._store.index_files(uuid))
        self._cache.put(key, files, measure_object_bytes(files.files) + _LIVE_BYTES * len(files.files))
        return files

    async def replace(
        self, uuid: str, definition_id: str, *, add: Sequence[RegisteredIndexFile], remove: Sequence[str] = ()
    ) -> int:
        """Add live files, and mark the files in `remove` as superseded, in one transaction.

        A repetition with the same `add` changes nothing. So if the answer of the database is lost, the method repeats
        the transaction once. Without added files, a repetition would fail, because the old files are no longer live.

        Returns:
            The table's new index version.

        Raises:
            CommitConflict: A file in `remove` is not live.
            NoSuchTable: No name refers to the table.
        """
        operation = ReplaceIndexFiles(uuid, definition_id, tuple(add), tuple(remove), self._clock.now_ms())
        try:
            return await self._change_files(operation)
        except CommitUnknown:
            if not add:
                raise
            return await self._change_files(operation)

    async def quarantine_file(self, uuid: str, location: str, reason: str) -> int:
        """Exclude a file from plans.

        Returns:
            The table's new index version.

        Raises:
            NotFound: The file is not registered.
        """
        return await self._change_files(QuarantineIndexFile(uuid, location, reason, self._clock.now_ms()))

    async def forget(self, uuid: str, location: str) -> int:
        """Remove the row of a file that was deleted from storage, and return the new index version of the table.

        The index version counts the changes of the table's index files.

        Raises:
            CommitConflict: The file is live.
        """
        return await self._change_files(ForgetIndexFile(uuid, location, self._clock.now_ms()))

    async def _change_files(self, operation: Operation) -> int:
        """Run an operation on index files, and return the table's new index version."""
        (version,) = await self._store.transact([operation])
        return int(version)
