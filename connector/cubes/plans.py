"""Requests the plan of an aggregate query over a cube: the groups of covered files, and a plan of the other files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from seamark.connector.client.errors import ClientError, ServerFailed
from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.statements import CubeStatement, CubeTable
from seamark.connector.cubes.summaries import CubeSummary
from seamark.connector.plans.async_client import CubePlanRequest, KnownTable, Seamark
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.kinds.cube import build_entry_schema
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.protocol.wire import CUBE_PLAN
from seamark.formats.runtime.decoding import convert_json


class _Plan(msgspec.Struct, frozen=True, rename="kebab"):
    """A decoded response, which contains the plan of a query over a cube.

    Attributes:
        reason: The reason why the cube cannot be used, or None.
        covered_files: The number of files whose rows are in the groups of the cube.
        considered_files: The number of files that the server considered for the plan.
        row_files: The number of files without groups, whose rows must be read.
        row_bytes: The size of these files.
        schema_id: The schema of the table with which the server made the plan.
        name: The name of the plan table with the files without groups, or None.
        plan_snapshot_id: The id of the plan snapshot with the files without groups, or None.
    """

    reason: str | None
    schema_id: int = 0
    covered_files: int = 0
    considered_files: int = 0
    row_files: int = 0
    row_bytes: int = 0
    name: str | None = None
    plan_snapshot_id: int | None = None


@dataclass(frozen=True)
class CubeScan:
    """The plan of one query over a cube.

    Attributes:
        groups: The groups of the covered files. Equal groups may appear several times.
        summary: The use of the cube, for the report of the query.
        considered_files: The number of files that the server considered for the plan.
        row_bytes: The size of the files whose rows are read.
        name, plan_snapshot_id: The plan of the other files, or None if the cube covers all files.
    """

    groups: pa.Table
    summary: CubeSummary
    considered_files: int
    row_bytes: int
    name: str | None
    plan_snapshot_id: int | None


CUBE_FAILURES = (NotFromCube, ClientError, TimeoutError)
"""The errors after which a query reads rows instead of groups."""


def explain_failure(error: NotFromCube | ClientError | TimeoutError) -> CubeSummary:
    """Return the summary of a query that uses no cube because of one of `CUBE_FAILURES`."""
    match error:
        case NotFromCube():
            reason = str(error)
        case ClientError():
            reason = f"the groups cannot be read: {error}"
        case _:
            reason = "Seamark was too slow"
    return CubeSummary(None, 0, 0, reason)


def find_cube_table(table: KnownTable, *, truncates_in_utc: bool) -> CubeTable | None:
    """Return the cubes of a table, or None if it has no cubes.

    Args:
        table: The current state of the table.
        truncates_in_utc: Whether the engine truncates times with a zone in UTC, as cubes do.
    """
    if table.cube_metadata is None:
        return None
    definitions = read_definitions(table.cube_metadata).enabled
    cubes = tuple(definition for definition in definitions if KINDS[definition.kind].aggregates)
    return CubeTable(table.cube_metadata.current_schema, cubes, truncates_in_utc) if cubes else None


def build_negated_filter(
    statement: CubeStatement, find_filter: Callable[[str, str], Expression | None]
) -> Expression | None:
    """Return a filter that is true for each row that does not meet the statement's condition on rows.

    The result is None if the statement has no such condition. Groups answer the query only for files without such rows.

    Args:
        statement: The query over the cube.
        find_filter: A function with two arguments: the alias of the table and a condition in the engine's SQL. It
            returns a filter that is true for each row that meets the condition, or None if it cannot read it.

    Raises:
        NotFromCube: `find_filter` cannot read the condition, so it is unknown which files have only rows that meet it.
    """
    if not statement.negated_row_condition:
        return None
    negated_filter = find_filter(statement.alias, statement.negated_row_condition)
    if negated_filter is None:
        raise NotFromCube(
            f"{statement.cube.name}: file statistics cannot show which files have only rows with "
            f"{statement.row_condition[:200]}"
        )
    return negated_filter


async def scan_cube(server: Seamark, statement: CubeStatement, request: CubePlanRequest, table: KnownTable) -> CubeScan:
    """Request the plan of a query.

    Args:
        server: The server of the table.
        statement: The query over the cube.
        request: The request, for the cube and the columns of the query.
        table: The table with which the query was translated.

    Raises:
        NotFromCube: The server cannot answer from the cube.
        ClientError: The server refuses the request or does not respond.
    """
    raw = await server.request_cube_plan(request)
    try:
        groups = pa.ipc.open_stream(pa.py_buffer(raw)).read_all()
        plan = convert_json((groups.schema.metadata or {}).get(CUBE_PLAN.encode(), b""), _Plan)
    except (pa.ArrowException, OSError, msgspec.MsgspecError) as error:
        raise ServerFailed(f"{server.url} sent a response that is not a plan of a cube: {error}") from None
    cube = statement.cube
    if plan.reason is not None:
        raise NotFromCube(f"{cube.name}: {plan.reason}")
    if statement.needs_all_files and plan.row_files:
        raise NotFromCube(
            f"{cube.name}: rows cannot be added to its sketches, and it does not cover {plan.row_files} files"
        )
    if table.cube_metadata is None or plan.schema_id != table.cube_metadata.current_schema_id:
        raise NotFromCube(f"{cube.name}: the columns of the table changed during planning")
    groups = groups.replace_schema_metadata(None)
    expected = build_entry_schema(cube.terms, cube.measures)
    if groups.schema != pa.schema([expected.field(name) for name in statement.columns]):
        raise NotFromCube(f"{cube.name}: the server returned other columns")
    if plan.row_files and plan.name is None and plan.plan_snapshot_id is None:
        raise NotFromCube(f"{cube.name}: the server created no plan of the other files")
    summary = CubeSummary(cube.name, plan.covered_files, plan.row_files)
    return CubeScan(groups, summary, plan.considered_files, plan.row_bytes, plan.name, plan.plan_snapshot_id)


def convert_uuids(groups: pa.Table, statement: CubeStatement) -> pa.Table:
    """Return the groups with Arrow's type for UUIDs, so that an engine reads them as UUIDs.

    The column `d3` has the values of the cube's term 3. Columns of measures begin with another letter.
    """
    for number, name in enumerate(statement.columns):
        if name.startswith("d") and statement.cube.terms[int(name[1:])].source == "uuid":
            chunks = [pa.ExtensionArray.from_storage(pa.uuid(), chunk) for chunk in groups[name].chunks]
            groups = groups.set_column(number, name, pa.chunked_array(chunks, pa.uuid()))
    return groups
