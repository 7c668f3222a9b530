"""Binding: names become column ids, literals become values, and negation moves into the predicates.

A bound expression has Iceberg's semantics. `Not` is pushed down by replacing each operator by its opposite, as Java's
`rewriteNot` does: `not(x < 5)` is `x >= 5`. Null matches neither of the two, but `not-eq` and `not-in` match null and
NaN. A comparison with a literal that the column's type cannot contain is replaced by an exact equivalent. Java turns a
comparison with a literal outside an int's range into `true`, which keeps nulls. This module turns it into `not-null`.

Infinity is never a value of a bound predicate, because JSON cannot represent it and Java could not read the residual.
The largest finite value replaces infinity. NaN counts as greater than this value, as in Spark, which keeps more rows.

A null literal represents an unknown value, because PyIceberg writes null for both infinities. A predicate with such a
literal, negated or not, becomes a condition that all rows satisfy. The condition is not `true`: if the residual of a
file is `true`, PyIceberg counts the file's rows from metadata.

A filter uses current names for every snapshot. If the schema of the snapshot lacks a name, the name is looked up in the
table's other schemas, newest first. Columns inside lists and maps have many values per row, so their predicates
cannot be evaluated on statistics. They are bound with the kind `list` or `map`. Other nested columns are bound with the
kind of their type.

A JSON literal of a filter, in the format of any client, becomes a value of the column's type. Java sends raw numbers
(days, microseconds), decimals as strings, bytes as hexadecimal, and infinities as strings. PyIceberg sends dates and
timestamps in ISO format, timestamps without an offset. If it parsed a number with a decimal point from a string, it
sends the number as a string. Therefore the column's type determines the conversion.

A literal outside the column's type must not change a result. It becomes a position: `Between` two adjacent values, or
`Above` or `Below` all values. Comparisons with a position are exact.

Three kinds of literals are rounded, because every client rounds them before it compares rows:

- A double for a float column becomes the nearest float. Java writes a float as the shortest digits that parse to it,
  and engines that compare as doubles send only literals that a float can represent.
- A JSON integer for a double column becomes the nearest double.
- A JSON number with a decimal point for a decimal column is rounded half up. A decimal string is exact.

Integers for timestamps are microseconds, even for nanosecond columns (Java's `LongLiteral`). A timestamp without an
offset is UTC if the column has a time zone. The sign of zero is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import copysign
from typing import TypeAlias
from uuid import UUID

import msgspec

from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Not,
    Op,
    Or,
    Unbound,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.types.functions import accepts_values, is_function
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.iceberg.types.schema import Column, ListType, MapType, Schema, describe_type, is_primitive
from seamark.formats.iceberg.types.transforms import (
    IDENTITY,
    VOID,
    accepts_type,
    compute_result_type,
    get_transform_name,
    is_known,
)
from seamark.formats.iceberg.types.types import canonicalize_primitive, get_base_name
from seamark.formats.iceberg.types.values import (
    FLOATS,
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    NANOS_PER_DAY,
    NANOS_PER_MICRO,
    Value,
    floor_unscaled,
    get_decimal_precision,
    get_decimal_scale,
    get_fixed_length,
    parse_decimal,
    parse_iso_date,
    parse_iso_time,
    parse_iso_timestamp,
    round_to_type,
)
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize

FINITE_MAX = {"float": (2.0 - 2.0**-23) * 2.0**127, "double": (2.0 - 2.0**-52) * 2.0**1023}
"""The largest finite value of each floating-point type."""

_SHOWN_CHARS_MAX = 100
"""The maximum number of characters of a literal, or of an error, in a message."""
_INFINITIES = {"Infinity": math.inf, "+Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Above:
    """A literal that is greater than all finite values of the type.

    Attributes:
        infinite: Whether the literal is positive infinity.
    """

    infinite: bool = False


@dataclass(frozen=True, slots=True)
class Below:
    """A literal that is less than all finite values of the type.

    Attributes:
        infinite: Whether the literal is negative infinity.
    """

    infinite: bool = False


@dataclass(frozen=True, slots=True)
class Between:
    """A literal between two adjacent values of the type, such as 1.5 for integers.

    Attributes:
        lower: The greatest value below the literal.
        upper: The least value above the literal, which is `lower` + 1.
    """

    lower: int
    upper: int


Literal: TypeAlias = Value | Above | Below | Between


def parse_literal(kind: str, json: object) -> Literal:
    """Convert a JSON literal to a value of a primitive type, or to its position among the values of the type.

    For example, 1.5 for an int column becomes `Between(1, 2)`, and a number beyond the range of ints becomes `Above` or
    `Below`. Comparisons with such a position are exact.

    Raises:
        BadRequest: `json` is NaN or cannot be converted to the type, or the type cannot be compared with literals.
    """
    parse = _PARSERS.get(get_base_name(kind))
    if parse is None:
        raise BadRequest(f"cannot compare a column of type {kind} with a literal")
    is_nan = json != json
    if is_nan or (json == "NaN" and kind in FINITE_MAX):
        raise BadRequest("cannot create expression literal from NaN; use is-nan or not-nan instead")
    try:
        literal = parse(kind, json) if kind == "boolean" or not isinstance(json, bool) else None
    except (ValueError, OverflowError) as error:
        raise BadRequest(
            f"invalid value for conversion to type {kind}: {_show_json(json)} ({_truncate_text(str(error))})"
        ) from None
    if literal is None:
        raise BadRequest(f"invalid value for conversion to type {kind}: {_show_json(json)}")
    return literal


def _show_json(json: object) -> str:
    return _truncate_text(repr(json))


def _truncate_text(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def _parse_boolean(_: str, json: object) -> Literal | None:
    if isinstance(json, bool):
        return json
    return {"true": True, "false": False}.get(json.lower()) if isinstance(json, str) else None


def _parse_integer(kind: str, json: object) -> Literal | None:
    limits = (INT_MIN, INT_MAX) if kind == "int" else (LONG_MIN, LONG_MAX)
    match json:
        case int():
            return _choose_position_literal(json, True, *limits)
        case float():
            return (
                _to_infinite_literal(json)
                if math.isinf(json)
                else _choose_position_literal(math.floor(json), json.is_integer(), *limits)
            )
        case str():
            return _choose_position_literal(*floor_unscaled(parse_decimal(json), 0), *limits)
    return None


def _parse_float(kind: str, json: object) -> Literal | None:
    match json:
        case int() | float():
            number = _convert_to_float(json)
        case str() if json in _INFINITIES:
            return _to_infinite_literal(_INFINITIES[json])
        case str():
            number = float(parse_decimal(json))
            if math.isinf(number):
                return Above() if number > 0 else Below()
        case _:
            return None
    if math.isinf(number):
        # An infinite float is infinity. An int is finite, so one that overflows is only beyond the largest float.
        return _to_infinite_literal(number) if isinstance(json, float) else Above() if number > 0 else Below()
    try:
        # The largest float, written with the fewest digits, is parsed as a double that is greater than the float. This
        # double rounds to the float.
        return round_to_type(kind, number)
    except ValueError:
        return Above() if number > 0 else Below()


def _convert_to_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _to_infinite_literal(infinity: float) -> Literal:
    return Above(infinite=True) if infinity > 0 else Below(infinite=True)


def _parse_decimal(kind: str, json: object) -> Literal | None:
    scale, limit = get_decimal_scale(kind), 10 ** get_decimal_precision(kind) - 1
    match json:
        case int():
            return _choose_position_literal(json * 10**scale, exact=True, low=-limit, high=limit)
        case float() if math.isinf(json):
            return _to_infinite_literal(json)
        case float():
            # Iceberg's clients in Java and Python round half up, so only the first digit beyond the scale matters.
            tenths, _ = floor_unscaled(Decimal(repr(abs(json))), scale + 1)
            magnitude = (tenths + 5) // 10
            unscaled = -magnitude if json < 0 else magnitude
            return _choose_position_literal(unscaled, exact=True, low=-limit, high=limit)
        case str():
            floor, exact = floor_unscaled(parse_decimal(json), scale)
            return _choose_position_literal(floor, exact, low=-limit, high=limit)
    return None


def _parse_date(_: str, json: object) -> Literal | None:
    match json:
        case int():
            return _choose_position_literal(json, True, INT_MIN, INT_MAX)
        case str() if "T" in json.upper():
            days, remainder = divmod(parse_iso_timestamp(json)[0], NANOS_PER_DAY)
            return _choose_position_literal(days, remainder == 0, INT_MIN, INT_MAX)
        case str():
            return _choose_position_literal(parse_iso_date(json), True, INT_MIN, INT_MAX)
    return None


def _parse_time(_: str, json: object) -> Literal | None:
    match json:
        case int():
            return _choose_position_literal(json, True, LONG_MIN, LONG_MAX)
        case str():
            micros, remainder = divmod(parse_iso_time(json), NANOS_PER_MICRO)
            return _choose_position_literal(micros, remainder == 0, LONG_MIN, LONG_MAX)
    return None


def _parse_timestamp(kind: str, json: object) -> Literal | None:
    match json:
        case int():
            nanos = json * NANOS_PER_MICRO
        case str() if "T" in json.upper():
            nanos, offset = parse_iso_timestamp(json)
            if offset is not None and "tz" not in kind:
                raise ValueError("the column has no time zone: omit the offset")
        case str():
            nanos = parse_iso_date(json) * NANOS_PER_DAY
        case _:
            return None
    unit_nanos = 1 if kind.endswith("_ns") else NANOS_PER_MICRO
    units, remainder = divmod(nanos, unit_nanos)
    return _choose_position_literal(units, remainder == 0, LONG_MIN, LONG_MAX)


def _parse_string(_: str, json: object) -> Literal | None:
    if isinstance(json, str):
        json.encode()  # A file cannot contain a lone surrogate.
        return json
    return None


def _parse_uuid(_: str, json: object) -> Literal | None:
    if isinstance(json, str) and len(json) in (32, 36):  # Without and with hyphens.
        return UUID(json).bytes
    return None


def _parse_bytes(kind: str, json: object) -> Literal | None:
    if not isinstance(json, str) or " " in json:
        return None
    data = bytes.fromhex(json)
    if get_base_name(kind) == "fixed" and len(data) != get_fixed_length(kind):
        raise ValueError(f"the value has {len(data)} bytes, but the type {kind} needs {get_fixed_length(kind)}")
    return data


def _choose_position_literal(floor: int, exact: bool, low: int, high: int) -> Literal:
    """Return the literal of a number: `floor` if the number is exact, otherwise its position among the integers.

    Args:
        floor: The largest integer that is not greater than the number.
        exact: Whether the number is the integer `floor`.
        low: The smallest integer of the type.
        high: The largest integer of the type.
    """
    if floor > high or (floor == high and not exact):
        return Above()
    if floor < low:
        return Below()
    return floor if exact else Between(floor, floor + 1)


# Python's booleans are also integers, but only the type `boolean` accepts them.
_PARSERS: dict[str, Callable[[str, object], Literal | None]] = {
    "boolean": _parse_boolean,
    "int": _parse_integer,
    "long": _parse_integer,
    "float": _parse_float,
    "double": _parse_float,
    "decimal": _parse_decimal,
    "date": _parse_date,
    "time": _parse_time,
    **dict.fromkeys(("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), _parse_timestamp),
    "string": _parse_string,
    "uuid": _parse_uuid,
    "fixed": _parse_bytes,
    "binary": _parse_bytes,
}


_WIDTH_DIGITS = 10
"""The number of digits of the largest width of a truncation, 2³¹ - 1."""
OPPOSITE = {
    Op.IS_NULL: Op.NOT_NULL,
    Op.IS_NAN: Op.NOT_NAN,
    Op.LT: Op.GT_EQ,
    Op.GT: Op.LT_EQ,
    Op.EQ: Op.NOT_EQ,
    Op.IN: Op.NOT_IN,
    Op.STARTS_WITH: Op.NOT_STARTS_WITH,
}
OPPOSITE |= {opposite: op for op, opposite in OPPOSITE.items()}

_NULL_OPS = frozenset({Op.IS_NULL, Op.NOT_NULL})
_NAN_OPS = frozenset({Op.IS_NAN, Op.NOT_NAN})
_PREFIX_OPS = frozenset({Op.STARTS_WITH, Op.NOT_STARTS_WITH})
_SET_OPS = frozenset({Op.IN, Op.NOT_IN})
_POSITION_CLASSES = (Above, Below, Between)
"""The classes of positions, as a tuple.

Building a union of classes for isinstance is slow, and every plan runs this code.
"""


def bind(expression: Expression, schema: Schema, schemas: Iterable[Schema], *, case_sensitive: bool) -> Expression:
    """Bind an expression to columns. The result contains only `Always`, `And`, `Or` and `Bound`.

    Names are looked up in `schema`, and then in `schemas`, which are all schemas of the table in any order. Predicates
    that are already bound do not change.

    Raises:
        BadRequest: A column is unknown or ambiguous, or a literal does not fit its column.
    """
    return _Binder(_order_for_lookup(schema, schemas), case_sensitive).bind(expression, negated=False)


def list_terms(
    expression: Expression, schema: Schema, schemas: Iterable[Schema], *, case_sensitive: bool
) -> list[tuple[int, str, str]]:
    """Return the column id, the transform and the column's type for each unbound predicate, in order.

    Names of columns are looked up in `schema`, and then in `schemas`, the newest first.
    """
    binder = _Binder(_order_for_lookup(schema, schemas), case_sensitive)
    return [(term.column_id, term.transform, term.kind) for term in binder.bind_terms(expression)]


def _order_for_lookup(schema: Schema, schemas: Iterable[Schema]) -> tuple[Schema, ...]:
    """Return the schema, and then the other schemas, newest first."""
    other_schemas = [other for other in schemas if other is not schema]
    other_schemas.sort(key=lambda other: other.id, reverse=True)
    return (schema, *other_schemas)


class _Term(msgspec.Struct, frozen=True, gc=False):
    """A column or its transform, to which predicates are bound.

    Attributes:
        kind: The type of the column, as in `Bound`.
        result: The type of the transformed values.
        never_null: Whether no row has a null for the term.
    """

    column_id: int
    name: str
    kind: str
    transform: str
    result: str
    never_null: bool

    def make_predicate(self, op: Op, *values: Value) -> Bound:
        return Bound(op, self.column_id, self.name, self.kind, self.transform, self.result, values)


class _Binder:
    """The binding of an expression to the columns of some schemas."""

    def __init__(self, schemas: Sequence[Schema], case_sensitive: bool) -> None:
        self._schemas = schemas
        self._case_sensitive = case_sensitive
        self._columns_by_lower_name: dict[int, dict[str, set[int]]] = {}

    def bind(self, expression: Expression, *, negated: bool) -> Expression:
        """Bind an expression, or its negation.

        A negation is moved to the predicates, whose operators become the opposite. The negation of AND is the OR of the
        negated children, and vice versa.
        """
        match expression:
            case Unbound(op, name, transform, literals):
                term = self._bind_term(name, transform)
                return _make_predicate(OPPOSITE[op] if negated else op, term, literals)
            case And(children) | Or(children):
                bound = [self.bind(child, negated=negated) for child in children]
                return join_by_and(*bound) if isinstance(expression, And) != negated else join_by_or(*bound)
            case Not(child):
                return self.bind(child, negated=not negated)
            case Always(value):
                return Always(value != negated)
            case Bound() if negated:
                raise BadRequest(f"Cannot negate the predicate on {expression.name}: it is already bound")
            case Bound():
                return expression

    def bind_terms(self, expression: Expression) -> Iterator[_Term]:
        """Yield the term of each unbound predicate, in order."""
        match expression:
            case Unbound(_, name, transform):
                yield self._bind_term(name, transform)
            case And(children) | Or(children):
                for child in children:
                    yield from self.bind_terms(child)
            case Not(child):
                yield from self.bind_terms(child)

    def _bind_term(self, name: str, transform: str) -> _Term:
        for position, schema in enumerate(self._schemas):
            if column := self._find_column(schema, position, name):
                return _bind_term(column, schema, transform, trusted=position == 0)
        raise BadRequest(f"Cannot find column '{name}' in the table's schemas{self._suggest_similar_names(name)}")

    def _find_column(self, schema: Schema, position: int, name: str) -> Column | None:
        """Return the column with a name in a schema, or None.

        If names are not case-sensitive, the names of each schema are converted to lower case once, and are kept by the
        index of the schema.

        Args:
            schema: The schema.
            position: The index of the schema in the list of schemas.
            name: The full name of the column.

        Raises:
            BadRequest: Several columns have this name if case is ignored.
        """
        if self._case_sensitive:
            return schema.find_column_by_name(name)
        columns_by_lower_name = self._columns_by_lower_name.get(position)
        if columns_by_lower_name is None:
            columns_by_lower_name = self._columns_by_lower_name[position] = {}
            for column_name, column_id in schema.index.by_name.items():
                columns_by_lower_name.setdefault(column_name.lower(), set()).add(column_id)
        ids = columns_by_lower_name.get(name.lower(), set())
        if len(ids) > 1:
            names = ", ".join(sorted(schema.index.by_id[column_id].name for column_id in ids))
            raise BadRequest(f"Cannot resolve column '{name}' case-insensitively: it matches {names}")
        return schema.index.by_id[next(iter(ids))] if ids else None

    def _suggest_similar_names(self, name: str) -> str:
        similar_names = find_near_names(name, (other for schema in self._schemas for other in schema.index.by_name))
        return f"; did you mean {' or '.join(similar_names)}?" if similar_names else ""


def _bind_term(column: Column, schema: Schema, transform: str, *, trusted: bool) -> _Term:
    """Return the term of a column and a transform.

    A column inside a list or map has the kind of this list or map, because statistics cannot decide predicates on it.
    A term is never null if the column and all structs around it are required. The transforms `bucket` and `void` are
    exceptions, because they can give null for a value that is not null.

    Args:
        column: The column.
        schema: The schema that contains the column.
        transform: The transform.
        trusted: Whether the data satisfy the schema's required fields.

    Raises:
        BadRequest: The transform is unknown, or does not accept the type of the column.
    """
    if transform != IDENTITY and not is_known(transform) and not is_function(transform):
        raise BadRequest(f"Cannot bind {column.name}: unknown transform {transform}")
    if isinstance(column.type, str):
        kind, result, is_accepted = _resolve_types(column.type, transform)
    else:
        kind = result = describe_type(column.type)
        is_accepted = False
    if transform != IDENTITY and not is_accepted:
        raise BadRequest(f"Cannot bind: {transform} cannot transform the {kind} values of '{column.name}'")
    required = column.required
    parent_id = column.parent
    while parent_id is not None:
        ancestor = schema.index.by_id[parent_id]
        if isinstance(ancestor.type, (ListType, MapType)):
            kind, required = describe_type(ancestor.type), False
        required = required and ancestor.required
        parent_id = ancestor.parent
    never_null = (
        trusted and required and (transform == IDENTITY or get_transform_name(transform) not in ("bucket", VOID))
    )
    return _Term(column.id, column.name, kind, transform, result, never_null)


@memoize(1024)
def _resolve_types(name: str, transform: str) -> tuple[str, str, bool]:
    """Return a primitive type's canonical name, the transform's result type, and whether the transform accepts it."""
    try:
        kind = canonicalize_primitive(name)
    except BadRequest:
        # The type belongs to a later format version, so its values are unknown.
        kind = name
    if not is_primitive(kind):
        return kind, kind, False
    if is_function(transform):
        return kind, kind, accepts_values(transform, kind)
    return kind, compute_result_type(transform, kind), accepts_type(transform, kind)


def _make_predicate(op: Op, term: _Term, literals: tuple[object, ...]) -> Expression:
    """Bind a predicate to a term: convert its literals to the type of the term.

    A test for null becomes a constant if the schema decides it. A column of type unknown has only nulls.
    """
    if op in _NULL_OPS:
        if term.never_null or term.kind == "unknown":
            return Always((op == Op.NOT_NULL) == term.never_null)
        return term.make_predicate(op)
    if op in _NAN_OPS:
        if term.result not in FLOATS:
            raise BadRequest(f"Cannot bind {op} of {term.name}: only float and double have NaN, not {term.result}")
        return term.make_predicate(op)
    if op in _PREFIX_OPS and term.result != "string":
        raise BadRequest(f"Cannot bind {op} of {term.name}: the type must be string, but it is {term.result}")
    if None in literals:
        return _bind_null_literal(op, term)
    domain = _find_domain(term)
    try:
        parsed_literals = [parse_literal(domain, literal) for literal in literals]
    except BadRequest as error:
        raise BadRequest(f"Cannot bind {op} of {term.name}: {error.message}") from None
    return (
        _make_set_predicate(op, term, parsed_literals)
        if op in _SET_OPS
        else _make_comparison(op, term, parsed_literals[0])
    )


def _bind_null_literal(op: Op, term: _Term) -> Expression:
    """Return a condition that all rows satisfy, because the value of a null literal is unknown.

    PyIceberg writes null for both infinities, so null is only accepted for columns of floats. The condition is not the
    constant TRUE, so that it still names the column.

    Raises:
        BadRequest: The type is not float or double, or the column is transformed.
    """
    if term.result not in FLOATS or term.transform != IDENTITY:
        raise BadRequest(f"Cannot bind {op} of {term.name}: null is not a literal; use is-null or not-null")
    return Or((term.make_predicate(Op.IS_NULL), term.make_predicate(Op.NOT_NULL)))


def _find_domain(term: _Term) -> str:
    """Return a type that contains all values of a term.

    A truncated decimal can exceed the precision of its column: -95 becomes -100.
    """
    if term.transform == IDENTITY or not term.result.startswith("decimal"):
        return term.result
    return f"decimal({get_decimal_precision(term.result) + _WIDTH_DIGITS}, {get_decimal_scale(term.result)})"


def _make_set_predicate(op: Op, term: _Term, literals: list[Literal]) -> Expression:
    """Return the predicate for `in` or `not-in`.

    A literal that is no value of the type is a position, such as "above all values". It becomes a separate comparison.
    The other literals are sorted, and a single value becomes `eq` or `not-eq`.
    """
    values = {}
    predicates = []
    single_op = Op.EQ if op == Op.IN else Op.NOT_EQ
    for literal in literals:
        if isinstance(literal, _POSITION_CLASSES):
            predicates.append(_make_comparison(single_op, term, literal))
        else:
            # Keep both zeros: -0.0 equals 0.0 in Python, but not for every reader.
            values[_make_sort_key(literal)] = literal
    sorted_values = [values[key] for key in sorted(values)]
    if len(sorted_values) > 1:
        predicates.append(term.make_predicate(op, *sorted_values))
    elif sorted_values:
        predicates.append(term.make_predicate(single_op, *sorted_values))
    return join_by_or(*predicates) if op == Op.IN else join_by_and(*predicates)


def _make_sort_key(value: Value) -> tuple[Value, float]:
    """Return a key by which -0.0 precedes 0.0."""
    return value, copysign(1.0, value) if isinstance(value, float) else 0.0


def _make_comparison(op: Op, term: _Term, literal: Literal) -> Expression:
    """Return the predicate for a comparison with a literal.

    If the literal is no value of the type, it is a position among the values: above or below all, or between two. No
    value equals it. A comparison then becomes a constant, a test for null, or a comparison with an adjacent value.
    """
    if not isinstance(literal, _POSITION_CLASSES):
        return term.make_predicate(op, literal)
    match literal:
        case Above() | Below() if term.result in FLOATS:
            return _compare_beyond_finite(op, term, literal)
        case Above() | Below() | Between() if op in (Op.EQ, Op.NOT_EQ):
            return Always(op == Op.NOT_EQ)
        case Between(lower, upper):
            return (
                term.make_predicate(Op.LT_EQ, lower)
                if op in (Op.LT, Op.LT_EQ)
                else term.make_predicate(Op.GT_EQ, upper)
            )
        case Above() | Below():
            satisfied_ops = (Op.LT, Op.LT_EQ) if isinstance(literal, Above) else (Op.GT, Op.GT_EQ)
            return _make_predicate(Op.NOT_NULL, term, ()) if op in satisfied_ops else FALSE


def _compare_beyond_finite(op: Op, term: _Term, literal: Above | Below) -> Expression:
    """Return a comparison with an infinity, or with a number between an infinity and the nearest finite value.

    The result uses the largest finite value instead, because bound predicates contain no infinity. NaN is greater than
    all numbers, as in Java, so it needs separate tests.

    Args:
        op: The operator.
        term: The compared term.
        literal: The position of the literal.
    """
    upwards = isinstance(literal, Above)  # The literal is above the largest finite value, not below the smallest.
    limit = FINITE_MAX[term.result] if upwards else -FINITE_MAX[term.result]
    finite = term.make_predicate(Op.LT_EQ if upwards else Op.GT_EQ, limit)
    infinite = term.make_predicate(Op.GT if upwards else Op.LT, limit)
    not_nan = term.make_predicate(Op.NOT_NAN)
    strict_op, inclusive_op = (Op.LT, Op.LT_EQ) if upwards else (Op.GT, Op.GT_EQ)
    if op == strict_op or (op == inclusive_op and not literal.infinite):
        return finite
    if op == inclusive_op:
        return (
            join_by_and(_make_predicate(Op.NOT_NULL, term, ()), not_nan)
            if upwards
            else _make_predicate(Op.NOT_NULL, term, ())
        )
    if op == Op.EQ:
        return join_by_and(infinite, not_nan) if literal.infinite else FALSE
    if op == Op.NOT_EQ:
        not_infinite = join_by_or(finite, _make_predicate(Op.IS_NULL, term, ()), term.make_predicate(Op.IS_NAN))
        return not_infinite if literal.infinite else TRUE
    # Only NaN is greater than infinity, and nothing is less than negative infinity.
    past_infinity = literal.infinite and op in (Op.GT, Op.LT)
    if past_infinity:
        return term.make_predicate(Op.IS_NAN) if upwards else FALSE
    return infinite
