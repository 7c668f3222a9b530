"""Answers an aggregate query from a cube: chooses the cube, and reads the groups of the files that it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
import pyarrow as pa
from sqlglot import exp

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from seamark.connector.cubes.summaries import CUBE_USES as CUBE_USES
from seamark.connector.cubes.summaries import EXACT as EXACT
from seamark.connector.cubes.summaries import OFF as OFF
from seamark.connector.cubes.summaries import ON as ON
from seamark.connector.cubes.summaries import CubeSummary as CubeSummary
from seamark.connector.read.tables import ScanTask
from seamark.connector.sql.cubes.queries import CubeQuery, NotFromCube, check_form, translate_over_cube
from seamark.connector.sql.queries import DuckDBQuery
from seamark.connector.sql.reads import PlannedTableRead
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.hashing import file_ids
from seamark.formats.index.kinds.cube import entry_schema
from seamark.formats.index.kinds.kinds import KINDS


@dataclass(frozen=True)
class CubePlan:
    """A query that reads groups of a cube.

    Attributes:
        query: The query in DuckDB's SQL.
        read: The rows to read of files that the cube does not cover.
        groups: The groups of the covered files.
    """

    query: DuckDBQuery
    read: PlannedTableRead
    groups: pa.Table
    summary: CubeSummary


def plan_cube(
    client: SeamarkClient,
    tree: exp.Expr,
    query: DuckDBQuery,
    reads: Sequence[PlannedTableRead],
    now: datetime,
    use: str,
) -> CubePlan | CubeSummary | None:
    """Return the plan that answers a query from a cube.

    Args:
        client: The client of the catalog.
        tree: The query.
        query: The translation that reads rows.
        reads: The planned reads of the tables of `query`.
        now: The time at which the statement runs.
        use: One of `CUBE_USES`.

    Returns:
        A plan, or a summary that explains why no cube is used, or None if the query has no table with a cube.
    """
    definitions = [one for read in reads for one in read_definitions(read.named.opened.metadata).enabled]
    cubes = [definition for definition in definitions if KINDS[definition.kind].aggregates]
    if not cubes:
        return None
    files = sum(len(read.tasks) for read in reads)
    try:
        if use == OFF:
            raise NotFromCube("the session does not use cubes")
        check_form(tree)
        (read,) = reads
        if read.named.opened is not read.opened:
            raise NotFromCube("the rows of the table are selected by another table")
        cube, translated = _choose(tree, query, read, cubes, now, floats=use != EXACT)
        return _read_groups(client, query, read, cube, translated)
    except NotFromCube as why:
        return CubeSummary(None, 0, files, str(why))
    except ClientError as error:
        return CubeSummary(None, 0, files, f"the groups cannot be read: {error}")


def _choose(
    tree: exp.Expr,
    query: DuckDBQuery,
    read: PlannedTableRead,
    cubes: Sequence[IndexDefinition],
    now: datetime,
    *,
    floats: bool,
) -> tuple[IndexDefinition, CubeQuery]:
    """Return the cube with the fewest dimensions from which the query follows.

    Raises:
        NotFromCube: The query follows from no cube. The message has the reason for each cube.
    """
    reasons = []
    for cube in sorted(cubes, key=lambda one: (len(one.terms), len(one.measures), one.name)):
        try:
            return cube, translate_over_cube(tree, query.tables[0], read.opened.schema, cube, now, floats=floats)
        except NotFromCube as why:
            reasons.append(f"{cube.name}: {why}")
    raise NotFromCube("; ".join(reasons)[:1000])


def _read_groups(
    client: SeamarkClient, query: DuckDBQuery, read: PlannedTableRead, cube: IndexDefinition, translated: CubeQuery
) -> CubePlan:
    tasks = [number for number, task in enumerate(read.tasks) if _has_whole_file(task)]
    if not tasks:
        raise NotFromCube("no file of the plan is without deletes")
    files = [read.tasks[number] for number in tasks]
    ids = file_ids([one.path for one in files], [one.size_bytes for one in files], [one.records for one in files])
    groups, bits = client.cube_groups(
        read.named.name, cube.id, translated.columns, np.ascontiguousarray(ids, dtype="<u8").tobytes()
    )
    expected = entry_schema(cube.terms, cube.measures)
    if groups.schema != pa.schema([expected.field(name) for name in translated.columns]):
        raise NotFromCube("the server returned columns that were not requested")
    covered = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(files), bitorder="little")
    answered = {tasks[number] for number in np.flatnonzero(covered).tolist()}
    if not answered:
        raise NotFromCube(f"{cube.name}: it has no entry for a file of the plan")
    row_tasks = tuple(task for number, task in enumerate(read.tasks) if number not in answered)
    return CubePlan(
        DuckDBQuery(translated.text, query.columns, (translated.table,)),
        replace(read, table=translated.table, tasks=row_tasks),
        _convert_uuids(groups, cube, translated.columns),
        CubeSummary(cube.name, len(answered), len(row_tasks)),
    )


def _has_whole_file(task: ScanTask) -> bool:
    """Return whether the task reads all rows of an identified file.

    In this case, the condition of the query can select groups.
    """
    is_whole = not task.deletes and task.removed_by is None and task.span is None
    return is_whole and task.records >= 0 and task.size_bytes >= 0


def _convert_uuids(groups: pa.Table, cube: IndexDefinition, columns: Sequence[str]) -> pa.Table:
    """Return the groups with Arrow's type for UUIDs, so that DuckDB reads them as UUIDs."""
    for number, name in enumerate(columns):
        if name.startswith("d") and cube.terms[int(name[1:])].source == "uuid":
            chunks = [pa.ExtensionArray.from_storage(pa.uuid(), chunk) for chunk in groups[name].chunks]
            groups = groups.set_column(number, name, pa.chunked_array(chunks, pa.uuid()))
    return groups
