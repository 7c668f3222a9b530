"""Attributes of dimension tables, as columns in the filters of requests.

An index on an attribute (`formats/index/keys/lookups.py`) gives the table a further name for filters: the name of the
index. A predicate on the name leaves out files by the index. A client cannot evaluate it on rows.
So in the filter of the rows it becomes a condition that all rows satisfy. The client reads the dimension table to
filter the rows. A column of the table with this name has priority. This module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    And,
    Bound,
    Expression,
    Not,
    Or,
    Unbound,
    collect_predicates,
    replace_predicates,
)
from seamark.formats.iceberg.expressions.residuals import make_tautology
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import canonicalize_primitive
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.lookups import Lookup, parse_lookup
from seamark.formats.index.kinds.kinds import KINDS


class AttributeColumn(msgspec.Struct, frozen=True, array_like=True):
    """An attribute that filters can name: a column of a dimension table that the table joins by a key.

    Attributes:
        name: The name of the index.
        column_id: The field id of the key of the table.
        transform: The attribute, as a transform of the key.
        is_current: Whether the index is enabled, and the current snapshot of the dimension table is the snapshot of
            the attribute. Otherwise a predicate on the name leaves out no files.
    """

    name: str
    column_id: int
    transform: str
    is_current: bool = True

    @property
    def lookup(self) -> Lookup:
        lookup = parse_lookup(self.transform)
        assert lookup is not None
        return lookup


def list_attribute_names(metadata: TableMetadata) -> tuple[str, ...]:
    """Return the names of the table's indexes on attributes, enabled or paused.

    An attribute is a column of another table, a dimension table, that an index of this table contains. A filter names
    it like a column.

    Columns of the table may have the same names.
    """
    return tuple(definition.name for definition in _list_definitions(metadata))


def find_attribute_columns(metadata: TableMetadata, names: Iterable[str]) -> tuple[AttributeColumn, ...]:
    """Return the attributes of the table that have one of these names and do not have the name of a column.

    Names are compared without regard to case. The attributes of paused indexes are included, but are not current.
    """
    folded_names = {name.lower() for name in names}
    named_definitions = [
        definition for definition in _list_definitions(metadata) if definition.name.lower() in folded_names
    ]
    if not named_definitions:
        return ()  # A table may have many schemas, so read their names only for a filter that names an attribute.
    column_names = {name.lower() for schema in metadata.schemas for name in schema.index.by_name}
    return tuple(
        AttributeColumn(
            definition.name, definition.terms[0].column_id, definition.terms[0].transform, definition.enabled
        )
        for definition in named_definitions
        if definition.name.lower() not in column_names
    )


def _list_definitions(metadata: TableMetadata) -> list[IndexDefinition]:
    """Return the definitions of the indexes on one attribute of a dimension table, except cubes.

    Two definitions may be equal except for their names.
    """
    return [
        definition
        for definition in read_definitions(metadata).by_name.values()
        if len(definition.terms) == 1 and definition.dimension_tables and not KINDS[definition.kind].aggregates
    ]


def add_to_schema(schema: Schema, attributes: Sequence[AttributeColumn]) -> Schema:
    """Return the schema with a field for each attribute, so that a filter can be bound to attributes.

    The ids of these fields are negative, so that no column has the same id.
    """
    fields = (
        Field(_make_id(n), attribute.name, False, attribute.lookup.type) for n, attribute in enumerate(attributes)
    )
    return msgspec.structs.replace(schema, fields=(*schema.fields, *fields)) if attributes else schema


def collect_names(expression: Expression) -> Iterator[str]:
    """Yield the names of the columns in an unbound expression."""
    match expression:
        case Unbound(_, name):
            yield name
        case And(children) | Or(children):
            for child in children:
                yield from collect_names(child)
        case Not(child):
            yield from collect_names(child)


def split_filter(
    bound: Expression, schema: Schema, attributes: Sequence[AttributeColumn]
) -> tuple[Expression, Expression]:
    """Return a filter as (a condition on rows, a condition on attributes for indexes).

    Rows do not contain attributes. So a predicate on an attribute becomes a condition on the key that is always true
    in the first result. In the second result, it becomes a predicate on a transform of the key.

    Args:
        bound: The filter, bound to the schema with the fields of `add_to_schema`.
        schema: The schema without these fields.
        attributes: The attributes.
    """
    by_id = {_make_id(number): attribute for number, attribute in enumerate(attributes)}
    if not any(predicate.column_id in by_id for predicate in collect_predicates(bound)):
        return bound, TRUE

    def move_to_key(predicate: Bound) -> Bound | None:
        """Return the predicate on an attribute as a transform of the key, or None if the schema lacks the key."""
        attribute = by_id[predicate.column_id]
        key = schema.column(attribute.column_id)
        if key is None or not isinstance(key.type, str):
            return None
        kind = canonicalize_primitive(key.type)
        return Bound(predicate.op, key.id, key.name, kind, attribute.transform, predicate.kind, predicate.values)

    def to_row_condition(predicate: Bound) -> Expression:
        if predicate.column_id not in by_id:
            return predicate
        key_condition = move_to_key(predicate)
        return TRUE if key_condition is None else make_tautology(key_condition)

    def to_attribute_condition(predicate: Bound) -> Expression:
        if predicate.column_id not in by_id:
            return predicate
        is_usable = predicate.transform == IDENTITY and by_id[predicate.column_id].is_current
        key_condition = move_to_key(predicate) if is_usable else None
        return TRUE if key_condition is None else key_condition

    return replace_predicates(bound, to_row_condition), replace_predicates(bound, to_attribute_condition)


def _make_id(number: int) -> int:
    return -1 - number
