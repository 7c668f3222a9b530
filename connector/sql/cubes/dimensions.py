"""Removes joined tables from a query of `seamark sql` if a cube contains the attributes that the query uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlglot import exp

from seamark.connector.cubes.attributes import DimensionTable, ReplacedTable, replace_tables
from seamark.connector.read.tables import OpenTable
from seamark.connector.sql.scopes import NameScope, SqlValue, StoredTable, VisibleColumn
from seamark.formats.iceberg.types.schema import Column, Field, Schema, StructType, is_primitive
from seamark.formats.index.definitions import IndexDefinition


def remove_tables(
    tree: exp.Expr,
    sources: Mapping[int, exp.Table],
    tables: Sequence[StoredTable],
    tables_at_snapshots: Sequence[OpenTable],
    facts: int,
    cube: IndexDefinition,
) -> list[ReplacedTable]:
    """Remove joined tables whose attributes the cube contains from the query, and return these tables.

    Args:
        tree: The query, which is changed.
        sources: The references to tables in `tree`, by their numbers.
        tables: The references to tables in the translation without a cube.
        tables_at_snapshots: The tables at the snapshots that the query reads, in the order of `tables`.
        facts: The number of the reference that is read as groups. Its table is called the facts.
        cube: The definition of the cube.
    """
    joined_tables = {}
    for number, node in sources.items():
        table = tables_at_snapshots[number]
        assert not isinstance(table.name, str)
        joined_tables[number] = DimensionTable(node, tuple(table.name), table.snapshot_id, table.schema)
    return replace_tables(tree, joined_tables, facts, cube, _Names(sources, tables).find)


class _Names:
    """Finds the table to which the name of a column refers."""

    def __init__(self, sources: Mapping[int, exp.Table], tables: Sequence[StoredTable]) -> None:
        visible = []
        for number, node in sources.items():
            alias, table = node.args.get("alias"), tables[number]
            names = (
                [identifier.name for identifier in alias.columns]
                if alias is not None and alias.columns
                else list(table.columns)
            )
            parts = tuple(part.name.lower() for part in node.parts)
            qualifiers = (alias.name.lower(),) if alias is not None and alias.name else parts
            for name, (column, kind) in zip(names, table.columns.items(), strict=True):
                visible.append(VisibleColumn(name.lower(), qualifiers, SqlValue("", kind), (table, column)))
        self._scope = NameScope(tuple(visible), {})
        self._numbers = {id(table): number for number, table in enumerate(tables)}

    def find(self, node: exp.Column) -> tuple[int, str] | None:
        """Return the number of the table and the name of the column, or None if the name is unknown or ambiguous."""
        visible = self._scope.find(node)
        if visible is None or visible.stored is None:
            return None
        table, column = visible.stored
        return self._numbers[id(table)], column


def list_columns_by_id(schema: Schema) -> dict[int, Column]:
    """Return the columns of primitive types, and the fields of structs with primitive types, by id."""
    return {
        column.id: column
        for column in schema.index.by_id.values()
        if is_primitive(column.type)
        and all(isinstance(ancestor.type, StructType) for ancestor in schema.list_ancestors(column))
    }


def find_field(field: Field | None, name: str) -> Field | None:
    """Return the only field of a struct with this name in any case, or None."""
    if field is None or not isinstance(field.type, StructType):
        return None
    matches = [inner for inner in field.type.fields if inner.name.lower() == name]
    return matches[0] if len(matches) == 1 else None
