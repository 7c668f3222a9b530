"""Answers an aggregate query from a cube: chooses the cube, and reads the groups of the files that it covers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from seamark.connector.sql.reads import NamedTable, PlannedTableRead
from seamark.formats.iceberg.expressions.expression import Bound, Expression, all_of
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.group_conditions import rename_condition, to_group_condition
from seamark.formats.index.keys.hashing import file_ids
from seamark.formats.index.kinds.cube import entry_schema
from seamark.formats.index.kinds.kinds import KINDS


@dataclass(frozen=True)
class CubePlan:
    """A query that reads groups of a cube.

    Attributes:
        query: The query in DuckDB's SQL.
        reads: The rows to read of each table. Of the table with the cube, these are files that the cube does not cover.
        groups: The groups of the covered files.
    """

    query: DuckDBQuery
    reads: tuple[PlannedTableRead, ...]
    groups: pa.Table
    summary: CubeSummary


ReadPlanner = Callable[[bool, Collection[int]], Sequence[PlannedTableRead]]
"""A function that plans the reads of a query's tables.

Its arguments are whether joins may leave out files, and the numbers of references that need no plan.
"""


def plan_cube(
    client: SeamarkClient,
    tree: exp.Expr,
    query: DuckDBQuery,
    tables: Sequence[NamedTable],
    plan: ReadPlanner,
    now: datetime,
    use: str,
) -> tuple[Sequence[PlannedTableRead], CubePlan | CubeSummary | None]:
    """Plan the reads of a query, and how it is answered from a cube.

    Args:
        client: The client of the catalog.
        tree: The query.
        query: The translation that reads rows.
        tables: The tables of `query`, in the order of its references.
        plan: The function that plans the reads.
        now: The time at which the statement runs.
        use: One of `CUBE_USES`.

    Returns:
        The reads of rows, and a plan, or a summary that explains why no cube is used, or None if the query has no table
        with a cube.
    """
    if not any(_list_cubes(table) for table in tables):
        return plan(True, ()), None
    try:
        if use == OFF:
            raise NotFromCube("the session does not use cubes")
        check_form(tree)
        cube, translated = _choose(tree, query, tables, now, floats=use != EXACT)
    except NotFromCube as why:
        reads = plan(True, ())
        return reads, CubeSummary(None, 0, _count_files(reads), str(why))
    # Reading the groups is faster than requesting the joins, which could only leave out files.
    reads = plan(False, translated.replaced)
    try:
        cube_plan = _read_groups(client, query, reads, cube, translated, plan)
        return cube_plan.reads, cube_plan
    except NotFromCube as why:
        reason = str(why)
    except ClientError as error:
        reason = f"the groups cannot be read: {error}"
    if len(tables) > 1:
        reads = plan(True, ())
    return reads, CubeSummary(None, 0, _count_files(reads), reason)


def _list_cubes(table: NamedTable) -> list[IndexDefinition]:
    return [one for one in read_definitions(table.opened.metadata).enabled if KINDS[one.kind].aggregates]


def _count_files(reads: Sequence[PlannedTableRead]) -> int:
    return sum(len(read.tasks) for read in reads)


def _choose(
    tree: exp.Expr, query: DuckDBQuery, tables: Sequence[NamedTable], now: datetime, *, floats: bool
) -> tuple[IndexDefinition, CubeQuery]:
    """Return the cube with the fewest dimensions from which the query follows. Cubes of the largest table are first.

    Raises:
        NotFromCube: The query follows from no cube. The message has the reason for each cube.
    """
    cubes = [(number, cube) for number, table in enumerate(tables) for cube in _list_cubes(table)]
    cubes.sort(key=lambda one: (-tables[one[0]].bytes, len(one[1].terms), len(one[1].measures), one[1].name))
    opened = [table.opened for table in tables]
    reasons = []
    for number, cube in cubes:
        try:
            return cube, translate_over_cube(tree, query.tables, opened, number, cube, now, floats=floats)
        except NotFromCube as why:
            reasons.append(f"{cube.name}: {why}")
    raise NotFromCube("; ".join(reasons)[:1000])


def _read_groups(
    client: SeamarkClient,
    query: DuckDBQuery,
    reads: Sequence[PlannedTableRead],
    cube: IndexDefinition,
    translated: CubeQuery,
    plan: ReadPlanner,
) -> CubePlan:
    facts = reads[translated.facts]
    tasks = [number for number, task in enumerate(facts.tasks) if _has_whole_file(task)]
    if not tasks:
        raise NotFromCube("no file of the plan is without deletes")
    files = [facts.tasks[number] for number in tasks]
    ids = file_ids([one.path for one in files], [one.size_bytes for one in files], [one.records for one in files])
    groups, bits = client.cube_groups(
        facts.named.name,
        cube.id,
        translated.columns,
        np.ascontiguousarray(ids, dtype="<u8").tobytes(),
        _find_condition(reads, cube, translated),
    )
    expected = entry_schema(cube.terms, cube.measures)
    if groups.schema != pa.schema([expected.field(name) for name in translated.columns]):
        raise NotFromCube("the server returned columns that were not requested")
    covered = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(files), bitorder="little")
    answered = {tasks[number] for number in np.flatnonzero(covered).tolist()}
    if not answered:
        raise NotFromCube(f"{cube.name}: it has no entry for a file of the plan")
    row_tasks = tuple(task for number, task in enumerate(facts.tasks) if number not in answered)
    if row_tasks and translated.replaced:
        joined = plan(False, translated.tables.keys() - translated.replaced)
        reads = [joined[number] if number in translated.replaced else read for number, read in enumerate(reads)]
    remaining = {number: replace(reads[number], table=table) for number, table in translated.tables.items()}
    remaining[translated.facts] = replace(remaining[translated.facts], tasks=row_tasks)
    return CubePlan(
        DuckDBQuery(translated.text, query.columns, tuple(translated.tables.values())),
        tuple(remaining.values()),
        _convert_uuids(groups, cube, translated.columns),
        CubeSummary(cube.name, len(answered), len(row_tasks)),
    )


def _find_condition(reads: Sequence[PlannedTableRead], cube: IndexDefinition, translated: CubeQuery) -> Expression:
    """Return a condition that is true for each group that the query needs."""
    parts = [to_group_condition(reads[translated.facts].where, cube.terms)]
    for number, attributes in translated.attributes.items():
        fields = {field.id: field.name for field in reads[number].named.opened.schema.fields}

        def find_number(
            predicate: Bound, attributes: Mapping[str, str] = attributes, fields: Mapping[int, str] = fields
        ) -> int | None:
            column = attributes.get(fields.get(predicate.column_id, ""))
            return None if column is None else int(column[1:])

        parts.append(rename_condition(reads[number].where, find_number))
    return all_of(*parts)


def _has_whole_file(task: ScanTask) -> bool:
    """Return whether the task reads all rows of an identified file.

    In this case, the condition of the query can select groups.
    """
    is_whole = not task.deletes and task.removed_by is None and task.span is None
    return is_whole and task.records >= 0 and task.size_bytes >= 0


def _convert_uuids(groups: pa.Table, cube: IndexDefinition, columns: Sequence[str]) -> pa.Table:
    """Return the groups with Arrow's type for UUIDs, so that DuckDB reads them as UUIDs."""
    for number, name in enumerate(columns):
        if name.startswith("d") and cube.terms[int(name[1:])].kind == "uuid":
            chunks = [pa.ExtensionArray.from_storage(pa.uuid(), chunk) for chunk in groups[name].chunks]
            groups = groups.set_column(number, name, pa.chunked_array(chunks, pa.uuid()))
    return groups
