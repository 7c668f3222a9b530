"""Converts comparisons of arithmetic on a column, such as `c + 1 > 5`, to comparisons of the column itself."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from sqlglot import exp

from seamark.connector.analysis.comparisons import FLIPPED, ComparisonReader, have_same_class, make_moment_literal
from seamark.connector.analysis.literals import EXACT, UNITS, parse_interval
from seamark.connector.plans.conditions import NEVER, Condition, all_of, any_of
from seamark.connector.plans.literals import LOCAL, Literal

_DAYS_MAX = 10**6
"""The maximum number of days in a condition on a difference. A condition with more days keeps all files."""
_DIGITS_MAX = 38
"""The maximum number of digits of a decimal in Trino."""
_RELATIVE_ERRORS_MAX = {"double": Decimal("1e-9"), "float": Decimal("1e-4")}
"""Upper bounds of the relative rounding error of floating-point operations, by type."""
_QUOTIENT_DIGITS_MIN = 6
"""The minimum number of digits after the point of a quotient of decimals, unless both operands have fewer digits."""
_PRODUCT_ERROR = Decimal("1e-15")
"""An upper bound of the absolute rounding error of a product near zero."""
_FACTOR_MIN, _SCALED_MAX, _BOUND_UNIT = Decimal("1e-6"), Decimal("1e12"), Decimal("1e-12")
"""The smallest factor and the largest value for which a product is inverted, and the precision of the result."""


def move_operands_to_literal(op: str, node: exp.Expr, literal: Literal, reader: ComparisonReader) -> Condition | None:
    """Read a comparison of arithmetic on a column as a comparison of the column itself.

    The inverse operation is applied to the literal, so `c + 1 > 5` becomes `c > 4`. Overflow needs no attention,
    because Trino fails on overflow. Return None for other arithmetic.

    Args:
        op: The operator of the comparison.
        node: The arithmetic expression.
        literal: The literal with which the expression is compared.
        reader: The reader of the condition.
    """
    if isinstance(node, exp.Neg):
        return _compare_shifted(FLIPPED[op], node.this, literal, -1, Decimal(0), reader)
    if isinstance(node, exp.DateAdd):
        interval = parse_interval(exp.Interval(this=node.expression, unit=node.args.get("unit")))
        if interval is None:
            return None
        unit, count = interval
        return _compare_shifted_days(op, node.this, literal, unit, -count, reader)
    if isinstance(node, exp.Add | exp.Sub) and isinstance(node.expression, exp.Interval):
        interval = parse_interval(node.expression)
        if interval is None:
            return None
        unit, count = interval
        return _compare_shifted_days(
            op, node.this, literal, unit, -count if isinstance(node, exp.Add) else count, reader
        )
    for side, other in ((node.this, node.expression), (node.expression, node.this)):
        number = reader.read_literal(other)
        if number is None:
            continue
        is_whole = {number.kind, literal.kind} == {"integer"} and _is_whole(side, reader)
        if isinstance(node, exp.Mul) and not is_whole:
            return _compare_scaled(op, side, literal, number, reader, is_quotient=False)
        if number.kind not in ("integer", "decimal"):
            continue
        operand = Decimal(number.value)
        match node:
            case exp.Add():
                return _compare_shifted(op, side, literal, 1, -operand, reader)
            case exp.Sub() if side is node.this:
                return _compare_shifted(op, side, literal, 1, operand, reader)
            case exp.Sub():
                return _compare_shifted(FLIPPED[op], side, literal, -1, operand, reader)
            case exp.Mul() if operand:
                return _compare_multiple(op if operand > 0 else FLIPPED[op], side, literal, int(operand), reader)
    return None


def _compare_shifted(
    op: str, side: exp.Expr, literal: Literal, sign: int, addend: Decimal, reader: ComparisonReader
) -> Condition | None:
    """Return the condition on `side` of `side op sign * literal + addend`, or None if it is not supported.

    The literal and the column must be exact numbers, because engines may round floats.
    """
    if literal.kind not in ("integer", "decimal") or not have_same_class(literal, reader, _find_innermost(side)):
        return None
    value = EXACT.add(sign * Decimal(literal.value), addend)
    if abs(value.adjusted()) > _DIGITS_MAX or len(value.as_tuple().digits) > _DIGITS_MAX:
        return None
    return reader.compare(op, side, _make_number_literal(value))


def _compare_multiple(
    op: str, side: exp.Expr, literal: Literal, divisor: int, reader: ComparisonReader
) -> Condition | None:
    """Return the condition of `side op literal / divisor` for integers.

    If the division has a remainder, `=` is never true, and `<>` gives no condition (None). The bound is rounded up for
    < and >=, and down for <= and >.
    """
    quotient, remainder = divmod(int(literal.value), divisor)
    match op:
        case "=" | "<>":
            if remainder:
                return NEVER if op == "=" else None
            return reader.compare(op, side, _make_number_literal(Decimal(quotient)))
        case "<" | ">=":
            return reader.compare(op, side, _make_number_literal(Decimal(quotient + bool(remainder))))
    return reader.compare(op, side, _make_number_literal(Decimal(quotient)))


def compare_quotient(
    op: str, side: exp.Expr, literal: Literal, divisor_node: exp.Expr, reader: ComparisonReader
) -> Condition | None:
    """Return the condition of a comparison of a quotient with a literal, or None if it is not supported.

    Engines truncate the quotient of two integers towards zero, so `c / 10 = 3` becomes `c BETWEEN 30 AND 39`.

    Args:
        op: The operator.
        side: The dividend.
        literal: The literal with which the quotient is compared.
        divisor_node: The divisor.
        reader: The reader of the condition.
    """
    divisor = reader.read_literal(divisor_node)
    if divisor is None:
        return None
    if divisor.kind != "integer" or (reader.find_kind(side) or "") not in ("int", "long"):
        return _compare_scaled(op, side, literal, divisor, reader, is_quotient=True)
    if literal.kind != "integer" or int(divisor.value) < 1:
        return None
    divisor_value, value = int(divisor.value), int(literal.value)
    # The quotient of an integer is `value` if the integer is between `first` and `last`.
    first, last = divisor_value * value, divisor_value * value
    first -= divisor_value - 1 if value <= 0 else 0
    last += divisor_value - 1 if value >= 0 else 0

    def compare_side(op: str, bound: int) -> Condition | None:
        return reader.compare_column(op, side, Literal("integer", str(bound)))

    match op:
        case "=":
            return all_of([compare_side(">=", first), compare_side("<=", last)])
        case "<>":
            return any_of([compare_side("<", first), compare_side(">", last)])
        case "<" | ">=":
            return compare_side(op, first)
    return compare_side(op, last)


def _compare_scaled(
    op: str, side: exp.Expr, literal: Literal, factor: Literal, reader: ComparisonReader, *, is_quotient: bool
) -> Condition | None:
    """Read `side * factor op literal` or `side / factor op literal` as a range of `side` that is slightly too wide.

    Products of decimals are exact, and floating-point results are rounded. The rounding of a quotient of decimals
    depends on the engine and its version: some engines compute a double, and others keep at least as many digits after
    the point as both operands have.
    """
    kind = reader.find_kind(_find_innermost(side)) or ""
    base = kind.partition("(")[0].strip()
    literal_kinds = {literal.kind, factor.kind}
    is_exact = base in ("int", "long", "decimal") and literal_kinds <= {"integer", "decimal"}
    if op == "<>" or not (
        is_exact or (base in _RELATIVE_ERRORS_MAX and literal_kinds <= {"integer", "decimal", "double"})
    ):
        return None
    factor_value, value = Decimal(factor.value), Decimal(literal.value)
    if not _FACTOR_MIN <= abs(factor_value) <= 1 / _FACTOR_MIN or abs(value) > _SCALED_MAX:
        return None
    absolute_error = Decimal(0)
    if is_exact and is_quotient:
        digits = max(_get_scale(kind), len(factor.value.partition(".")[2]))
        absolute_error = Decimal(1).scaleb(-min(digits, _QUOTIENT_DIGITS_MIN))
    relative_error = (
        Decimal(0) if is_exact and not is_quotient else _RELATIVE_ERRORS_MAX.get(base, _RELATIVE_ERRORS_MAX["double"])
    )
    # A rounded product near zero also has an absolute error.
    product_error = _PRODUCT_ERROR if relative_error else Decimal(0)
    bounds: list[Condition | None] = []
    # An equality becomes a lower and an upper bound. < and > become <= and >=, because the bounds are not exact.
    for direction in {"=": (">=", "<="), ">": (">=",), "<": ("<=",)}.get(op, (op,)):
        sign = -1 if direction == ">=" else 1
        widened_value = value + sign * (absolute_error + abs(value) * relative_error + product_error)
        bound = (
            EXACT.multiply(widened_value, factor_value) if is_quotient else EXACT.divide(widened_value, factor_value)
        )
        is_lower = (direction == ">=") == (factor_value > 0)
        rounding = ROUND_FLOOR if is_lower else ROUND_CEILING
        # Rounding to `_BOUND_UNIT` moves the bound outwards and limits its digits.
        rounded_bound = bound.quantize(_BOUND_UNIT, rounding=rounding, context=EXACT)
        # A double has 17 significant digits, so 26 digits are enough.
        number = (
            _make_number_literal(rounded_bound.normalize(EXACT))
            if is_exact
            else Literal("double", f"{rounded_bound:.25e}")
        )
        bounds.append(reader.compare(">=" if is_lower else "<=", side, number))
    return all_of(bounds)


def _get_scale(kind: str) -> int:
    """Return the number of digits after the decimal point of an integer or decimal type such as `decimal(9, 2)`."""
    return int(kind.rstrip(") ").rpartition(",")[2]) if kind.startswith("decimal") else 0


def _find_innermost(node: exp.Expr) -> exp.Expr:
    """Return the column to which a chain of operations with literals is applied."""
    while isinstance(node, exp.Paren | exp.Neg) or type(node) in (exp.Add, exp.Sub, exp.Mul):
        if isinstance(node, exp.Paren | exp.Neg):
            node = node.this
        else:
            node = node.expression if isinstance(node.this.unnest(), exp.Literal | exp.Neg) else node.this
    return node


def _is_whole(node: exp.Expr, reader: ComparisonReader) -> bool:
    """Return whether all values in a chain of operations are integers. They are not in `(c - 0.5) * 10`."""
    remaining_nodes = [node]
    while remaining_nodes:
        part = remaining_nodes.pop()
        if isinstance(part, exp.Paren | exp.Neg):
            remaining_nodes.append(part.this)
            continue
        literal = reader.read_literal(part)
        if literal is None and type(part) in (exp.Add, exp.Sub, exp.Mul):
            remaining_nodes += [part.this, part.expression]
        elif (reader.find_kind(part) not in ("int", "long")) if literal is None else literal.kind != "integer":
            return False
    return True


def _make_number_literal(value: Decimal) -> Literal:
    if value == value.to_integral_value():
        return Literal("integer", str(int(value)))
    return Literal("decimal", format(value, "f"))


def _compare_shifted_days(
    op: str, side: exp.Expr, literal: Literal, unit: str, count: int, reader: ComparisonReader
) -> Condition | None:
    """Return the condition of a comparison of `side` plus an interval in weeks, days or smaller units, or None.

    The caller passes the interval with the opposite sign in `count`, because it is added to the literal instead. Months
    are not supported, because two different dates may become the same date when a month is added.
    """
    kind = reader.find_kind(side)
    if unit not in UNITS or kind not in ("date", "timestamp") or literal.zone != LOCAL:
        return None
    if kind == "date" and UNITS[unit] < timedelta(days=1):
        return None
    try:
        moment = datetime.fromisoformat(literal.value) + count * UNITS[unit]
    except (ValueError, OverflowError):
        return None
    return reader.compare_column(op, side, make_moment_literal(moment, literal))


def compare_days_between(op: str, node: exp.DateDiff, literal: Literal, reader: ComparisonReader) -> Condition | None:
    """Return the condition of `date_diff('day', from, to) op n`, with a range that is one day wider at both ends.

    Trino counts complete days between timestamps, and DuckDB counts midnights. `<>` gives no condition (None), because
    it excludes only one number of days.
    """
    if literal.kind != "integer" or op == "<>" or abs(int(literal.value)) > _DAYS_MAX:
        return None
    count, start, end = int(literal.value), node.expression, node.this
    parts: list[Condition | None] = []
    for column, other, sign in ((start, end, -1), (end, start, 1)):  # A later start makes the difference smaller.
        if op in ("<", "<=", "="):
            parts.append(reader.read_condition(_compare_within_days(column, other, sign, count + 1)))
        if op in (">", ">=", "="):
            parts.append(reader.read_condition(_compare_within_days(column, other, -sign, 1 - count)))
    return all_of(parts)


def _compare_within_days(column: exp.Expr, other: exp.Expr, sign: int, days: int) -> exp.Expr:
    """Return `column <= other + days` or, with a negative sign, `column >= other - days`."""
    days *= sign
    interval = exp.Interval(this=exp.Literal.string(abs(days)), unit=exp.Var(this="DAY"))
    limit = (exp.Add if days >= 0 else exp.Sub)(this=other, expression=interval)
    return (exp.LTE if sign > 0 else exp.GTE)(this=column, expression=limit)
