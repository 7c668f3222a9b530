"""Translates elements of lists and maps, and fields of structs, to DuckDB's SQL."""

from __future__ import annotations

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.expressions import Expressions, FunctionTranslator
from seamark.connector.sql.scopes import NameScope, SqlValue, describe, select_field
from seamark.connector.sql.types import BIGINT, BOOLEAN, UNREADABLE, SqlType, UnsupportedInDuckDB, find_common_type
from seamark.connector.sql.values import cast, check_args, read_whole_number

_POSITION_MAX = 1_000_000
"""The maximum position of an element that a statement names."""


def _translate_field(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate a field of an expression, such as `tags[1].name`."""
    if not isinstance(node.expression, exp.Identifier):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    return select_field(expressions.translate_value(node.this, scope), node.expression.name, node)


def _translate_element(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `list[1]`, `map['key']` and `element_at`.

    An element that does not exist is null for `element_at`, and an error for the brackets. Negative positions, which
    count from the end, are allowed only in `element_at`.

    Raises:
        InvalidRequest: The position is 0, or is negative in brackets.
        UnsupportedInDuckDB: The value is not an array or a map, or the form of the access is not translated.
    """
    check_args(node, frozenset(("this", "expressions", "offset", "safe")))
    value = expressions.translate_value(node.this, scope)
    is_safe = bool(node.args.get("safe"))
    if value.type.key is not None and value.type.element not in (None, UNREADABLE):
        return _translate_map_value(expressions, node, value, scope, is_safe=is_safe)
    if value.type.element in (None, UNREADABLE) or len(node.expressions) != 1:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    position = _read_position(node.expressions[0], node)
    if not is_safe:
        position += 1 - int(node.args.get("offset") or 0)  # sqlglot counts from 0.
    if position == 0 or (position < 0 and not is_safe):
        raise InvalidRequest(f"{describe(node)}: the elements of an array are counted from 1")
    element = f"({value.sql})[{position}]"
    if not is_safe:
        message = "error('Array subscript must be less than or equal to array length')"
        element = f"(CASE WHEN len({value.sql}) < {position} THEN {message} ELSE {element} END)"
    return SqlValue(element, value.type.element)


def _read_position(argument: exp.Expr, node: exp.Expr) -> int:
    position = read_whole_number(argument.this if isinstance(argument, exp.Neg) else argument, _POSITION_MAX)
    if position is None:
        raise UnsupportedInDuckDB(f"{describe(node)}: the position must be a literal up to {_POSITION_MAX:,}")
    return -position if isinstance(argument, exp.Neg) else position


def _translate_map_value(
    expressions: Expressions, node: exp.Expr, value: SqlValue, scope: NameScope, *, is_safe: bool
) -> SqlValue:
    """Translate the access to a value of a map by a key of the same type.

    A key that does not exist gives null if `is_safe` is true, as in `element_at`, and an error otherwise. Float keys
    are not translated, because DuckDB compares NaN and the two zeros differently.

    Raises:
        UnsupportedInDuckDB: The key has another type than the keys of the map, or is not translated.
    """
    assert value.type.key is not None
    assert value.type.element is not None
    if len(node.expressions) != 1:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    argument = node.expressions[0]
    # sqlglot subtracts 1 from a key in brackets, except from a text or the name of a column.
    is_unchanged = isinstance(argument, exp.Column) or (isinstance(argument, exp.Literal) and argument.is_string)
    if not is_safe and not is_unchanged:
        raise UnsupportedInDuckDB(f"{describe(node)}: a map with this key is not translated")
    key = expressions.translate_value(argument, scope)
    if key.type != value.type.key or key.type.is_float or not key.type.is_comparable:
        raise UnsupportedInDuckDB(f"{describe(node)}: a key of the type {key.type} is not translated")
    element = f"({value.sql})[{key.sql}]"
    if not is_safe:
        is_absent = f"NOT list_contains(map_keys({value.sql}), {key.sql})"
        element = f"(CASE WHEN {is_absent} THEN error('Key not present in map') ELSE {element} END)"
    return SqlValue(element, value.type.element)


def _translate_cardinality(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if value.type.element is None:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    name = "len" if value.type.key is None else "cardinality"
    return SqlValue(f"CAST({name}({value.sql}) AS BIGINT)", BIGINT)


def _translate_contains(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `contains`. It is null if the value is null, or if no element is equal to it and the array has nulls.

    DuckDB's aggregate `count` leaves nulls out, so a count below the length of the array shows that it has nulls.

    Raises:
        UnsupportedInDuckDB: The types of the array and the value are not translated.
    """
    check_args(node, frozenset(("this", "expression", "ensure_variant")))
    array, value = expressions.translate_values([node.this, node.expression], scope)
    element = array.type.element
    if element is None or array.type.key is not None or element.is_float or not element.is_comparable:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {array.type}")
    if find_common_type(element, value.type) != element:
        raise UnsupportedInDuckDB(f"{describe(node)}: a value of the type {value.type} is not translated")
    value_sql = cast(value, element).sql
    is_unknown = f"{value_sql} IS NULL OR list_aggregate({array.sql}, 'count') < len({array.sql})"
    contains = f"list_contains({array.sql}, {value_sql})"
    return SqlValue(f"(CASE WHEN {contains} THEN TRUE WHEN {is_unknown} THEN NULL ELSE {contains} END)", BOOLEAN)


def translate_unnest(
    expressions: Expressions, node: exp.Unnest, scope: NameScope
) -> tuple[str, list[tuple[str, SqlType]]]:
    """Translate UNNEST of one array to a query.

    Args:
        expressions: Translates the array.
        node: The node of UNNEST.
        scope: The relations before UNNEST, whose columns the array may use.

    Returns:
        The query, and the name and the type of each of its columns.

    Raises:
        InvalidRequest: The alias has another number of names than there are columns.
        UnsupportedInDuckDB: There is not exactly one array, or its elements are rows or cannot be read.
    """
    check_args(node, frozenset(("expressions", "alias", "offset")))
    array = expressions.translate_value(node.expressions[0], scope) if len(node.expressions) == 1 else None
    element = None if array is None else array.type.element
    # Trino makes a column of each field of a row.
    if array is None or element is None or array.type.key is not None or element.fields or element == UNREADABLE:
        raise UnsupportedInDuckDB(f"FROM {describe(node)} is not translated")
    alias, ordinality = node.args.get("alias"), node.args.get("offset")
    names = [column.name for column in alias.columns] if alias is not None else []
    # sqlglot removes the last name of the alias, and keeps it as the name of the ordinality.
    count = len(names) + isinstance(ordinality, exp.Identifier)
    expected = 2 if ordinality else 1
    if count not in (0, expected):
        raise InvalidRequest(f"FROM {describe(node)}: there are {count} names for {expected} columns")
    outputs, columns = [f"unnest({array.sql})"], [(names[0] if names else "", element)]
    if ordinality:
        outputs.append(f"CAST(generate_subscripts({array.sql}, 1) AS BIGINT)")
        columns.append((ordinality.name if isinstance(ordinality, exp.Identifier) else "", BIGINT))
    return f"SELECT {', '.join(outputs)}", columns


METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.Dot: _translate_field,
    exp.Bracket: _translate_element,
    exp.ArraySize: _translate_cardinality,
    exp.ArrayContains: _translate_contains,
}
