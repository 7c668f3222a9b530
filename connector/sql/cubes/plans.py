"""Answers an aggregate query from a cube: chooses the cube, and reads the groups of the files that it covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from seamark.connector.sql.cubes.computed_groups import ComputedGroups
from seamark.connector.sql.cubes.queries import CubeQuery, NotFromCube, check_form, translate_over_cube
from seamark.connector.sql.queries import DuckDBQuery
from seamark.connector.sql.reads import NamedTable, PlannedTableRead, ReadPlanner
from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter
from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    Bound,
    Expression,
    collect_predicates,
    is_longer,
    join_by_and,
)
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.group_conditions import (
    get_group_column_name,
    to_group_condition,
    translate_dimension_condition,
)
from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.formats.index.kinds.cube import build_entry_schema
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.protocol.wire import CUBE_COST_MAX_FRACTION, CUBE_UNCHECKED_ROWS_MAX

_SMALL_TABLE_MAX_FRACTION = 0.05
"""If a query reads at most this fraction of the rows of its plan, it uses groups without a comparison of costs.

The comparison needs the rows that joins leave out. Planning the joins takes longer than reading this fraction.
"""
FILTERED_GROUPS_MIN = 1_000
"""The minimum number of groups of a file from which a query selects the groups that it needs."""
_CONDITION_VALUES_MAX = 1_000
"""The maximum number of values and predicates of a condition by which groups are selected."""
_ROWS_PER_GROUP_COST = 4
"""The cost of a group, in rows: the number of rows that are read in the time in which a group is sent and read.

A group in the memory of the session costs as much as a row.
"""
_REASONS_CHARACTERS_MAX = 1000
"""The maximum length of the reasons in an error message."""


class _ExpensiveCube(NotFromCube):
    """Raised if it is cheaper to read the rows than the groups of a cube.

    Attributes:
        reads: The reads of the query without a cube.
    """

    def __init__(self, reason: str, reads: Sequence[PlannedTableRead]) -> None:
        super().__init__(reason)
        self.reads = reads


@dataclass(frozen=True)
class CubePlan:
    """A query that reads groups of a cube.

    Attributes:
        query: The query in DuckDB's SQL.
        reads: The rows to read of each table. For the table with the cube, these are the rows of files that the cube
            does not cover.
        groups: The groups of the covered files.
        deleted: The deleted rows of the covered files, which the query subtracts, or None if there are none.
    """

    query: DuckDBQuery
    reads: tuple[PlannedTableRead, ...]
    groups: pa.Table
    summary: CubeSummary
    deleted: PlannedTableRead | None = None


@dataclass(frozen=True)
class CubeChoice:
    """A cube that can answer a query, and the query over it."""

    cube: IndexDefinition
    query: CubeQuery


def choose_cube(
    tree: exp.Expr, query: DuckDBQuery, tables: Sequence[NamedTable], now: datetime, use: str
) -> CubeChoice | NotFromCube | None:
    """Return a cube that can answer a query, or the reason why none can, or None if no table of the query has a cube.

    The result depends only on the arguments, and on the date of `now`.

    Args:
        tree: The query.
        query: The translation that reads rows.
        tables: The tables of `query`, in the order of its references.
        now: The time at which the statement runs.
        use: One of `CUBE_USES`.
    """
    cubes = [(number, cube) for number, table in enumerate(tables) for cube in _list_cubes(table)]
    if not cubes:
        return None
    try:
        if use == OFF:
            raise NotFromCube("the session does not use cubes")
        check_form(tree)
        return _choose(tree, query, tables, cubes, now, floats=use != EXACT)
    except NotFromCube as error:
        return error.with_traceback(None)


def plan_cube(
    client: SeamarkClient,
    query: DuckDBQuery,
    choice: CubeChoice | NotFromCube | None,
    planner: ReadPlanner,
    computed_groups: ComputedGroups | None = None,
) -> tuple[Sequence[PlannedTableRead], CubePlan | CubeSummary | None]:
    """Plan the reads of a query and, if a cube can answer it, the use of the cube.

    Args:
        client: The client of the catalog.
        query: The translation that reads rows.
        choice: The cube (`choose_cube`).
        planner: The planner of the query's reads.
        computed_groups: The groups of files without entries. If it is None, the rows of these files are read.

    Returns:
        Two values. The first is the reads of rows. The second is the plan with the cube, or a summary with the reason
        why no cube is used, or None if no table of the query has a cube.
    """
    if not isinstance(choice, CubeChoice):
        reads = planner.plan()
        return reads, None if choice is None else CubeSummary(None, 0, _count_files(reads), str(choice))
    # Reading the groups takes less time than requesting plans of the joins, which could only leave out files.
    reads = planner.plan(joins=False, skipped_numbers=choice.query.joined_in_groups)
    try:
        cube_plan = _read_groups(client, query, reads, choice.cube, choice.query, planner, computed_groups)
        return cube_plan.reads, cube_plan
    except _ExpensiveCube as problem:
        return problem.reads, CubeSummary(None, 0, _count_files(problem.reads), str(problem))
    except NotFromCube as problem:
        reason = str(problem)
    except ClientError as error:
        reason = f"the groups cannot be read: {error}"
    if len(reads) > 1:
        reads = planner.plan()
    return reads, CubeSummary(None, 0, _count_files(reads), reason)


def _list_cubes(table: NamedTable) -> list[IndexDefinition]:
    return [
        definition
        for definition in read_definitions(table.open_table.metadata).enabled
        if KINDS[definition.kind].aggregates
    ]


def _count_files(reads: Sequence[PlannedTableRead]) -> int:
    return sum(len(table_read.tasks) for table_read in reads)


def _choose(
    tree: exp.Expr,
    query: DuckDBQuery,
    tables: Sequence[NamedTable],
    cubes: Sequence[tuple[int, IndexDefinition]],
    now: datetime,
    *,
    floats: bool,
) -> CubeChoice:
    """Return the first cube that can answer a query.

    The cubes of the table with the most bytes are tried first, in the order of their number of dimensions.

    Args:
        tree: The query.
        query: The translation that reads rows.
        tables: The tables of `query`, in the order of its references.
        cubes: The cubes of the tables, each with the number of its table.
        now: The time at which the statement runs.
        floats: Whether sums of floats and averages of integers may be used (`translate_over_cube`).

    Raises:
        NotFromCube: No cube can answer the query. The message has the reason for each cube.
    """

    def make_sort_key(choice: tuple[int, IndexDefinition]) -> tuple[int, int, int, str]:
        table_number, definition = choice
        return -tables[table_number].bytes, len(definition.terms), len(definition.measures), definition.name

    ordered_cubes = sorted(cubes, key=make_sort_key)
    open_tables = [table.open_table for table in tables]
    reasons = []
    for number, cube in ordered_cubes:
        try:
            cube_query = translate_over_cube(tree, query.tables, open_tables, number, cube, now, floats=floats)
            return CubeChoice(cube, cube_query)
        except NotFromCube as error:
            reasons.append(f"{cube.name}: {error}")
    raise NotFromCube("; ".join(reasons)[:_REASONS_CHARACTERS_MAX])


def _read_groups(
    client: SeamarkClient,
    query: DuckDBQuery,
    reads: Sequence[PlannedTableRead],
    cube: IndexDefinition,
    cube_query: CubeQuery,
    planner: ReadPlanner,
    computed_groups: ComputedGroups | None,
) -> CubePlan:
    """Request the groups of the covered files, and plan the reads of the other rows."""
    facts = reads[cube_query.facts]
    corrected_query = cube_query.corrected
    tasks = [
        number
        for number, task in enumerate(facts.tasks)
        if _reads_whole_file(task) and (not task.deletes or corrected_query is not None)
    ]
    if not tasks:
        raise NotFromCube("deletes apply to all files of the plan")
    files = [facts.tasks[number] for number in tasks]
    has_deletes = corrected_query is not None and any(file.deletes for file in files)
    columns = corrected_query.columns if corrected_query is not None and has_deletes else cube_query.columns
    ids = compute_file_ids(
        [file.path for file in files], [file.size_bytes for file in files], [file.records for file in files]
    )
    condition = _find_condition(reads, cube, cube_query)
    groups, bits = client.cube_groups(
        facts.named.name,
        cube.id,
        columns,
        np.ascontiguousarray(ids, dtype="<u8").tobytes(),
        condition,
    )
    expected = build_entry_schema(cube.terms, cube.measures)
    if groups.schema != pa.schema([expected.field(name) for name in columns]):
        raise NotFromCube("the server returned columns that were not requested")
    is_covered = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(files), bitorder="little")
    answered_tasks = {tasks[number] for number in np.flatnonzero(is_covered).tolist()}
    if not answered_tasks:
        raise NotFromCube(f"{cube.name}: it has no entry for a file of the plan")
    groups_cost = _ROWS_PER_GROUP_COST * groups.num_rows
    if computed_groups is not None and len(answered_tasks) < len(facts.tasks):
        uncovered = [number for number in tasks if number not in answered_tasks and not facts.tasks[number].deletes]
        batches_by_place = computed_groups.find_or_compute(
            client, facts.open_table, cube, [facts.tasks[number] for number in uncovered]
        )
        answered_tasks.update(uncovered[place] for place in batches_by_place)
        selected_groups = [_select_groups(batch, condition, columns) for batch in batches_by_place.values()]
        groups_cost += sum(part.num_rows for part in selected_groups)
        groups = pa.concat_tables([groups, *selected_groups])
    row_tasks = tuple(task for number, task in enumerate(facts.tasks) if number not in answered_tasks)
    # All conditions are conditions on dimensions, which the query checks again, so deleted rows need no other filter.
    deleted_tasks = tuple(
        replace(facts.tasks[number], deletes=(), removed_by=facts.tasks[number].deletes)
        for number in sorted(answered_tasks)
        if facts.tasks[number].deletes
    )
    if row_tasks or deleted_tasks:
        deleted_rows = _count_rows_to_find_deletes(deleted_tasks)
        rows = sum(task.records for task in row_tasks) + groups_cost + deleted_rows
        planned_rows = sum(task.records for task in facts.tasks)
        if planned_rows > CUBE_UNCHECKED_ROWS_MAX and rows > _SMALL_TABLE_MAX_FRACTION * planned_rows:
            joined_reads = planner.plan() if len(reads) > 1 else reads
            rows_without_cube = sum(task.records for task in joined_reads[cube_query.facts].tasks)
            if rows >= CUBE_COST_MAX_FRACTION * rows_without_cube:
                raise _ExpensiveCube(
                    f"{cube.name}: rows of {len(row_tasks)} of {len(facts.tasks)} files"
                    f"{f', and {deleted_rows:,} rows for deletes,' if deleted_rows else ''} would be read besides "
                    f"{groups.num_rows:,} groups; without the cube, {rows_without_cube:,} rows are read",
                    joined_reads,
                )
    if (row_tasks or deleted_tasks) and cube_query.joined_in_groups:
        planned_reads = planner.plan(
            joins=False, skipped_numbers=cube_query.tables.keys() - cube_query.joined_in_groups
        )
        reads = [
            planned_reads[number] if number in cube_query.joined_in_groups else table_read
            for number, table_read in enumerate(reads)
        ]
    remaining = {number: replace(reads[number], table=table) for number, table in cube_query.tables.items()}
    remaining[cube_query.facts] = replace(remaining[cube_query.facts], tasks=row_tasks)
    text = cube_query.text if row_tasks else cube_query.groups_text
    if corrected_query is not None and has_deletes:
        text = corrected_query.text
    rows = remaining[cube_query.facts]
    return CubePlan(
        DuckDBQuery(text, query.columns, tuple(cube_query.tables.values())),
        tuple(remaining.values()),
        _convert_uuids(groups, cube, columns),
        CubeSummary(cube.name, len(answered_tasks), len(row_tasks)),
        replace(rows, where=TRUE, tasks=deleted_tasks) if has_deletes else None,
    )


def _find_condition(reads: Sequence[PlannedTableRead], cube: IndexDefinition, cube_query: CubeQuery) -> Expression:
    """Return a condition that is true for each group that the query needs.

    It consists of the filter of the fact table, and of the filters of the dimension tables whose attributes the groups
    contain. The columns of these dimension tables are renamed to the columns of the groups.
    """
    parts = [to_group_condition(reads[cube_query.facts].where, cube.terms)]
    for number, attributes in cube_query.attributes.items():
        fields = {field.id: field.name for field in reads[number].named.open_table.schema.fields}

        def find_dimension_number(
            predicate: Bound, attributes: Mapping[str, str] = attributes, fields: Mapping[int, str] = fields
        ) -> int | None:
            """Return the number of the cube's dimension with the column that a predicate compares, or None."""
            # The columns of dimensions in the groups are named d0, d1 ….
            column = attributes.get(fields.get(predicate.column_id, ""))
            return None if column is None else int(column[1:])

        parts.append(translate_dimension_condition(reads[number].where, find_dimension_number))
    return join_by_and(*parts)


def _select_groups(batch: pa.RecordBatch, condition: Expression, columns: Sequence[str]) -> pa.Table:
    """Return columns of the groups that meet a condition. The query evaluates its own conditions again.

    Groups are not filtered if they are few or the condition is long, because filtering would take longer than it saves.
    """
    groups = pa.Table.from_batches([batch])
    if condition != TRUE and groups.num_rows >= FILTERED_GROUPS_MIN and not is_longer(condition, _CONDITION_VALUES_MAX):
        ids = {predicate.column_id for predicate in collect_predicates(condition)}
        values = {column_id: batch.column(get_group_column_name(column_id)) for column_id in ids}
        with suppress(ValueError):  # The condition cannot be evaluated exactly.
            groups = groups.filter(pa.array(evaluate_filter(condition, values, groups.num_rows)))
    return groups.select(list(columns))


def _count_rows_to_find_deletes(tasks: Sequence[ScanTask]) -> int:
    """Return the number of rows that are read to find the deleted rows of files, at most all rows of the files.

    Equality deletes are compared with each row of a file. A position delete file contains the positions of the deleted
    rows, and may apply to several data files.
    """
    compared_rows = 0
    positions: dict[tuple[object, object], int] = {}
    for task in tasks:
        removed_by = task.removed_by or ()
        if all(delete.get("content") == "position-deletes" for delete in removed_by):
            for delete in removed_by:
                key = (delete.get("file-path"), delete.get("content-offset"))
                positions[key] = int(delete.get("record-count") or task.records)
        else:
            compared_rows += task.records
    return min(sum(task.records for task in tasks), compared_rows + sum(positions.values()))


def _reads_whole_file(task: ScanTask) -> bool:
    """Return whether the task reads all rows of its file except deleted rows, and its file id can be computed."""
    is_whole = task.removed_by is None and task.span is None
    return is_whole and task.records >= 0 and task.size_bytes >= 0


def _convert_uuids(groups: pa.Table, cube: IndexDefinition, columns: Sequence[str]) -> pa.Table:
    """Return the groups with Arrow's type for UUIDs, so that DuckDB reads them as UUIDs.

    The column `d3` has the values of the cube's term 3. Columns of measures begin with another letter.
    """
    for number, name in enumerate(columns):
        if name.startswith("d") and cube.terms[int(name[1:])].kind == "uuid":
            chunks = [pa.ExtensionArray.from_storage(pa.uuid(), chunk) for chunk in groups[name].chunks]
            groups = groups.set_column(number, name, pa.chunked_array(chunks, pa.uuid()))
    return groups
