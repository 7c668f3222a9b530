"""Index files for lookups: the files of one definition, in memory or remote, and their coverage of a view.

A lookup waits until its index files are loaded. The exception is a large file for which a few range reads suffice: it
is fetched in the background for later lookups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.index_file import FilesTable
from seamark.formats.index.keys.hashing import Hashes
from seamark.formats.index.kinds.bitmap import Bitmap
from seamark.formats.index.kinds.record import RowPositions
from seamark.metaserver.index.files.indexes import Indexes, OpenIndex
from seamark.metaserver.index.files.remote import RemoteIndexFile
from seamark.metaserver.planner.indexes.coverage import Coverage, compute_coverages
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import Entry, RegisteredIndexFile


class RemoteRows(NamedTuple):
    """The rows that a remotely read record index contains for the keys of a lookup."""

    location: str
    files: FilesTable
    rows: RowPositions


class RecordIndex(NamedTuple):
    """The index files of a record index, by location.

    `open_indexes` are in memory, and the values of `remote` were read by ranges.
    """

    coverage: Coverage
    open_indexes: Mapping[str, OpenIndex]
    remote: Mapping[str, RemoteRows]


@dataclass(frozen=True)
class BitmapIndex:
    """A bitmap index on one term: its coverage of a view, and its usable and registered files by location."""

    definition: IndexDefinition
    coverage: Coverage
    files: dict[str, OpenIndex | RemoteIndexFile]
    listed: Mapping[str, RegisteredIndexFile]

    def find_bitmap(self, location: str) -> Bitmap | None:
        """Return the bitmaps of an index file, or None if the file can no longer be used."""
        index_file = self.files.get(location)
        if index_file is None:
            return None
        index = index_file.bitmap.bitmap if isinstance(index_file, RemoteIndexFile) else index_file.index
        assert isinstance(index, Bitmap)
        return index


class IndexResolver:
    """Opens the index files that a lookup needs.

    An instance belongs to one event loop.
    """

    def __init__(self, indexes: Indexes) -> None:
        self._indexes = indexes

    async def open_records(
        self, view: TableView, definition: IndexDefinition, entry: Entry, hashes: tuple[Hashes, Hashes] | None
    ) -> RecordIndex:
        """Return the index files of a record index.

        Args:
            view: The view of the snapshot.
            definition: The record index, which finds the rows of a key.
            entry: The table's entry in the catalog.
            hashes: The two halves of the keys' hashes, or None if there are too many keys for remote reads.
        """

        async def probe_index(index: RemoteIndexFile) -> RemoteRows | None:
            located_rows = None if hashes is None else await index.record_index.look_up_rows(*hashes)
            return None if located_rows is None else RemoteRows(index.location, index.files, located_rows)

        live_files = (await self._indexes.registry.load_files(entry)).list_live_files(definition.id)
        if hashes is None:
            open_files: Sequence[OpenIndex | RemoteRows | None] = await asyncio.gather(
                *map(self._indexes.open, live_files)
            )
        else:
            open_files = await asyncio.gather(*(self._indexes.open_or_read(file, probe_index) for file in live_files))
        usable = [result for result in open_files if result is not None]
        coverage = (await compute_coverages(view, {definition.id: usable}))[definition.id]
        open_indexes = {index.location: index for index in usable if isinstance(index, OpenIndex)}
        return RecordIndex(
            coverage, open_indexes, {rows.location: rows for rows in usable if isinstance(rows, RemoteRows)}
        )

    async def open_bitmaps(self, view: TableView, definition: IndexDefinition, entry: Entry) -> BitmapIndex:
        """Return the files of a bitmap index. The rows of remote index files are not loaded yet; see `load`."""

        async def probe_index(index: RemoteIndexFile) -> RemoteIndexFile:
            return index

        live_files = (await self._indexes.registry.load_files(entry)).list_live_files(definition.id)
        open_files = await asyncio.gather(*(self._indexes.open_or_read(file, probe_index) for file in live_files))
        usable = [index for index in open_files if index is not None]
        coverage = (await compute_coverages(view, {definition.id: usable}))[definition.id]
        files = {index.location: index for index in usable}
        return BitmapIndex(definition, coverage, files, {file.location: file for file in live_files})

    async def load(self, index: BitmapIndex, positions: Iterable[int]) -> None:
        """Load the rows of the data files at these positions in the view.

        If an index file cannot be read by range, the method waits until the whole file is loaded. It removes index
        files that cannot be used from `index.files`.
        """
        missing_files: dict[str, list[int]] = {}
        for position in positions:
            location_and_number = index.coverage.find_index_file(position)
            if location_and_number is None:
                continue
            location, number = location_and_number
            if isinstance(index.files.get(location), RemoteIndexFile):
                missing_files.setdefault(location, []).append(number)
        await asyncio.gather(
            *(self._load_file_rows(index, location, files) for location, files in missing_files.items())
        )

    async def _load_file_rows(self, index: BitmapIndex, location: str, files: Sequence[int]) -> None:
        """Load the parts of a remote index file that describe the rows of some data files.

        If these parts cannot be loaded by range reads, the index file is read completely, and replaces the remote index
        file in `index.files`. If this also fails, the index file is removed from `index.files`.

        Args:
            index: The index.
            location: The location of the index file.
            files: The numbers of the data files in the index file.
        """
        file, remote = index.listed[location], index.files.pop(location)
        assert isinstance(remote, RemoteIndexFile)

        async def load(_: RemoteIndexFile) -> RemoteIndexFile | None:
            return remote if await remote.bitmap.load_rows(files) else None

        load_result = await self._indexes.open_or_read(file, load)
        if load_result is not None:
            index.files[location] = load_result

    async def schedule_verification(self, entry: Entry, damaged_files: Mapping[str, str]) -> None:
        """Verify the stored objects of damaged index files, and wait for the result.

        An index file whose stored object is damaged too is quarantined. The verification itself raises no error.

        Args:
            entry: The entry of the table.
            damaged_files: The reason for each damaged index file, by location.

        Raises:
            RetryLater: The list of the index files is not cached, and the database does not answer.
        """
        if damaged_files:
            registered_files = await self._indexes.registry.load_files(entry)
            files = [file for file in registered_files.files if file.location in damaged_files]
            await self._indexes.verify_source(files, "; ".join(damaged_files.values()))
