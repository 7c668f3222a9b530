"""Chooses the joins of a statement that its plan requests contain.

A join is chosen if the other table is much smaller and is restricted. A table is restricted if it has a condition, or
is joined with a restricted table. A self-join is chosen if a column of one side must have given values.

Joined scans refer to each other (`scan.py`). For each scan, the joins become a tree, in which no table is its own
ancestor. Sizes come from the summary of a table's snapshot. The server skips joins with tables that exceed its limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seamark.connector.plans.async_client import JoinRequest, KnownTable, Name
from seamark.connector.plans.conditions import (
    AllOf,
    Atom,
    ColumnComparison,
    all_of,
    build_expression,
    drop_functions,
    weaken,
)
from seamark.connector.plans.scan import Join, Scan, list_columns
from seamark.formats.iceberg.types.transforms import IDENTITY

DEPTH_MAX = 4
JOINS_MAX = 32
"""The server's maximum number of joins in one request."""
_STEPS_MAX = 500
"""The maximum number of joins that are examined for one scan.

If each table is joined with all others, the number of joins in the tree grows exponentially.
"""
SIZE_RATIO_MIN = 4
"""The minimum ratio of the size of a table to the size of a dimension that filters it."""
SMALL_BYTES = 4 << 20
"""The maximum size of a table that may filter tables of any size.

A larger table may also filter tables of any size if a column of its needed rows must have given values. The server
then reads only the files with these rows, within its limits.
"""


@dataclass(frozen=True)
class PlannedScan:
    """A scan of a table for which a plan may be requested, with the name of the table in Seamark."""

    scan: Scan
    catalog: str
    table: Name
    within: tuple[int, ...] = ()
    """The view whose text contains the scan (`views.py`), as the numbers of the scans on the path to the view.

    If it is empty, the scan is in the statement itself.
    """

    @property
    def read_key(self) -> tuple[str, Name, int | None, str | None]:
        """A key of the rows that the scan reads. Scans with the same key read the same rows."""
        return self.catalog, self.table, self.scan.snapshot_id, self.scan.ref

    @property
    def state(self) -> tuple[str, Name, int | None]:
        """A key of the state of the table. Scans with the same key read the same state.

        The current snapshot, branches and tags belong to one state. A snapshot that is named by its id does not change,
        and is a separate state.
        """
        return self.catalog, self.table, self.scan.snapshot_id


@dataclass(frozen=True)
class Dimension:
    """A scan that filters another scan by a join. It reads one snapshot of its table."""

    planned: PlannedScan
    snapshot_id: int
    files: int
    """The number of data files of the dimension's table."""
    join: Join
    dimensions: tuple[Dimension, ...]

    @property
    def on(self) -> tuple[tuple[str, str], ...]:
        return self.join.on

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the dimension's table by which rows of the other table are left out."""
        return frozenset(other for _, other in self.on) | self.planned.scan.columns | list_columns(self.join.where)

    def request(self) -> JoinRequest:
        """Return the join for a plan request.

        For a join with a minimum or maximum, only its own condition is sent, because other conditions on the rows could
        change the minimum or maximum. Conditions that cannot filter rows of the dimension are left out.
        """
        scan, join = self.planned.scan, self.join
        nested_requests = tuple(dimension.request() for dimension in self.dimensions)
        condition = join.where if join.is_extreme else all_of([scan.condition, join.where])
        condition = drop_functions(weaken(condition, _keep_whole_column))
        return JoinRequest(
            self.planned.table,
            join.on,
            None if condition is None else build_expression(condition),
            self.snapshot_id,
            nested_requests,
            () if join.is_extreme else scan.likes,
            join.transform,
            join.any_of,
            None if join.exempt_condition is None else build_expression(join.exempt_condition),
            join.ops,
            join.exact,
        )


def list_depth_first(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Return the dimensions and all of their dimensions. Each dimension precedes its own dimensions."""
    dimensions_in_order: list[Dimension] = []
    for dimension in dimensions:
        dimensions_in_order += (dimension, *list_depth_first(dimension.dimensions))
    return dimensions_in_order


def find_dimensions(
    planned_scans: Mapping[int, PlannedScan], tables: Mapping[tuple[str | None, str | None, str], KnownTable]
) -> dict[PlannedScan, tuple[Dimension, ...]]:
    """Return the dimensions of each scan: the joined tables whose rows can leave out files of the scan.

    Args:
        planned_scans: The scans by their numbers in the statement.
        tables: The tables by their names in the statement.
    """
    selected_dimensions = {}
    for number, planned_scan in planned_scans.items():
        table = _find_table(planned_scan, tables)
        if table is not None and table.files > 1:  # A table with one file is always read completely.
            dimensions = _DimensionTree(planned_scans, tables).list_dimensions(number, ())
            if dimensions:
                selected_dimensions[planned_scan] = dimensions
    return selected_dimensions


def explain_unrequested_joins(
    number: int,
    planned_scans: Mapping[int, PlannedScan],
    tables: Mapping[tuple[str | None, str | None, str], KnownTable],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
) -> list[str]:
    """Explain why the rows of joined tables leave out no files of a scan.

    A joined table whose rows leave out files is a dimension of the scan. Each line is about one other joined table, and
    has its name and the reason. If the table of the scan is not read at the current snapshot, there is one line for all
    joins.

    Args:
        number: The number of the scan.
        planned_scans: The scans by their numbers in the statement.
        tables: The tables by their names in the statement.
        dimensions: The dimensions of each scan.
    """
    planned_scan = planned_scans[number]
    limited_table, requested_scans = (
        _find_table(planned_scan, tables),
        {dimension.join.scan for dimension in dimensions.get(planned_scan, ())},
    )
    reasons: dict[str, None] = {}
    for join in planned_scan.scan.joins:
        other = planned_scans.get(join.scan)
        if join.scan in requested_scans or other is None:
            continue
        table, name = _find_table(other, tables), ".".join(other.table)
        if limited_table is None or table is None:
            reason = "the table is not read at the current snapshot"
            reasons[
                f"joins leave out no files, because {reason}"
                if limited_table is None
                else _explain_unhelpful(name, reason)
            ] = None
        elif table.snapshot_id is None:
            reasons[_explain_unhelpful(name, "the table has no snapshot")] = None
        elif not _is_small(table, limited_table):
            reasons[_explain_unhelpful(name, f"the table is not {SIZE_RATIO_MIN} times smaller")] = None
        else:
            reasons[
                _explain_unhelpful(name, "neither it nor a smaller table that it is joined with has a condition")
            ] = None
    return list(reasons)


def _explain_unhelpful(table: str, reason: str) -> str:
    return f"the join with {table} leaves out no files, because {reason}"


class _DimensionTree:
    """The tree of the joins of one scan."""

    def __init__(
        self,
        planned_scans: Mapping[int, PlannedScan],
        known_tables: Mapping[tuple[str | None, str | None, str], KnownTable],
    ) -> None:
        self._planned_scans = planned_scans
        self._known_tables = known_tables
        self._joins_left = JOINS_MAX
        self._steps_left = _STEPS_MAX

    def list_dimensions(self, number: int, path: tuple[int, ...]) -> tuple[Dimension, ...]:
        """Return the dimensions of a scan, with their own dimensions.

        A dimension is a joined table whose rows can leave out files of the scan. A join is skipped if its table is too
        large, has no snapshot or is already above in the tree, or if its rows would leave out no further files.

        Args:
            number: The number of the scan.
            path: The numbers of the scans above it in the tree.
        """
        limited_table = _find_table(self._planned_scans[number], self._known_tables)
        if limited_table is None or len(path) >= DEPTH_MAX:
            return ()
        dimensions: list[Dimension] = []
        for join in self._planned_scans[number].scan.joins:
            if not self._joins_left or not self._steps_left:
                break
            self._steps_left -= 1
            planned_scan = self._planned_scans.get(join.scan)
            table = None if planned_scan is None else _find_table(planned_scan, self._known_tables)
            if planned_scan is None or table is None or table.snapshot_id is None or join.scan in path:
                continue
            # The server finds extremes in statistics of files, so the table may have any size.
            if join.is_extreme:
                self._joins_left -= 1
                dimensions.append(Dimension(planned_scan, table.snapshot_id, table.files, join, ()))
                continue
            if not _is_small(table, limited_table) and not (
                planned_scan.table == self._planned_scans[number].table and _has_literal_equality(planned_scan.scan)
            ):
                continue
            self._joins_left -= 1
            own_dimensions = self.list_dimensions(join.scan, (*path, number))
            # A condition on only the join columns also applies to the filtered table directly.
            is_pushed_down = join.transform == IDENTITY and join.where is None and join.any_of is None
            # If the other table has no condition, a range without an end leaves out few files.
            is_open = len(join.ops) == 1
            if (
                own_dimensions
                or not (is_pushed_down or is_open)
                or not planned_scan.scan.columns <= {column for _, column in join.on}
                or (is_open and planned_scan.scan.columns)
            ):
                dimensions.append(Dimension(planned_scan, table.snapshot_id, table.files, join, own_dimensions))
            else:  # The join is skipped, so it does not count towards the limit.
                self._joins_left += 1
        # A row needs a partner in only one of several alternative joins, so all alternatives are needed or none.
        return tuple(
            dimension
            for dimension in dimensions
            if dimension.join.any_of is None or self._has_all_alternatives(dimension.join, number, dimensions)
        )

    def _has_all_alternatives(self, join: Join, scan_number: int, dimensions: Sequence[Dimension]) -> bool:
        """Return whether all alternatives of a join are among the dimensions.

        If an alternative is missing, the others do not restrict the rows.
        """
        scan_joins = self._planned_scans[scan_number].scan.joins
        alternatives = [alternative for alternative in scan_joins if alternative.any_of == join.any_of]
        return all(any(other.join is alternative for other in dimensions) for alternative in alternatives)


def _keep_whole_column(atom: Atom) -> Atom | None:
    """Return the atom, or None if it compares a field of a struct.

    Only whole columns can filter the rows of a dimension.
    """
    return None if isinstance(atom, ColumnComparison) and "." in atom.column[1] else atom


def _has_literal_equality(scan: Scan) -> bool:
    """Return whether a column of the needed rows must be equal to one of a few literals."""
    condition = scan.condition
    parts = condition.parts if isinstance(condition, AllOf) else (condition,)
    return any(isinstance(part, ColumnComparison) and part.op in ("=", "IN") and not part.negated for part in parts)


def _is_small(table: KnownTable, limited_table: KnownTable) -> bool:
    return table.size_bytes <= max(SMALL_BYTES, limited_table.size_bytes // SIZE_RATIO_MIN)


def _find_table(
    planned_scan: PlannedScan, tables: Mapping[tuple[str | None, str | None, str], KnownTable]
) -> KnownTable | None:
    scan = planned_scan.scan
    return None if scan.selects_version else tables.get((scan.catalog, scan.schema, scan.table))
