"""Which values a column has because of a partner in a join: the values of equal columns of its table, or literals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sqlglot import exp

from seamark.connector.analysis.algebra.relations import Scope, is_exact
from seamark.connector.analysis.conditions import is_plain
from seamark.connector.analysis.literals import unit_of
from seamark.connector.plans.conditions import (
    DAY,
    HOUR,
    MONTH,
    NEVER,
    YEAR,
    AllOf,
    AnyOf,
    ColumnComparison,
    ColumnReference,
    Condition,
    SemiJoin,
    any_of,
    move,
    references_of,
    weaken,
)

Equal: TypeAlias = tuple[ColumnReference, ColumnReference]
_WHOLE = frozenset(("int", "long"))


def comparable(one: str | None, other: str | None) -> bool:
    """Whether values of the two types are equal only if they are identical."""
    return is_exact(one) and (one == other or {one, other} == _WHOLE)


def restricted(condition: Condition | None, sources: frozenset[int]) -> Condition | None:
    return move(condition, lambda reference: reference if reference[0] in sources else None)


def at_reference(condition: Condition | None, reference: ColumnReference) -> Condition | None:
    return move(condition, lambda _: reference)


def on_references(condition: Condition | None, references: Collection[ColumnReference | None]) -> Condition | None:
    return move(condition, lambda reference: reference if reference in references else None)


def semi_joins(pairs: list[tuple[ColumnReference, str]], partner: Scope) -> list[SemiJoin]:
    """A single semi-join, with one row of the table, if all columns of the partner come from the same table."""
    found = partner.origin([column for _, column in pairs])
    if found is not None:
        references = [reference for reference, _ in pairs]
        return [SemiJoin(tuple(sorted(zip(references, found[1], strict=True))), found[0])]
    return [] if len(pairs) == 1 else [one for pair in pairs for one in semi_joins([pair], partner)]


def partner_values(pairs: list[tuple[ColumnReference, str]], partner: Scope) -> list[Condition]:
    """The columns of the partner have these values: rows of a table, or literals."""
    found: list[Condition] = [*semi_joins(pairs, partner)]
    for reference, column in pairs:
        literals = partner.values(column)
        if literals is not None:
            found.append(ColumnComparison(reference, "IN", literals) if literals else NEVER)
    return found


def groups_of(equal: Iterable[Equal]) -> dict[ColumnReference, set[ColumnReference]]:
    """For each column those that are equal to it, itself too, also by way of others."""
    groups: dict[ColumnReference, set[ColumnReference]] = {}
    for one, other in equal:
        first, second = (groups.get(reference, {reference}) for reference in (one, other))
        if first is second:
            continue
        small, large = sorted((first, second), key=len)
        large |= small
        groups |= dict.fromkeys(small | {one, other}, large)
    return groups


def pairs_by_partner(equal: Iterable[Equal]) -> dict[tuple[int, int], list[tuple[ColumnReference, str]]]:
    """By two sources, columns of the first and the equal columns of the second."""
    pairs: defaultdict[tuple[int, int], list[tuple[ColumnReference, str]]] = defaultdict(list)
    for one, other in equal:
        for here, there in ((one, other), (other, one)):
            if here[0] != there[0]:
                pairs[here[0], there[0]].append((here, there[1]))
    return pairs


def push_disjunction_across_join(
    condition: Condition | None, equal: Iterable[Equal], result_of: Callable[[int], Scope]
) -> Iterator[Condition | None]:
    """Of disjunctions of conditions on several sources, what follows for each source that is joined with them:
    `d.x = 1 OR e.y = 2` is true for a row only if its partner in d or its partner in e meets its condition."""
    pairs = pairs_by_partner(equal)
    for part in condition.parts if isinstance(condition, AllOf) else () if condition is None else (condition,):
        if not isinstance(part, AnyOf) or len({source for source, _ in references_of(part)}) < 2:
            continue
        for source in {one for one, _ in pairs}:
            partners = {other: found for (one, other), found in pairs.items() if one == source}
            yield any_of(_of_branch(branch, source, partners, result_of) for branch in part.parts)


def _of_branch(
    branch: Condition,
    source: int,
    partners: Mapping[int, Sequence[tuple[ColumnReference, str]]],
    result_of: Callable[[int], Scope],
) -> Condition | None:
    """The part of a condition on a source's own columns; otherwise on one of its partners."""
    found = restricted(branch, frozenset({source}))
    if found is not None:
        return found
    for partner, pairs in partners.items():
        semi_join = _semi_join(pairs, result_of(partner), restricted(branch, frozenset({partner})))
        if semi_join is not None:
            return semi_join
    return None


def _semi_join(
    pairs: Sequence[tuple[ColumnReference, str]], partner: Scope, wanted: Condition | None
) -> SemiJoin | None:
    """A semi-join with a row of the partner's table that meets a condition on its columns. Comparisons that are
    true for null are left out: null may represent a missing value."""
    kept = weaken(wanted, lambda atom: atom if isinstance(atom, ColumnComparison) and atom.rejects_null else None)
    if kept is None:
        return None
    columns = sorted({column for _, column in references_of(kept)})
    found = partner.origin([*(column for _, column in pairs), *columns])
    if found is None:
        return None
    table, names = found
    stored = dict(zip(columns, names[len(pairs) :], strict=True))
    matched = zip((reference for reference, _ in pairs), names[: len(pairs)], strict=True)
    return SemiJoin(tuple(sorted(matched)), table, move(kept, lambda reference: (0, stored[reference[1]])))


class Period(NamedTuple):
    """An expression that is the start of a period of a column or, with `is_number`, the number of its year."""

    column: exp.Column
    transform: str
    """Of Iceberg."""
    is_cast: bool = False
    is_number: bool = False


def period_of(node: exp.Expr) -> Period | None:
    node = node.unnest()
    found: tuple[exp.Expr, str, bool, bool] | None = None
    match node:
        case exp.Cast() if type(node) is exp.Cast and node.to.this is exp.DataType.Type.DATE and is_plain(node):
            found = node.this, DAY, True, False
        case exp.Date() if not node.expressions and is_plain(node):
            found = node.this, DAY, True, False
        case exp.TimestampTrunc() | exp.DateTrunc() if unit_of(node).lower() in (DAY, MONTH, YEAR, HOUR):
            found = node.this, unit_of(node).lower(), False, False
        case exp.Year() if is_plain(node):
            found = node.this, YEAR, False, True
        case exp.Extract() if type(node.this) is exp.Var and node.name.upper() == "YEAR" and is_plain(node):
            found = node.expression, YEAR, False, True
    return Period(found[0], *found[1:]) if found is not None and type(found[0]) is exp.Column else None


def period_semi_joins(
    period: Period, reference: ColumnReference, kind: str | None, partner: Scope, column: str
) -> Iterator[SemiJoin]:
    """The period of a column of the type `kind` is a value of the partner's column. Only of types whose
    values are equal if they are the same period: a zoned time is not compared with one without a zone."""
    other = partner.kind(column)
    if period.is_number:
        fits = kind in ("date", "timestamp", "timestamptz") and other in _WHOLE
    elif period.is_cast:
        fits = kind in ("timestamp", "timestamptz") and other == "date"
    else:
        fits = kind in ("date", "timestamp") and other in ("date", "timestamp")
    found = partner.origin([column]) if fits else None
    if found is not None and not (kind == "date" and period.transform == HOUR):
        yield SemiJoin(((reference, found[1][0]),), found[0], transform=period.transform)
