"""Reads a star join: a query that joins a table of facts with dimension tables by inner joins.

A cube of the facts may have attributes of the dimension tables. If they replace all dimension tables
(`attributes.py`), the query is a query of one table whose columns are those of the facts and the attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from seamark.connector.cubes.attributes import DimensionTable, list_sources, replace_tables
from seamark.connector.cubes.dialects import NotFromCube
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.definitions import IndexDefinition

_PLAIN_JOINS = ("", "INNER", "CROSS")


@dataclass(frozen=True)
class StarTable:
    """A table of a star join.

    Attributes:
        name: The levels of the namespace, and the name of the table.
        snapshot_id: The snapshot that the query reads.
        schema: The schema with which the query reads the table.
        relation: The table at this snapshot, in the engine's SQL.
    """

    name: tuple[str, ...]
    snapshot_id: int | None
    schema: Schema
    relation: str


@dataclass(frozen=True)
class StarJoin:
    """A dimension table that need not be joined for the groups of a cube, because the groups have its attributes.

    Attributes:
        table: The levels of the namespace, and the name of the table.
        columns: The columns of the table that the query uses.
        attributes: The names of columns in the cube's entries, by the name of the attribute.
        text: The join clause in the engine's SQL. It joins the rows of files that the cube does not cover.
    """

    table: tuple[str, ...]
    columns: frozenset[str]
    attributes: Mapping[str, str]
    text: str


@dataclass(frozen=True)
class StarAttribute:
    """An attribute of a dimension table, as a column of a query of one table.

    Attributes:
        entry_column: The name of the column in the cube's entries, which are its groups.
        row_sql: The SQL of the value for one row of the fact table, used for files that the cube does not cover.
        kind: The Iceberg type.
        key_id: The field id of the fact table's key column for the dimension table.
    """

    entry_column: str
    row_sql: str
    kind: str
    key_id: int

    @property
    def hidden_name(self) -> str:
        """The name of the column. No statement can contain it."""
        return f"\0attribute\0{self.entry_column}"


def flatten_joins(select: exp.Select) -> exp.Select:
    """Return a query in which the conditions of inner joins are in WHERE.

    Raises:
        NotFromCube: There is another join.
    """
    flat = select.copy()
    assert isinstance(flat, exp.Select)
    for join in flat.args.get("joins") or ():
        other_clauses = {name for name, value in join.args.items() if value} - {"this", "kind", "on"}
        if other_clauses or join.text("kind").upper() not in _PLAIN_JOINS:
            raise NotFromCube("the query has a join that is not an inner join with ON")
        if (on := join.args.get("on")) is not None:
            join.set("on", None)
            flat.where(on, copy=False)
    return flat


class Star:
    """The tables of a star join.

    Args:
        tables: The tables, in the order in which FROM names them.
        facts: The number of the table of facts.
    """

    def __init__(self, tables: Sequence[StarTable], facts: int) -> None:
        self.tables, self.facts = tables, facts

    def bind_names(self, select: exp.Select) -> StarNames:
        """Bind the names in a query to the tables of the join, and return them.

        Raises:
            NotFromCube: FROM has other tables, or two tables or columns have one name.
        """
        sources = list_sources(select)
        if len(sources) != len(self.tables):
            raise NotFromCube("a table of the join is not understood")
        return StarNames(self, [source for source in sources if isinstance(source, exp.Table)])


class StarNames:
    """The names of the tables and columns of one star join."""

    def __init__(self, star: Star, sources: Sequence[exp.Table]) -> None:
        self._star = star
        self.aliases = [source.alias or source.name for source in sources]
        self._numbers = {alias.lower(): number for number, alias in enumerate(self.aliases)}
        self._columns = [{field.name.lower(): field.name for field in table.schema.fields} for table in star.tables]
        if len(self._numbers) < len(star.tables) or len({table.name for table in star.tables}) < len(star.tables):
            raise NotFromCube("the query reads a table twice")
        if any(len(names) < len(table.schema.fields) for names, table in zip(self._columns, star.tables, strict=True)):
            raise NotFromCube("a table has columns whose names differ only in case")

    @property
    def dimension_columns(self) -> frozenset[str]:
        """The names of all columns of dimension tables, in lower case."""
        names_of_tables = (names for number, names in enumerate(self._columns) if number != self._star.facts)
        return frozenset(name for names in names_of_tables for name in names)

    def find(self, node: exp.Column) -> tuple[int, str] | None:
        """Return the number of the table and the name of a column, or None if no table has the column.

        The first part of a name with a dot is a qualifier or a column of the type struct. It must have one meaning.

        Raises:
            NotFromCube: The name may be of several columns.
        """
        parts = [part.name.lower() for part in node.parts]
        owners = [number for number, names in enumerate(self._columns) if parts[0] in names]
        number = self._numbers.get(parts[0]) if len(parts) > 1 else None
        if len(owners) + (number is not None) > 1:
            raise NotFromCube(f"{parts[0]} is ambiguous")
        if number is not None:
            name = self._columns[number].get(parts[1])
            return None if name is None else (number, name)
        return (owners[0], self._columns[owners[0]][parts[0]]) if owners else None

    def replace(
        self, tree: exp.Expr, cube: IndexDefinition, quote: Callable[[str], str], write_name: Callable[[str], str]
    ) -> tuple[list[StarJoin], dict[str, StarAttribute]]:
        """Replace the dimension tables of a query by attributes in a cube.

        Args:
            tree: A copy of the query, which is changed.
            cube: The definition of the cube.
            quote: Returns a name in quotes.
            write_name: Returns the name that a column has in the engine.

        Returns:
            The replaced tables, and the attributes by their names in the changed query.

        Raises:
            NotFromCube: The cube does not have the needed attributes of a dimension table.
        """
        tables = self._star.tables
        dimension_tables = {
            number: DimensionTable(node, table.name, table.snapshot_id, table.schema)
            for number, (node, table) in enumerate(zip(list_sources(tree), tables, strict=True))
            if isinstance(node, exp.Table)
        }
        # The nodes of removed conditions are kept, so that no later node gets the id of one of them.
        columns = {
            id(node): (node, source) for node in tree.find_all(exp.Column) if (source := self.find(node)) is not None
        }
        replaced_tables = {
            replaced_table.number: replaced_table
            for replaced_table in replace_tables(tree, dimension_tables, self._star.facts, cube, self.find)
        }
        missing = [
            ".".join(table.name)
            for number, table in enumerate(tables)
            if number not in replaced_tables and number != self._star.facts
        ]
        if missing:
            raise NotFromCube(
                f"the cube lacks attributes of {', '.join(missing)} that the query uses, at the current snapshot"
            )
        facts = self._star.tables[self._star.facts].schema
        attributes: dict[str, StarAttribute] = {}
        joins = []
        for number, table in replaced_tables.items():
            alias = quote(self.aliases[number])
            key_id = next(field.id for field in facts.fields if field.name == table.key)
            partner = f"{alias}.{quote(write_name(table.partner))}"
            has_partner = StarAttribute(table.has_partner, f"({partner} IS NOT NULL)", "boolean", key_id)
            attributes[table.hidden_name] = has_partner
            used_names = {table.partner}
            kinds = {field.name: str(field.type) for field in tables[number].schema.fields}
            for node in list(tree.find_all(exp.Column)):
                _, source = columns.get(id(node), (None, None))
                if source is None or source[0] != number:
                    continue
                name = source[1]
                used_names.add(name)
                row = f"{alias}.{quote(write_name(name))}"
                attribute = StarAttribute(table.attributes[name], row, kinds[name], key_id)
                attributes[attribute.hidden_name] = attribute
                node.replace(exp.column(exp.to_identifier(attribute.hidden_name, quoted=True)))
            key = f"{quote(self.aliases[self._star.facts])}.{quote(write_name(table.key))}"
            text = f" LEFT JOIN {tables[number].relation} AS {alias} ON {key} = {partner}"
            joins.append(StarJoin(tables[number].name, frozenset(used_names), table.attributes, text))
        return joins, attributes
