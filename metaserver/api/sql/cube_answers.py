"""Computes the answers of `POST /api/v1/aggregate` from cubes, in the server's process.

A request needs no SQL engine if it can be computed from a cube that has an entry for each data file. The groups of a
snapshot are merged once (`planner/cubes/segments.py`), then grouped by the dimensions of the request, and finally
filtered and aggregated. Each of these three results is kept in memory up to a limit. If anything else is needed, such
as the rows of a file, the request runs as a statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from aiohttp import web

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.measures import ColumnOperand, list_columns
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.protocol.json_rows import to_json_rows
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.principal import ANONYMOUS
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http.components import ServerComponents
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.sql_texts import IN_LOOP_CHARACTERS, read_in_turn
from seamark.metaserver.api.sql.fair_slots import FairSlots
from seamark.metaserver.api.sql.protocol import CubeUse, StatementColumn, StatementPlan, TableRead
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.history.history import StatementRead
from seamark.metaserver.history.shapes import Aggregate, QueryShape, list_conjuncts, select_shape_columns
from seamark.metaserver.planner.cubes.aggregation import (
    CubeAnswerColumns,
    GroupQuery,
    NotFromGroups,
    aggregate_groups,
    find_cube_answer,
    reduce_groups,
)
from seamark.metaserver.planner.cubes.file_tree import Ids
from seamark.metaserver.planner.cubes.segments import SegmentTooLarge
from seamark.metaserver.planner.indexes.coverage import list_file_ids
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry

Format = Literal["json", "arrow"]

ENGINE = "cube"
_HISTORY_ENGINE = "seamark"
_ENGINE_REASON = "a cube that has all data files answers the request"
_CONCURRENT_ANSWERS_MAX = 16
"""The maximum number of requests whose answers are computed at once."""
_IN_LOOP_VALUES, _IN_LOOP_BYTES = 5_000, 1 << 20
"""The maximum number and the maximum size of values that are processed in the event loop.

A value takes some microseconds, because averages and JSON are computed in Python.
"""
_ANSWERS_BYTES_DIVISOR, _GROUPS_BYTES_DIVISOR = 8, 4
"""The divisors of the memory for cubes, for answers and for groups by the dimensions of requests."""
_SNAPSHOTS_BYTES = 32 << 20
"""The memory for the identities of the files of snapshots."""
_CUBES_BYTES, _CUBE_BYTES = 8 << 20, 8 << 10
"""The memory for the definitions of cubes, and the estimated memory of one definition."""
_ANSWER_BYTES_MAX = 1 << 20
"""The maximum size of an answer that is kept in memory."""
_SNAPSHOT_BYTES = 500
"""The memory of a snapshot without the identities of its files, in bytes."""


class _SnapshotFiles(NamedTuple):
    """The data files of a snapshot.

    Attributes:
        key: The table and the manifest list.
        ids: The identities of the files, by which index files refer to them. None if a file has no identity, is
            repeated, or has deleted rows, because a cube then cannot answer for the whole snapshot.
    """

    key: tuple[str, ...]
    ids: Ids | None


class _EncodedAnswer(NamedTuple):
    """An encoded answer to a request.

    Attributes:
        body: JSON or an Arrow stream, with a placeholder for the id of the statement.
        cube_id: The id of the cube that answers.
        snapshot_id: The snapshot whose rows are aggregated.
        statement_read: The statement with the numbers of files and bytes that it reads, for the query history.
    """

    body: bytes
    cube_id: str
    snapshot_id: int
    statement_read: StatementRead


class CubeAnswers:
    """Computes answers, and keeps answers and groups in memory. An instance belongs to one event loop."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._placeholder = str(clock.uuid4())
        """A random text that clients do not know. It marks the place of the statement id in the answers in memory."""
        memory_bytes = settings.cube_memory_bytes
        self._slots = FairSlots("aggregates at once", _CONCURRENT_ANSWERS_MAX)
        self._wait_s = settings.sql_queue_s
        self._rows_limit, self._bytes_limit = settings.sql_rows_limit, settings.sql_bytes_limit
        self._answers: MemoryCache[tuple[object, ...], _EncodedAnswer] = MemoryCache(
            memory_bytes // _ANSWERS_BYTES_DIVISOR, "cube-answers"
        )
        self._groups: MemoryCache[tuple[object, ...], pa.Table] = MemoryCache(
            memory_bytes // _GROUPS_BYTES_DIVISOR, "cube-answers"
        )
        self._cubes: MemoryCache[str, tuple[IndexDefinition, ...]] = MemoryCache(_CUBES_BYTES, "cube-answers")
        self._snapshots: MemoryCache[tuple[str, ...], _SnapshotFiles] = MemoryCache(_SNAPSHOTS_BYTES, "cube-answers")

    async def find(self, components: ServerComponents, loaded_table: LoadedTable, key: bytes) -> _EncodedAnswer | None:
        """Return the answer to a request if it is in memory, or None.

        Args:
            components: The components of the server.
            loaded_table: The table.
            key: The request and its format. The metadata file of the table decides the rest of the answer.

        Raises:
            Forbidden: The snapshot names files in a location that another table claims.
        """
        if loaded_table.entry is None:
            return None
        answer = self._answers.get(_make_key(loaded_table.entry, key))
        if answer is not None:
            # Another table may have claimed a location since the answer was computed.
            await _plan_snapshot(components, loaded_table, answer.snapshot_id)
        return answer

    def respond(self, call: Call, entry: Entry, answer: _EncodedAnswer, kind: Format) -> web.Response:
        """Return the response with an answer, as a statement with a new id, and count the statement.

        An answer from memory has a placeholder, which the new id replaces.
        """
        components, principal = call.components, call.principal
        # The rows of the files are not read, so the files count as removed.
        files = answer.statement_read.files_in
        components.usage.note(
            entry.uuid, answer.cube_id, files_in=files, files_removed=files, now_ms=components.clock.now_ms()
        )
        if components.history.is_on and principal.name != SERVICE_PRINCIPAL:
            components.history.add(answer.statement_read, None if principal is ANONYMOUS else principal.name)
        statement_id = str(components.clock.uuid4())
        headers = {"Cache-Control": "no-store", "X-Seamark-Statement": statement_id}
        body = answer.body.replace(self._placeholder.encode(), statement_id.encode(), 1)
        content_type = ARROW_STREAM if kind == "arrow" else "application/json"
        return web.Response(body=body, content_type=content_type, headers=headers)

    async def compute_answer(
        self, call: Call, loaded_table: LoadedTable, query: GroupQuery, snapshot_id: int, key: bytes, kind: Format
    ) -> _EncodedAnswer | None:
        """Compute the answer to a request from a cube, and keep it in memory unless it is large.

        Args:
            call: The request, whose caller may read the table.
            loaded_table: The table.
            query: The request over the schema of the snapshot.
            snapshot_id: The snapshot.
            key: The request and its format.
            kind: The format of the answer.

        Returns:
            The answer. None if no cube can answer the request, if the table is a stream table, if a data file has no
            entry or has deleted rows, or if the answer exceeds a limit of statements.

        Raises:
            TooManyRequests, RetryLater: See `FairSlots`.
        """
        entry = loaded_table.entry
        if entry is None or entry.flushed or not entry.index_version:  # A stream table may have rows without a file.
            return None
        cubes = self._list_cubes(entry, loaded_table.metadata)
        if not cubes:
            return None
        principal = call.principal.name
        async with self._slots.hold_slot(None if principal == ANONYMOUS.name else principal, self._wait_s):
            try:
                encoded_answer = await self._compute_from_cubes(call, loaded_table, query, snapshot_id, cubes, kind)
            except (NotFromGroups, SegmentTooLarge):
                return None
        if encoded_answer is not None and len(encoded_answer.body) <= _ANSWER_BYTES_MAX:
            self._answers.put(_make_key(entry, key), encoded_answer, len(encoded_answer.body) + len(key))
        return encoded_answer

    def _list_cubes(self, entry: Entry, metadata: TableMetadata) -> tuple[IndexDefinition, ...]:
        """Return the enabled cubes of a table, ordered by their number of dimensions.

        A cube with fewer dimensions has fewer groups, so it answers faster.
        """
        cubes = self._cubes.get(entry.metadata_location)
        if cubes is None:
            cube_definitions = [
                definition for definition in read_definitions(metadata).enabled if KINDS[definition.kind].aggregates
            ]
            cubes = tuple(sorted(cube_definitions, key=lambda cube: (len(cube.terms), len(cube.measures), cube.name)))
            self._cubes.put(entry.metadata_location, cubes, _CUBE_BYTES * (1 + len(cubes)))
        return cubes

    async def _compute_from_cubes(
        self,
        call: Call,
        loaded_table: LoadedTable,
        query: GroupQuery,
        snapshot_id: int,
        cubes: Sequence[IndexDefinition],
        kind: Format,
    ) -> _EncodedAnswer | None:
        """Return the answer from the first cube that has an entry for each data file, or None.

        An entry has the groups of the rows of one data file. There is no answer without data files, or if the answer
        exceeds the limits of rows or bytes.

        Raises:
            NotFromGroups: The condition is not a simple comparison, or a value does not fit its type.
            SegmentTooLarge: The groups exceed a limit.
        """
        assert loaded_table.entry is not None
        character_count = len(query.where or "")
        condition = await read_in_turn(call, character_count, query.parse_condition)
        for cube in cubes:
            try:
                answer = find_cube_answer(query, condition, cube)
            except NotFromGroups:
                continue
            files = await self._list_files(call.components, loaded_table, snapshot_id)
            if files.ids is None or not len(files.ids):
                return None
            groups = await self._read_groups(call.components, loaded_table.entry, files, cube, answer)
            if groups is None:
                continue
            aggregate = partial(aggregate_groups, groups, answer)
            is_small = _is_small(groups, len(query.names)) and character_count <= IN_LOOP_CHARACTERS
            rows = aggregate() if is_small else await asyncio.to_thread(aggregate)
            if rows.num_rows > self._rows_limit:
                return None
            plan = _make_plan(self._placeholder, loaded_table, cube, answer, len(files.ids))
            encode = partial(_encode_arrow if kind == "arrow" else _encode_json, rows, answer, plan)
            body = encode() if _is_small(rows, rows.num_columns) else await asyncio.to_thread(encode)
            statement_read = StatementRead(loaded_table.entry.uuid, _make_shape(answer), len(files.ids), 0)
            return None if len(body) > self._bytes_limit else _EncodedAnswer(body, cube.id, snapshot_id, statement_read)
        return None

    async def _list_files(
        self, components: ServerComponents, loaded_table: LoadedTable, snapshot_id: int
    ) -> _SnapshotFiles:
        """Return the data files of a snapshot.

        Raises:
            Forbidden: The snapshot names files in a location that another table claims.
        """
        assert loaded_table.entry is not None
        bound_scan, scan = await _plan_snapshot(components, loaded_table, snapshot_id)
        key = (loaded_table.entry.uuid, *bound_scan.view_key)
        files = self._snapshots.get(key)
        if files is None:
            files = _SnapshotFiles(key, await asyncio.to_thread(_identify_files, scan))
            self._snapshots.put(key, files, _SNAPSHOT_BYTES + (0 if files.ids is None else int(files.ids.nbytes)))
        return files

    async def _read_groups(
        self,
        components: ServerComponents,
        entry: Entry,
        files: _SnapshotFiles,
        cube: IndexDefinition,
        answer: CubeAnswerColumns,
    ) -> pa.Table | None:
        """Return the groups of a snapshot by the dimensions of a request, or None if a data file has no entry.

        Raises:
            NotFromGroups, SegmentTooLarge: The groups cannot be merged.
        """
        assert files.ids is not None
        key = (files.key, entry.index_version, cube.id, answer.kept_dimensions)
        cached_groups = self._groups.get(key)
        if cached_groups is not None:
            return cached_groups
        # The first check reads no groups. The read can still find a damaged index file, which covers nothing.
        if not (await components.segments.find_covered(entry, cube, files.ids)).all():
            return None
        segment = await components.segments.read(entry, cube, files.ids)
        if not segment.covered.all():
            return None
        reduced_groups: pa.Table = await asyncio.to_thread(reduce_groups, segment.table, answer)
        self._groups.put(key, reduced_groups, int(reduced_groups.nbytes))
        return reduced_groups


async def _plan_snapshot(
    components: ServerComponents, loaded_table: LoadedTable, snapshot_id: int
) -> tuple[BoundScan, ScanPlan]:
    """Plan a snapshot. The planner checks the locations of its files for each request, even for a cached plan.

    Raises:
        Forbidden: The snapshot names files in a location that another table claims.
    """
    bound_scan = BoundScan.bind(loaded_table.metadata, ScanRequest(snapshot_id=snapshot_id))
    return bound_scan, await components.planner.plan(bound_scan, loaded_table.entry)


def _make_key(entry: Entry, key: bytes) -> tuple[object, ...]:
    """Return the key of an answer. It contains the entry, because plans check the locations of each entry."""
    return (entry.namespace, entry.name, entry.uuid, entry.metadata_location, entry.index_version, key)


def _is_small(table: pa.Table, columns: int) -> bool:
    """Return whether this number of columns may be computed from the rows of a table in the event loop."""
    rows, size = int(table.num_rows), int(table.nbytes)
    return rows * columns <= _IN_LOOP_VALUES and size <= _IN_LOOP_BYTES


def _identify_files(scan: ScanPlan) -> Ids | None:
    """Return the identities by which index files refer to the data files of a whole snapshot.

    The result is None if a file has no identity, occurs twice, or has deleted rows. A cube then cannot answer for the
    whole snapshot.
    """
    ids, is_known = list_file_ids(scan.view)
    positions = scan.view.find_positions(scan.entry_ids)
    ids, is_known = ids[positions], is_known[positions]
    if not is_known.all() or any(scan.find_deletes_by_file(scan.entry_ids)) or len(np.unique(ids, axis=0)) < len(ids):
        return None
    return ids


def _make_plan(
    statement_id: str, loaded_table: LoadedTable, cube: IndexDefinition, answer: CubeAnswerColumns, files: int
) -> StatementPlan:
    """Return the plan in the answer. It states that the groups of the cube replace all files of the snapshot."""
    assert loaded_table.entry is not None
    name = ".".join((*loaded_table.entry.namespace, loaded_table.entry.name))
    table = TableRead(
        table=name, files=files, considered_files=files, bytes=0, columns=len(_list_columns(answer)), joins=()
    )
    cube_use = CubeUse(index=cube.name, files=files, row_files=0, reason=None)
    return StatementPlan(statement_id, ENGINE, why=_ENGINE_REASON, tables=(table,), cube=cube_use)


def _list_columns(answer: CubeAnswerColumns) -> tuple[int, ...]:
    """Return the ids of the columns that the request uses, or none if they are more than the query history stores."""
    columns = {term.column_id for term in answer.query.dimensions} | set(answer.filtered)
    columns |= {column.column_id for measure in answer.query.measures for column in list_columns(measure.operand)}
    return select_shape_columns(columns)


def _make_shape(answer: CubeAnswerColumns) -> QueryShape:
    """Return the shape of the request: its columns, conditions and aggregates, without values.

    The query history counts requests with the same shape together. The column id of an aggregate is 0 if its argument
    is not a single column.
    """
    aggregates = {
        Aggregate(measure.function, measure.operand.column_id if isinstance(measure.operand, ColumnOperand) else 0)
        for measure in answer.query.measures
    }
    return QueryShape(
        _HISTORY_ENGINE,
        _list_columns(answer),
        list_conjuncts(answer.condition),
        grouping=select_shape_columns(term.column_id for term in answer.query.dimensions),
        aggregates=tuple(sorted(aggregates)),
    )


def _encode_json(rows: pa.Table, answer: CubeAnswerColumns, plan: StatementPlan) -> bytes:
    """Return the answer as JSON, in the same form as `commands/sql/worker.py`."""
    columns = [StatementColumn(name, kind) for name, kind in zip(rows.column_names, answer.types, strict=True)]
    head = msgspec.json.encode(plan)[:-1]  # The rows follow before the closing brace.
    values = [row for batch in rows.to_batches() for row in to_json_rows(batch)]
    return b"".join(
        (
            head,
            b',"columns":',
            msgspec.json.encode(columns),
            b',"rows":',
            msgspec.json.encode(values),
            b',"complete":true}',
        )
    )


def _encode_arrow(rows: pa.Table, _: CubeAnswerColumns, plan: StatementPlan) -> bytes:
    """Return the answer as an Arrow stream."""
    table = rows.replace_schema_metadata({"seamark": msgspec.json.encode(plan)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


CUBE_ANSWERS: web.AppKey[CubeAnswers] = web.AppKey("cube-answers", CubeAnswers)
