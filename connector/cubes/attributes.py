"""Finds joined tables that the attributes in a cube replace, and removes them from the query.

A cube of facts may have attributes of a dimension table, at one snapshot of it, as dimensions. If a query reads the
dimension table at this snapshot, joins it by its key, and uses only these attributes, then it does not need the table:
the condition of the join becomes the attribute that states whether a key has a partner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.lookups import HAS_PARTNER, DimensionSource, parse_lookup

FindColumn = Callable[[exp.Column], "tuple[int, str] | None"]
"""A function that returns the number of a column's table and its name, or None if the name is ambiguous or unknown."""


@dataclass(frozen=True)
class DimensionTable:
    """A table of a join, at the snapshot that the query reads.

    Attributes:
        node: The reference to the table.
        name: The levels of the namespace, and the name of the table.
        schema: The schema with which the query reads the table.
    """

    node: exp.Table
    name: tuple[str, ...]
    snapshot_id: int | None
    schema: Schema


@dataclass(frozen=True)
class ReplacedTable:
    """A dimension table that the query need not join, because the cube contains the columns that it uses.

    The cube is on the fact table. Its entries are rows of groups, and some of their columns have attributes of the
    dimension table.

    Attributes:
        number: The number of the reference to the table.
        node: The reference to the table.
        key: The name of the column of the fact table by which the dimension table is joined.
        partner: The name of the column of the dimension table that equals `key`.
        attributes: The names of columns of the cube's entries, by the name of the attribute.
        has_partner: The name of the entries' boolean column. It is true if the dimension table has a row with the key.
    """

    number: int
    node: exp.Table
    key: str
    partner: str
    attributes: Mapping[str, str]
    has_partner: str

    @property
    def hidden_name(self) -> str:
        """The name, in the changed query, of the column that is true if the dimension table has a row with the key.

        No statement can contain this name.
        """
        return f"\0partner\0{self.number}"


@dataclass(frozen=True)
class JoinedAttributes:
    """The attributes of one dimension table in a cube, joined by one key column of the fact table.

    Attributes:
        source: The dimension table, its snapshot and its key.
        key_id: The field id of the key column of the fact table.
        columns: By the field id of the attribute: the name of the column in the cube's entries, and the type.
    """

    source: DimensionSource
    key_id: int
    key_type: str
    columns: Mapping[int, tuple[str, str]]


def list_attributes(cube: IndexDefinition) -> list[JoinedAttributes]:
    """Return the attributes of dimension tables that a cube has.

    Attributes are left out if the cube does not record whether the dimension table has a row with a key. An inner join
    drops the rows of the other keys, so the cube could not answer it. The column of term 3 in the cube is `d3`.
    """
    attributes: dict[tuple[DimensionSource, int], JoinedAttributes] = {}
    for number, term in enumerate(cube.terms):
        lookup = parse_lookup(term.transform)
        if lookup is not None:
            join_key = (lookup.source, term.column_id)
            columns = attributes[join_key].columns if join_key in attributes else {}
            columns = {**columns, lookup.attribute_id: (f"d{number}", lookup.type)}
            attributes[join_key] = JoinedAttributes(lookup.source, term.column_id, term.source, columns)
    return [joined_attributes for joined_attributes in attributes.values() if HAS_PARTNER in joined_attributes.columns]


def list_sources(tree: exp.Expr) -> list[exp.Expr | None]:
    """Return the relations in FROM, in the order of the text. The first is None if there is no FROM."""
    clause = tree.args.get("from_")
    return [None if clause is None else clause.this, *(join.this for join in tree.args.get("joins") or ())]


def list_qualifiers(table: exp.Table) -> list[exp.Expr]:
    """Return the names by which a query can qualify the columns of a table."""
    alias = table.args.get("alias")
    return [alias.this] if alias is not None and alias.name else list(table.parts)


def replace_tables(
    tree: exp.Expr, tables: Mapping[int, DimensionTable], facts: int, cube: IndexDefinition, find: FindColumn
) -> list[ReplacedTable]:
    """Remove from a query the dimension tables whose used columns are in the cube, and return these tables.

    The condition of a removed join is replaced by the column that states whether the key has a row in the table.
    If a join is not an inner join, no table is removed.

    Args:
        tree: The query, which is changed.
        tables: The references to tables in `tree`, by their numbers.
        facts: The number of the reference to the fact table, on which the cube is.
        cube: The definition of the cube.
        find: Finds the columns of the query.
    """
    joins = tree.args.get("joins") or []
    if any(
        join.text("side") or join.text("kind").upper() not in ("", "INNER", "CROSS") or join.args.get("using")
        for join in joins
    ):
        return []
    equalities = list(_find_equalities(tree, find))
    joined_attributes = list_attributes(cube)
    replaced_tables = []
    for number, table in tables.items():
        alias = table.node.args.get("alias")
        if number == facts or (alias is not None and alias.columns):
            continue
        for attributes in joined_attributes:
            condition = _find_condition(attributes, number, facts, tables, equalities)
            if condition is None:
                continue
            usable_columns = _list_usable(attributes, table.schema)
            if _uses_only(tree, number, usable_columns, condition.node, find):
                partner = attributes.columns[HAS_PARTNER][0]
                replacement = ReplacedTable(
                    number, table.node, condition.key, condition.partner, usable_columns, partner
                )
                condition.node.replace(exp.column(exp.to_identifier(replacement.hidden_name, quoted=True)))
                replaced_tables.append(replacement)
                break
    if replaced_tables:
        _remove_sources(tree, {id(replaced_table.node) for replaced_table in replaced_tables})
    return replaced_tables


def _remove_sources(tree: exp.Expr, removed_ids: set[int]) -> None:
    """Remove relations from FROM. All joins are inner joins, so their conditions may move to WHERE."""
    assert isinstance(tree, exp.Select)
    joins = list(tree.args.get("joins") or ())
    sources = [source for source in list_sources(tree) if id(source) not in removed_ids]
    for join in joins:
        if (on := join.args.get("on")) is not None:
            join.set("on", None)
            tree.where(on, copy=False)
    tree.set("from_", exp.From(this=sources[0]))
    tree.set("joins", [exp.Join(this=source) for source in sources[1:]])


@dataclass(frozen=True)
class _Equality:
    """A condition that two columns of different tables are equal. All rows of the result meet it.

    Attributes:
        left, right: The number of the table, and the name of the column.
    """

    node: exp.Expr
    left: tuple[int, str]
    right: tuple[int, str]


@dataclass(frozen=True)
class _JoinCondition:
    """A condition by which a dimension table is joined.

    Attributes:
        key: The name of the column of the facts.
        partner: The name of the column of the dimension table.
    """

    node: exp.Expr
    key: str
    partner: str


def _find_equalities(tree: exp.Expr, find: FindColumn) -> Iterator[_Equality]:
    where_clause = tree.args.get("where")
    conditions = [] if where_clause is None else [where_clause.this]
    conditions += [join.args["on"] for join in tree.args.get("joins") or () if join.args.get("on") is not None]
    while conditions:
        node = conditions.pop()
        match node:
            case exp.Paren():
                conditions.append(node.this)
            case exp.And():
                conditions += [node.this, node.expression]
            case exp.EQ() if isinstance(node.this, exp.Column) and isinstance(node.expression, exp.Column):
                left, right = find(node.this), find(node.expression)
                if left is not None and right is not None:
                    yield _Equality(node, left, right)


def _find_condition(
    attributes: JoinedAttributes,
    number: int,
    facts: int,
    tables: Mapping[int, DimensionTable],
    equalities: Sequence[_Equality],
) -> _JoinCondition | None:
    """Return the condition by which a table is joined.

    The result is None if the attributes are not of this table at this snapshot, or if no condition joins it by their
    key.

    Args:
        attributes: The attributes of a dimension table in the cube.
        number: The number of the table in the query.
        facts: The number of the table of facts.
        tables: The tables of the query, by number.
        equalities: The conditions of the query that columns of two tables are equal.
    """
    table, source = tables[number], attributes.source
    if (source.table, source.snapshot_id) != (table.name, table.snapshot_id):
        return None
    key, partner = (
        next((field.name for field in schema.fields if (field.id, field.type) == (field_id, attributes.key_type)), None)
        for schema, field_id in ((tables[facts].schema, attributes.key_id), (table.schema, source.key_id))
    )
    if key is None or partner is None:
        return None
    for equality in equalities:
        if {equality.left, equality.right} == {(facts, key), (number, partner)}:
            return _JoinCondition(equality.node, key, partner)
    return None


def _list_usable(attributes: JoinedAttributes, schema: Schema) -> dict[str, str]:
    """Return the names of columns in the cube's entries, by the name of the attribute.

    Attributes whose type has changed are left out. `HAS_PARTNER`, which states whether the table has a row with the
    key, is also left out, because it is no column of the table.
    """
    usable_columns = {}
    for field in schema.fields:
        if field.id != HAS_PARTNER and field.id in attributes.columns:
            entry_column, attribute_type = attributes.columns[field.id]
            if attribute_type == field.type:
                usable_columns[field.name] = entry_column
    return usable_columns


def _uses_only(
    tree: exp.Expr, number: int, attributes: Mapping[str, str], condition: exp.Expr, find: FindColumn
) -> bool:
    """Return whether all columns of a table that the query uses outside of the join condition are in `attributes`."""
    join_columns = {id(column) for column in condition.find_all(exp.Column)}
    return all(
        source is None or source[0] != number or source[1] in attributes
        for column in tree.find_all(exp.Column)
        if id(column) not in join_columns
        for source in (find(column),)
    )
