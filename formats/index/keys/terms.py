"""Terms, on which indexes are built: a column, or an Iceberg transform, `lower` or `upper` of a column.

In text, a term names its column: `a.b`, `lower(name)`, `bucket[16](id)`, `day(ts)`. `date_trunc('day', ts)` means the
same as `day(ts)`. In all other places, a term has the column's field id, so that renames do not affect it. A name with
a space, comma, backtick, parenthesis or equals sign is quoted in backticks, and backticks inside it are doubled. As in
filters, names are resolved in the current schema, then in older schemas, newest first.

Results of the transforms for values that are not null (null stays null):

    bucket[N], truncate[N], year, month, day, hour    the spec's partition transforms (`iceberg.types.transforms`)
    lookup[...]                                       an attribute of a dimension table (`lookups.py`)
    lower, upper                                      the folded text (`case_folding.py`); both have the same keys

A column is a field of the table or of a struct in it, with a primitive type. A column inside a list or map has many
values per row, which row indexes cannot describe. This module has no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.iceberg.types.schema import Column, ListType, MapType, Schema, describe_type, is_primitive
from seamark.formats.iceberg.types.transforms import (
    IDENTITY,
    VOID,
    accepts_type,
    canonicalize_transform,
    compute_result_type,
    is_known,
)
from seamark.formats.iceberg.types.types import canonicalize_primitive, get_base_name
from seamark.formats.index.keys.functions import INDEXED_FUNCTIONS
from seamark.formats.index.keys.lookups import KEY_TYPES, parse_lookup
from seamark.formats.runtime.errors import BadRequest

TEXT_MAX = 10_000
"""The maximum number of characters of a term, or of a list of terms."""

_SHOWN_MAX, _SHOWN_NAME_MAX = 100, 200
"""The maximum number of characters of a text, and of the name of a column, in a message."""
_CALL = re.compile(r"\s*([A-Za-z]\w*(?:\[\s*\d+\s*\])?)\s*\((.*)\)\s*", re.DOTALL)
_LOOKUP_CALL = re.compile(r"\s*(lookup\[[^\[\]()]*\])\s*\((.*)\)\s*", re.DOTALL)
_DATE_TRUNC = re.compile(r"\s*date_trunc\s*\(\s*'(year|month|day|hour)'\s*,(.*)\)\s*", re.DOTALL | re.IGNORECASE)
_QUOTED_NAME = re.compile(r"`((?:[^`]|``)+)`")
_PLAIN_NAME = re.compile(r"[^\s`(),=]+")
_TYPES_WITHOUT_KEYS = frozenset({"unknown", "variant", "geometry", "geography"})


@dataclass(frozen=True, slots=True)
class Term:
    """A column, or a transform or function of a column.

    Attributes:
        column_id: The field id of the column.
        name: The column's full name in the schema in which it was found.
        transform: A canonical Iceberg transform, `identity` for the column itself, a name in `INDEXED_FUNCTIONS`, or an
            attribute of a dimension table (`lookups.py`).
        source: The Iceberg type of the column.
        kind: The Iceberg type of the term's values.
    """

    column_id: int
    name: str
    transform: str
    source: str
    kind: str

    @property
    def text(self) -> str:
        return format_term(self.transform, self.name)


def parse_term(text: str) -> tuple[str, str]:
    """Parse the text of a term, and return its transform and the name of its column.

    Raises:
        BadRequest: The text is not a term.
    """
    if len(text) > TEXT_MAX:
        raise BadRequest(f"A term of {len(text)} characters is too long; the limit is {TEXT_MAX} characters")
    call = _DATE_TRUNC.fullmatch(text) or _LOOKUP_CALL.fullmatch(text) or _CALL.fullmatch(text)
    transform = IDENTITY
    if call is not None:
        transform = _parse_transform(re.sub(r"\s", "", call[1]))
        text = call[2]
    column_text = text.strip()
    if quoted_match := _QUOTED_NAME.fullmatch(column_text):
        return transform, quoted_match[1].replace("``", "`")
    if not _PLAIN_NAME.fullmatch(column_text):
        raise BadRequest(
            f"{column_text[:_SHOWN_MAX]!r} is not a column: write c, a.b, lower(c), bucket[16](c), or `odd name` in "
            "backticks"
        )
    return transform, column_text


def format_term(transform: str, column: str) -> str:
    """Return the text of a term. The name of the column is quoted if necessary."""
    column_text = column if _PLAIN_NAME.fullmatch(column) else "`" + column.replace("`", "``") + "`"
    return column_text if transform == IDENTITY else f"{transform}({column_text})"


def split_arguments(text: str, separator: str = ",") -> Iterator[str]:
    """Yield the items of a list, which is split at separators outside backticks and parentheses.

    Raises:
        BadRequest: A backtick or parenthesis is not closed, or the text has more than `TEXT_MAX` characters.
    """
    part, depth, is_quoted = "", 0, False
    for character in text[: TEXT_MAX + 1]:
        if character == "`":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (character == "(") - (character == ")")
            if character == separator and depth == 0:
                yield part
                part = ""
                continue
        part += character
    if is_quoted or depth or len(text) > TEXT_MAX:
        raise BadRequest(f"{text[:_SHOWN_MAX]!r} is not a list of columns: close its backticks and parentheses")
    yield part


def resolve_term(text: str, schema: Schema, older_schemas: Iterable[Schema] = ()) -> Term:
    """Parse the text of a term for a table with this current schema.

    Args:
        text: The text of the term.
        schema: The current schema.
        older_schemas: The table's schemas in any order, for names that the current schema does not have.

    Raises:
        BadRequest: The text is not a term, or its column does not exist or cannot be indexed.
    """
    transform, name = parse_term(text)
    schemas = (schema, *older_schemas)
    for candidate in (
        schema,
        *sorted((other for other in schemas if other is not schema), key=lambda other: -other.id),
    ):
        column = _find_column(candidate, name)
        if column is not None:
            return resolve_term_by_id(transform, column.id, schema, schemas)
    similar_names = find_near_names(name, schema.index.by_name)
    hint = f"; did you mean {' or '.join(similar_names)}?" if similar_names else ""
    raise BadRequest(f"Cannot index {name[:_SHOWN_NAME_MAX]!r}: the table has no such column{hint}")


def resolve_term_by_id(transform: str, column_id: int, schema: Schema, older_schemas: Iterable[Schema] = ()) -> Term:
    """Return the term of a column id. For a dropped column, use the newest schema that contains it.

    The schema with the highest id is the newest. Indexes can be on dropped columns, because the plans of earlier
    snapshots still use them.

    Raises:
        BadRequest: No schema has the column, or it cannot be indexed in this way.
    """
    for candidate in (
        schema,
        *sorted((other for other in older_schemas if other is not schema), key=lambda other: -other.id),
    ):
        column = candidate.column(column_id)
        if column is not None:
            return _make_term(candidate, column, _parse_transform(transform))
    raise BadRequest(f"Cannot index field {column_id}: the table has no column with this id")


def _parse_transform(text: str) -> str:
    """Return the canonical form of a transform or function. Raise BadRequest if no index can use it."""
    if text.lower() in INDEXED_FUNCTIONS:
        return text.lower()
    if parse_lookup(text) is not None:
        return text
    transform = canonicalize_transform(text)
    if not is_known(transform) or transform == VOID:
        raise BadRequest(
            f"Cannot index by {text[:_SHOWN_MAX]!r}: use lower, upper, bucket[N], truncate[N], year, month, day or hour"
        )
    return transform


def _find_column(schema: Schema, name: str) -> Column | None:
    """Return the column with this exact name, otherwise the only column with this name in any case, as in Spark.

    The result is None if there is no such column.

    Raises:
        BadRequest: Several columns have the name in another case.
    """
    column = schema.find_column_by_name(name)
    if column is not None:
        return column
    ids = {column_id for full_name, column_id in schema.index.by_name.items() if full_name.lower() == name.lower()}
    if len(ids) > 1:
        names = ", ".join(sorted(schema.index.by_id[column_id].name for column_id in ids))
        raise BadRequest(f"Cannot index {name!r}: case-insensitively it matches {names}")
    return schema.index.by_id[ids.pop()] if ids else None


def _make_term(schema: Schema, column: Column, transform: str) -> Term:
    """Return the term of a column and a transform, after checking that it can be indexed.

    A column in a list or map cannot be indexed, because a row has several values of it. The values of a function have
    the type of the column. The values of an attribute of a dimension table have the type that the attribute states.

    Raises:
        BadRequest: The column cannot be indexed in this way.
    """
    parent_id = column.parent
    while parent_id is not None:
        ancestor = schema.index.by_id[parent_id]
        if isinstance(ancestor.type, ListType | MapType):
            raise BadRequest(f"Cannot index {column.name}: a {describe_type(ancestor.type)} has many values per row")
        parent_id = ancestor.parent
    if not is_primitive(column.type):
        raise BadRequest(f"Cannot index {column.name}: it is a {describe_type(column.type)}; index one of its fields")
    assert isinstance(column.type, str)
    source = canonicalize_primitive(column.type)
    if get_base_name(source) in _TYPES_WITHOUT_KEYS:
        raise BadRequest(f"Cannot index {column.name}: values of type {source} have no order")
    if function := INDEXED_FUNCTIONS.get(transform):
        if not function.supports_type(source):
            raise BadRequest(f"Cannot index {transform}({column.name}): the column has type {source}, not string")
        return Term(column.id, column.name, transform, source, source)
    if (lookup := parse_lookup(transform)) is not None:
        if source not in KEY_TYPES:
            types = ", ".join(sorted(KEY_TYPES))
            raise BadRequest(f"Cannot look up {column.name}, of type {source}: the types of keys are {types}")
        return Term(column.id, column.name, transform, source, lookup.type)
    if not accepts_type(transform, source):
        raise BadRequest(
            f"Cannot index {transform}({column.name}): {transform} does not accept values of type {source}"
        )
    return Term(column.id, column.name, transform, source, compute_result_type(transform, source))
