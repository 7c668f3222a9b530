"""Rewrites an aggregate query so that Trino reads groups of a cube. The new statement contains the groups as VALUES.

Users can read the text of their statements in Trino, including the groups in the text. Therefore the proxy first runs a
query without rows, for which Trino checks the rights on the table and on each used column (`rights_check`). Users who
may see the statements of other users also see the groups in them, so cubes are off unless an operator enables them.

The table with the cube stays in the statement: its files that the cube does not cover are read at a plan snapshot. If
the cube covers all files, the statement contains a query of the table without rows. Therefore Trino checks the rights
on the table and on each used column. Trino's row filters and column masks cannot be applied to groups. If one of them
affects the table, the original statement runs (`protocol/access_rules.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlglot import exp

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import ParsedQuery, find_scans, parse_query
from seamark.connector.analysis.statement_cache import StatementReader, StatementText
from seamark.connector.cubes.dialects import TRINO, NotFromCube
from seamark.connector.cubes.plans import CubeScan, build_negated_filter, find_cube_table, scan_cube
from seamark.connector.cubes.sketches import convert_sketches, encode_for_trino
from seamark.connector.cubes.star_scans import StarScan, find_group_condition, translate_star
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
        columns: The tables of the statement, each with the names in lower case of the columns that the statement reads.
        rights_check: A query without rows, for which Trino checks the same rights as for the original statement.
    """

    text: str
    scan: CubeScan
    columns: Sequence[tuple[PlannedScan, frozenset[str]]]
    rights_check: str


def translate_scans(
    text: StatementText, scans: Sequence[PlannedScan], tables: Sequence[KnownTable], *, floats: bool
) -> tuple[int, CubeStatement]:
    """Translate a statement to a query over a cube. The cube is of the only table, or of a table of a star join.

    Args:
        text: The statement.
        scans: The scans of the statement.
        tables: The table of each scan.
        floats: See `translate_statement`.

    Returns:
        The index in `scans` of the scan whose table has the cube, and the translation.

    Raises:
        NotFromCube: The statement cannot be computed from a cube.
    """
    if len(scans) > 1:
        star_scans = [_to_star_scan(text, *scan_and_table) for scan_and_table in zip(scans, tables, strict=True)]
        query = _parse(text)

        def find_start(node: exp.Table) -> int:
            return query.text.offsets[int(node.parts[0].meta["start"])]

        return translate_star(query.tree, star_scans, find_start, TRINO, floats=floats)
    cubes = find_cube_table(tables[0], truncates_in_utc=True)
    if cubes is None:
        raise NotFromCube("the table has no cube")
    return 0, translate_statement(_parse(text).tree, cubes, TRINO, floats=floats)


def _to_star_scan(text: StatementText, planned_scan: PlannedScan, table: KnownTable) -> StarScan:
    name = text.text[planned_scan.scan.start : planned_scan.scan.end]
    return StarScan(planned_scan.scan, planned_scan.table, table, f"{name} FOR VERSION AS OF {table.snapshot_id}")


def _parse(text: StatementText) -> ParsedQuery:
    """Parse a statement that is only a query.

    Raises:
        NotFromCube: The statement is not only a query, or is not fully supported.
    """
    if text.prepared is not None or text.parameters:
        raise NotFromCube("the statement is a prepared statement")
    try:
        query = parse_query(text.text)
    except UnsupportedStatement:
        raise NotFromCube("the statement is not fully supported") from None
    first_token = query.text.tokens[0]
    if query.text.quoted or query.text.offsets[first_token.start] != len(text.text) - len(text.text.lstrip()):
        raise NotFromCube("the statement is not only a query")
    return query


async def rewrite_over_cube(
    client: Seamark,
    reader: StatementReader,
    text: StatementText,
    planned_scan: PlannedScan,
    statement: CubeStatement,
    table: KnownTable,
    dimensions: Sequence[tuple[PlannedScan, KnownTable]],
    until_s: float,
) -> CubeRewrite:
    """Return the statement that reads groups.

    Args:
        client: The client of the server.
        reader: The reader that runs work on long texts outside of the event loop.
        text: The statement.
        planned_scan: The scan of the table with the cube.
        statement: The translation of the statement.
        table: The table.
        dimensions: The other scans of the statement, with their tables.
        until_s: The deadline, on the clock of the event loop.

    Raises:
        NotFromCube: The server cannot answer from the cube, or the groups do not fit into a statement.
        TimeoutError: The deadline has passed.
        ClientError: The server refuses the request or does not respond.
    """
    scan, name = planned_scan.scan, text.text[planned_scan.scan.start : planned_scan.scan.end]
    negated_filter = None
    if statement.negated_row_condition:
        build_filter = partial(build_negated_filter, statement, partial(_find_filter, name, text, table))
        negated_filter = await reader.run(
            len(name) + len(statement.negated_row_condition), build_filter, until_s, in_loop_max=0
        )
    request = CubePlanRequest(
        planned_scan.table,
        statement.cube.id,
        statement.columns,
        scan.filter,
        negated_filter,
        scan.snapshot_id,
        scan.ref,
        groups_max=GROUPS_MAX,
        group_filter=find_group_condition(
            statement, [_to_star_scan(text, *scan_and_table) for scan_and_table in dimensions]
        ),
    )
    answer = await scan_cube(client, statement, request, table)
    version = "" if scan.version_span is None else text.text[slice(*scan.version_span)]
    if answer.plan_snapshot_id is not None:
        version = f"FOR VERSION AS OF {answer.plan_snapshot_id}"
    table_text, has_rows = f"{name} {version}".rstrip(), answer.plan_snapshot_id is not None
    assert table.cube_metadata is not None
    schema = table.cube_metadata.current_schema
    columns = (schema.column(column_id) for column_id in statement.used_columns)
    names = frozenset(column.name.partition(".")[0].lower() for column in columns if column is not None)
    scans_with_names = [(planned_scan, names)]
    for dimension, _ in dimensions:
        joins = (join for join in statement.joins if join.table == dimension.table)
        scans_with_names.append((dimension, frozenset(name.lower() for join in joins for name in join.columns)))

    def write() -> str:
        groups = convert_sketches(answer.groups, statement, encode_for_trino)
        values = write_values(groups, statement, VALUES_CHARACTERS_MAX)
        return statement.write(values, table_text, has_rows=has_rows)

    characters = len(text.text) + count_characters(answer.groups)
    return CubeRewrite(
        await reader.run(characters, write, until_s),
        answer,
        scans_with_names,
        _write_rights_check(text, scans_with_names),
    )


def _write_rights_check(text: StatementText, columns: Sequence[tuple[PlannedScan, frozenset[str]]]) -> str:
    """Return a query without rows that reads these columns of these tables.

    The names of the tables are copied from the statement, so Trino resolves them in the same way and checks the rights.
    """
    tables, column_texts = [], []
    for number, (planned_scan, names) in enumerate(columns):
        tables.append(f"{text.text[planned_scan.scan.start : planned_scan.scan.end]} AS t{number}")
        column_texts += [f"t{number}.{quote_name(name)}" for name in sorted(names)]
    return f"SELECT {', '.join(column_texts) or '1'} FROM {', '.join(tables)} WHERE FALSE"  # noqa: S608


def _find_filter(name: str, text: StatementText, table: KnownTable, alias: str, condition: str) -> Expression | None:
    """Return a filter that is true for each row that meets a condition, or None if the analysis finds no filter."""
    query = f"SELECT 1 FROM {name} AS {quote_name(alias)} WHERE {condition}"  # noqa: S608
    scans = find_scans(query, find_columns=lambda _: table.columns, utc=text.utc, today=text.today)
    return scans[0].filter if len(scans) == 1 else None
