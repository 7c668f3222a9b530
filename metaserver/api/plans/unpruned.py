"""Why the plan of a table leaves out no file, for the person who wrote the query. Pure.

If all files of a table are read, a condition may be missing, not understood, or true in every file. The remedies differ
much: another query, an index, another layout, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from seamark.metaserver.planner.joins.joins import JoinOutcome

if TYPE_CHECKING:
    from seamark.metaserver.api.plans.joins import JoinSpec

REASONS_MAX = 32


def unpruned_reasons(
    files: tuple[int, int],
    joins: Sequence[JoinSpec],
    outcomes: Sequence[JoinOutcome],
    *,
    has_condition: bool,
    complete: bool,
    beside: Sequence[str] = (),
    kept_max: float = 1.0,
) -> tuple[str, ...]:
    """Return the reasons why a plan keeps all or too many of the files.

    Args:
        files: How many there are, and how many of them the plan keeps.
        outcomes: Of the joins, with nested joins after their join.
        beside: Reasons why other joins were not requested.
        kept_max: The fraction of the files above which engines do without the plan.
    """
    considered, kept = files
    if kept < considered:
        is_unused = kept > kept_max * considered
        return (f"engines mostly use no plan that keeps more than {kept_max:.0%} of the files",) if is_unused else ()
    if considered <= 1:
        return ("the table has one file" if considered else "the table has no files",)
    found = []
    if has_condition:
        found.append("each file may have rows that meet the condition, by its partition, its bounds and the indexes")
    elif not joins and not beside:
        found.append("the query has no condition and no join by which files could be left out")
    found += [_of_join(outcome, ", ".join(join.on)) for join, outcome in _outermost(joins, outcomes)]
    found += beside
    if not complete:
        found.append("a time limit ended the plan, or an index was late: a repeat may keep fewer files")
    return tuple(found[:REASONS_MAX])


def _of_join(outcome: JoinOutcome, columns: str) -> str:
    table = ".".join(outcome.table)
    if not outcome.used:
        return f"the join with {table} is not used: {outcome.reason}"
    keys = f"{outcome.keys:,} {'key' if outcome.keys == 1 else 'keys'}"
    return f"each file may have rows that join with {table} ({keys} of {columns}), by its bounds and the indexes"


def _outermost(joins: Sequence[JoinSpec], outcomes: Sequence[JoinOutcome]) -> Iterator[tuple[JoinSpec, JoinOutcome]]:
    at = 0
    for join in joins:
        yield join, outcomes[at]
        at += _count(join)


def _count(join: JoinSpec) -> int:
    return 1 + sum(map(_count, join.joins))
