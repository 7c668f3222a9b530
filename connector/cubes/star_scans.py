"""Translates a star join over a cube, for engines whose statements are analysed as scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlglot import exp

from seamark.connector.cubes.attributes import list_sources
from seamark.connector.cubes.dialects import CubeDialect, NotFromCube
from seamark.connector.cubes.plans import find_cube_table
from seamark.connector.cubes.stars import Star, StarTable
from seamark.connector.cubes.statements import CubeStatement, translate_statement
from seamark.connector.plans.async_client import KnownTable, Name
from seamark.connector.plans.scan import Scan
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.comparisons import resolve_literals
from seamark.formats.iceberg.expressions.expression import TRUE, Bound, Expression, join_by_and
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.group_conditions import translate_dimension_condition
from seamark.formats.runtime.errors import RequestError


@dataclass(frozen=True)
class StarScan:
    """A scan of a star join.

    Attributes:
        name: The name of the table in Seamark.
        table: The current state of the table.
        relation: The table at its current snapshot, in the engine's SQL.
    """

    scan: Scan
    name: Name
    table: KnownTable
    relation: str

    @property
    def schema(self) -> Schema:
        """The columns of the table. Nested columns have a placeholder type, because attributes are never nested."""
        return Schema(tuple(Field(field_id, name, False, kind) for field_id, name, kind in self.table.fields))


def translate_star(
    tree: exp.Expr,
    scans: Sequence[StarScan],
    find_start: Callable[[exp.Table], int],
    dialect: CubeDialect,
    *,
    floats: bool,
) -> tuple[int, CubeStatement]:
    """Translate a star join over a cube of one of its tables. Cubes of the largest table are first.

    Args:
        tree: The query, in the engine's dialect.
        scans: The scans of the query.
        find_start: Returns the position in the statement at which a reference to a table begins.
        dialect: The engine.
        floats: Whether sums of floats, and averages that are floats, may be used. Their last digits depend on the order
            of the additions.

    Returns:
        The number of the scan whose table has the cube, and the translation.

    Raises:
        NotFromCube: A cube cannot answer the statement.
    """
    starts = [find_start(source) if isinstance(source, exp.Table) else -1 for source in list_sources(tree)]
    numbers = {star_scan.scan.start: number for number, star_scan in enumerate(scans)}
    if sorted(starts) != sorted(numbers):
        raise NotFromCube("the query is not one SELECT of tables")
    order = [numbers[start] for start in starts]
    tables = [
        StarTable(scans[number].name, scans[number].table.snapshot_id, scans[number].schema, scans[number].relation)
        for number in order
    ]
    reasons = []
    for number in sorted(order, key=lambda each: -scans[each].table.size_bytes):
        cubes = find_cube_table(scans[number].table, truncates_in_utc=True)
        if cubes is None:
            continue
        dimensions = [scans[other] for other in order if other != number]
        if any(dimension.scan.selects_version for dimension in dimensions):
            raise NotFromCube("the query reads a dimension table at a snapshot")
        if not all(dimension.table.snapshot_has_current_schema for dimension in dimensions):
            # The join names the snapshot, which the engine reads with the schema of the snapshot.
            raise NotFromCube("the columns of a dimension table have changed since its current snapshot")
        try:
            star = Star(tables, order.index(number))
            return number, translate_statement(tree, cubes, dialect, floats=floats, star=star)
        except NotFromCube as error:
            reasons.append(str(error))
    raise NotFromCube("; ".join(reasons) or "no table has a cube")


def find_group_condition(statement: CubeStatement, scans: Sequence[StarScan]) -> Expression:
    """Return a condition that is true for each group that the query needs.

    Args:
        statement: The translation of the query.
        scans: The scans of dimension tables. Their filters are true for all needed rows.
    """
    return join_by_and(*(_find_condition(statement, star_scan) for star_scan in scans))


def _find_condition(statement: CubeStatement, star_scan: StarScan) -> Expression:
    """Return the scan's condition on a dimension table as a condition on columns of the cube's entries.

    The result is always true if the condition cannot be expressed with these columns.
    """
    schema = star_scan.schema
    attributes = next((join.attributes for join in statement.joins if join.table == star_scan.name), {})
    names = {field.id: field.name for field in schema.fields}

    def find_number(predicate: Bound) -> int | None:
        entry_column = attributes.get(names.get(predicate.column_id, ""))
        return None if entry_column is None else int(entry_column[1:])  # The name is `d` and the number.

    if star_scan.scan.filter is None:
        return TRUE
    try:
        condition = resolve_literals(star_scan.scan.filter, schema, ())
        return translate_dimension_condition(bind(condition, schema, (), case_sensitive=False), find_number)
    except RequestError:  # The condition is on a column of another type, such as a field of a struct.
        return TRUE
