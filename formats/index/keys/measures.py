"""Measures of a cube: aggregates of columns, or of sums, differences and products of columns.

In text, a measure names its columns: `count(*)`, `sum(price * (1 - discount))`, `max(a.b)`. In definitions, a column is
its field id, as in `sum(#3 * (1 - #4))`, so that renames do not affect it.

A measure is stored as partial aggregates, which can be combined: an average as a sum and a count. The types follow
Trino's rules. Integers keep their type, and an operation on decimals has at most 38 digits. The functions have no side
effects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale
from seamark.formats.index.keys.distinct_sketches import SKETCHED_TYPES
from seamark.formats.index.keys.terms import TEXT_MAX, Term, resolve_term, resolve_term_by_id
from seamark.formats.runtime.errors import BadRequest

COUNT, SUM, MIN, MAX, AVG = "count", "sum", "min", "max", "avg"
APPROX_DISTINCT = "approx_distinct"
"""The approximate number of distinct values, from a sketch (`distinct_sketches.py`)."""
FUNCTIONS = (COUNT, SUM, MIN, MAX, AVG, APPROX_DISTINCT)
PRECISION_MAX = 38
MEASURES_MAX = 64
"""The maximum number of measures of a cube."""

_SHOWN_MAX, _SHOWN_NUMBER_MAX, _SHOWN_TOKEN_MAX = 100, 50, 20
"""The maximum number of characters of a measure, of a number, and of an unexpected text in messages."""
_DEPTH_MAX = 50
_TOKENS_MAX = 200
"""The maximum number of tokens of a measure. It limits the nesting of the functions that recurse into operands."""
_PRODUCT_DIGITS_MAX = 75
"""The maximum number of digits of both operands of a product together. The exact product then has at most 76 digits."""
_TOKEN = re.compile(r"\s*(?:(?P<symbol>[-+*()])|(?P<number>[0-9]+(?:\.[0-9]+)?)|`(?P<quoted>(?:[^`]|``)+)`"
                    r"|#(?P<id>[0-9]{1,10})|(?P<name>[^\s`()+*,;=#-]+))")  # fmt: skip
_INTEGER_DIGITS = {"int": 10, "long": 19}
"""The number of digits of the decimal type to which Trino converts each integer type."""
_INT_MAX, _LONG_MAX = 2**31 - 1, 2**63 - 1
_SUMMABLE_TYPES = frozenset({"int", "long", "decimal", "float", "double"})
_COMPARABLE_TYPES = _SUMMABLE_TYPES | {"date", "time", "timestamp", "timestamptz", "string", "binary"}


@dataclass(frozen=True, slots=True)
class ColumnOperand:
    """A column in a measure.

    Attributes:
        column_id: The field id of the column.
        name: The full name of the column.
        kind: The Iceberg type of the column.
    """

    column_id: int
    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class NumberOperand:
    """An integer or a decimal in a measure, such as `1` or `0.05`."""

    text: str

    @property
    def kind(self) -> str:
        integer_digits, _, fraction = self.text.partition(".")
        if fraction:
            return f"decimal({max(1, len(integer_digits.lstrip('0')) + len(fraction))}, {len(fraction)})"
        return "int" if int(self.text) <= _INT_MAX else "long"


@dataclass(frozen=True, slots=True)
class BinaryOperation:
    """A sum, a difference or a product in a measure.

    Attributes:
        sign: `+`, `-` or `*`.
        left: The left operand.
        right: The right operand.
        kind: The Iceberg type of the result.
    """

    sign: str
    left: Operand
    right: Operand
    kind: str


Operand: TypeAlias = ColumnOperand | NumberOperand | BinaryOperation


def make_operation(sign: str, left: Operand, right: Operand) -> BinaryOperation:
    """Return an operation with the type that Trino gives it.

    The operands of sums and products are sorted, so that `a + b` and `b + a` are the same measure. As in Trino, a
    product of decimals has all digits of both operands, and a sum has one digit more than its longer operand.
    The type of the result has at most `PRECISION_MAX` digits.

    Args:
        sign: `+`, `-` or `*`.
        left: The left operand.
        right: The right operand.

    Raises:
        BadRequest: The operation is not defined for these types, or its result may have too many digits.
    """
    kinds = (left.kind, right.kind)
    if not all(get_base_name(kind) in ("int", "long", "decimal") for kind in kinds):
        raise BadRequest(f"A measure cannot compute {kinds[0]} {sign} {kinds[1]}: use columns of integers or decimals")
    if sign in "+*" and format_operand(right, _format_id) < format_operand(left, _format_id):
        left, right = right, left
    if all(kind in _INTEGER_DIGITS for kind in kinds):
        return BinaryOperation(sign, left, right, "long" if "long" in kinds else "int")
    (left_digits, left_scale), (right_digits, right_scale) = map(get_decimal_digits, kinds)
    if sign == "*":
        digits, scale = left_digits + right_digits, left_scale + right_scale
        if scale > PRECISION_MAX or digits > _PRODUCT_DIGITS_MAX:
            raise BadRequest(f"A measure cannot compute {kinds[0]} * {kinds[1]}: the product has too many digits")
        return BinaryOperation(sign, left, right, f"decimal({min(PRECISION_MAX, digits)}, {scale})")
    scale = max(left_scale, right_scale)
    digits = max(left_digits - left_scale, right_digits - right_scale) + scale + 1
    return BinaryOperation(sign, left, right, f"decimal({min(PRECISION_MAX, digits)}, {scale})")


def get_decimal_digits(kind: str) -> tuple[int, int]:
    """Return the precision and the scale of the decimal type to which a number of this type is converted."""
    return (
        (_INTEGER_DIGITS[kind], 0)
        if kind in _INTEGER_DIGITS
        else (get_decimal_precision(kind), get_decimal_scale(kind))
    )


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial aggregate, which an entry of a cube stores for each group.

    Attributes:
        function: `count`, `sum`, `min`, `max` or `approx_distinct`. `count` without an operand counts rows.
        operand: The aggregated column or expression, or None.
    """

    function: str
    operand: Operand | None

    @property
    def text(self) -> str:
        """The canonical text, with field ids."""
        return f"{self.function}({'*' if self.operand is None else format_operand(self.operand, _format_id)})"


COUNT_ROWS = Partial(COUNT, None)


@dataclass(frozen=True, slots=True)
class Measure:
    """An aggregate that a cube can answer.

    Attributes:
        function: One of `FUNCTIONS`.
        operand: The aggregated column or expression, or None.
    """

    function: str
    operand: Operand | None

    @property
    def partials(self) -> tuple[Partial, ...]:
        """The partial aggregates from which the measure is computed."""
        if self.function == AVG:
            return Partial(SUM, self.operand), Partial(COUNT, self.operand)
        return (Partial(self.function, self.operand),)

    @property
    def text(self) -> str:
        """The text with the names of columns."""
        return self._format(_format_name)

    @property
    def id_text(self) -> str:
        """The expression as text, with field ids instead of the names of columns, so that it survives renames."""
        return self._format(_format_id)

    def _format(self, format_column: Callable[[ColumnOperand], str]) -> str:
        return f"{self.function}({'*' if self.operand is None else format_operand(self.operand, format_column)})"


def list_partials(measures: Iterable[Measure]) -> tuple[Partial, ...]:
    """Return the distinct partial aggregates of some measures. The first is `count(*)`."""
    return tuple(dict.fromkeys((COUNT_ROWS, *(partial for measure in measures for partial in measure.partials))))


def list_columns(operand: Operand | None) -> Iterator[ColumnOperand]:
    """Yield the columns of an operand."""
    match operand:
        case ColumnOperand():
            yield operand
        case BinaryOperation():
            yield from list_columns(operand.left)
            yield from list_columns(operand.right)


def format_operand(operand: Operand, format_column: Callable[[ColumnOperand], str]) -> str:
    """Return the text of an operand. `format_column` returns the text of a column."""
    match operand:
        case ColumnOperand():
            return format_column(operand)
        case NumberOperand():
            return operand.text
    left, right = (format_operand(side, format_column) for side in (operand.left, operand.right))
    left = f"({left})" if operand.sign == "*" and _is_sum(operand.left) else left
    # Keep the parentheses of `a - (b - c)` and `a + (b + c)`, because the order of operations can matter.
    right = f"({right})" if isinstance(operand.right, BinaryOperation) else right
    return f"{left} {operand.sign} {right}"


def _is_sum(operand: Operand) -> bool:
    return isinstance(operand, BinaryOperation) and operand.sign != "*"


def _format_id(column: ColumnOperand) -> str:
    return f"#{column.column_id}"


def _format_name(column: ColumnOperand) -> str:
    """Return the name of a column in the text of a measure. It is quoted if it would be parsed as something else.

    For example, `1a` would be parsed as a number, and the space at the start of ` a` would be ignored.
    """
    match = _TOKEN.match(column.name)
    is_plain = match is not None and match["name"] == column.name
    return column.name if is_plain else "`" + column.name.replace("`", "``") + "`"


def parse_measure(text: str, schema: Schema, older_schemas: Iterable[Schema] = ()) -> Measure:
    """Parse a measure for a table with this current schema.

    Args:
        text: The text of the measure.
        schema: The current schema.
        older_schemas: The table's schemas in any order, for names and field ids that the current schema does not have.

    Raises:
        BadRequest: The text is not a measure, or its column does not exist or has a type that the function does not
            accept.
    """
    schemas = tuple(older_schemas)
    measure = _MeasureParser(text, schema, schemas).parse()
    # The canonical text can have more parentheses. A definition stores it, so it must be a valid measure too.
    _MeasureParser(measure.id_text, schema, schemas).parse()
    return measure


class _MeasureParser:
    """A recursive-descent parser of the tokens of a measure."""

    def __init__(self, text: str, schema: Schema, older_schemas: tuple[Schema, ...]) -> None:
        self._text, self._schema, self._older_schemas = text, schema, older_schemas
        self._tokens = list(islice(self._split(text), _TOKENS_MAX + 1))
        if len(self._tokens) > _TOKENS_MAX:
            raise self._make_error(f"the expression has more than {_TOKENS_MAX} names, numbers and signs")
        self._position = 0
        self._depth = 0

    def parse(self) -> Measure:
        function = self._take().lower()
        if function not in FUNCTIONS or not self._skip("("):
            raise self._make_error(f"begin with one of {', '.join(FUNCTIONS)}, as in sum(amount)")
        operand = None if function == COUNT and self._skip("*") else self._parse_sum()
        if not self._skip(")") or self._position < len(self._tokens):
            raise self._make_error("a measure is one function of columns and numbers with +, - and *")
        if operand is not None:
            self._check_operand(function, operand)
        return Measure(function, operand)

    def _check_operand(self, function: str, operand: Operand) -> None:
        """Check that a function accepts an operand."""
        if not any(True for _ in list_columns(operand)):  # The operand consists only of numbers.
            raise self._make_error("the expression has no column")
        name = get_base_name(operand.kind)
        if (function in (SUM, AVG) and name not in _SUMMABLE_TYPES) or (
            function in (MIN, MAX) and name not in _COMPARABLE_TYPES
        ):
            raise self._make_error(f"{function} is not defined for values of type {operand.kind}")
        if function == APPROX_DISTINCT and not (isinstance(operand, ColumnOperand) and name in SKETCHED_TYPES):
            types = ", ".join(sorted(SKETCHED_TYPES))
            raise self._make_error(f"{function} needs a column of the type {types}; this is a {operand.kind}")

    def _parse_sum(self) -> Operand:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise self._make_error("the expression is nested too deeply")
        operand = self._parse_product()
        while (sign := self._peek()) in ("+", "-"):
            self._take()
            operand = make_operation(sign, operand, self._parse_product())
        self._depth -= 1
        return operand

    def _parse_product(self) -> Operand:
        operand = self._parse_factor()
        while self._skip("*"):
            operand = make_operation("*", operand, self._parse_factor())
        return operand

    def _parse_factor(self) -> Operand:
        if self._skip("("):
            operand = self._parse_sum()
            if not self._skip(")"):
                raise self._make_error("a parenthesis is not closed")
            return operand
        if self._position >= len(self._tokens):
            raise self._make_error("the expression ends before a column")
        kind, value = self._tokens[self._position]
        self._position += 1
        match kind:
            case "number":
                return self._parse_number(value)
            case "id":
                term = resolve_term_by_id("identity", int(value), self._schema, (self._schema, *self._older_schemas))
            case "name":
                term = resolve_term(value, self._schema, self._older_schemas)
            case "quoted":
                term = resolve_term(f"`{value}`", self._schema, self._older_schemas)
            case _:
                raise self._make_error(f"{value!r} is not a column or a number")
        return make_column_operand(term)

    def _parse_number(self, text: str) -> NumberOperand:
        number = NumberOperand(text)
        if len(text) > PRECISION_MAX or ("." not in text and int(text) > _LONG_MAX):
            raise self._make_error(f"the number {text[:_SHOWN_NUMBER_MAX]} has too many digits")
        return number

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each token.

        Raises:
            BadRequest: The text is too long, or contains a character that begins no token.
        """
        if len(text) > TEXT_MAX:
            raise BadRequest(f"A measure has {len(text)} characters; the limit is {TEXT_MAX} characters")
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise self._make_error(f"{text[position : position + _SHOWN_TOKEN_MAX]!r} is not expected")
            yield match.lastgroup, match[match.lastgroup]
            position = match.end()

    def _peek(self) -> str:
        """Return the next token if it is a symbol, otherwise an empty text."""
        kind, value = self._tokens[self._position] if self._position < len(self._tokens) else ("", "")
        return value if kind == "symbol" else ""

    def _take(self) -> str:
        """Return the text of the next token, and continue after it. At the end, return an empty text."""
        self._position += 1
        if self._position > len(self._tokens):
            return ""
        _, text = self._tokens[self._position - 1]
        return text

    def _skip(self, symbol: str) -> bool:
        """Skip the symbol if it is the next token, and return whether it was skipped."""
        is_next = self._peek() == symbol
        self._position += is_next
        return is_next

    def _make_error(self, reason: str) -> BadRequest:
        return BadRequest(f"{self._text[:_SHOWN_MAX]!r} is not a measure of a cube: {reason}")


def make_column_operand(term: Term) -> ColumnOperand:
    """Return the column of a term as the operand of a measure. `term.source` is the type of the column."""
    return ColumnOperand(term.column_id, term.name, term.source)


def list_measured_types(measures: Iterable[Measure]) -> Mapping[str, str]:
    """Return the types of the columns of some measures, by field id as text."""
    columns = {column.column_id: column.kind for measure in measures for column in list_columns(measure.operand)}
    return {str(column_id): columns[column_id] for column_id in sorted(columns)}
