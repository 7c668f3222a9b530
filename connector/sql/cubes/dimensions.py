"""Removes joined tables that the attributes in a cube replace from a query of `seamark sql`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlglot import exp

from seamark.connector.cubes.attributes import DimensionTable, ReplacedTable, replace_tables
from seamark.connector.read.tables import OpenTable
from seamark.connector.sql.scopes import NameScope, SqlValue, StoredTable, VisibleColumn
from seamark.formats.index.definitions import IndexDefinition


def remove_tables(
    tree: exp.Expr,
    sources: Mapping[int, exp.Table],
    tables: Sequence[StoredTable],
    opened: Sequence[OpenTable],
    facts: int,
    cube: IndexDefinition,
) -> list[ReplacedTable]:
    """Remove the tables that attributes in the cube replace from the query, and return them.

    Args:
        tree: The query, which is changed.
        sources: The references to tables in `tree`, by their numbers.
        tables: The references to tables of the translation without a cube.
        opened: The tables at the snapshots that the query reads.
        facts: The number of the reference whose groups are read.
        cube: The definition of the cube.
    """
    joined = {}
    for number, node in sources.items():
        table = opened[number]
        assert not isinstance(table.name, str)
        joined[number] = DimensionTable(node, tuple(table.name), table.snapshot_id, table.schema)
    return replace_tables(tree, joined, facts, cube, _Names(sources, tables).find)


class _Names:
    """Finds the tables of columns by their names."""

    def __init__(self, sources: Mapping[int, exp.Table], tables: Sequence[StoredTable]) -> None:
        visible = []
        for number, node in sources.items():
            alias, table = node.args.get("alias"), tables[number]
            names = [one.name for one in alias.columns] if alias is not None and alias.columns else list(table.columns)
            parts = tuple(part.name.lower() for part in node.parts)
            qualifiers = (alias.name.lower(),) if alias is not None and alias.name else parts
            for name, (column, kind) in zip(names, table.columns.items(), strict=True):
                visible.append(VisibleColumn(name.lower(), qualifiers, SqlValue("", kind), (table, column)))
        self._scope = NameScope(tuple(visible), {})
        self._numbers = {id(table): number for number, table in enumerate(tables)}

    def find(self, node: exp.Column) -> tuple[int, str] | None:
        """Return the number of the table and the name of the column, or None if the name is not of one column."""
        visible = self._scope.find(node)
        if visible is None or visible.stored is None:
            return None
        table, column = visible.stored
        return self._numbers[id(table)], column
