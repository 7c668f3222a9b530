"""Index files for lookups: those of one definition, here or afar, and what they describe of a view.

The rule it keeps: a lookup waits for index files as long as it takes, but not for a large one that can be asked by a
few range reads, while that is fetched for those who ask next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from metaserver.index.files.definitions import IndexDefinition
from metaserver.index.files.index_file import FilesTable
from metaserver.index.files.indexes import Indexes, OpenIndex
from metaserver.index.files.remote import ColdIndex
from metaserver.index.keys.hashing import Hashes
from metaserver.index.kinds.bitmap import Bitmap
from metaserver.index.kinds.record import Found
from metaserver.planner.indexes.coverage import Coverage, coverages
from metaserver.planner.view.view import TableView
from metaserver.store.port import Entry, RegisteredIndexFile


class RemoteRows(NamedTuple):
    """What a record index that is not here said of the keys of a lookup."""

    location: str
    files: FilesTable
    found: Found


class RecordIndex(NamedTuple):
    """`opened` and `asked` by location."""

    coverage: Coverage
    opened: Mapping[str, OpenIndex]
    asked: Mapping[str, RemoteRows]


@dataclass(frozen=True)
class BitmapIndex:
    """A bitmap index of one term: what it describes of a view, and its files by location."""

    definition: IndexDefinition
    coverage: Coverage
    files: dict[str, OpenIndex | ColdIndex]
    listed: Mapping[str, RegisteredIndexFile]

    def bitmap(self, location: str) -> Bitmap | None:
        """None where it cannot be used any more."""
        found = self.files.get(location)
        if found is None:
            return None
        index = found.bitmap.bitmap if isinstance(found, ColdIndex) else found.index
        assert isinstance(index, Bitmap)
        return index


class IndexResolver:
    """Belongs to one event loop."""

    def __init__(self, indexes: Indexes) -> None:
        self._indexes = indexes

    async def records(
        self, view: TableView, definition: IndexDefinition, entry: Entry, hashes: tuple[Hashes, Hashes] | None
    ) -> RecordIndex:
        """To look for keys. `hashes`, their halves, where these are few: then index files may be asked from afar."""

        async def ask(cold: ColdIndex) -> RemoteRows | None:
            found = None if hashes is None else await cold.record.rows(*hashes)
            return None if found is None else RemoteRows(cold.location, cold.files, found)

        listed = (await self._indexes.registry.files(entry)).live(definition.id)
        if hashes is None:
            ready: Sequence[OpenIndex | RemoteRows | None] = await asyncio.gather(*map(self._indexes.open, listed))
        else:
            ready = await asyncio.gather(*(self._indexes.ready(file, ask) for file in listed))
        usable = [one for one in ready if one is not None]
        coverage = (await coverages(view, {definition.id: usable}))[definition.id]
        opened = {one.location: one for one in usable if isinstance(one, OpenIndex)}
        return RecordIndex(coverage, opened, {one.location: one for one in usable if isinstance(one, RemoteRows)})

    async def bitmaps(self, view: TableView, definition: IndexDefinition, entry: Entry) -> BitmapIndex:
        """To ask for rows of files, which `load` makes ready."""

        async def ask(cold: ColdIndex) -> ColdIndex:
            return cold

        listed = (await self._indexes.registry.files(entry)).live(definition.id)
        ready = await asyncio.gather(*(self._indexes.ready(file, ask) for file in listed))
        usable = [one for one in ready if one is not None]
        coverage = (await coverages(view, {definition.id: usable}))[definition.id]
        files = {one.location: one for one in usable}
        return BitmapIndex(definition, coverage, files, {file.location: file for file in listed})

    async def load(self, index: BitmapIndex, places: Iterable[int]) -> None:
        """So that the index can be asked for the rows of the data files at these places among all of the view. What
        cannot be had by range is waited for; what cannot be used is left out of `files`."""
        wanted: dict[str, list[int]] = {}
        for place in places:
            found = index.coverage.file_at(place)
            if found is not None and isinstance(index.files.get(found[0]), ColdIndex):
                wanted.setdefault(found[0], []).append(found[1])
        await asyncio.gather(*(self._load(index, location, files) for location, files in wanted.items()))

    async def _load(self, index: BitmapIndex, location: str, files: Sequence[int]) -> None:
        file, cold = index.listed[location], index.files.pop(location)
        assert isinstance(cold, ColdIndex)

        async def load(_: ColdIndex) -> ColdIndex | None:
            return cold if await cold.bitmap.load_rows(files) else None

        ready = await self._indexes.ready(file, load)
        if ready is not None:
            index.files[location] = ready

    async def suspect(self, entry: Entry, damaged: Mapping[str, str]) -> None:
        """Has index files looked at on which a question broke. Never raises."""
        if damaged:
            listed = await self._indexes.registry.files(entry)
            files = [file for file in listed.files if file.location in damaged]
            await self._indexes.suspect(files, "; ".join(damaged.values()))
