"""Projection of a bound expression on rows onto the partition values of files, and onto source columns.

*Inclusive*: if a row matches, the projection is true for its partition. So files for which it is false are skipped.
*Strict*: if the projection is true for a partition, all of its rows match. A strict projection is the negation of the
inclusive projection of the negated predicate, so only the inclusive projection is implemented. The result is at least
as narrow as Java's (`Projections`, `Transform.project`), except where Java loses rows:

- Java up to 0.10 rounded times before 1970 towards zero, so the result is too high by one. Java's readers compensate
  for this in predicates on the source. This module also compensates in predicates on the transform.
- A result that overflows its type is looked up at the value to which it wraps (`ranges.py`).
- If the field is partitioned by identity, Java treats a predicate on a transform as a predicate on the value. Java
  compares prefixes with a truncation's width in UTF-16 units, not in characters.

A predicate on a transform that the field does not have is projected through the ranges of source values that satisfy
it, if these can be computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from seamark.formats.iceberg.expressions.binding import OPPOSITE
from seamark.formats.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Op,
    Or,
    join_by_and,
    join_by_or,
    replace_predicates,
)
from seamark.formats.iceberg.expressions.ranges import (
    OverflowedTruncation,
    Range,
    compute_complement,
    contains_value,
    find_overflowed_truncation,
    get_successor,
    invert_ranges,
    keeps_order,
    may_be_stored_one_too_high,
    transform_range,
)
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.transforms import (
    IDENTITY,
    VOID,
    accepts_type,
    canonicalize_transform,
    compute_values_type,
    get_transform_name,
    get_transform_width,
    is_known,
    make_function,
)
from seamark.formats.iceberg.types.values import Value
from seamark.formats.runtime.memoization import memoize

RANGES_MAX = 200
"""The maximum number of ranges for a predicate on a transform. Java also stops at 200 values of an `in`."""

_EQUALITY_OPS = frozenset({Op.EQ, Op.IN})
_COMPARISON_OPS = frozenset({Op.LT, Op.LT_EQ, Op.GT, Op.GT_EQ})
_NULL_OPS = frozenset({Op.IS_NULL, Op.NOT_NULL})
_PREFIX_OPS = frozenset({Op.STARTS_WITH, Op.NOT_STARTS_WITH})


class ProjectedExpression(msgspec.Struct, frozen=True, gc=False):
    """A bound expression with its projections: conditions on partition values that follow from the expression.

    It is computed once per plan.

    Attributes:
        expression: The bound expression.
        possible: The inclusive projection, which the partitions of all matching rows satisfy.
        certain: The strict projection of a predicate, which is true only for partitions whose rows all match.
        decides: Whether partition values may decide at least one predicate of the expression.
        parts: The projections of a junction's children.

    Both projections are bound expressions whose columns are partition fields. Their predicates have a field's id as
    `column_id`, its name, and the type of its values as `kind` and `result`.
    """

    expression: Expression
    possible: Expression
    certain: Expression = FALSE
    decides: bool = False
    parts: tuple[ProjectedExpression, ...] = ()


def project(expression: Expression, spec: PartitionSpec) -> ProjectedExpression:
    """Return conditions on the partition values of a spec that follow from a bound expression.

    A predicate on a column by which the spec does not partition is not decided: its condition is TRUE. For a junction,
    only the inclusive projection is computed, because residuals use the strict projections of its parts.

    Raises:
        TypeError: The expression is not bound.
    """
    match expression:
        case Bound():
            if not spec.list_fields_with_source(expression.column_id):
                return ProjectedExpression(expression, TRUE)
            possible_condition, certain_condition = (
                _project_inclusive(expression, spec),
                project_strict(expression, spec),
            )
            return ProjectedExpression(
                expression,
                possible_condition,
                certain_condition,
                possible_condition != TRUE or certain_condition != FALSE,
            )
        case And(children) | Or(children):
            parts = tuple([project(child, spec) for child in children])
            join = join_by_and if isinstance(expression, And) else join_by_or
            possible_condition = join(*[part.possible for part in parts])
            return ProjectedExpression(
                expression, possible_condition, FALSE, any(part.decides for part in parts), parts
            )
        case Always():
            return ProjectedExpression(expression, expression)
    raise TypeError(f"not a bound expression: {expression}")


def project_inclusive(expression: Expression, spec: PartitionSpec) -> Expression:
    """Return a condition that the partitions of all matching rows satisfy.

    The condition is a bound expression on partition values: the `column_id` of a predicate is the id of a partition
    field, and its kind is the type of the field's values.
    """
    return replace_predicates(expression, lambda predicate: _project_inclusive(predicate, spec))


def _project_inclusive(predicate: Bound, spec: PartitionSpec) -> Expression:
    # Several fields of a source column, such as bucket(7, x) and bucket(5, x), give different conditions.
    return join_by_and(
        *[_project_predicate(predicate, field) for field in spec.list_fields_with_source(predicate.column_id)]
    )


def project_strict(predicate: Bound, spec: PartitionSpec) -> Expression:
    """Return a condition that is true only for partitions whose rows all match.

    The condition is a bound expression on partition values: the `column_id` of a predicate is the id of a partition
    field, and its kind is the type of the field's values.
    """
    return join_by_or(
        *[_project_strict(predicate, field) for field in spec.list_fields_with_source(predicate.column_id)]
    )


def find_deciding_fields(projection: ProjectedExpression, spec: PartitionSpec) -> dict[int, str]:
    """Return the partition fields whose values may decide a predicate: that all rows of a file match, or none.

    Returns:
        The type of the values that the evaluation needs, by field id.
    """
    if not projection.decides:
        return {}
    if isinstance(projection.expression, Bound):
        predicate = projection.expression
        fields = spec.list_fields_with_source(predicate.column_id)
        return {field.field_id or 0: compute_values_type(field.transform, predicate.kind) for field in fields}
    return {field_id: kind for part in projection.parts for field_id, kind in find_deciding_fields(part, spec).items()}


def find_source_ranges(predicate: Bound) -> Expression:
    """Return a condition on the source column of a transform. All rows that match the predicate satisfy it.

    - A predicate on a plain column is returned unchanged.
    - If the transform keeps the order of values, the condition is exact, and bounds of the column prune as many files
      as in Java's `InclusiveMetricsEvaluator`. More than `RANGES_MAX` ranges become one wider range. For operators such
      as `not-in`, which match the ranges outside of some values, they become TRUE.
    - For other transforms, the condition is TRUE, or excludes only nulls.
    """
    transform, kind, op = predicate.transform, predicate.kind, predicate.op
    if transform == IDENTITY:
        return predicate
    if is_function(transform):
        return TRUE if op in NULL_MATCHES else _move_to_source(predicate, Op.NOT_NULL)
    if not is_known(transform) or not accepts_type(transform, kind):
        return TRUE
    if op == Op.NOT_NULL or (op == Op.IS_NULL and transform != VOID):
        return _move_to_source(predicate, op)
    if op in _PREFIX_OPS:
        if len(str(predicate.values[0])) <= get_transform_width(transform):
            return _move_to_source(predicate, op, *predicate.values)
        return Always(op == Op.NOT_STARTS_WITH)
    if op in NULL_MATCHES:
        # The ranges contain all rows except rows whose result is one of the values.
        if not keeps_order(transform, kind):
            return TRUE
        outside_ranges = compute_complement(
            invert_ranges(transform, kind, _list_matching_ranges(replace(predicate, op=OPPOSITE[op])))
        )
        if len(outside_ranges) > RANGES_MAX or Range(None, None) in outside_ranges:
            return TRUE
        return join_by_or(
            _move_to_source(predicate, Op.IS_NULL), _match_ranges(_make_source_predicate(predicate), outside_ranges)
        )
    if not keeps_order(transform, kind):
        return _move_to_source(predicate, Op.NOT_NULL)
    ranges = invert_ranges(transform, kind, _list_matching_ranges(predicate))
    if len(ranges) > RANGES_MAX:
        ranges = [Range(ranges[0].low, ranges[-1].high)]
    return _match_ranges(_make_source_predicate(predicate), ranges)


class _TransformProperties(NamedTuple):
    """The properties of a transform for values of a type, independent of a predicate."""

    transform: str
    """The canonical form of the transform."""
    keeps_order: bool
    """Whether the transform changes values and keeps their order, so that it maps ranges (`ranges.keeps_order`).

    It is False for identity, because predicates are then used without mapping ranges.
    """
    is_bucket: bool
    is_same: bool
    """Whether the transform does not change the values."""
    may_be_one_too_high: bool
    """Whether old writers stored results before 1970 that are too high by one."""
    overflowed: OverflowedTruncation | None
    """The result that is stored as another value in old files, because the column was an int then, or None.

    For example, `truncate[10]` of the lowest int is -2147483650, but old files have 2147483646.
    """


@memoize(1024)
def _find_properties(transform: str, kind: str) -> _TransformProperties | None:
    """Return the properties of a transform for values of a type.

    The result is None if the results of the transform are unknown, as for a transform of several columns (spec, version
    3).
    """
    transform = canonicalize_transform(transform)
    if transform == VOID or not is_known(transform) or not accepts_type(transform, kind):
        return None
    return _TransformProperties(
        transform,
        keeps_order(transform, kind),
        get_transform_name(transform) == "bucket",
        transform == IDENTITY or (transform, kind) == ("day", "date"),
        may_be_stored_one_too_high(transform, kind),
        find_overflowed_truncation(transform, kind),
    )


def _project_strict(predicate: Bound, field: PartitionField) -> Expression:
    """Return the strict projection of a predicate onto a field of its column.

    The strict projection is true only for partitions whose rows all match. A partition qualifies if no row in it can
    match the opposite predicate. So the result is the negation of the opposite predicate's inclusive projection.
    """
    projection = _negate_expression(_project_predicate(replace(predicate, op=OPPOSITE[predicate.op]), field))
    if projection == FALSE:
        return FALSE
    if predicate.op in NULL_MATCHES or (isinstance(projection, Bound) and projection.op not in NULL_MATCHES):
        return projection
    # Negation would turn "no value" into "all values and null", but the predicate does not match null.
    if isinstance(projection, Bound) and projection.op == Op.IS_NULL:
        return FALSE
    return join_by_and(_make_field_predicate(predicate, field, Op.NOT_NULL), projection)


def _negate_expression(expression: Expression) -> Expression:
    match expression:
        case And(children):
            return join_by_or(*map(_negate_expression, children))
        case Or(children):
            return join_by_and(*map(_negate_expression, children))
        case Bound():
            return replace(expression, op=OPPOSITE[expression.op])
        case Always(value):
            return Always(not value)
    raise TypeError(f"expected a bound expression, not {expression}")


def _project_predicate(predicate: Bound, field: PartitionField) -> Expression:
    """Return the inclusive projection of a predicate onto a field of its column.

    The partitions of all matching rows satisfy it. A predicate with another transform than the field is first replaced
    by a condition on the column. A transform that keeps no order, such as `bucket`, decides only equalities.
    """
    kind, op = predicate.kind, predicate.op
    properties = _find_properties(field.transform, kind)
    if properties is None:
        return TRUE
    transform = properties.transform
    if predicate.transform != IDENTITY:
        if predicate.transform == transform:
            return _project_same_transform(predicate, field, properties)
        return replace_predicates(find_source_ranges(predicate), lambda source: _project_predicate(source, field))
    if op in _NULL_OPS or properties.is_same:
        return _make_field_predicate(predicate, field, op, *predicate.values)
    if op in _EQUALITY_OPS and (properties.keeps_order or properties.is_bucket):
        return _match_results(predicate, field, properties, map(make_function(transform, kind), predicate.values))
    if not properties.keeps_order:
        return TRUE if op in NULL_MATCHES else _make_field_predicate(predicate, field, Op.NOT_NULL)
    if op in _COMPARISON_OPS:
        ranges = [
            result for source in _list_matching_ranges(predicate) for result in transform_range(transform, kind, source)
        ]
        if properties.may_be_one_too_high:
            ranges = list(map(_widen_range, ranges))
        return _match_ranges(_make_field_predicate(predicate, field, op), ranges)
    return _project_prefix(predicate, field, get_transform_width(transform)) if op in _PREFIX_OPS else TRUE


def _project_same_transform(predicate: Bound, field: PartitionField, properties: _TransformProperties) -> Expression:
    """Return the inclusive projection of a predicate whose transform is the same as the field's.

    The result is the same predicate on the field. It also matches results that old writers stored as other values:
    results before 1970 that were rounded up by 1, and truncated ints that overflowed.
    """
    op, values = predicate.op, predicate.values
    if properties.overflowed is not None and op not in _NULL_OPS:
        return _project_overflowed(predicate, field, properties, properties.overflowed)
    if op in _NULL_OPS or not properties.may_be_one_too_high:
        return _make_field_predicate(predicate, field, op, *values)
    if op in _EQUALITY_OPS:
        return _match_results(predicate, field, properties, values)
    if op in _COMPARISON_OPS:
        return _match_ranges(
            _make_field_predicate(predicate, field, op),
            [_widen_range(span) for span in _list_matching_ranges(predicate)],
        )
    # A stored result up to 0 may represent the next lower result.
    positive = [value for value in values if isinstance(value, int) and value > 0]
    if not positive:
        return TRUE
    return _make_field_predicate(predicate, field, Op.NOT_EQ if len(positive) == 1 else Op.NOT_IN, *positive)


def _project_overflowed(
    predicate: Bound, field: PartitionField, properties: _TransformProperties, overflowed: OverflowedTruncation
) -> Expression:
    """Project a predicate like `_project_same_transform`, for a long column that may have been an int.

    When it was an int, the truncation of the lowest ints overflowed, so files can contain the value
    `overflowed.wrapped` instead of the result `overflowed.exact`. Conditions that accept the exact result also accept
    the wrapped value, and no condition excludes it.
    """
    if not properties.keeps_order:  # The truncation is so wide that many ints have other results than the equal longs.
        return TRUE if predicate.op in NULL_MATCHES else _make_field_predicate(predicate, field, Op.NOT_NULL)
    if predicate.op in _EQUALITY_OPS:
        return _match_results(predicate, field, properties, predicate.values)
    predicate_on_field = _make_field_predicate(predicate, field, predicate.op, *predicate.values)
    if predicate.op in _COMPARISON_OPS:
        is_sought = contains_value(_list_matching_ranges(predicate), overflowed.exact)
        return (
            join_by_or(predicate_on_field, replace(predicate_on_field, op=Op.EQ, values=(overflowed.wrapped,)))
            if is_sought
            else predicate_on_field
        )
    other_values = [value for value in predicate.values if value != overflowed.wrapped]
    return (
        _make_field_predicate(predicate, field, Op.NOT_EQ if len(other_values) == 1 else Op.NOT_IN, *other_values)
        if other_values
        else TRUE
    )


def _project_prefix(predicate: Bound, field: PartitionField, width: int) -> Expression:
    """Return the inclusive projection of a test for a prefix onto a field that truncates strings to `width`.

    A longer prefix is compared with its first `width` characters. These do not decide whether a string lacks the
    prefix, so NOT_STARTS_WITH becomes TRUE. A prefix of exactly `width` characters equals the result of the field.
    """
    prefix = str(predicate.values[0])
    if len(prefix) < width:
        return _make_field_predicate(predicate, field, predicate.op, prefix)
    if predicate.op == Op.STARTS_WITH:
        return _make_field_predicate(predicate, field, Op.EQ, prefix[:width])
    return _make_field_predicate(predicate, field, Op.NOT_EQ, prefix) if len(prefix) == width else TRUE


def _match_results(
    predicate: Bound, field: PartitionField, properties: _TransformProperties, results: Iterable[Value | None]
) -> Expression:
    """Return the condition that the field has one of the results. Null results are ignored.

    Old writers stored some results as other values, which are added: results before 1970 that Java rounded up by 1, and
    the truncation of the lowest ints, which overflowed.
    """
    distinct = {result for result in results if result is not None}
    if properties.may_be_one_too_high:
        distinct |= {result + 1 for result in distinct if isinstance(result, int) and result < 0}
    if properties.overflowed is not None and properties.overflowed.exact in distinct:
        distinct.add(properties.overflowed.wrapped)
    values: list[Any] = sorted(distinct)
    return _make_field_predicate(predicate, field, Op.EQ if len(values) == 1 else Op.IN, *values)


def _widen_range(stored_results: Range) -> Range:
    """Return a range that also contains the results that Iceberg's Java library up to version 0.10 stored one too high.

    Only results of times before 1970, which are negative, were stored one too high. So a range that ends above 0
    already contains them.
    """
    high = stored_results.high
    return stored_results if high is None or high > 0 else Range(stored_results.low, high + 1)


def _make_field_predicate(predicate: Bound, field: PartitionField, op: Op, *values: Value) -> Bound:
    """Return the predicate on the field that replaces a predicate on its source column."""
    result = compute_values_type(field.transform, predicate.kind)
    return Bound(op, field.field_id or 0, field.name, result, IDENTITY, result, values)


def _make_source_predicate(predicate: Bound) -> Bound:
    return replace(predicate, transform=IDENTITY, result=predicate.kind)


def _move_to_source(predicate: Bound, op: Op, *values: Value) -> Bound:
    return replace(_make_source_predicate(predicate), op=op, values=values)


def _list_matching_ranges(predicate: Bound) -> list[Range]:
    """Return the ranges of values that match a comparison, `eq` or `in` on integers, strings or bytes."""
    values = predicate.values
    match predicate.op:
        case Op.LT:
            return [Range(None, values[0])]
        case Op.LT_EQ:
            return [Range(None, get_successor(values[0]))]
        case Op.GT:
            return [Range(get_successor(values[0]), None)]
        case Op.GT_EQ:
            return [Range(values[0], None)]
    return [Range(value, get_successor(value)) for value in values]


def _match_ranges(template: Bound, ranges: Iterable[Range]) -> Expression:
    """Return the condition that a term is in one of the ranges. It excludes null.

    Args:
        template: A predicate on the term.
        ranges: The ranges.
    """
    points: list[Value] = []
    conditions: list[Expression] = []
    for low, high in ranges:
        if low is None and high is None:
            return replace(template, op=Op.NOT_NULL, values=())
        if low is not None and high == get_successor(low):
            points.append(low)
        else:
            conditions.append(join_by_and(*_make_bounds(template, low, high)))
    if points:
        conditions.append(replace(template, op=Op.EQ if len(points) == 1 else Op.IN, values=tuple(points)))
    return join_by_or(*conditions) if conditions else FALSE


def _make_bounds(template: Bound, low: Value | None, high: Value | None) -> Iterable[Bound]:
    if low is not None:
        previous_value = _find_previous_value(low)
        op, value = (Op.GT_EQ, low) if previous_value is None else (Op.GT, previous_value)
        yield replace(template, op=op, values=(value,))
    if high is not None:
        previous_value = _find_previous_value(high)
        op, value = (Op.LT, high) if previous_value is None else (Op.LT_EQ, previous_value)
        yield replace(template, op=op, values=(value,))


def _find_previous_value(value: Value) -> Value | None:
    """Return the greatest string or byte array that is less than `value`, or None if there is none.

    It is `value` without its trailing zero. With it, a bound such as `< "a\\0"` becomes `<= "a"`, which is easier to
    read.
    """
    if isinstance(value, str) and value.endswith("\0"):
        return value[:-1]
    return value[:-1] if isinstance(value, bytes) and value.endswith(b"\0") else None
