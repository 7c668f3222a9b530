"""The route that returns the groups of a cube for data files.

The client plans the files of its query, and sends their ids. So the plan decides about snapshots, branches and deletes,
and this route only finds entries. An entry describes one immutable file. Files without a usable entry are not covered
by the answer, and the client reads their rows.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from aiohttp import web

from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.keys.measures import list_partials
from seamark.formats.index.kinds.cube import CubeEntries, SumOverflow, combine_groups, entry_schema
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.runtime.errors import BadRequest, NotFound
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.index.files.indexes import OpenIndex
from seamark.metaserver.planner.cubes.segments import MergedGroups, SegmentTooLarge
from seamark.metaserver.planner.indexes.coverage import find_ids
from seamark.metaserver.store.model import Entry

FILES_MAX = 1_000_000
"""The maximum number of data files of a request."""
GROUPS_MAX = 2_000_000
"""The number of groups in memory from which no further index file is read."""
BYTES_MAX = 256 << 20
"""The number of bytes of groups in memory from which no further entry is read."""
_COMBINED_BYTES = 64 << 20
_COMBINED_GROUPS = 500_000
"""The number of groups, or of their bytes, at which groups are combined before further groups are read."""
_ID_BYTES = 16
_OPENED_AT_ONCE = 16
_SEGMENT_FILES_MIN = 64
"""The number of data files from which their groups are read from segments."""

Ids = npt.NDArray[np.uint64]


class ReadCubeGroupsRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    definition_id: Annotated[str, doc("The definition-id of the cube.")]
    columns: Annotated[
        list[str],
        doc("Dimensions d0, d1, … and partial aggregates m0, m1, … of the entries.", examples=[["d0", "m1"]]),
    ]
    files: Annotated[
        str,
        doc(
            f"The ids of at most {FILES_MAX:,} data files, in base64: for each file the XXH64 with the seeds 0 and 1 "
            "of path, size and record count, as two 64-bit little-endian integers."
        ),
    ]


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/cube-groups",
    "readCubeGroups",
    "Returns the groups of a cube with their partial aggregates, for the data files that the cube covers",
    tags=("indexes",),
    body_size=BodySize.LARGE,
    answers=(
        ResponseSpec(
            200,
            "An Arrow IPC stream with the requested columns. A group may appear several times. The metadata `covered` "
            "of its schema has a bit for each requested file, in base64, the lowest bit of a byte first",
        ),
        ResponseSpec(400, "A column or the list of files is invalid"),
        ResponseSpec(403, "The caller may not read a dimension table whose attributes the cube has"),
        ResponseSpec(404, "No such table, or it has no such cube"),
    ),
).takes(ReadCubeGroupsRequest)
async def read_cube_groups(call: Call, body: ReadCubeGroupsRequest) -> web.Response:
    loaded = await call.components.catalog.tables.load(call.namespace, call.name)
    definition = find_cube(call, loaded, body.definition_id)
    ids = await asyncio.to_thread(_parse_ids, body.files)
    reading = await read_groups(call, loaded, definition, body.columns, ids)
    return web.Response(body=await asyncio.to_thread(reading.encode), content_type=ARROW_STREAM)


def find_cube(call: Call, loaded: LoadedTable, definition_id: str) -> IndexDefinition:
    """Return the definition of a cube.

    Raises:
        Forbidden: The caller may not read a dimension table whose attributes the cube has.
        NotFound: The table has no cube with this id.
    """
    defined = read_definitions(loaded.metadata).by_name.values()
    definition = next((one for one in defined if one.id == definition_id and KINDS[one.kind].aggregates), None)
    if definition is None or loaded.entry is None:
        raise NotFound("The table has no cube with this definition-id; list its indexes with seamark index list")
    for term in definition.terms:  # Who may read the facts may not be allowed to read their dimension tables.
        if (lookup := parse_lookup(term.transform)) is not None:
            call.allow(lookup.source.table[:-1])
    return definition


async def read_groups(
    call: Call, loaded: LoadedTable, definition: IndexDefinition, columns: Sequence[str], ids: Ids
) -> GroupReading:
    """Read the groups of data files.

    Args:
        call: The request.
        loaded: The table.
        definition: A cube of the table.
        columns: Dimensions and partial aggregates of the entries, in their order.
        ids: uint64[files, 2], the ids of the data files.

    Raises:
        BadRequest: A column does not exist.
    """
    schema = _select(definition, columns)
    assert loaded.entry is not None
    live = (await call.components.registry.files(loaded.entry)).live(definition.id)
    # The ids are sorted, which takes long for a million files.
    reading = await asyncio.to_thread(GroupReading, schema, _functions_of(definition, columns), ids)
    if await _add_segments(call, loaded.entry, definition, reading):
        live = ()
    for start in range(0, len(live), _OPENED_AT_ONCE):
        # If two index files have an entry of one data file, the entries are equal, and the newer entry is read.
        newest = live[::-1][start : start + _OPENED_AT_ONCE]
        opened = await asyncio.gather(*(call.components.indexes.open(file) for file in newest))
        damaged = await asyncio.to_thread(reading.add, [file for file in opened if file is not None])
        call.components.indexes.schedule_verification(
            [file for file in newest if file.location in damaged], "the groups cannot be read"
        )
        if reading.is_done:
            break
    _count_use(call, loaded.entry, definition, reading)
    return reading


async def _add_segments(call: Call, entry: Entry, definition: IndexDefinition, reading: GroupReading) -> bool:
    """Add the groups of many files from segments, and return whether it is done."""
    if reading.files < _SEGMENT_FILES_MIN:
        return False
    try:
        merged = await call.components.segments.read(entry, definition, reading.ids, stores_all=False)
    except SegmentTooLarge:
        return False
    await asyncio.to_thread(reading.add_merged, merged)
    return True


def _count_use(call: Call, entry: Entry, definition: IndexDefinition, reading: GroupReading) -> None:
    """Count the use of the cube. The covered files count as removed, because their rows are not read."""
    call.components.usage.note(
        entry.uuid,
        definition.id,
        files_in=reading.files,
        files_removed=reading.covered_files,
        now_ms=call.components.clock.now_ms(),
    )


def _select(definition: IndexDefinition, columns: Sequence[str]) -> pa.Schema:
    schema = entry_schema(definition.terms, definition.measures)
    if not columns or list(columns) != [name for name in schema.names if name in columns]:
        raise BadRequest(f"columns must be some of {', '.join(schema.names)} in this order, not {columns[:100]!r}")
    return pa.schema([schema.field(name) for name in columns])


def _functions_of(definition: IndexDefinition, columns: Sequence[str]) -> Mapping[str, str]:
    partials = list_partials(definition.measures)
    functions = {f"m{number}": partial.function for number, partial in enumerate(partials)}
    return {name: functions[name] for name in columns if name in functions}


def _parse_ids(text: str) -> Ids:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadRequest(f"files is not base64: {error}") from None
    if len(data) % _ID_BYTES or len(data) > FILES_MAX * _ID_BYTES:
        raise BadRequest(f"files has {len(data):,} bytes; it must have {_ID_BYTES} bytes for each file, and at most "
                         f"{FILES_MAX:,} files")  # fmt: skip
    return np.frombuffer(data, dtype="<u8").reshape(-1, 2).astype(np.uint64)


class GroupReading:
    """The groups that were read for a request."""

    def __init__(self, schema: pa.Schema, functions: Mapping[str, str], ids: Ids) -> None:
        self._schema, self._functions, self.ids = schema, functions, ids
        self._order = np.lexsort((ids[:, 1], ids[:, 0]))
        self._covered = np.zeros(len(ids), dtype=np.bool_)
        self._groups = schema.empty_table()

    @property
    def groups(self) -> pa.Table:
        """The groups of the covered files. A group may appear several times."""
        return self._groups

    @property
    def covered(self) -> npt.NDArray[np.bool_]:
        """bool[files]: whether the groups contain the rows of each requested file."""
        return self._covered

    @property
    def files(self) -> int:
        """The number of requested data files."""
        return len(self.ids)

    @property
    def covered_files(self) -> int:
        return int(self._covered.sum())

    @property
    def is_done(self) -> bool:
        is_full = self._groups.num_rows > GROUPS_MAX or self._groups.nbytes > BYTES_MAX
        return is_full or bool(self._covered.all())

    def add(self, opened: Sequence[OpenIndex]) -> set[str]:
        """Add the groups of the files that are not covered yet.

        Returns:
            The locations of damaged index files. They cover no file.
        """
        damaged = set[str]()
        for index_file in opened:
            if self.is_done:
                break
            entries = index_file.index
            assert isinstance(entries, CubeEntries)
            missing = self._order[~self._covered[self._order]]
            places = find_ids(self.ids[missing], index_file.files.ids)
            numbers = np.flatnonzero(places >= 0)
            # A data file counts once, even if the index file has two entries of it.
            numbers = numbers[np.unique(places[numbers], return_index=True)[1]]
            try:
                self._add_entries(entries, numbers.tolist(), missing[places[numbers]].tolist())
            except ValueError:  # Arrow also raises this error for other columns.
                damaged.add(index_file.location)
        return damaged

    def _add_entries(self, entries: CubeEntries, numbers: Sequence[int], files: Sequence[int]) -> None:
        """Add the groups of some entries, until there are too many groups.

        Args:
            numbers: The numbers of the entries in the index file.
            files: For each entry, the number of the data file in the request.

        Raises:
            ValueError: An entry cannot be read. It is not added.
        """
        pending: dict[int, pa.RecordBatch] = {}
        rows = size = 0
        try:
            for file, groups in zip(files, entries.read(numbers, self._schema.names), strict=True):
                if groups.schema != self._schema:
                    raise ValueError("an entry has other columns than its definition")
                pending[file] = groups
                rows += groups.num_rows
                size += groups.nbytes
                if rows > _COMBINED_GROUPS or size > _COMBINED_BYTES:
                    self._combine(pending)
                    pending, rows, size = {}, 0, 0
                    if self.is_done:
                        return
        finally:
            if pending:
                self._combine(pending)

    def _combine(self, added: Mapping[int, pa.RecordBatch]) -> None:
        """Add groups to the groups that were read before, and combine equal groups.

        Args:
            added: The groups of entries, by the number of the data file in the request.

        Raises:
            ValueError: The groups cannot be combined. They are not added, and their data files are not covered.
        """
        groups = pa.concat_tables([self._groups, pa.Table.from_batches(list(added.values()), self._schema)])
        if groups.num_rows:
            with suppress(SumOverflow):  # The engine adds the groups again, and reports the error.
                groups = combine_groups(groups, self._functions)
        self._groups = groups
        self._covered[list(added)] = True

    def add_merged(self, merged: MergedGroups) -> None:
        """Add the groups of segments, with the requested columns. No other groups were added before."""
        groups = merged.table.select(self._schema.names)
        if groups.num_rows and len(self._schema.names) < len(merged.table.column_names):
            with suppress(SumOverflow):  # The engine adds the groups again, and reports the error.
                groups = combine_groups(groups, self._functions).select(self._schema.names)
        self._groups, self._covered = groups, merged.covered

    def encode(self) -> bytes:
        covered = base64.b64encode(np.packbits(self._covered, bitorder="little").tobytes())
        table = self._groups.replace_schema_metadata({"covered": covered})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        body: bytes = sink.getvalue().to_pybytes()
        return body
