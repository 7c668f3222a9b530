"""Projection: a bound expression on rows as expressions on their files' partition values, and on source columns.

*Inclusive*: whenever a row matches, the projection is true of its partition, so files where it is false are skipped.
*Strict*: whenever the projection is true of a partition, all its rows match. Each is the other's mirror image: a
strict projection is the negation of what the negated predicate projects to, so only one of them is written down.
The result is at least as narrow as Java's (`Projections`, `Transform.project`), but for what Java would lose:

- Java up to 0.10 rounded times before 1970 towards zero, one too high. Java's readers allow for it in predicates on
  the source; here also in predicates on the transform itself.
- Results that overflow their type are looked for where they wrap to (`ranges.py`).
- Java takes a predicate on a transform for one on the value where the field is partitioned by identity; it compares
  prefixes with a truncation's width in UTF-16 units, not in characters.

A predicate on a transform that the field does not have is projected by way of its source, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from metaserver.iceberg.binding import OPPOSITE
from metaserver.iceberg.evaluation import NULL_MATCHES
from metaserver.iceberg.expressions import (
    FALSE,
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Op,
    Or,
    Value,
    all_of,
    any_of,
)
from metaserver.iceberg.partition import PartitionField, PartitionSpec
from metaserver.iceberg.ranges import CALENDAR, Range, backwards, complement, forwards, is_ordered, next_value
from metaserver.iceberg.transforms import (
    IDENTITY,
    VOID,
    accepts,
    canonical,
    function,
    is_known,
    name_of,
    result_type,
    width_of,
)

RANGES_MAX = 200
"""Ranges that one predicate on a transform may become; Java too stops at 200 values of an `in`."""

_COMPARISONS = frozenset({Op.LT, Op.LT_EQ, Op.GT, Op.GT_EQ})
_NULLITY = frozenset({Op.IS_NULL, Op.NOT_NULL})
_PREFIXES = frozenset({Op.STARTS_WITH, Op.NOT_STARTS_WITH})


def inclusive(expression: Expression, spec: PartitionSpec) -> Expression:
    """What the partition of every matching row satisfies: a bound expression whose columns are partition fields.

    Its predicates have a field's id as `column_id`, its name, and the type of its values as `kind` and `result`.
    """
    match expression:
        case Bound():
            # fields of one source each tell something else, like bucket(7, x) and bucket(5, x)
            fields = _fields(expression, spec)
            return all_of(*[_projected(expression, field) for field in fields]) if fields else TRUE
        case And(children):
            return all_of(*[inclusive(child, spec) for child in children])
        case Or(children):
            return any_of(*[inclusive(child, spec) for child in children])
        case Always():
            return expression
    raise TypeError(f"not a bound expression: {expression}")


def strict(predicate: Bound, spec: PartitionSpec) -> Expression:
    """What is true only of partitions whose rows all match the predicate, in the form of `inclusive`."""
    return any_of(*(_strict(predicate, field) for field in _fields(predicate, spec)))


def source_ranges(predicate: Bound) -> Expression:
    """What each row that matches a predicate on a transform satisfies, as predicates on the source column itself.

    Exact for transforms that keep the order of values, so that lower and upper bounds of the column decide as much
    as in Java's `InclusiveMetricsEvaluator`. A predicate on a plain column is returned as it is.
    """
    transform, kind, op = predicate.transform, predicate.kind, predicate.op
    if transform == IDENTITY:
        return predicate
    if not is_known(transform) or not accepts(transform, kind):
        return TRUE
    if op == Op.NOT_NULL or (op == Op.IS_NULL and transform != VOID):
        return _on_source(predicate, op)
    if op in _PREFIXES:
        if len(str(predicate.values[0])) <= width_of(transform):
            return _on_source(predicate, op, *predicate.values)
        return Always(op == Op.NOT_STARTS_WITH)
    if op in NULL_MATCHES:
        # all but the rows whose result is one of the values
        if not is_ordered(transform, kind):
            return TRUE
        outside = complement(backwards(transform, kind, _ranges(replace(predicate, op=OPPOSITE[op]))))
        if len(outside) > RANGES_MAX or Range(None, None) in outside:
            return TRUE
        return any_of(_on_source(predicate, Op.IS_NULL), _within(_source(predicate), outside))
    if not is_ordered(transform, kind):
        return _on_source(predicate, Op.NOT_NULL)
    found = backwards(transform, kind, _ranges(predicate))
    if len(found) > RANGES_MAX:
        found = [Range(found[0].low, found[-1].high)]
    return _within(_source(predicate), found)


def _fields(predicate: Bound, spec: PartitionSpec) -> list[PartitionField]:
    """The fields that can decide the predicate; a transform of several columns is unknown to us (spec: v3)."""
    source = (predicate.column_id,)
    return [field for field in spec.fields if field.sources == source and field.field_id is not None]


def _strict(predicate: Bound, field: PartitionField) -> Expression:
    projected = _negated(_projected(replace(predicate, op=OPPOSITE[predicate.op]), field))
    if predicate.op in NULL_MATCHES or (isinstance(projected, Bound) and projected.op not in NULL_MATCHES):
        return projected
    # negation turns "no value" into "all", null included, which the predicate does not match
    if isinstance(projected, Bound) and projected.op == Op.IS_NULL:
        return FALSE
    return all_of(_target(predicate, field, Op.NOT_NULL), projected)


def _negated(expression: Expression) -> Expression:
    match expression:
        case And(children):
            return any_of(*map(_negated, children))
        case Or(children):
            return all_of(*map(_negated, children))
        case Bound():
            return replace(expression, op=OPPOSITE[expression.op])
        case Always(value):
            return Always(not value)
    raise TypeError(f"not a bound expression: {expression}")


def _projected(predicate: Bound, field: PartitionField) -> Expression:
    """The inclusive projection of one predicate onto one field of its column."""
    transform, kind, op = canonical(field.transform), predicate.kind, predicate.op
    if transform == VOID or not is_known(transform) or not accepts(transform, kind):
        return TRUE
    if predicate.transform == transform != IDENTITY:
        return _same_transform(predicate, field)
    if predicate.transform != IDENTITY:
        return _by_source(source_ranges(predicate), field)
    if op in _NULLITY or transform == IDENTITY or (transform, kind) == ("day", "date"):
        return _target(predicate, field, op, *predicate.values)
    ordered = is_ordered(transform, kind)
    if op in (Op.EQ, Op.IN) and (ordered or name_of(transform) == "bucket"):
        return _among(predicate, field, map(function(transform, kind), predicate.values))
    if not ordered:
        return TRUE if op in NULL_MATCHES else _target(predicate, field, Op.NOT_NULL)
    if op in _COMPARISONS:
        found = [result for source in _ranges(predicate) for result in forwards(transform, kind, source)]
        if _may_be_rounded_up(transform, kind):
            found = list(map(_widened, found))
        return _within(_target(predicate, field, op), found)
    return _prefix(predicate, field, width_of(transform)) if op in _PREFIXES else TRUE


def _by_source(expression: Expression, field: PartitionField) -> Expression:
    """The inclusive projection of what `source_ranges` returned."""
    match expression:
        case And(children):
            return all_of(*(_by_source(child, field) for child in children))
        case Or(children):
            return any_of(*(_by_source(child, field) for child in children))
        case Bound():
            return _projected(expression, field)
    return expression


def _same_transform(predicate: Bound, field: PartitionField) -> Expression:
    """The term is the field, but for results that old writers rounded up."""
    op, values = predicate.op, predicate.values
    if op in _NULLITY or not _may_be_rounded_up(predicate.transform, predicate.kind):
        return _target(predicate, field, op, *values)
    if op in (Op.EQ, Op.IN):
        return _among(predicate, field, values)
    if op in _COMPARISONS:
        return _within(_target(predicate, field, op), [_widened(span) for span in _ranges(predicate)])
    # results up to 0 may stand for those one lower
    kept = [value for value in values if isinstance(value, int) and value > 0]
    if not kept:
        return TRUE
    return _target(predicate, field, Op.NOT_EQ if len(kept) == 1 else Op.NOT_IN, *kept)


def _prefix(predicate: Bound, field: PartitionField, width: int) -> Expression:
    prefix = str(predicate.values[0])
    if len(prefix) < width:
        return _target(predicate, field, predicate.op, prefix)
    if predicate.op == Op.STARTS_WITH:
        return _target(predicate, field, Op.EQ, prefix[:width])
    return _target(predicate, field, Op.NOT_EQ, prefix) if len(prefix) == width else TRUE


def _among(predicate: Bound, field: PartitionField, results: Iterable[Value | None]) -> Expression:
    """The field holds one of the results, none of them null."""
    distinct = {result for result in results if result is not None}
    if _may_be_rounded_up(canonical(field.transform), predicate.kind):
        distinct |= {result + 1 for result in distinct if isinstance(result, int) and result < 0}
    values: list[Any] = sorted(distinct)
    return _target(predicate, field, Op.EQ if len(values) == 1 else Op.IN, *values)


def _may_be_rounded_up(transform: str, kind: str) -> bool:
    """Whether Java up to 0.10 stored results before 1970 one too high."""
    return transform in CALENDAR and (transform, kind) != ("day", "date")


def _widened(results: Range) -> Range:
    return results if results.high is None or results.high > 0 else Range(results.low, results.high + 1)


def _target(predicate: Bound, field: PartitionField, op: Op, *values: Value) -> Bound:
    """A predicate on the field, which one on its source became."""
    result = result_type(canonical(field.transform), predicate.kind)
    return Bound(op, field.field_id or 0, field.name, result, IDENTITY, result, values)


def _source(predicate: Bound) -> Bound:
    return replace(predicate, transform=IDENTITY, result=predicate.kind)


def _on_source(predicate: Bound, op: Op, *values: Value) -> Bound:
    return replace(_source(predicate), op=op, values=values)


def _ranges(predicate: Bound) -> list[Range]:
    """The values that match a comparison, `eq` or `in` on integers, strings or bytes."""
    values = predicate.values
    match predicate.op:
        case Op.LT:
            return [Range(None, values[0])]
        case Op.LT_EQ:
            return [Range(None, next_value(values[0]))]
        case Op.GT:
            return [Range(next_value(values[0]), None)]
        case Op.GT_EQ:
            return [Range(values[0], None)]
    return [Range(value, next_value(value)) for value in values]


def _within(template: Bound, ranges: Iterable[Range]) -> Expression:
    """The template's term lies in one of the ranges; what is in a range is not null."""
    points: list[Value] = []
    found: list[Expression] = []
    for low, high in ranges:
        if low is None and high is None:
            return replace(template, op=Op.NOT_NULL, values=())
        if low is not None and high == next_value(low):
            points.append(low)
        else:
            found.append(all_of(*_bounds(template, low, high)))
    if points:
        found.append(replace(template, op=Op.EQ if len(points) == 1 else Op.IN, values=tuple(points)))
    return any_of(*found) if found else FALSE


def _bounds(template: Bound, low: Value | None, high: Value | None) -> Iterable[Bound]:
    if low is not None:
        before = _previous(low)
        op, value = (Op.GT_EQ, low) if before is None else (Op.GT, before)
        yield replace(template, op=op, values=(value,))
    if high is not None:
        before = _previous(high)
        op, value = (Op.LT, high) if before is None else (Op.LT_EQ, before)
        yield replace(template, op=op, values=(value,))


def _previous(value: Value) -> Value | None:
    """The value that this one comes next to, for strings and bytes, where a bound reads better without the zero."""
    if isinstance(value, str) and value.endswith("\0"):
        return value[:-1]
    return value[:-1] if isinstance(value, bytes) and value.endswith(b"\0") else None
