"""Random REST filters for a lake, and an evaluator of these filters on rows that follows Iceberg's semantics.

`matches` evaluates a filter on one row: comparisons with null are false; `not-eq`, `not-in` and `not-starts-with`
match null and NaN; `not` turns each predicate into its opposite (so `not(x < 5)` is `x >= 5`, false on null). Where
clients differ, `FloatOrder` says which of them to follow.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.planner.lakes import partitioning
from tests.planner.lakes.kinds import (
    FLOATS,
    INT_MAX,
    INT_MIN,
    NANOSECOND_TYPES,
    compute_sort_key,
    get_limits,
    strip_parameters,
)
from tests.planner.lakes.lake import Lake
from tests.planner.lakes.literal_forms import parse, render
from tests.planner.lakes.schemas import LakeColumn, Schema

NEGATED_OPERATORS = {
    "is-null": "not-null",
    "is-nan": "not-nan",
    "lt": "gt-eq",
    "gt": "lt-eq",
    "eq": "not-eq",
    "in": "not-in",
    "starts-with": "not-starts-with",
}
NEGATED_OPERATORS |= {opposite: op for op, opposite in NEGATED_OPERATORS.items()}
UNARY = ("is-null", "not-null", "is-nan", "not-nan")
ORDER_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "lt-eq": operator.le,
    "gt": operator.gt,
    "gt-eq": operator.ge,
}
COMPARISONS = [*ORDER_COMPARISONS, "eq", "not-eq"]


@dataclass(frozen=True)
class FloatOrder:
    """The order of floating-point numbers, by which clients differ.

    Attributes:
        has_equal_zeros: -0.0 equals 0.0; otherwise it is less than 0.0.
        nan_greatest: NaN is greater than every number.
    """

    has_equal_zeros: bool = True
    nan_greatest: bool = False


IEEE_FLOAT_ORDER = FloatOrder()
JAVA_FLOAT_ORDER = FloatOrder(has_equal_zeros=False)
SPARK_FLOAT_ORDER = FloatOrder(nan_greatest=True)


class Names:
    """The columns of a table by full name.

    A name belongs to the column of `schema` that has it, or else to the column of the latest other schema.
    """

    def __init__(self, schema: Schema, schemas: Sequence[Schema] = (), *, case_sensitive: bool = True) -> None:
        self._ignores_case = not case_sensitive
        self._columns: dict[str, LakeColumn] = {}
        for known_schema in [*sorted(schemas, key=lambda other: other.id), schema]:
            self._columns |= {self._fold_name(column.name): column for column in known_schema.list_columns().values()}

    def _fold_name(self, name: str) -> str:
        return name.lower() if self._ignores_case else name

    def __getitem__(self, name: str) -> LakeColumn:
        return self._columns[self._fold_name(name)]


def matches(expression: Any, row: Mapping[int, Any], names: Names, float_order: FloatOrder = IEEE_FLOAT_ORDER) -> bool:
    """Return whether a row satisfies a filter.

    Args:
        expression: The filter as JSON.
        row: The values by column id.
        names: The columns by the names that the filter uses.
        float_order: How the client compares zeros and NaN.
    """
    return _matches(expression, row, names, float_order, negated=False)


def _matches(expression: Any, row: Mapping[int, Any], names: Names, float_order: FloatOrder, *, negated: bool) -> bool:
    if isinstance(expression, bool):
        return expression != negated
    kind = expression["type"]
    if kind == "not":
        return _matches(expression["child"], row, names, float_order, negated=not negated)
    if kind in ("and", "or"):
        sides = (_matches(expression[side], row, names, float_order, negated=negated) for side in ("left", "right"))
        return all(sides) if (kind == "and") != negated else any(sides)
    term = expression["term"]
    transform, name = ("identity", term) if isinstance(term, str) else (term.get("transform", "identity"), term["term"])
    while not isinstance(name, str):
        name = name["term"]
    column = names[name]
    value = partitioning.apply(transform, column.kind, row[column.id])
    result_kind = column.kind if column.kind == "struct" else partitioning.infer_result_kind(transform, column.kind)
    op = NEGATED_OPERATORS[kind] if negated else kind
    literals = expression.get("values", [expression["value"]] if "value" in expression else [])
    return _holds(
        op, value, [parse(result_kind, _unwrap_literal(literal)) for literal in literals], result_kind, float_order
    )


def _unwrap_literal(literal: Any) -> Any:
    return literal["value"] if isinstance(literal, dict) else literal


def _holds(op: str, value: Any, literals: list[Any], kind: str, float_order: FloatOrder) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    if op in UNARY:
        return {"is-null": value is None, "not-null": value is not None, "is-nan": is_nan, "not-nan": not is_nan}[op]
    if op.startswith("not-"):
        return not _holds(NEGATED_OPERATORS[op], value, literals, kind, float_order)
    if value is None:
        return False
    if is_nan:
        return float_order.nan_greatest and op in ("gt", "gt-eq")
    if op == "starts-with":
        return str(value).startswith(literals[0])
    key = _make_comparison_key(value, kind, float_order)
    keys = [_make_comparison_key(literal, kind, float_order) for literal in literals]
    if op in ("eq", "in"):
        return key in keys
    return ORDER_COMPARISONS[op](key, keys[0])


def _make_comparison_key(value: Any, kind: str, float_order: FloatOrder) -> Any:
    return value if float_order.has_equal_zeros else compute_sort_key(kind, value)


# Random filters


@dataclass(frozen=True)
class Literal:
    """A literal of a random filter, before `to_json` converts it to the JSON of one client."""

    kind: str
    value: Any


def to_json(tree: Any, form: str) -> Any:
    """Return a random filter as the JSON of one client."""
    if isinstance(tree, Literal):
        return render(tree.kind, tree.value, form)
    if isinstance(tree, dict):
        return {key: to_json(value, form) for key, value in tree.items()}
    return [to_json(value, form) for value in tree] if isinstance(tree, list) else tree


def list_columns(tree: Any) -> set[str]:
    """Return the names of the columns in a filter.

    Args:
        tree: A filter as JSON, or as a tree of `draw_filter`, whose literals are of the type `Literal`.
    """
    if isinstance(tree, dict):
        if "term" in tree and isinstance(tree["term"], str):
            return {tree["term"]}
        return set().union(*(list_columns(value) for value in tree.values()), set())
    return set()


def draw_filter(rng: random.Random, lake: Lake, schema: Schema, depth: int = 0) -> Any:
    """Return a random filter with the names of `schema` and literals near the data; `to_json` converts it to JSON.

    The filter has up to three levels of AND, OR and NOT. AND is more frequent, because it lets a plan omit files.
    """
    draw = rng.random()
    if depth < 3 and draw < 0.35:
        left, right = (draw_filter(rng, lake, schema, depth + 1) for _ in range(2))
        return {"type": rng.choice(["and", "and", "or"]), "left": left, "right": right}
    if depth < 3 and draw < 0.45:
        return {"type": "not", "child": draw_filter(rng, lake, schema, depth + 1)}
    if draw < 0.46:
        return rng.random() < 0.5
    predicate = _draw_predicate(rng, lake, schema)
    return expand_zeros_sometimes(rng, predicate) if depth < 3 else predicate


def _draw_predicate(rng: random.Random, lake: Lake, schema: Schema) -> Any:
    columns = list(schema.list_columns().values())
    column = rng.choice(columns)
    sources = [part.source for fields in lake.specs.values() for part in fields]
    if sources and rng.random() < 0.4:
        column = schema.list_columns().get(rng.choice(sources), column)
    if column.kind == "struct":
        return {"type": rng.choice(["is-null", "not-null"]), "term": column.name}
    transform = "identity"
    if rng.random() < 0.15:
        values = lake.pools[column.id]
        transforms = [part.transform for fields in lake.specs.values() for part in fields if part.source == column.id]
        transform = rng.choice([*transforms, partitioning.draw_transform(rng, column.kind, values)])
    if transform == "void":
        transform = "identity"
    return draw_predicate_on(rng, lake, column, transform)


def draw_predicate_on(
    rng: random.Random, lake: Lake, column: LakeColumn, transform: str, ops: Sequence[str] | None = None
) -> Any:
    """Return a predicate on a transform of a column, with literals near the data.

    Args:
        ops: The operations to choose from; None means all. A list has up to eight values.
    """
    name: Any = column.name
    if transform != "identity":
        name = {"type": "transform", "transform": transform, "term": column.name}
    kind = partitioning.infer_result_kind(transform, column.kind)
    op = rng.choice(ops) if ops else _draw_op(rng, kind)
    predicate: dict[str, Any] = {"type": op, "term": name}
    if op in ("in", "not-in"):
        count = rng.choice([1, 2, 3, 5, 5, 8])
        predicate["values"] = [_draw_literal(rng, lake, column, transform) for _ in range(count)]
    elif op not in UNARY:
        predicate["value"] = _draw_literal(rng, lake, column, transform, prefix=op.endswith("starts-with"))
    return predicate


def expand_zeros_sometimes(rng: random.Random, predicate: Any) -> Any:
    """Return a predicate, or in some cases an AND or OR of two predicates that compare with 0.0 and -0.0.

    Many programs treat the two zeros as one value. Only predicates on floats change.
    """
    literal = predicate.get("value")
    if not isinstance(literal, Literal) or literal.kind not in FLOATS or rng.random() < 0.6:
        return predicate
    zeros = [{**predicate, "value": Literal(literal.kind, zero)} for zero in rng.sample([0.0, -0.0], 2)]
    return {"type": rng.choice(["and", "or", "or"]), "left": zeros[0], "right": zeros[1]}


def _draw_op(rng: random.Random, kind: str) -> str:
    ops = [*COMPARISONS, *COMPARISONS, "in", "in", "not-in", "is-null", "not-null"]
    if kind in FLOATS:
        ops += ["is-nan", "not-nan"]
    if kind == "uuid":  # Clients order the values of lists of UUIDs differently.
        ops += ["in"] * 8
    if kind == "string":
        ops += ["starts-with", "starts-with", "starts-with", "not-starts-with"]
    return rng.choice(ops)


def _draw_literal(
    rng: random.Random, lake: Lake, column: LakeColumn, transform: str, *, prefix: bool = False
) -> Literal:
    kind = partitioning.infer_result_kind(transform, column.kind)
    value = partitioning.apply(transform, column.kind, rng.choice(lake.pools[column.id]))
    if prefix:
        return Literal(kind, value[: rng.choice([0, 1, 2, 5, 17, 300])] + rng.choice(["", "", "", "a"]))
    return Literal(kind, _draw_near(rng, kind, value) if rng.random() < 0.35 else value)


def _draw_near(rng: random.Random, kind: str, value: Any) -> Any:
    """Return a value near `value`, the least or greatest value of the type, or a value that it cannot represent."""
    name = strip_parameters(kind)
    if isinstance(value, bool):
        return not value
    if kind in FLOATS:
        # The neighbours of an infinity are outside the range of floats, and are rounded to an infinity.
        value_beside = math.nextafter(value, math.inf) if math.isfinite(value) else value
        return rng.choice([-value, value_beside, value / 2, math.inf, -math.inf])
    if isinstance(value, int):
        minimum, greatest = get_limits(kind)
        draw = rng.random()
        if draw < 0.1:
            return rng.choice([minimum, greatest])
        if draw < 0.2 and name == "int":
            return rng.choice([INT_MAX + 1, INT_MIN - 1, 2**40])
        if draw < 0.27 and name in ("int", "long", "decimal"):
            return value + Fraction(1, 2) if abs(value) < 2**50 else value
        return max(minimum, min(greatest, value + rng.choice([-1, 1])))
    if isinstance(value, str):
        return rng.choice([value[:-1], value + "a", value + "\U0010ffff", "", value[:1]])
    if name == "binary":
        return rng.choice([value[:-1], value + b"\x00", b"", value[:1] + b"\xff"])
    flipped_value = bytearray(value)
    flipped_value[-1] ^= 1
    return bytes(flipped_value)


def is_judged_otherwise_by_java(expression: Any, names: Names, lake: Lake) -> bool:
    """Return whether one of four faults of Java's planner affects a filter.

    Java compares UUIDs as pairs of signed numbers. For an identity partition of a column, it tests a predicate on a
    transform of the column with the untransformed partition value. It truncates a literal near the least number to a
    number near the greatest, so that `v >= -2147483648` prunes every partition of `truncate[5](v)`. And it parses the
    text of a timestamp for a nanosecond column, and binds the result again as if it were in microseconds.
    """
    if any(names[name].kind == "uuid" for name in list_columns(expression)):
        return True
    parts = [part for fields in lake.specs.values() for part in fields]
    if any(
        names[name].kind in NANOSECOND_TYPES and isinstance(literal, str) for name, literal in list_literals(expression)
    ):
        return True
    identities = {part.source for part in parts if part.transform == "identity"}
    if any(names[name].id in identities for name in find_transformed(expression)):
        return True
    truncated_columns = {
        (part.source, partitioning.parse_width(part.transform))
        for part in parts
        if part.transform.startswith("truncate[")
    }
    return any(
        names[name].id == source
        and names[name].kind in ("int", "long")
        and isinstance(literal, int)
        and literal - width <= get_limits(names[name].kind)[0]
        for name, literal in list_literals(expression)
        for source, width in truncated_columns
    )


def list_literals(expression: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, literal as in JSON) for each predicate of a filter on a column itself.

    The literal is None for a predicate without a literal, and once more after the literals of a list.
    """
    if not isinstance(expression, dict):
        return
    if isinstance(expression.get("term"), str):
        for value in [*expression.get("values", ()), expression.get("value")]:
            yield expression["term"], _unwrap_literal(value)
    for child in expression.values():
        yield from list_literals(child)


def find_transformed(expression: Any) -> set[str]:
    """Return the names of the columns that a filter uses through a transform."""
    if not isinstance(expression, dict):
        return set()
    if isinstance(expression.get("term"), dict):
        return {expression["term"]["term"]}
    return set().union(*(find_transformed(child) for child in expression.values()), set())
