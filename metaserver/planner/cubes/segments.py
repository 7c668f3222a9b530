"""Merged groups of a cube over many data files, stored as segments.

An entry of a cube has the groups of one data file. A request for a table of 10,000 files would merge 10,000 entries.
A segment has the merged groups of several files, which form a group of the `FileTree`. A request that includes all of
these files reads the segment, in any snapshot and branch: its key contains the identities of the files, and the files
are immutable. After a commit, one group of each level is merged again. The key also contains the index files from which
the segment was made. So if an audit finds wrong entries, segments with these entries are no longer read, because the
index file of the entries is no longer live.

Segments are the values of a cache in memory and on the local disk, with a limit of bytes for each. A segment that is
missing or damaged is merged again from its entries. A reader that selects groups gets parts: segments of many files, or
the entries of few files. An instance belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.cache.memory import MemoryCache
from seamark.cache.opening import open_stack
from seamark.cache.single_flight import SingleFlight
from seamark.cache.stack import Stack
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.measures import list_partials
from seamark.formats.index.kinds.cube import CUBE, CubeEntries, SumOverflow, build_entry_schema, combine_groups
from seamark.formats.index.packing import Longs
from seamark.metaserver.index.files.indexes import Indexes, OpenIndex
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.planner.cubes.encoded_groups import EncodedGroups
from seamark.metaserver.planner.cubes.file_tree import FileGroup, FileTree, Ids
from seamark.metaserver.planner.indexes.coverage import find_ids
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, RegisteredIndexFile

GROUPS_MAX = 2_000_000
"""The maximum number of groups of a segment."""
BYTES_MAX = 256 << 20
"""The maximum number of bytes of the groups of a segment, in memory."""
_COMBINED_BYTES = 64 << 20
_UNCOMBINED_GROUPS_MAX = 500_000
"""Pending groups are combined if their number exceeds this limit, or if their bytes exceed `_COMBINED_BYTES`."""
_CONCURRENT_OPENS_MAX = 16
_CONCURRENT_BUILDS_MAX = 2
_PLACES_BYTES = 32 << 20
"""The memory for the cached places of entries (`_Places`)."""
_TOO_LARGE_BYTES = 256 << 10
"""The memory for the keys of groups that exceed the limits, with the reasons."""
_ENTRY_FILES_MAX = 64
"""The maximum number of data files for which a reader gets entries as parts. For more files, it gets segments."""
_ATTEMPTS_MAX = 3
"""The maximum number of attempts to read groups. After each failed attempt, a damaged index file is excluded."""
_THREADS = 2
_WHOLE_SEGMENT = -1
"""The value that replaces the entry number in the cache of entries if the value is a segment."""
_SEGMENTS_FRACTION, _ENTRIES_FRACTION = 3 / 8, 1 / 4
"""The shares of the memory for cubes that segments and entries may use. `api/sql/cube_answers.py` uses the rest."""
_IN_LOOP_FILES_MAX = 50_000
"""The maximum number of files whose identities are hashed in the event loop."""


class SegmentTooLarge(Exception):
    """Raised if the merged groups exceed a limit, or if a sum of their values does not fit its type."""


class _DamagedIndexFile(Exception):
    """Raised if an index file cannot be read, or has other columns than its definition."""

    def __init__(self, file: RegisteredIndexFile) -> None:
        super().__init__(file.location)
        self.file = file


@dataclass(frozen=True, slots=True, eq=False)
class MergedGroups:
    """The groups of data files, merged: rows of a cube with the dimensions and the partial aggregates of each group.

    Attributes:
        table: All columns of the cube's entries. A group may appear twice if its values differ only in their bits, as
            -0.0 and 0.0 do.
        covered: bool[files]: whether the rows of each requested file are in the groups.
    """

    table: pa.Table
    covered: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPart:
    """The groups of some of the requested data files.

    Attributes:
        groups: All columns of the cube's entries.
        files: int64[n]: the positions of these data files in the request.
    """

    groups: EncodedGroups
    files: Longs


@dataclass(slots=True)
class SegmentStats:
    """The numbers of read entries and merged segments since the start of the server.

    An entry has the groups of one data file. A segment has the merged groups of several data files, and is stored.
    """

    entries_read: int = 0
    merged: int = 0


class _Places:
    """The places of the entries of data files: for each file, an index file and the number of the entry in it.

    Args:
        ids: The identities of the data files.
        files: The live index files, the newest first.
    """

    def __init__(self, ids: Ids, files: Sequence[RegisteredIndexFile]) -> None:
        self.files = files
        self._ids = ids
        self._order = np.lexsort((ids[:, 1], ids[:, 0]))
        self.file_numbers: Longs = np.full(len(ids), -1, dtype=np.int64)
        self.entry_numbers: Longs = np.full(len(ids), -1, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        return self.file_numbers.nbytes + self.entry_numbers.nbytes + self._order.nbytes + self._ids.nbytes

    @property
    def covered(self) -> npt.NDArray[np.bool_]:
        """bool[files]: whether each file has an entry."""
        is_covered: npt.NDArray[np.bool_] = self.file_numbers >= 0
        return is_covered

    @property
    def is_complete(self) -> bool:
        return bool(self.covered.all())

    def add(self, first: int, index_files: Sequence[OpenIndex | None]) -> None:
        """Look in further index files for the entries of the data files for which no entry is known yet.

        Args:
            first: The number of the first of these index files.
            index_files: The index files, or None for an index file that cannot be opened.
        """
        for number, index_file in enumerate(index_files, first):
            if index_file is None:
                continue
            unplaced_files = self._order[self.file_numbers[self._order] < 0]
            places = find_ids(self._ids[unplaced_files], index_file.files.ids)
            entries = np.flatnonzero(places >= 0)
            # An index file may have two equal entries of a data file. Use only one of them.
            entries = entries[np.unique(places[entries], return_index=True)[1]]
            files = unplaced_files[places[entries]]
            self.file_numbers[files], self.entry_numbers[files] = number, entries

    def make_tree(self) -> FileTree:
        """Return the tree of the covered files, by which their groups of rows are merged step by step.

        Segments, the stored results of these steps, have keys that contain the source of each file: a hash of the
        location of its index file. So after a rebuild of the index, segments of the earlier index are not found.
        """
        digests = b"".join(blake2b(file.location.encode(), digest_size=8).digest() for file in self.files)
        sources = np.frombuffer(digests, dtype="<u8").astype(np.uint64)[self.file_numbers[self.covered]]
        return FileTree(self._ids[self.covered], sources)


class _GroupCombiner:
    """Merges groups as they arrive, so that only a limited number of them is in memory."""

    def __init__(self, schema: pa.Schema, functions: Mapping[str, str]) -> None:
        self._functions = functions
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._rows = self._bytes = 0

    def add(self, groups: pa.Table) -> None:
        """Add groups.

        Raises:
            SegmentTooLarge: There are too many groups, or a sum does not fit its type.
            ValueError: The columns of the groups differ from the definition.
        """
        if groups.schema != self._schema:
            raise ValueError("the columns of an entry differ from the definition of the cube")
        self._pending.append(groups)
        self._rows += groups.num_rows
        self._bytes += groups.nbytes
        if self._rows > _UNCOMBINED_GROUPS_MAX or self._bytes > _COMBINED_BYTES:
            self._combine_pending()
            if self._rows > GROUPS_MAX or self._bytes > BYTES_MAX:
                raise SegmentTooLarge(f"the merged groups exceed {GROUPS_MAX:,} groups or {BYTES_MAX:,} bytes")

    def finish(self) -> pa.Table:
        """Return the merged groups.

        Raises:
            SegmentTooLarge: A sum does not fit its type.
        """
        if len(self._pending) != 1:  # A single table is already combined, or has the groups of only one entry.
            self._combine_pending()
        return self._pending[0]

    def _combine_pending(self) -> None:
        """Combine the pending groups to one table, and merge groups with equal dimensions.

        Raises:
            SegmentTooLarge: A sum does not fit its type.
        """
        groups = pa.concat_tables(self._pending) if self._pending else self._schema.empty_table()
        if groups.num_rows:
            try:
                groups = combine_groups(groups, self._functions).select(self._schema.names)
            except SumOverflow as error:
                raise SegmentTooLarge(str(error)) from None
        self._pending, self._rows, self._bytes = [groups], groups.num_rows, groups.nbytes


class Segments:
    """Reads the merged groups of cubes, and stores them."""

    def __init__(
        self, indexes: Indexes, registry: Registry, stack: Stack[pa.Table], entries_bytes: int = 1 << 20
    ) -> None:
        self._indexes = indexes
        self._registry = registry
        self._stack = stack
        self._places: MemoryCache[tuple[str, str, int, bytes], _Places] = MemoryCache(_PLACES_BYTES, "cube-segments")
        self._entries: MemoryCache[tuple[str, int], EncodedGroups] = MemoryCache(entries_bytes, "cube-segments")
        """Decoded entries, by the location of their index file and their number in it.

        The cache also has segments. Their key takes the place of the location.
        """
        self._oversize_reasons: MemoryCache[str, str] = MemoryCache(_TOO_LARGE_BYTES, "cube-segments")
        """The reasons why groups cannot be merged, by the key of their segment."""
        self._flights: SingleFlight[str, pa.Table] = SingleFlight()
        self._builds = asyncio.Semaphore(_CONCURRENT_BUILDS_MAX)
        self.stats = SegmentStats()

    async def find_covered(self, entry: Entry, definition: IndexDefinition, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return bool[files]: whether the cube has an entry of each data file."""
        return (await self._locate_entries(entry, definition, ids, frozenset())).covered

    async def read(
        self, entry: Entry, definition: IndexDefinition, ids: Ids, *, stores_all: bool = True
    ) -> MergedGroups:
        """Return the merged groups of the files that the cube covers.

        Args:
            entry: The entry of the table in the catalog.
            definition: The definition of the cube.
            ids: The identities of the data files. Neighbouring files of a snapshot should be neighbours in this array.
            stores_all: Whether all merged groups are stored. If it is False, groups at the ends of the sequence are
                not stored, because other requests may begin and end with other files.

        Raises:
            SegmentTooLarge: The groups cannot be merged within the limits, or several index files are damaged.
        """
        damaged_locations = set[str]()
        for _ in range(_ATTEMPTS_MAX):
            places = await self._locate_entries(entry, definition, ids, frozenset(damaged_locations))
            is_covered = places.covered
            if not is_covered.any():
                return MergedGroups(build_entry_schema(definition.terms, definition.measures).empty_table(), is_covered)
            prefix = f"cube/{entry.uuid}/{definition.id}"
            merger = await asyncio.to_thread(_Merger, self, prefix, definition, places, stores_all)
            try:
                return MergedGroups(await self._merge_group(merger, merger.tree.root), is_covered)
            except _DamagedIndexFile as error:
                self._indexes.schedule_verification([error.file], "the groups cannot be read")
                damaged_locations.add(error.file.location)
        raise SegmentTooLarge("several index files of the cube are damaged")

    async def read_parts(self, entry: Entry, definition: IndexDefinition, ids: Ids) -> AsyncIterator[GroupPart]:
        """Yield the groups of rows of the files that the cube covers, each file once.

        An entry has the groups of one data file. A segment has the merged groups of several files. If one of them
        cannot be read, its index file is left out, and the verification of the index file is scheduled.

        Args:
            entry: The entry of the table in the catalog.
            definition: The definition of the cube.
            ids: The identities of the data files.
        """
        damaged_locations = set[str]()
        pending_files = np.arange(len(ids))
        for _ in range(_ATTEMPTS_MAX):
            places = await self._locate_entries(entry, definition, ids[pending_files], frozenset(damaged_locations))
            covered_files = pending_files[places.covered]
            if not len(covered_files):
                return
            prefix = f"cube/{entry.uuid}/{definition.id}"
            # Do not store merged groups that change with the next files.
            make_merger = partial(_Merger, self, prefix, definition, places, stores_all=False)
            merger = make_merger() if len(covered_files) <= _ENTRY_FILES_MAX else await asyncio.to_thread(make_merger)
            try:
                async for first, end, groups in self._list_parts(merger, merger.tree.root):
                    files = covered_files[first:end]
                    pending_files = pending_files[~np.isin(pending_files, files)]
                    yield GroupPart(groups, files)
                return
            except _DamagedIndexFile as error:
                self._indexes.schedule_verification([error.file], "the groups cannot be read")
                damaged_locations.add(error.file.location)

    async def _list_parts(self, merger: _Merger, group: FileGroup) -> AsyncIterator[tuple[int, int, EncodedGroups]]:
        """Yield (first file, end, groups of rows) for the parts of a file group, which is a range of files.

        A part is one file, or a file group whose groups of rows could be merged within the limits.

        Raises:
            _DamagedIndexFile: An entry cannot be read.
        """
        if group.end - group.first <= _ENTRY_FILES_MAX:
            for number in range(group.first, group.end):
                yield number, number + 1, await merger.read_entry(number)
            return
        try:
            merged_groups = await self._merge_group(merger, group)
        except SegmentTooLarge:  # Divide the file group, because a smaller range of files has fewer groups of rows.
            members = merger.tree.list_subgroups(group) or [
                FileGroup(1, first, min(first + _ENTRY_FILES_MAX, group.end))
                for first in range(group.first, group.end, _ENTRY_FILES_MAX)
            ]
            for member in members:
                async for part in self._list_parts(merger, member):
                    yield part
            return
        yield group.first, group.end, await self._encode_segment(merger.make_segment_key(group), merged_groups)

    async def _encode_segment(self, key: str, segment: pa.Table) -> EncodedGroups:
        """Return the encoded groups of a segment, from the cache if possible.

        The cache of entries also keeps encoded segments, with the number `_WHOLE_SEGMENT` instead of an entry's number.
        """
        encoded_groups = self.get_entry(key, _WHOLE_SEGMENT)
        if encoded_groups is None:
            encoded_groups = await asyncio.to_thread(EncodedGroups, segment)
            self.put_entry(key, _WHOLE_SEGMENT, encoded_groups)
        return encoded_groups

    async def _merge_group(self, merger: _Merger, group: FileGroup) -> pa.Table:
        """Return the cube's groups of rows, merged over a file group, from the stored result if possible.

        Raises:
            SegmentTooLarge: The groups exceed a limit.
        """
        key = merger.make_segment_key(group)
        stored_segment = self._stack.get_cached(key)
        if stored_segment is not None:
            return stored_segment
        reason = self._oversize_reasons.get(key)
        if reason is not None:
            raise SegmentTooLarge(reason)

        # `_builds` limits how many groups are merged at the same time, because they need much memory.
        async def build() -> pa.Table:
            async with self._builds:
                try:
                    return await merger.merge(group)
                except SegmentTooLarge as error:
                    # Store the reason. Otherwise, each request would merge the groups again up to the limit.
                    self._oversize_reasons.put(key, str(error), len(key) + len(str(error)))
                    raise

        return await self._flights.run(f"{key}/{merger.stores_all}", build)

    async def _locate_entries(
        self, entry: Entry, definition: IndexDefinition, ids: Ids, damaged_locations: frozenset[str]
    ) -> _Places:
        """Return the index file and the entry number of each of these data files, from index files that plans may use.

        An entry has the cube's groups of one data file. The places are cached if all index files were opened and none
        is damaged.
        """
        index_files = await self._registry.load_files(entry)
        digest = (
            _compute_digest(ids) if len(ids) <= _IN_LOOP_FILES_MAX else await asyncio.to_thread(_compute_digest, ids)
        )
        key = (entry.uuid, definition.id, index_files.version, digest)
        places = None if damaged_locations else self._places.get(key)
        if places is not None:
            return places
        # Two index files may have entries of the same data file. These are equal, and the newer entry is read.
        files = [
            file for file in index_files.list_live_files(definition.id)[::-1] if file.location not in damaged_locations
        ]
        places = await asyncio.to_thread(_Places, ids, files)
        were_all_opened = True
        for start in range(0, len(files), _CONCURRENT_OPENS_MAX):
            if places.is_complete:
                break
            open_files = await self.open(files[start : start + _CONCURRENT_OPENS_MAX])
            were_all_opened = were_all_opened and all(open_files)
            await asyncio.to_thread(places.add, start, open_files)
        if were_all_opened and not damaged_locations:
            self._places.put(key, places, places.size_bytes)
        return places

    async def open(self, files: Sequence[RegisteredIndexFile]) -> list[OpenIndex | None]:
        """Open index files. The result has None for each index file that cannot be opened."""
        return list(await asyncio.gather(*(self._indexes.open(file) for file in files)))

    def get_entry(self, location: str, number: int) -> EncodedGroups | None:
        """Return the groups of an entry if they are in memory."""
        return self._entries.get((location, number))

    def put_entry(self, location: str, number: int, groups: EncodedGroups) -> None:
        self._entries.put((location, number), groups, groups.nbytes + len(location))

    async def find(self, key: str) -> pa.Table | None:
        """Return the stored segment with this key, or None. A segment is in memory or on the local disk."""
        segment = self._stack.get_cached(key)
        if segment is not None or not self._stack.may_have(key):
            return segment
        return (await self._stack.get_stored_values([key], _decode_segment))[0]

    def put(self, key: str, segment: pa.Table, payload: memoryview) -> None:
        self._stack.put(key, segment, payload, _decode_segment)


class _Merger:
    """Merges the groups of the files of a tree, from segments and from entries."""

    def __init__(
        self, segments: Segments, prefix: str, definition: IndexDefinition, places: _Places, stores_all: bool
    ) -> None:
        self._segments = segments
        self._prefix = prefix
        self._files = places.files
        self._file_numbers, self._entry_numbers = (
            places.file_numbers[places.covered],
            places.entry_numbers[places.covered],
        )
        self.tree = places.make_tree()
        self.stores_all = stores_all
        self._schema = build_entry_schema(definition.terms, definition.measures)
        partials = list_partials(definition.measures)
        self._functions = {f"m{number}": partial.function for number, partial in enumerate(partials)}

    def make_segment_key(self, group: FileGroup) -> str:
        """Return the key of the segment of a group of files."""
        return f"{self._prefix}/{self.tree.digest(group)}"

    async def merge(self, group: FileGroup) -> pa.Table:
        """Return the cube's groups of rows, merged over a file group, and store them as a segment.

        They are not stored if the file group has only one file, or if later files may change the file group.

        Raises:
            SegmentTooLarge: There are too many groups, or a sum does not fit its type.
            _DamagedIndexFile: An entry cannot be read.
        """
        key = self.make_segment_key(group)
        segment = await self._segments.find(key)
        if segment is not None and segment.schema == self._schema:
            return segment
        members = self.tree.list_subgroups(group)
        if len(members) == 1:  # The member has the same files, so it has the same segment.
            return await self.merge(members[0])
        if members:
            combiner = _GroupCombiner(self._schema, self._functions)
            for member in members:
                part = await self.merge(member)
                await asyncio.to_thread(combiner.add, part)
            merged_groups = await asyncio.to_thread(combiner.finish)
        else:
            merged_groups = await self._merge_entries(group)
        self._segments.stats.merged += 1
        # The groups of rows of one file are already stored as an entry. A file group that is not closed would change
        # with the next files.
        if group.end - group.first > 1 and (self.stores_all or self.tree.is_closed(group)):
            payload = await asyncio.to_thread(_encode_segment, merged_groups)
            self._segments.put(key, merged_groups, payload)
        return merged_groups

    async def read_entry(self, number: int) -> EncodedGroups:
        """Return the groups of one data file. `number` is its number among the covered files.

        Raises:
            _DamagedIndexFile: The entry cannot be read.
        """
        file, entry = self._files[int(self._file_numbers[number])], int(self._entry_numbers[number])
        cached_groups = self._segments.get_entry(file.location, entry)
        if cached_groups is not None and cached_groups.schema == self._schema:
            return cached_groups
        (open_file,) = await self._segments.open([file])
        if open_file is None:
            raise _DamagedIndexFile(file)
        self._segments.stats.entries_read += 1
        try:
            groups = await asyncio.to_thread(_read_entry, open_file, entry)
        except ValueError:  # The entry is damaged, or Arrow cannot read its columns.
            raise _DamagedIndexFile(file) from None
        if groups.schema != self._schema:
            raise _DamagedIndexFile(file)
        self._segments.put_entry(file.location, entry, groups)
        return groups

    async def _merge_entries(self, group: FileGroup) -> pa.Table:
        """Return the cube's groups of rows of the files in a file group, merged from the entries of the files.

        The method reads one index file after another.

        Raises:
            SegmentTooLarge: There are too many groups, or a sum does not fit its type.
            _DamagedIndexFile: An entry cannot be read.
        """
        file_numbers, entry_numbers = (
            values[group.first : group.end] for values in (self._file_numbers, self._entry_numbers)
        )
        combiner = _GroupCombiner(self._schema, self._functions)
        for number in np.unique(file_numbers).tolist():
            file = self._files[number]
            (open_file,) = await self._segments.open([file])
            if open_file is None:
                raise _DamagedIndexFile(file)
            entries = np.sort(entry_numbers[file_numbers == number]).tolist()
            self._segments.stats.entries_read += len(entries)
            try:
                await asyncio.to_thread(_add_entries, combiner, open_file, entries)
            except ValueError:  # An entry is damaged, or its columns differ from the definition.
                raise _DamagedIndexFile(file) from None
        return await asyncio.to_thread(combiner.finish)


def _compute_digest(ids: Ids) -> bytes:
    return blake2b(np.ascontiguousarray(ids).tobytes(), digest_size=16).digest()


def _add_entries(combiner: _GroupCombiner, index_file: OpenIndex, numbers: Sequence[int]) -> None:
    entries = index_file.index
    assert isinstance(entries, CubeEntries)
    for groups in entries.read(numbers):
        combiner.add(pa.Table.from_batches([groups]))


def _read_entry(index_file: OpenIndex, number: int) -> EncodedGroups:
    entries = index_file.index
    assert isinstance(entries, CubeEntries)
    return EncodedGroups(pa.Table.from_batches(entries.read([number])))


def _encode_segment(segment: pa.Table) -> memoryview:
    """Encode a segment, the merged groups of several data files, for the local disk.

    The result has the format of the files of cube indexes, because this format has checksums. It contains one entry.
    """
    batches = segment.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([], segment.schema)
    return memoryview(b"".join(CUBE.encode([batch])))


def _decode_segment(data: memoryview) -> pa.Table:
    """Return the segment that `_encode_segment` wrote.

    Raises:
        ValueError: The bytes are damaged.
    """
    return pa.Table.from_batches(CubeEntries(data).read([0]))


@asynccontextmanager
async def open_segments(settings: Settings, indexes: Indexes, registry: Registry) -> AsyncIterator[Segments]:
    """Open the cache of segments, in memory and in a folder on the local disk.

    A segment has the groups of a cube, merged over several data files.
    """
    async with open_stack(
        MemoryCache[str, pa.Table](int(settings.cube_memory_bytes * _SEGMENTS_FRACTION), "cube-segments"),
        weigh=lambda segment: int(segment.nbytes),
        pending_bytes_max=settings.cube_memory_bytes,
        folder=settings.home / "cache" / "cubes",
        disk_bytes=settings.cube_disk_bytes,
        threads=_THREADS,
        name="cubes",
    ) as stack:
        yield Segments(indexes, registry, stack, int(settings.cube_memory_bytes * _ENTRIES_FRACTION))
