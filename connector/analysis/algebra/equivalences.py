"""Derives conditions on the rows of a block's sources from equal columns of these sources.

A column that must be equal to a column of a join partner can only have the values of the partner's column. These values
are stored values of a table, which gives a semi-join, or literals. A condition on a column also applies to each equal
column of the same type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from seamark.connector.analysis.algebra.extremes import have_same_exact_order, iter_extreme_semi_joins
from seamark.connector.analysis.algebra.relations import Relation, find_exact_origin, is_exact
from seamark.connector.plans.conditions import (
    LEAVES_MAX,
    NEVER,
    AnyOf,
    ColumnComparison,
    ColumnReference,
    Condition,
    SemiJoin,
    all_of,
    any_of,
    drop_functions,
    list_references,
    move,
    split_parts,
    weaken,
)
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale
from seamark.formats.protocol.wire import RANGE

Equality: TypeAlias = tuple[ColumnReference, ColumnReference]
"""Two equal columns of the sources of a block."""
Pair: TypeAlias = tuple[ColumnReference, str]
"""A column of a block's source, and the equal column of a partner."""


class Limit(NamedTuple):
    """A comparison of a column by `op` (<, <=, >, >=) with another column: `column` of the join partner.

    The join partner is the other side of a join, from which the rows with matching values come.
    """

    op: str
    column: str


GetKind: TypeAlias = Callable[[ColumnReference], str | None]
_INTEGER_TYPES = frozenset(("int", "long"))
_FLOATS = frozenset(("float", "double"))
_SHORT_DIGITS_MAX = 18
"""The maximum number of digits of short decimals. The server does not compare short decimals with longer decimals."""
_LOWER, _UPPER = (">", ">="), ("<", "<=")


@dataclass(frozen=True)
class Predicate:
    """What is known about each row for which a boolean expression is true.

    Attributes:
        condition: A condition on columns of the block's sources. If a column is compared with a subquery, or if its
            period, such as its day, is compared with a column of another source, the condition has a semi-join.
        equalities: Pairs of equal columns with comparable types.
        exact: A function that returns a condition that is true for exactly the rows for which the expression is true,
            or None if there is no such condition.
    """

    condition: Condition | None = None
    equalities: tuple[Equality, ...] = ()
    exact: Callable[[], Condition | None] = field(default=lambda: None, compare=False)


ALWAYS = Predicate()


def is_equality_exact(first: str | None, second: str | None) -> bool:
    """Return whether two values of these types are equal only if they are identical.

    This is not true for floats, because 0.0 equals -0.0, nor for values of different types except int and long.
    """
    return is_exact(first) and (first == second or {first, second} == _INTEGER_TYPES)


def can_limit(first: str | None, second: str | None) -> bool:
    """Return whether engines and the server order values of the two types in the same way.

    A value of one type can then be a lower or upper limit of a column of the other type. Decimals must have the same
    scale. The server does not compare decimals of at most `_SHORT_DIGITS_MAX` digits with longer decimals. Floats are
    permitted, because their zeros compare as equal, and the server does not leave out rows with NaN that an engine
    might keep.
    """
    if first is None or second is None:
        return False
    if first.startswith("decimal(") and second.startswith("decimal("):
        is_short = [get_decimal_precision(kind) <= _SHORT_DIGITS_MAX for kind in (first, second)]
        return get_decimal_scale(first) == get_decimal_scale(second) and is_short[0] == is_short[1]
    return have_same_exact_order(first, second) or {first, second} <= _FLOATS or first == second == "string"


def is_wider(kind: str | None, other_kind: str | None) -> bool:
    """Return whether `kind` has all values of `other_kind`: it is a wider type, or a decimal with enough digits.

    Decimals must have the same scale, so that a cast changes no digits.
    """
    if kind is None or other_kind is None:
        return False
    if kind.startswith("decimal(") and other_kind.startswith("decimal("):
        return get_decimal_scale(kind) == get_decimal_scale(other_kind) and get_decimal_precision(
            kind
        ) >= get_decimal_precision(other_kind)
    return (other_kind, kind) in (("int", "long"), ("float", "double"))


def is_year_number(kind: str | None) -> bool:
    """Return whether a column of this type may contain the number of a year."""
    return kind in _INTEGER_TYPES


# Parts of conditions


def restrict_to_sources(condition: Condition | None, sources: frozenset[int]) -> Condition | None:
    return move(condition, lambda reference: reference if reference[0] in sources else None)


def restrict_to_columns(
    condition: Condition | None, references: Collection[ColumnReference | None]
) -> Condition | None:
    return move(condition, lambda reference: reference if reference in references else None)


def move_to_column(condition: Condition | None, reference: ColumnReference) -> Condition | None:
    return move(condition, lambda _: reference)


# Values of a partner


def build_semi_joins(pairs: Sequence[Pair], partner: Relation) -> list[SemiJoin]:
    """Return the semi-joins for columns that equal columns of a partner (a joined relation or a subquery).

    A semi-join is the condition that a row of a table with equal values exists. If all columns of the partner come from
    rows of one table, there is a single semi-join with this table. Otherwise, there is a semi-join for each column that
    comes from a table.
    """
    origin = find_exact_origin(partner, [column for _, column in pairs])
    if origin is not None:
        table, names = origin
        references = [reference for reference, _ in pairs]
        return [SemiJoin(tuple(sorted(zip(references, names, strict=True))), table)]
    return [] if len(pairs) == 1 else [semi_join for pair in pairs for semi_join in build_semi_joins([pair], partner)]


def list_partner_conditions(pairs: Sequence[Pair], partner: Relation) -> list[Condition]:
    """Return conditions that limit columns to the values of the equal columns of a partner, the joined relation.

    The values are stored values of a table, which gives semi-joins, or literals.
    """
    conditions: list[Condition] = [*build_semi_joins(pairs, partner)]
    for reference, column in pairs:
        literals = partner.list_values(column)
        if literals is not None:
            conditions.append(ColumnComparison(reference, "IN", literals) if literals else NEVER)
    return conditions


def iter_period_semi_joins(
    reference: ColumnReference, transform: str, partner: Relation, column: str
) -> Iterator[SemiJoin]:
    """Yield the semi-join of a column whose period equals a value of `column` of the joined relation `partner`.

    If the values of `column` are not identical to stored values of a table, nothing is yielded. `transform` is the
    transform of the period, such as `day`.
    """
    origin = find_exact_origin(partner, [column])
    if origin is not None:
        table, (name,) = origin
        yield SemiJoin(((reference, name),), table, transform=transform)


def iter_range_semi_joins(reference: ColumnReference, limits: Sequence[Limit], partner: Relation) -> Iterator[SemiJoin]:
    """Yield the semi-joins of a column that is less or greater than columns of one row of the partner.

    The partner is the relation whose columns limit the column. The first lower limit and the first upper limit are
    combined into a range with both ends. If the columns of the range do not come from one table, each limit is tried
    separately.
    """
    lower = [limit for limit in limits if limit.op in _LOWER]
    upper = [limit for limit in limits if limit.op in _UPPER]
    if lower and upper:
        ranges = [(lower[0], upper[0]), *((limit,) for limit in (*lower[1:], *upper[1:]))]
    else:
        ranges = [(limit,) for limit in limits]
    for bounds in ranges:
        origin = partner.find_origin([limit.column for limit in bounds])
        if origin is not None:
            table, names = origin
            pairs = tuple((reference, name) for name in names)
            yield SemiJoin(pairs, table, transform=RANGE, ops=tuple(limit.op for limit in bounds))
        elif len(bounds) > 1:
            for limit in bounds:
                yield from iter_range_semi_joins(reference, [limit], partner)


# Equivalences


def compute_equivalence_classes(equalities: Iterable[Equality]) -> dict[ColumnReference, set[ColumnReference]]:
    """Return the set of columns that are directly or indirectly equal to each column, including the column itself.

    Two sets are joined by adding the smaller set to the larger set, so that the function is fast for long chains.
    """
    classes: dict[ColumnReference, set[ColumnReference]] = {}
    for left, right in equalities:
        left_class, right_class = (classes.get(reference, {reference}) for reference in (left, right))
        if left_class is right_class:
            continue
        smaller_class, larger_class = sorted((left_class, right_class), key=len)
        larger_class |= smaller_class
        classes |= dict.fromkeys(smaller_class | {left, right}, larger_class)
    return classes


def copy_to_equal_columns(
    condition: Condition | None, equalities: Iterable[Equality], get_kind: GetKind
) -> Condition | None:
    """Return the condition, extended by a copy of each single-column part for each equal column.

    For example, `a.x = b.y AND a.x > 1` is extended by `b.y > 1`.
    """
    classes = compute_equivalence_classes(
        (left, right)
        for left, right in equalities
        # If the types differ, the comparison may convert one of the values.
        if get_kind(left) is not None and get_kind(left) == get_kind(right)
    )
    if condition is None or not classes:
        return condition
    own_parts = split_parts(condition)
    parts: list[Condition | None] = list(own_parts)
    for part in own_parts:
        references = list_references(part)
        if len(references) == 1 and len(parts) < LEAVES_MAX:  # `all_of` does not accept more parts.
            (reference,) = references
            equal_columns = classes.get(reference, set(references)) - references
            parts += [move_to_column(part, other) for other in sorted(equal_columns)]
    return all_of(parts)


def group_pairs_by_partner(equalities: Iterable[Equality]) -> dict[tuple[int, int], list[Pair]]:
    """Group the equal columns by pair of sources.

    Returns:
        For each pair (first source, second source): columns of the first source, and the equal columns of the second.
    """
    pairs: defaultdict[tuple[int, int], list[Pair]] = defaultdict(list)
    for left, right in equalities:
        for side, other_side in ((left, right), (right, left)):
            if side[0] != other_side[0]:
                pairs[side[0], other_side[0]].append((side, other_side[1]))
    return pairs


def derive_conditions_from_equalities(
    equalities: Iterable[Equality], sources: Sequence[Relation]
) -> Iterator[Condition]:
    """Yield conditions that limit columns of a source to the values of the equal columns of a joined source.

    If an equal column is a minimum or maximum (an extreme), a condition with this value is also yielded.

    Args:
        equalities: Pairs of columns that are equal in each row of the join.
        sources: The joined sources, to whose positions the columns refer.
    """
    for (source, partner), pairs in group_pairs_by_partner(equalities).items():
        yield from list_partner_conditions(pairs, sources[partner])
        for reference, column in pairs:
            kind = sources[source].find_kind(reference[1])
            yield from iter_extreme_semi_joins(reference, kind, "=", sources[partner], column)


# Disjunctions on several sources


def push_disjunction_across_join(
    condition: Condition | None, equalities: Iterable[Equality], sources: Sequence[Relation]
) -> Iterator[Condition | None]:
    """Yield the conditions on single sources that follow from disjunctions of conditions on several joined sources.

    For example, `d.x = 1 OR e.y = 2` is true for a row only if its joined row of d or its joined row of e meets the
    condition on that table. If nothing follows for a source, None is yielded.
    """
    pairs = group_pairs_by_partner(equalities)
    for part in split_parts(condition):
        if not isinstance(part, AnyOf) or len({source for source, _ in list_references(part)}) < 2:
            continue
        for source in {first for first, _ in pairs}:
            partners = {
                second: pair_conditions for (first, second), pair_conditions in pairs.items() if first == source
            }
            yield any_of(_push_branch(branch, source, partners, sources) for branch in part.parts)


def _push_branch(
    branch: Condition, source: int, partners: Mapping[int, Sequence[Pair]], sources: Sequence[Relation]
) -> Condition | None:
    """Return the condition on a source that follows from one branch of a disjunction.

    It is the branch's condition on the source's own columns. If there is none, it is a semi-join with a partner, which
    is another source with columns that equal columns of this source. It is None if there is no such semi-join.
    """
    own_part = restrict_to_sources(branch, frozenset({source}))
    if own_part is not None:
        return own_part
    for partner, pairs in partners.items():
        condition = restrict_to_sources(branch, frozenset({partner}))
        semi_join = _make_semi_join(pairs, sources[partner], condition)
        if semi_join is not None:
            return semi_join
    return None


def _make_semi_join(pairs: Sequence[Pair], partner: Relation, condition: Condition | None) -> SemiJoin | None:
    """Return the semi-join which requires that a row of the partner's table meets the condition, or None.

    The partner is the relation with which the pairs of columns join the table of the result. Comparisons that are true
    for null are left out, because the null may come from an outer join that found no row. Comparisons of functions are
    left out, because the server compares only stored values of a dimension.
    """
    partner_condition = drop_functions(
        weaken(condition, lambda atom: atom if isinstance(atom, ColumnComparison) and atom.rejects_null else None)
    )
    if partner_condition is None:
        return None
    columns = sorted({column for _, column in list_references(partner_condition)})
    origin = find_exact_origin(partner, [*(column for _, column in pairs), *columns])
    if origin is None:
        return None
    table, names = origin
    columns_by_reference = dict(zip(columns, names[len(pairs) :], strict=True))
    matched_pairs = zip((reference for reference, _ in pairs), names[: len(pairs)], strict=True)
    return SemiJoin(
        tuple(sorted(matched_pairs)),
        table,
        move(partner_condition, lambda reference: (0, columns_by_reference[reference[1]])),
    )
