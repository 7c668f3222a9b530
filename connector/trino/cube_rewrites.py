"""Rewrites an aggregate query so that Trino reads groups of a cube, which the statement contains as VALUES.

Users can read the text of their statements in Trino, including the groups in the text. Therefore the proxy first runs a
query without rows, by which Trino checks the rights on the table and on each used column (`rights_check`). Users who
may see the statements of other users see their groups, too, so an operator has to switch cubes on.

The base table stays in the statement: the files that the cube does not cover are read at a plan snapshot of it, and if
there are none, a branch that returns no row names it. So Trino checks the rights on the table and on each used column.
Its row filters and column masks cannot apply to groups: if one of them concerns the table, the original statement runs
(`protocol/access_rules.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import find_scans, parse_query
from seamark.connector.analysis.statement_cache import StatementReader, StatementText
from seamark.connector.cubes.dialects import TRINO, NotFromCube
from seamark.connector.cubes.plans import CubeScan, cube_table_of, find_doubt, scan_cube
from seamark.connector.cubes.statements import CubeStatement, translate_statement
from seamark.connector.plans.async_client import CubePlanRequest, KnownTable, Seamark
from seamark.connector.plans.joins import PlannedScan
from seamark.connector.plans.quotes import quote_name
from seamark.connector.trino.cube_values import count_characters, write_values
from seamark.formats.iceberg.expressions.expression import Expression

GROUPS_MAX = 10_000
"""The maximum number of groups in a statement."""
VALUES_CHARACTERS_MAX = 500_000
"""The maximum number of characters of the groups in a statement."""


@dataclass(frozen=True)
class CubeRewrite:
    """A statement that reads groups of a cube.

    Attributes:
        text: The text of the statement.
        scan: The plan of the query.
        columns: The columns of the table that the statement reads, in lower case.
        rights_check: A query without rows, for which Trino checks the same rights as for the original statement.
    """

    text: str
    scan: CubeScan
    columns: frozenset[str]
    rights_check: str


def translate_text(text: StatementText, table: KnownTable, *, floats: bool) -> CubeStatement:
    """Translate a statement over a cube of its only table.

    Args:
        text: The statement.
        table: The table.
        floats: See `translate_statement`.

    Raises:
        NotFromCube: The statement does not follow from a cube of the table.
    """
    cubes = cube_table_of(table, truncates_in_utc=True)
    if cubes is None:
        raise NotFromCube("the table has no cube")
    if text.prepared is not None or text.parameters:
        raise NotFromCube("it is a prepared statement")
    try:
        query = parse_query(text.text)
    except UnsupportedStatement:
        raise NotFromCube("it is not fully understood") from None
    first = query.text.tokens[0]
    if query.text.quoted or query.text.offsets[first.start] != len(text.text) - len(text.text.lstrip()):
        raise NotFromCube("it is more than a query")
    return translate_statement(query.tree, cubes, TRINO, floats=floats)


async def rewrite_over_cube(
    client: Seamark,
    reader: StatementReader,
    text: StatementText,
    planned: PlannedScan,
    statement: CubeStatement,
    table: KnownTable,
    until_s: float,
) -> CubeRewrite:
    """Return the statement that reads groups.

    Args:
        client: The client of the server.
        reader: Runs the work on texts outside of the event loop.
        text: The statement.
        planned: The only scan of the statement.
        statement: The translation of the statement.
        table: The table.
        until_s: The deadline, on the clock of the event loop.

    Raises:
        NotFromCube: The server cannot answer from the cube, or the groups do not fit into a statement.
        TimeoutError: The deadline has passed.
        ClientError: The server refuses the request or does not respond.
    """
    scan, name = planned.scan, text.text[planned.scan.start : planned.scan.end]
    doubt = None
    if statement.doubt:
        find = partial(find_doubt, statement, partial(_find_filter, name, text, table))
        doubt = await reader.run(len(name) + len(statement.doubt), find, until_s, in_loop_max=0)
    request = CubePlanRequest(
        planned.table,
        statement.cube.id,
        statement.columns,
        scan.filter,
        doubt,
        scan.snapshot_id,
        scan.ref,
        groups_max=GROUPS_MAX,
    )
    answer = await scan_cube(client, statement, request, table)
    version = "" if scan.version_span is None else text.text[slice(*scan.version_span)]
    if answer.plan_snapshot_id is not None:
        version = f"FOR VERSION AS OF {answer.plan_snapshot_id}"
    rows, has_rows = f"{name} {version}".rstrip(), answer.plan_snapshot_id is not None
    assert table.cube_metadata is not None
    schema = table.cube_metadata.current_schema
    columns = (schema.column(column_id) for column_id in statement.used_columns)
    names = frozenset(column.name.partition(".")[0].lower() for column in columns if column is not None)
    listed = ", ".join(map(quote_name, sorted(names))) or "1"
    check = f"SELECT {listed} FROM {name} WHERE FALSE"  # noqa: S608

    def write() -> str:
        values = write_values(answer.groups, statement, VALUES_CHARACTERS_MAX)
        return statement.write(values, rows, has_rows=has_rows)

    characters = len(text.text) + count_characters(answer.groups)
    return CubeRewrite(await reader.run(characters, write, until_s), answer, names, check)


def _find_filter(name: str, text: StatementText, table: KnownTable, alias: str, condition: str) -> Expression | None:
    """Return a filter that is true for each row that meets a condition, or None if the analysis finds none."""
    query = f"SELECT 1 FROM {name} AS {quote_name(alias)} WHERE {condition}"  # noqa: S608
    scans = find_scans(query, columns_of=lambda _: table.columns, utc=text.utc, today=text.today)
    return scans[0].filter if len(scans) == 1 else None
