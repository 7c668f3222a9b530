"""The results of rewriting: statements that read plans, with the summary for a response header."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import structlog

from seamark.connector.analysis.scans import read_at_snapshot, read_from_view
from seamark.connector.analysis.statement_cache import (
    ReadStatement,
    StatementText,
)
from seamark.connector.client.errors import ClientError
from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.plans import explain_failure
from seamark.connector.cubes.summaries import CubeSummary
from seamark.connector.plans.async_client import PlanView, TablePlanResponse
from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.plans.plan_requests import find_used_joins
from seamark.connector.plans.quotes import quote_name
from seamark.connector.plans.rewrites import RewrittenStatement, show_keys
from seamark.connector.plans.splices import Replacement, splice
from seamark.connector.trino.cube_rewrites import CubeRewrite
from seamark.connector.trino.protocol.access_rules import PlanInputs, TableName
from seamark.connector.trino.protocol.plan_withdrawal import PlanSnapshotRef
from seamark.connector.trino.protocol.statement_times import PlannedRead

TEXT_CHARACTERS_MAX = 1_000_000
"""The maximum length of a rewritten statement, in characters. It is the default of Trino's `query.max-length`."""
_SUMMARY_CHARACTERS_MAX = 2000
_REASON_CHARACTERS_MAX = 300
_REASON_CHARACTERS = " !'()*+,-./:<=>?@_"
"""The characters of a reason that are not escaped in a header."""
_log = structlog.get_logger("seamark.trino-proxy")


@dataclass(frozen=True)
class RewriteResult(RewrittenStatement):
    """The result of rewriting a statement. A response header contains its summary."""

    prepared: str | None = None
    """The prepared statement whose new text is `statement`, or None if `statement` itself is sent."""
    plans: Sequence[PlanSnapshotRef] = ()
    """The plans of tables and views that `statement` reads. The caller must release them with `Rewriter.release`."""
    used: PlanInputs = field(default_factory=PlanInputs)
    """The tables and columns by which files were pruned."""
    depends_on_data: bool = False
    """Whether the summary reveals data, so that only clients that may read the tables may receive it."""
    breaker_key: int = 0
    """A hash of the sender, and of the tables and columns that the statement reads."""
    rights_check: str = ""
    """A query that Trino must accept before `statement` is sent, or "".

    The text of `statement` then contains groups of a cube, and users can read the texts of their statements in Trino.
    The query returns no rows. Trino accepts it only if the sender may read the table and the columns.
    """
    reads: Sequence[PlannedRead] = ()
    """The files and bytes of each table that `statement` reads, for the query history."""
    is_wasted: bool = False
    """Whether all plans kept too many files, so that plans of the same statement will probably not be better."""


def build_cube_result(planned_scan: PlannedScan, cube: CubeRewrite) -> RewriteResult:
    """Return the result for a statement that reads a cube instead of the rows of a table.

    The summary has the number of read files and of all files, in total and for the table (`read/all`), and then the
    name of the cube with the number of files that it covers.
    """
    summary, name = cube.scan.summary, quote(".".join(planned_scan.table), safe=".")
    columns = {_name_table(planned_scan): names | planned_scan.scan.columns for planned_scan, names in cube.columns}
    plans = [] if cube.scan.plan_snapshot_id is None else [(planned_scan.table, cube.scan.plan_snapshot_id)]
    return RewriteResult(
        cube.text,
        f"rewritten; scans={len(cube.columns)}; files={summary.row_files}/{cube.scan.considered_files}; "
        f"{name}={summary.row_files}/{cube.scan.considered_files}; cube={quote(str(summary.index))}:{summary.files}",
        summary.row_files,
        cube.scan.considered_files,
        plans=plans,
        used=PlanInputs(columns, aggregated=frozenset(columns)),
        depends_on_data=True,
        rights_check=cube.rights_check,
    )


def explain_cube_failure(error: NotFromCube | ClientError | TimeoutError) -> CubeSummary:
    """Return the reason why no cube is used, for a header that any sender of the statement may read.

    The message of the server's error is only written to the log, because it may contain URLs or names of tables.
    """
    if not isinstance(error, ClientError):
        return explain_failure(error)
    _log.info("the groups of a cube cannot be read", error=str(error))
    return CubeSummary(None, 0, 0, f"the groups cannot be read: {type(error).__name__}")


def add_no_cube_reason(result: RewriteResult, cube: CubeSummary | None) -> RewriteResult:
    """Add the reason why no cube is used to the summary of a result."""
    if cube is None:
        return result
    summary = f"{result.summary}; no-cube={quote(str(cube.reason)[:_REASON_CHARACTERS_MAX], safe=_REASON_CHARACTERS)}"
    # A reason can reveal data, such as the number of files that the cube does not cover.
    return replace(result, summary=summary[:_SUMMARY_CHARACTERS_MAX], depends_on_data=True)


def build_result(
    text: StatementText,
    parsed_statement: ReadStatement,
    planned_scans: Sequence[PlannedScan],
    plans: Mapping[PlannedScan, TablePlanResponse],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
    views: Mapping[PlannedScan, PlanView],
) -> RewriteResult:
    """Return the rewritten statement with its summary.

    The plans of tables behind views are not inserted, because the text of a plan view already contains them.
    """
    # `within` is the view whose text contains the scan. It is empty for scans in the statement itself.
    outer_views = {planned_scan: view for planned_scan, view in views.items() if not planned_scan.within}
    own_plans = {planned_scan: plan for planned_scan, plan in plans.items() if not planned_scan.within}
    replacements = [
        read_at_snapshot(planned_scan.scan, int(plan.plan_snapshot_id or 0)) for planned_scan, plan in own_plans.items()
    ]
    replacements += [read_from_view(planned_scan.scan, view.name) for planned_scan, view in outer_views.items()]
    if outer_views:
        replacements.append(_write_access_checks(text, parsed_statement, outer_views))
    statement = splice(text.text, replacements)
    if len(statement) > TEXT_CHARACTERS_MAX:
        return RewriteResult(None, "unchanged; the text of the statement would be too long with plans")
    summary_parts, joins = [], []
    for planned_scan in planned_scans:
        if planned_scan in own_plans:  # The summary must not reveal the tables behind a view.
            plan, name = plans[planned_scan], quote(".".join(planned_scan.table), safe=".")
            summary_parts.append(f"{name}={plan.files}/{plan.considered_files}")
            used_joins = find_used_joins(dimensions.get(planned_scan, ()), plan)
            joins += [f"{name}.{quote(columns, safe='+')}:{show_keys(keys)}" for columns, keys in used_joins]
    summary_parts += [f"joins={','.join(joins)}"] if joins else []
    view_names = ",".join(
        quote(".".join(planned_scan.table), safe=".")
        for planned_scan in sorted(outer_views, key=lambda view: view.scan.start)
    )
    summary_parts += [f"views={view_names}"] if view_names else []
    summary = f"rewritten; scans={len(own_plans) + len(outer_views)}; files={_count_files(own_plans.values())}; "
    summary += "; ".join(summary_parts)
    plan_ids = {(planned_scan.table, int(plan.plan_snapshot_id or 0)) for planned_scan, plan in plans.items()}
    plan_ids |= {(planned_scan.table, view.plan_id) for planned_scan, view in views.items()}
    files, considered_files = (
        sum(plan.files for plan in plans.values()),
        sum(plan.considered_files for plan in plans.values()),
    )
    return RewriteResult(
        statement,
        summary[:_SUMMARY_CHARACTERS_MAX],
        files,
        considered_files,
        text.prepared,
        sorted(plan_ids),
        _collect_plan_inputs(plans, dimensions, views),
        depends_on_data=True,
        reads=[
            PlannedRead(planned_scan.table, plan.statement, plan.files, plan.bytes)
            for planned_scan, plan in plans.items()
        ],
    )


def _write_access_checks(
    text: StatementText, statement: ReadStatement, views: Mapping[PlannedScan, PlanView]
) -> Replacement:
    """Return queries for WITH that read the original views, so that Trino checks the access rules of the views.

    The queries are never executed. If the reference to a view is inside a string literal, as in EXECUTE IMMEDIATE, the
    quotes in the names of its columns are doubled.
    """
    with_offset, has_with = statement.with_position
    columns_by_name = {}
    for planned_scan, view in views.items():
        columns = ", ".join(map(quote_name, view.columns))
        columns = columns.replace("'", "''") if planned_scan.scan.quoted else columns
        columns_by_name[text.text[planned_scan.scan.start : planned_scan.scan.end]] = columns
    parts = [
        f'"~{number}" AS (SELECT {columns} FROM {name} WHERE FALSE)'  # noqa: S608
        for number, (name, columns) in enumerate(columns_by_name.items())
    ]
    query_list = ", ".join(parts)
    return Replacement(with_offset, with_offset, f"{query_list}, " if has_with else f"WITH {query_list} ")


def _collect_plan_inputs(
    plans: Mapping[PlannedScan, TablePlanResponse],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
    views: Mapping[PlannedScan, PlanView],
) -> PlanInputs:
    """Return the tables and columns by which files were pruned, so that Trino's access rules on them can be checked.

    Args:
        plans: The plans that the statement reads.
        dimensions: The joined tables whose rows may have pruned files of each scan, and their own joined tables.
        views: The plan views that the statement reads.
    """
    columns: defaultdict[TableName, set[str]] = defaultdict(set)
    limiting_tables: set[TableName] = set()

    def add_joins(planned_scan: PlannedScan, joined_tables: Sequence[Dimension]) -> None:
        for dimension in joined_tables:
            columns[_name_table(planned_scan)] |= {own_column for own_column, _ in dimension.on}
            columns[_name_table(dimension.planned)] |= dimension.columns
            limiting_tables.add(_name_table(dimension.planned))
            add_joins(dimension.planned, dimension.dimensions)

    for planned_scan, plan in plans.items():
        columns[_name_table(planned_scan)] |= planned_scan.scan.columns
        if find_used_joins(dimensions.get(planned_scan, ()), plan):
            add_joins(planned_scan, dimensions.get(planned_scan, ()))
    columns_by_table = {table: frozenset(names) for table, names in columns.items()}
    return PlanInputs(columns_by_table, frozenset(limiting_tables), frozenset(map(_name_table, views)))


def _name_table(planned_scan: PlannedScan) -> TableName:
    return planned_scan.catalog, ".".join(planned_scan.table[:-1]).lower(), planned_scan.table[-1].lower()


def _count_files(plans: Collection[TablePlanResponse]) -> str:
    return f"{sum(plan.files for plan in plans)}/{sum(plan.considered_files for plan in plans)}"
