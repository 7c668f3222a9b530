"""The route that returns the groups of a cube for data files.

The client plans the files of its query, and sends their ids. So the plan takes snapshots, branches and deletes into
account, and this route only finds entries. An entry describes one immutable file. The answer does not cover files
without a usable entry. The client reads the rows of these files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from aiohttp import web

from seamark.formats.iceberg.expressions.arrow_filters import check_filter
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE, Expression, collect_predicates, is_longer
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.group_conditions import make_group_schema
from seamark.formats.index.keys.measures import list_partials
from seamark.formats.index.kinds.cube import SumOverflow, build_entry_schema, combine_groups
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.protocol.wire import decode_json
from seamark.formats.runtime.errors import BadRequest, NotFound
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.indexes.dimension_rights import check_dimension_rights
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.cubes.segments import GroupPart
from seamark.metaserver.store.model import Entry

FILES_MAX = 1_000_000
"""The maximum number of data files of a request."""
GROUPS_MAX = 2_000_000
"""The number of groups in memory at which the server stops reading index files."""
BYTES_MAX = 256 << 20
"""The number of bytes of groups in memory at which the server stops reading entries."""
_COMBINED_BYTES = 64 << 20
_UNCOMBINED_GROUPS_MAX = 500_000
"""Groups are combined if their number exceeds this limit, or if their bytes exceed `_COMBINED_BYTES`."""
_ENGINE_COMBINED_GROUPS_MAX = 1_000
"""The maximum number of groups that an engine combines in less time than the server."""
_IN_LOOP_CHARACTERS = 16_384
"""The maximum length of texts and answers that are converted in the event loop."""
CONDITION_VALUES_MAX = 1_000
"""The maximum number of values and predicates of a condition that leaves out groups. Longer conditions are ignored."""
_TRANSFORMS_MAX = 16
"""The maximum number of transformed columns of a condition that leaves out groups."""
_ID_BYTES = 16

Ids = npt.NDArray[np.uint64]


class ReadCubeGroupsRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for the groups of a cube."""

    definition_id: Annotated[str, doc("The definition-id of the cube.")]
    columns: Annotated[
        list[str],
        doc("The dimensions d0, d1, … and partial aggregates m0, m1, … to return.", examples=[["d0", "m1"]]),
    ]
    files: Annotated[
        str,
        doc(
            f"The ids of at most {FILES_MAX:,} data files, in base64. The id of a file is the XXH64 of path, size and "
            "record count with the seeds 0 and 1, as two 64-bit little-endian integers."
        ),
    ]
    filter: Annotated[
        msgspec.Raw,
        doc("An expression over the dimensions d0, d1, … of the entries. Groups that do not meet it are left out."),
    ] = msgspec.field(default_factory=msgspec.Raw)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/cube-groups",
    "readCubeGroups",
    "Return the groups of a cube with their partial aggregates, for the data files that the cube covers",
    tags=("indexes",),
    body_size=BodySize.LARGE,
    answers=(
        ResponseSpec(
            200,
            "An Arrow IPC stream with the requested columns. A group may appear several times. The metadata `covered` "
            "of its schema contains a bit for each requested file, in base64. The lowest bit of a byte is first",
        ),
        ResponseSpec(400, "A column or the list of files is invalid"),
        ResponseSpec(403, "The caller may not read a dimension table whose attributes the cube has"),
        ResponseSpec(404, "The table or the cube does not exist"),
    ),
).takes(ReadCubeGroupsRequest)
async def read_cube_groups(call: Call, body: ReadCubeGroupsRequest) -> web.Response:
    """Return the groups of a cube with their partial aggregates, for the data files that the cube covers."""
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    definition = await find_cube(call, loaded_table, body.definition_id)
    is_short = len(body.files) <= _IN_LOOP_CHARACTERS
    ids = _parse_ids(body.files) if is_short else await asyncio.to_thread(_parse_ids, body.files)
    filter_json = bytes(body.filter)
    condition = await read_in_turn(call, len(filter_json), partial(read_condition, filter_json, definition))
    group_reading = await read_groups(call, loaded_table, definition, body.columns, ids, condition, combines_few=False)
    is_short = group_reading.groups.nbytes <= _IN_LOOP_CHARACTERS
    return web.Response(
        body=group_reading.encode() if is_short else await asyncio.to_thread(group_reading.encode),
        content_type=ARROW_STREAM,
    )


async def find_cube(call: Call, loaded_table: LoadedTable, definition_id: str) -> IndexDefinition:
    """Return the definition of a cube.

    Raises:
        Forbidden: The caller may not read a dimension table whose attributes the cube has.
        NotFound: The table has no cube with this id.
    """
    index_definitions = read_definitions(loaded_table.metadata).by_name.values()
    definition = next(
        (
            defined_index
            for defined_index in index_definitions
            if defined_index.id == definition_id and KINDS[defined_index.kind].aggregates
        ),
        None,
    )
    if definition is None or loaded_table.entry is None:
        raise NotFound("The table has no cube with this definition-id; list its indexes with seamark index list")
    # A caller that may read the fact table may lack the right to read its dimension tables.
    await check_dimension_rights(call, definition.dimension_tables, "readCubeGroups")
    return definition


async def read_groups(
    call: Call,
    loaded_table: LoadedTable,
    definition: IndexDefinition,
    columns: Sequence[str],
    ids: Ids,
    condition: Expression = TRUE,
    *,
    combines_few: bool = True,
) -> GroupReading:
    """Read the groups of data files.

    Args:
        call: The request.
        loaded_table: The table.
        definition: A cube of the table.
        columns: The dimensions and partial aggregates to return, in the order of the entries.
        ids: uint64[files, 2]: the ids of the data files.
        condition: A condition on groups (`group_conditions.py`). Groups that do not meet it are left out.
        combines_few: Whether equal groups are combined if there are few groups.

    Raises:
        BadRequest: A column does not exist.
    """
    schema = _select_columns(definition, columns)
    assert loaded_table.entry is not None
    group_reading = GroupReading(
        schema, _select_functions(definition, columns), len(ids), condition, combines_few=combines_few
    )

    async def run_in_thread(work: Callable[[], None]) -> None:
        if condition == TRUE:
            await asyncio.to_thread(work)
        else:
            # Conditions are evaluated in a queue: one part at a time, and each principal has one place in the queue.
            await call.components.worker_limits.selecting.run(call.principal.name, work)

    async for part in call.components.segments.read_parts(loaded_table.entry, definition, ids):
        if group_reading.enqueue(part):
            await run_in_thread(group_reading.process)
            if group_reading.is_done:
                break
    await run_in_thread(group_reading.finish)
    _count_use(call, loaded_table.entry, definition, group_reading)
    return group_reading


def _count_use(call: Call, entry: Entry, definition: IndexDefinition, group_reading: GroupReading) -> None:
    """Count the use of the cube, an index of pre-computed aggregates, for the statistics of indexes.

    The covered files count as removed, because their rows are not read.
    """
    call.components.usage.note(
        entry.uuid,
        definition.id,
        files_in=group_reading.files,
        files_removed=group_reading.covered_files,
        now_ms=call.components.clock.now_ms(),
    )


def _select_columns(definition: IndexDefinition, columns: Sequence[str]) -> pa.Schema:
    """Return the schema of the requested columns of a cube's entries.

    Raises:
        BadRequest: A column does not exist, or the columns have another order than in the entries.
    """
    schema = build_entry_schema(definition.terms, definition.measures)
    if not columns or list(columns) != [name for name in schema.names if name in columns]:
        raise BadRequest(f"columns must be some of {', '.join(schema.names)} in this order, not {columns[:100]!r}")
    return pa.schema([schema.field(name) for name in columns])


def _select_functions(definition: IndexDefinition, columns: Sequence[str]) -> Mapping[str, str]:
    """Return the function of each requested partial aggregate, by the name of its column."""
    partials = list_partials(definition.measures)
    functions = {f"m{number}": partial.function for number, partial in enumerate(partials)}
    return {name: functions[name] for name in columns if name in functions}


def read_condition(filter_json: bytes, definition: IndexDefinition) -> Expression:
    """Parse and bind the condition on groups, or return TRUE if its evaluation would take long.

    The client's query evaluates all of its conditions itself, so additional groups do not change its result.

    Args:
        filter_json: An expression over the dimensions d0, d1, … in JSON, or an empty text.
        definition: The definition of the cube.

    Raises:
        BadRequest: The condition is invalid.
    """
    if not filter_json:
        return TRUE
    expression = parse_expression(decode_json(filter_json, "The filter"))
    condition = bind(expression, make_group_schema(definition.terms), (), case_sensitive=True)
    try:
        check_filter(condition)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return TRUE if _is_expensive(condition) else condition


def _is_expensive(condition: Expression) -> bool:
    """Return whether a condition has too many values, predicates or transformed columns to be evaluated."""
    if is_longer(condition, CONDITION_VALUES_MAX):
        return True
    transformed_columns = {
        (predicate.column_id, predicate.transform)
        for predicate in collect_predicates(condition)
        if predicate.transform != IDENTITY
    }
    return len(transformed_columns) > _TRANSFORMS_MAX


def _parse_ids(text: str) -> Ids:
    """Return the ids of data files, uint64[n, 2], from a text in base64. An id has two little-endian numbers.

    Raises:
        BadRequest: The text is not base64, or has the wrong length.
    """
    try:
        id_bytes = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadRequest(f"files is not base64: {error}") from None
    if len(id_bytes) % _ID_BYTES or len(id_bytes) > FILES_MAX * _ID_BYTES:
        raise BadRequest(
            f"files has {len(id_bytes):,} bytes; it must have {_ID_BYTES} bytes for each file, and at most "
            f"{FILES_MAX:,} files"
        )
    return np.frombuffer(id_bytes, dtype="<u8").reshape(-1, 2).astype(np.uint64)


class GroupReading:
    """The groups that were read for a request.

    Args:
        schema: The requested columns.
        functions: The function of each requested partial aggregate.
        files: The number of requested data files.
        condition: A condition on groups. Groups that do not meet it are left out.
        combines_few: Whether equal groups are combined if there are few groups.
    """

    def __init__(
        self,
        schema: pa.Schema,
        functions: Mapping[str, str],
        files: int,
        condition: Expression = TRUE,
        *,
        combines_few: bool = True,
    ) -> None:
        self._schema, self._functions, self._condition = schema, functions, condition
        self._combines_few = combines_few
        self._is_covered = np.zeros(files, dtype=np.bool_)
        self._groups: pa.Table = schema.empty_table()
        self._waiting: list[GroupPart] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._uncombined: list[pa.Table] = []
        self._uncombined_rows = self._uncombined_bytes = 0

    @property
    def groups(self) -> pa.Table:
        """The groups of the covered files. A group may appear several times."""
        return self._groups

    @property
    def covered(self) -> npt.NDArray[np.bool_]:
        """bool[files]: whether the groups contain the rows of each requested file."""
        return self._is_covered

    @property
    def files(self) -> int:
        """The number of requested data files."""
        return len(self._is_covered)

    @property
    def covered_files(self) -> int:
        return int(self._is_covered.sum())

    @property
    def is_done(self) -> bool:
        """Whether the limit of groups is reached, so that the files of further parts are not covered."""
        return bool(self._groups.num_rows > GROUPS_MAX or self._groups.nbytes > BYTES_MAX)

    def enqueue(self, part: GroupPart) -> bool:
        """Enqueue the groups of some data files, and return whether the queue should be processed now."""
        self._waiting.append(part)
        self._waiting_rows += part.groups.rows
        self._waiting_bytes += part.groups.nbytes
        return self._waiting_rows > _UNCOMBINED_GROUPS_MAX or self._waiting_bytes > _COMBINED_BYTES

    def process(self) -> None:
        """Add the enqueued groups that meet the condition."""
        for part in self._waiting:
            self._add(part)
            if self.is_done:
                break
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _add(self, part: GroupPart) -> None:
        """Add the groups of some files."""
        try:
            selected_groups = part.groups.select(self._condition, self._schema.names)
        except ValueError:  # Keep all groups, because the client's query evaluates its condition itself.
            selected_groups = part.groups.select(TRUE, self._schema.names)
        self._is_covered[part.files] = True
        self._uncombined.append(selected_groups)
        self._uncombined_rows += selected_groups.num_rows
        self._uncombined_bytes += selected_groups.nbytes
        if self._uncombined_rows > _UNCOMBINED_GROUPS_MAX or self._uncombined_bytes > _COMBINED_BYTES:
            self._combine_groups()

    def finish(self) -> None:
        """Add the enqueued groups, and combine equal groups."""
        self.process()
        self._combine_groups()

    def _combine_groups(self) -> None:
        """Combine the groups that were added since the last combination with the earlier groups.

        A small number of groups is not combined if the engine that reads them combines groups itself.
        """
        groups = pa.concat_tables([self._groups, *(table for table in self._uncombined if table.num_rows)])
        if groups.num_rows > (0 if self._combines_few else _ENGINE_COMBINED_GROUPS_MAX):
            # Do not report the error here: the engine sums up the groups again, and reports it.
            with suppress(SumOverflow, pa.ArrowException):
                groups = combine_groups(groups, self._functions).select(self._schema.names)
        self._groups, self._uncombined, self._uncombined_rows, self._uncombined_bytes = groups, [], 0, 0

    def encode(self) -> bytes:
        """Return the groups as an Arrow stream, with the covered files in the metadata of its schema."""
        covered_files = base64.b64encode(np.packbits(self._is_covered, bitorder="little").tobytes())
        table = self._groups.replace_schema_metadata({"covered": covered_files})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        body: bytes = sink.getvalue().to_pybytes()
        return body
