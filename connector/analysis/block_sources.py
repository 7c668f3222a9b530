"""The sources of a block, and the fields of their structs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from seamark.connector.analysis.algebra.relations import Scope, Table, canonical_name
from seamark.connector.plans.conditions import ColumnReference


@dataclass
class BlockSource:
    """`name` qualifies its columns, and so does `schema` with the name if it is a table without an alias."""

    result: Scope
    name: str | None
    schema: str | None = None


def struct_field(
    column: exp.Column, sources: Sequence[BlockSource], relations: frozenset[str]
) -> ColumnReference | None:
    """The field `column.field` or `alias.column.field` of a table among the sources; its name has dots. None if a
    name may be that of a relation, also of an outer block: `relations` are the names of all of the statement."""
    parts = column.parts
    if len(parts) < 2 or not all(isinstance(part, exp.Identifier) for part in parts):
        return None
    names = [canonical_name(part.name) for part in parts]
    if any("." in name for name in names):
        return None
    qualified = [source for source in sources if source.name == names[0]]
    if qualified:
        names = names[1:]
    if len(names) < 2 or names[0] in relations or len(qualified) > 1:
        return None
    having = [source for source in qualified or sources if source.result.has(names[0]) is not False]
    table = having[0].result if len(having) == 1 else None
    field = ".".join(names)
    return (sources.index(having[0]), field) if isinstance(table, Table) and table.kind(field) is not None else None
