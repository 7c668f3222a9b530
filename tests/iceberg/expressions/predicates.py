"""Random columns, rows, predicates and specs, and an evaluator of predicates on rows: the oracle of the planning tests.

Clients order floats and UUIDs differently, so each check runs twice: with Java's orders and with Python's. Only values
of transforms come from the code under test; `test_transforms.py` checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.expression import (
    Always,
    And,
    Bound,
    Expression,
    Op,
    Or,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.transforms import compute_result_type, compute_transform
from seamark.formats.iceberg.types.values import Value

Row = Mapping[int, Value | None]
Order = Callable[[str, Any], Any]

HOUR = 3_600_000_000
DAY = 24 * HOUR


def _draw_near(*centres: int, spread: int = 3) -> st.SearchStrategy[int]:
    return st.one_of(*(st.integers(centre - spread, centre + spread) for centre in centres))


def _draw_bits(strategy: st.SearchStrategy[int], bits: int) -> st.SearchStrategy[int]:
    """Draw signed integers of this size: values of `strategy`, any values, and values near the limits."""
    half = 1 << bits - 1
    edges = _draw_near(-half + 12, half - 12, spread=12)  # Up to 24 from the lowest or the highest value.
    return st.one_of(strategy, st.integers(-half, half - 1), edges).map(lambda v: max(-half, min(v, half - 1)))


def _draw_times(units_per_us: int) -> st.SearchStrategy[int]:
    """Draw times before or after the start of 1970. Many are near the start of an hour around 1970 or in 2020.

    Args:
        units_per_us: The number of units of a time in a microsecond: 1, or 1,000 for nanoseconds.
    """
    hours = _draw_near(0, 24, -24, 31 * 24, 365 * 24, -365 * 24, 440_000, spread=30)
    moments = st.tuples(hours, st.sampled_from([0, 1, -1, HOUR // 2])).map(
        lambda t: (t[0] * HOUR + t[1]) * units_per_us
    )
    return _draw_bits(
        st.one_of(moments, st.integers(-2 * 365 * DAY, 2 * 365 * DAY).map(lambda v: v * units_per_us)), 64
    )


_CHARACTERS = "ab\0\x7f\ud7ff\ue000\uffff\U0001f9ca\U0010ffff"
_BYTES = [0, 1, 97, 254, 255]

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": _draw_bits(st.integers(-25, 25), 32),
    "long": _draw_bits(st.integers(-25, 25) | st.integers(-(2**31), -(2**31) + 12), 64),
    "date": _draw_bits(_draw_near(0, 31, -31, 365, -365, 18_000, spread=5), 32),
    "time": st.integers(0, 3),
    "timestamp": _draw_times(1),
    "timestamptz_ns": _draw_times(1000),
    "decimal(9, 2)": st.one_of(st.integers(-250, 250), st.integers(-(10**9) + 1, 10**9 - 1)),
    "float": st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.5, 2.0, math.inf, math.nan]),
    "double": st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.5, 2.0, math.inf, math.nan]),
    "string": st.text(st.sampled_from(_CHARACTERS), max_size=5),
    "uuid": st.sampled_from([bytes([first]) + bytes(14) + bytes([last]) for first in (0, 127, 128) for last in (0, 9)]),
    "fixed[2]": st.lists(st.sampled_from(_BYTES), min_size=2, max_size=2).map(bytes),
    "binary": st.lists(st.sampled_from(_BYTES), max_size=4).map(bytes),
}

_CALENDAR = ["year", "month", "day", "hour"]
_BUCKETS = ["bucket[2]", "bucket[5]"]

TRANSFORMS: dict[str, list[str]] = {
    "int": [*_BUCKETS, "truncate[1]", "truncate[8]", "truncate[10]", "truncate[2147483647]"],
    "long": [*_BUCKETS, "truncate[8]", "truncate[10]", "truncate[10]"],
    "date": [*_BUCKETS, "year", "month", "day"],
    "time": _BUCKETS,
    "timestamp": [*_BUCKETS, *_CALENDAR],
    "timestamptz_ns": [*_BUCKETS, *_CALENDAR],
    "decimal(9, 2)": [*_BUCKETS, "truncate[50]"],
    "string": [*_BUCKETS, "truncate[1]", "truncate[2]", "truncate[3]"],
    "uuid": _BUCKETS,
    "fixed[2]": _BUCKETS,
    "binary": [*_BUCKETS, "truncate[1]", "truncate[2]"],
}

COLUMNS = dict(enumerate(VALUES, start=1))

_MATCH_NULL = {Op.IS_NULL, Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH, Op.NOT_NAN}


Values = Mapping[str, st.SearchStrategy[Any]]


def draw_values_of(kind: str) -> st.SearchStrategy[Any]:
    return VALUES[kind]


@st.composite
def draw_predicate(
    draw: st.DrawFn, columns: Mapping[int, str], with_transforms: bool = True, values: Values = VALUES
) -> Bound:
    """Return a predicate on one of the columns or, if `with_transforms` is True, on a transform of it."""
    column = draw(st.sampled_from(sorted(columns)))
    kind = columns[column]
    transform = draw(st.sampled_from(["identity", *(TRANSFORMS.get(kind, []) if with_transforms else [])]))
    result_kind = compute_result_type(transform, kind)
    ops = [op for op in Op if "nan" not in op and "starts" not in op]
    if result_kind == "string":
        ops += [Op.STARTS_WITH, Op.NOT_STARTS_WITH] * 2
    if result_kind in ("float", "double"):
        ops += [Op.IS_NAN, Op.NOT_NAN]
    op = draw(st.sampled_from(ops))

    def draw_literal() -> Any:
        value = draw(values[kind].filter(lambda value: not (isinstance(value, float) and math.isnan(value))))
        value = compute_transform(transform, kind, value)
        # Some literals are near a result of the transform, and not equal to it.
        is_moved = transform != "identity" and result_kind == "int" and abs(value) < 2**31 - 1
        return value + draw(st.integers(-1, 1)) if is_moved else value

    literal_count = {Op.IN: 3, Op.NOT_IN: 3, Op.IS_NULL: 0, Op.NOT_NULL: 0, Op.IS_NAN: 0, Op.NOT_NAN: 0}.get(op, 1)
    literals = tuple(sorted({draw_literal() for _ in range(literal_count)}))
    if len(literals) == 1 and op in (Op.IN, Op.NOT_IN):  # All literals of the list are equal.
        op = Op.EQ if op == Op.IN else Op.NOT_EQ
    return Bound(op, column, f"c{column}", kind, transform, result_kind, literals)


def draw_expression(
    columns: Mapping[int, str], with_transforms: bool = True, values: Values = VALUES
) -> st.SearchStrategy[Expression]:
    return st.recursive(
        draw_predicate(columns, with_transforms, values),
        lambda children: st.builds(
            lambda join, parts: join(*parts),
            st.sampled_from([join_by_and, join_by_or]),
            st.lists(children, min_size=2, max_size=3),
        ),
        max_leaves=5,
    )


@st.composite
def draw_spec(draw: st.DrawFn, columns: Mapping[int, str]) -> PartitionSpec:
    fields = []
    for number in range(draw(st.integers(1, 3))):
        column = draw(st.sampled_from(sorted(columns)))
        transforms = ["identity", "void", "zorder", *TRANSFORMS.get(columns[column], []) * 2]
        fields.append(
            PartitionField(f"p{number}", draw(st.sampled_from(transforms)), source_id=column, field_id=1000 + number)
        )
    return PartitionSpec(1, tuple(fields))


def compute_partition(
    spec: PartitionSpec, columns: Mapping[int, str], row: Row, as_old_java: bool
) -> tuple[Value | None, ...]:
    """Return the partition that a writer stores for the row.

    Args:
        spec: The partition spec.
        columns: The types of the columns by id.
        row: The values of the row by column id.
        as_old_java: Compute it as Iceberg's Java library up to version 0.10, which rounded times before 1970 up, but
            not the days of dates. A long that fits into an int is also treated as if its column had been an int column
            when the row was written.
    """
    values: list[Value | None] = []
    for field in spec.fields:
        (source,) = field.sources
        kind, value = columns[source], row[source]
        if field.transform == "zorder":
            # Readers do not know this transform, so they cannot interpret its values. Any text will do.
            values.append(None if value is None else "z")
            continue
        was_int = as_old_java and kind == "long" and isinstance(value, int) and -(2**31) <= value < 2**31
        partition_value = compute_transform(field.transform, "int" if was_int else kind, value)
        if as_old_java and field.transform in _CALENDAR and (field.transform, kind) != ("day", "date"):
            assert partition_value is None or isinstance(partition_value, int)
            previous_value = compute_transform(field.transform, kind, value - 1) if isinstance(value, int) else None
            if partition_value is not None and partition_value < 0 and previous_value == partition_value:
                partition_value += 1
        values.append(partition_value)
    return tuple(values)


def index_by_field(spec: PartitionSpec, partition: tuple[Value | None, ...]) -> dict[int, Value | None]:
    """Return the values of `compute_partition` by field id. A field without an id has the key 0."""
    return {field.field_id or 0: value for field, value in zip(spec.fields, partition, strict=True)}


def order_like_java(kind: str, value: Any) -> Any:
    if kind in ("float", "double"):
        return (1, 0.0, 0.0) if math.isnan(value) else (0, value, math.copysign(1, value))
    if kind == "uuid":
        return int.from_bytes(value[:8], signed=True), int.from_bytes(value[8:], signed=True)
    return value


def order_like_python(_: str, value: Any) -> Any:
    return value


def matches(expression: Expression, row: Row, order: Order) -> bool:
    """Return whether the row matches. The keys of the row are the column ids of the predicates."""
    if isinstance(expression, Always):
        return expression.value
    if isinstance(expression, And):
        return all(matches(child, row, order) for child in expression.children)
    if isinstance(expression, Or):
        return any(matches(child, row, order) for child in expression.children)
    assert isinstance(expression, Bound)
    return holds(expression, compute_transform(expression.transform, expression.kind, row[expression.column_id]), order)


def holds(predicate: Bound, value: Any, order: Order) -> bool:
    """Return whether the value of the predicate's term matches the predicate."""
    op, kind = predicate.op, predicate.result
    if value is None:
        return op in _MATCH_NULL
    if op in (Op.IS_NULL, Op.NOT_NULL):
        return op == Op.NOT_NULL
    if op in (Op.IS_NAN, Op.NOT_NAN):
        return math.isnan(value) == (op == Op.IS_NAN)
    if op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH):
        prefix = predicate.values[0]
        assert isinstance(prefix, str)
        return (value[: len(prefix)] == prefix) == (op == Op.STARTS_WITH)
    sort_key = order(kind, value)
    literal_keys = [order(kind, literal) for literal in predicate.values]
    return {
        Op.LT: lambda: sort_key < literal_keys[0],
        Op.LT_EQ: lambda: sort_key <= literal_keys[0],
        Op.GT: lambda: sort_key > literal_keys[0],
        Op.GT_EQ: lambda: sort_key >= literal_keys[0],
        Op.EQ: lambda: sort_key == literal_keys[0],
        Op.NOT_EQ: lambda: sort_key != literal_keys[0],
        Op.IN: lambda: sort_key in literal_keys,
        Op.NOT_IN: lambda: sort_key not in literal_keys,
    }[op]()
