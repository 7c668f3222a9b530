"""Finds the reasons why the plan of a table keeps all files, for the author of the query.

The functions have no side effects.

If all files of a table are read, a condition may be missing, not understood, or true in every file. The remedy is
another query, an index, another layout, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from seamark.metaserver.planner.joins.joins import JoinOutcome

if TYPE_CHECKING:
    from seamark.metaserver.api.plans.joins import JoinSpec

REASONS_MAX = 32


def find_unpruned_reasons(
    files: tuple[int, int],
    joins: Sequence[JoinSpec],
    outcomes: Sequence[JoinOutcome],
    *,
    has_condition: bool,
    complete: bool,
    unrequested_reasons: Sequence[str] = (),
    max_kept_fraction: float = 1.0,
) -> tuple[str, ...]:
    """Return the reasons why a plan leaves out too few files. There are none if it leaves out enough files.

    At most `REASONS_MAX` reasons are returned.

    Args:
        files: The number of files, and the number of files that the plan keeps.
        joins: The joins of the request.
        outcomes: The outcomes of the joins. The outcomes of nested joins follow the outcome of their join.
        has_condition: Whether the query has a condition on the table.
        complete: Whether the plan is complete.
        unrequested_reasons: The reasons why other joins were not requested.
        max_kept_fraction: The largest fraction of the files that a plan may keep so that engines use it.
    """
    considered_files, kept_files = files
    if kept_files < considered_files:
        is_unused = kept_files > max_kept_fraction * considered_files
        return (
            (f"engines usually do not use a plan that keeps more than {max_kept_fraction:.0%} of the files",)
            if is_unused
            else ()
        )
    if considered_files <= 1:
        return ("the table has one file" if considered_files else "the table has no files",)
    reasons = []
    if has_condition:
        reasons.append("each file may have rows that meet the condition, by its partition, its bounds and the indexes")
    elif not joins and not unrequested_reasons:
        reasons.append("the query has no condition and no join by which files could be left out")
    reasons += [_explain_join(outcome, ", ".join(join.on)) for join, outcome in _select_outermost(joins, outcomes)]
    reasons += unrequested_reasons
    if not complete:
        reasons.append("a time limit ended the plan, or an index was late: a new plan may keep fewer files")
    return tuple(reasons[:REASONS_MAX])


def _explain_join(outcome: JoinOutcome, columns: str) -> str:
    """Return the reason why a join leaves out no file."""
    table = ".".join(outcome.table)
    if not outcome.used:
        return f"the join with {table} is not used: {outcome.reason}"
    keys = "" if outcome.keys is None else f" ({outcome.keys:,} {'key' if outcome.keys == 1 else 'keys'} of {columns})"
    return f"each file may have rows that join with {table}{keys}, by its bounds and the indexes"


def _select_outermost(
    joins: Sequence[JoinSpec], outcomes: Sequence[JoinOutcome]
) -> Iterator[tuple[JoinSpec, JoinOutcome]]:
    """Yield each outermost join with its outcome.

    In `outcomes`, the outcomes of the nested joins of a join follow the outcome of the join.
    """
    position = 0
    for join in joins:
        yield join, outcomes[position]
        position += _count_outcomes(join)


def _count_outcomes(join: JoinSpec) -> int:
    """Return the number of outcomes of a join and its nested joins."""
    return 1 + sum(map(_count_outcomes, join.joins))
