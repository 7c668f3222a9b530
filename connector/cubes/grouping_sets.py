"""Checks the names of columns in ROLLUP, CUBE and GROUPING SETS."""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from seamark.connector.cubes.dialects import NotFromCube


def check_grouping_sets(select: exp.Select, find_path: Callable[[exp.Column], str | None]) -> None:
    """Check that grouping sets do not name a column in two ways, such as `k` and `a.k`.

    DuckDB then returns null for the column in a set that has only one of the two names. In the query over the cube, all
    names of a column are equal.

    Args:
        select: The query, before its columns are replaced.
        find_path: Returns the path of a column, which is the same for all its names.

    Raises:
        NotFromCube: Grouping sets name a column in two ways.
    """
    group = select.args.get("group")
    if group is None or group.find(exp.Rollup, exp.Cube, exp.GroupingSets) is None:
        return
    names_by_path: dict[str | None, tuple[str, ...]] = {}
    for column in group.find_all(exp.Column):
        names = tuple(part.name.lower() for part in column.parts)
        if names_by_path.setdefault(find_path(column), names) != names:
            raise NotFromCube(f"grouping sets name {'.'.join(names)} in two ways")
