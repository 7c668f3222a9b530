"""Describes the needed rows of a table after push-down: a condition, LIKE predicates, and joins with other tables.

Invariant: the result of the statement does not change, for any data, if these rows of a table are left out: rows for
which the predicate of the table is not true, and rows without a partner in one of the table's joins. A partner is a row
of the joined table that meets the predicate and the joins of the joined table. The columns of the join must not be null
and must be equal, less or greater, as the join requires. A join with an extreme compares with the extreme of the rows
that meet the join's condition. The scan of the joined table must read the same snapshot. If it is uncertain whether a
row can be left out, the predicates are weaker and there are fewer joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from seamark.connector.analysis.algebra.extremes import stays_true_with_more_rows
from seamark.connector.analysis.algebra.relations import COMPUTED, Columns, Table
from seamark.connector.plans.conditions import (
    AnyOf,
    Atom,
    ColumnComparison,
    ColumnReference,
    Condition,
    Like,
    SemiJoin,
    all_of,
    any_of,
    drop_functions,
    keep_comparisons,
    limit_text,
    list_likes,
    move,
    split_parts,
    weaken,
)
from seamark.connector.plans.literals import LOCAL, ZONED
from seamark.connector.plans.scan import Join
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import LIKES_MAX

FindScanNumber: TypeAlias = Callable[[Table], int | None]
"""A function that returns the number of the scan of a table, or None if no scan may be joined with the table."""


def build_condition(table: Table, *, utc: bool) -> Condition | None:
    """Return the condition on a table's rows, without joins.

    Comparisons that the catalog would evaluate differently from the engine are left out.
    """
    return _keep_evaluated_part(table, all_of([table.predicate, *_derive_partner_conditions(table)]), utc=utc)


def _keep_evaluated_part(table: Table, condition: Condition | None, *, utc: bool) -> Condition | None:
    """Return the part of a condition that the catalog evaluates exactly as the engine does."""
    columns = table.columns or {}

    def keep(atom: Atom) -> Atom | None:
        """Return a comparison that the catalog evaluates like the engine, or None for any other atom."""
        if not isinstance(atom, ColumnComparison) or columns.get(atom.column[1]) == COMPUTED:
            return None
        # Some file formats do not count a field of a null struct as null.
        if _has_field(atom) and not atom.rejects_null:
            return None
        return atom if utc or _is_zone_independent(atom, columns) else None

    return limit_text(weaken(condition, keep))


def _is_zone_independent(comparison: ColumnComparison, columns: Columns) -> bool:
    """Return whether the comparison has the same result in every time zone of the session."""
    if not comparison.zones:
        return True
    kind = columns.get(comparison.column[1])
    if kind is None:
        return False
    return comparison.zones == ({ZONED} if kind.startswith("timestamptz") else {LOCAL})


def _derive_partner_conditions(table: Table) -> Iterator[Condition | None]:
    """Yield conditions on the columns of joins that follow from the conditions on the joined tables.

    The matching row of a joined table meets the conditions of its table, and has equal values in the columns of the
    join. So these conditions also apply to the columns of the join.
    """
    for semi_join in split_parts(table.predicate):
        if not isinstance(semi_join, SemiJoin) or semi_join.transform != IDENTITY:
            continue
        for reference, column in semi_join.pairs:
            partner = semi_join.other_reference.predicate if isinstance(semi_join.other_reference, Table) else None
            yield move(keep_comparisons(partner), partial(_replace_column, column, reference))


def _replace_column(column: str, replacement: ColumnReference, reference: ColumnReference) -> ColumnReference | None:
    return replacement if reference[1] == column else None


def _has_field(atom: Atom) -> bool:
    return isinstance(atom, ColumnComparison) and "." in atom.column[1]


def list_string_likes(references: Sequence[Table]) -> tuple[tuple[Like, ...], ...]:
    """Return the LIKE predicates on stored string columns, as a conjunction of disjunctions.

    The number of predicates is limited to the number that a request may have. Leaving out a disjunction only makes the
    conjunction weaker.

    Args:
        references: The references to a table that a single scan reads.
    """
    if not references:
        return ()
    columns = references[0].columns or {}
    strings = {name for name, kind in columns.items() if kind == "string" and "." not in name}
    needed_likes = list_likes(any_of(table.predicate for table in references))
    likes = [disjunction for disjunction in needed_likes if all(like.column[1] in strings for like in disjunction)]
    while sum(map(len, likes)) > LIKES_MAX:
        likes.pop()
    return tuple(likes)


def build_joins(table: Table, find_scan_number: FindScanNumber, *, utc: bool) -> tuple[Join, ...]:
    """Return the joins by which rows of a table can be left out.

    A row that the statement needs has a matching row (a partner) in the other table of each join. For example, with
    `JOIN d ON t.k = d.k WHERE d.x = 1`, only rows of `t` are needed whose `k` is in a row of `d` with `x = 1`. If a
    part of the condition is a disjunction (OR), its joins are alternatives: a row needs a partner in only one of them.

    Args:
        table: The reference to the table, with its predicate after the push-down.
        find_scan_number: Returns the number of the scan of the other table, or None if it must not be joined.
        utc: Whether the time zone of the session is UTC.
    """
    joins: dict[Join, None] = {}
    for part_number, part in enumerate(split_parts(table.predicate)):
        if isinstance(part, SemiJoin):
            join = _build_join(part, table, find_scan_number, utc=utc)
            joins |= {} if join is None else {join: None}
        elif isinstance(part, AnyOf):
            joins |= dict.fromkeys(_list_alternatives(part, table, find_scan_number, part_number, utc=utc))
    return tuple(joins)


def _build_join(semi_join: SemiJoin, table: Table, find_scan_number: FindScanNumber, *, utc: bool) -> Join | None:
    partner = semi_join.other_reference
    scan = find_scan_number(partner) if isinstance(partner, Table) and partner is not table else None
    if scan is None or not isinstance(partner, Table):
        return None
    on = tuple((reference[1], column) for reference, column in semi_join.pairs)
    partner_condition = _keep_evaluated_part(partner, semi_join.where, utc=utc)
    join = Join(scan, on, semi_join.transform, partner_condition, ops=semi_join.ops)
    if not join.is_extreme:
        return join
    join = replace(join, exact=semi_join.exact and partner_condition == semi_join.where)
    return join if join.exact or stays_true_with_more_rows(join.transform, join.ops[0]) else None


def _list_alternatives(
    disjunction: AnyOf, table: Table, find_scan_number: FindScanNumber, disjunction_number: int, *, utc: bool
) -> list[Join]:
    """Return the joins of a disjunction as alternatives.

    A row of the table needs a matching row of the other table in only one of the alternatives. It needs none if it
    meets the condition of a branch on its own columns (`exempt_condition`). The list is empty if a branch has neither a
    condition nor a join, because the disjunction may then be true for any row.

    Args:
        disjunction: The disjunction.
        table: The table whose rows the disjunction restricts.
        find_scan_number: A function that returns the number of the scan of a table.
        disjunction_number: A number that only this disjunction of the table has. Its alternatives share it.
        utc: Whether the time zone of the session is UTC.
    """
    joins: dict[Join, None] = {}
    own_conditions: list[Condition | None] = []
    for branch in disjunction.parts:
        # The server does not filter the rows of a dimension by fields of structs or by functions.
        columns_only = drop_functions(weaken(branch, lambda atom: None if _has_field(atom) else atom))
        condition = _keep_evaluated_part(table, columns_only, utc=utc)
        if condition is not None:
            own_conditions.append(condition)
            continue
        candidates = (
            _build_join(part, table, find_scan_number, utc=utc)
            for part in split_parts(branch)
            if isinstance(part, SemiJoin)
        )
        join = next((candidate for candidate in candidates if candidate is not None), None)
        if join is None:
            return []
        joins[join] = None
    exempt_condition = any_of(own_conditions) if own_conditions else None
    return [replace(join, any_of=disjunction_number, exempt_condition=exempt_condition) for join in joins]


def intersect_joins(join_lists: Sequence[tuple[Join, ...]]) -> tuple[Join, ...]:
    """Return the joins that all references to a table share, because a single scan reads the rows of all references.

    The alternatives of a disjunction are returned only if all references share all of them.
    """
    if not join_lists:
        return ()
    first_joins, *other_joins = join_lists
    other_groups = [{_find_alternatives(join, joins) for join in joins} for joins in other_joins]
    return tuple(
        join for join in first_joins if all(_find_alternatives(join, first_joins) in groups for groups in other_groups)
    )


def _find_alternatives(join: Join, joins: Sequence[Join]) -> frozenset[Join]:
    """Return the join and its alternatives among `joins`. A row needs a matching row in only one of these joins.

    Args:
        join: The join. Its `any_of` is the number of the disjunction from which it comes, or None.
        joins: All joins of the reference to the table.
    """
    if join.any_of is None:
        return frozenset({join})
    # The number of the disjunction may differ between the references, so it is removed before joins are compared.
    return frozenset(replace(other, any_of=-1) for other in joins if other.any_of == join.any_of)
