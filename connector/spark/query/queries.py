"""Runs a query in Spark on only the files that its conditions and joins need.

    from seamark.spark import sql
    sql(spark, "SELECT … FROM sea.ssb.lineorder JOIN …").show()

Spark's Iceberg connector sends filters to the server, but no joins, and it plans tables of format version 3 itself.
This module analyses the whole query (`name_positions.py`, `plan_reader.py`), requests plan tables (`connector/plans/`),
and replaces the table names in the query's text. Spark then runs the new text.

Invariant: if anything is uncertain or fails, the original text runs. Plan tables have a lease, and a DataFrame can read
them until the lease ends. INSERT, CREATE TABLE AS and MERGE read plan tables in their queries, and run once. Any other
statement that is not a query is passed to Spark once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.analysis.algebra.needed_rows import (
    build_condition,
    build_joins,
    intersect_joins,
    list_string_likes,
)
from seamark.connector.analysis.algebra.relations import Table
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from seamark.connector.cubes.plans import CUBE_FAILURES, build_negated_filter, explain_failure, scan_cube
from seamark.connector.cubes.star_scans import StarScan, find_group_condition
from seamark.connector.cubes.summaries import EXACT, OFF, CubeSummary, check_cube_use
from seamark.connector.jobs.statements import parse_statement
from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import (
    CubePlanRequest,
    KnownTable,
    Name,
    TablePlanResponse,
    open_seamark,
    run_in_thread,
)
from seamark.connector.plans.conditions import any_of, limit_text
from seamark.connector.plans.joins import Dimension
from seamark.connector.plans.plan_requests import PlanRequests
from seamark.connector.plans.quotes import backquote
from seamark.connector.plans.rewrites import BUDGET_S, LEASE_S, MAX_KEPT_FRACTION, RewrittenStatement, write_summary
from seamark.connector.plans.scan import NO_USE, Scan, TableUse
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import SparkColumn, list_spark_columns
from seamark.connector.spark.query.cube_queries import QueryOverCube, translate_text
from seamark.connector.spark.query.maintenance import run_maintenance
from seamark.connector.spark.query.name_positions import (
    ReferencePosition,
    UnsupportedQuery,
    find_query,
    find_references,
    insert_markers,
    is_write,
    parse_marker_number,
    replace_names,
)
from seamark.connector.spark.query.plan_reader import MarkedTable, PlanReader, PlanTooLarge
from seamark.connector.spark.query.table_uses import read_table_uses
from seamark.connector.streams.status import flush_stream
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.protocol.wire import PLAN_MARK, STREAM_ENABLED

_CATALOG_CLASS = "org.apache.iceberg.spark.SparkCatalog"
_TABLE_CLASS = "org.apache.iceberg.spark.source.SparkTable"
_PLANNED_TABLE_CLASS = "org.apache.iceberg.rest.RESTTable"
"""The class of a table whose scans the server plans."""
_VERSION_LEVEL = re.compile(r"(branch|tag)_(.+)|(snapshot_id)_([0-9]{1,19})", re.ASCII)
_SETTINGS = ("spark.wap.branch", "spark.wap.id")
"""Settings that make Iceberg read a snapshot that is not the table's current snapshot."""
_ENGINE = "spark"
"""The name of the engine in the query history."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewrittenQuery(RewrittenStatement):
    """A query with plan tables in its text, or the reason why its text is unchanged."""

    is_write: bool = False
    """Whether the statement writes the rows of a query."""
    schemas: Mapping[Name, int] | None = None
    """The ids of the schemas with which the text was analysed, by plan table."""
    cube: CubeSummary | None = None
    """A summary of how the query uses a cube, or None if its tables have no cubes."""
    over_cube: QueryOverCube | None = None
    """The query over a cube. If it is set, `statement` is not used."""


@dataclass(frozen=True)
class _Table:
    """A table of the query, in the version that the query reads."""

    catalog: str
    name: Name
    state: KnownTable
    schema_id: int
    columns: Mapping[str, SparkColumn]
    """The columns whose values Spark compares as Iceberg does."""
    snapshot_id: int | None
    ref: str | None
    """The version in a name such as `db.t.branch_x` or `db.t.tag_x`."""
    is_stream: bool
    """Whether the table may have rows that wait for a flush. Spark misses them if it plans the table itself."""

    @property
    def qualified_name(self) -> tuple[str, Name]:
        return self.catalog, self.name


def sql(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    lease_s: int = LEASE_S,
    max_kept_fraction: float = MAX_KEPT_FRACTION,
    cubes: str = OFF,
) -> DataFrame:
    """Return the result of `spark.sql(text, args)`, but read fewer files if possible.

    The DataFrame reads the current snapshots of its tables. It is valid for at least half of `lease_s` seconds, but the
    server may grant a shorter lease. If the query uses the current time, the DataFrame is valid for at most a day. A
    table whose plan keeps a larger share of its files than `max_kept_fraction` is read by its own name.

    `ALTER TABLE … MERGE FILES` and `ALTER TABLE … PARTITION (…) DROP COLUMNS (…)` of a Seamark table run as Spark jobs.
    The DataFrame then has the counts of the job.

    With `cubes="on"`, an aggregate query of one table or a star join reads groups of a cube if the result can be
    computed from the cube. With `cubes="exact"`, it does so only without sums of floats and without averages.

    Raises:
        ValueError: The value of `cubes` is unknown.
        ClientError: The server refuses the job.
        Unreadable: A file cannot be read by the job.
    """
    check_cube_use(cubes)
    if args is None and (statement := parse_statement(text)) is not None:
        counts = run_maintenance(spark, statement)
        if counts is not None:
            return counts
    rewritten = rewrite_query(spark, text, args, lease_s=lease_s, max_kept_fraction=max_kept_fraction, cubes=cubes)
    _log.info("%s", rewritten.summary)
    if rewritten.over_cube is not None:
        try:
            frame = rewritten.over_cube.run(spark)
            if _has_analyzed_schemas(Catalyst(spark), _read_analyzed_plan(frame), rewritten):
                return frame
            _log.warning("The original text runs, because its table was altered after the analysis")
        except Exception as error:  # noqa: BLE001  a bug here must not fail a query
            _log.warning("The original text runs, because it cannot be answered from a cube: %s", error)
    elif rewritten.statement is not None and rewritten.is_write:
        if _may_run(spark, rewritten):
            try:
                return run_text(spark, rewritten.statement, args)
            except AnalysisException as error:
                if not is_plan_gone(error):
                    raise
    elif rewritten.statement is not None:
        try:
            frame = run_text(spark, rewritten.statement, args)
            if _has_analyzed_schemas(Catalyst(spark), _read_analyzed_plan(frame), rewritten):
                return frame
            _log.warning("The original text runs, because its tables were altered after the analysis")
        except (PySparkException, Py4JError) as error:
            _log.warning("The original text runs, because Spark does not accept it with plan tables: %s", error)
    frame = run_text(spark, text, args)
    # The frame has loaded the tables before rows were flushed, so the text is run again to load them with these rows.
    return run_text(spark, text, args) if _flush_unplanned_streams(spark, frame) else frame


def _flush_unplanned_streams(spark: SparkSession, frame: DataFrame) -> bool:
    """Flush the stream tables that Spark plans itself, because Spark's plans miss rows that wait for a flush.

    Returns:
        Whether rows were flushed, so that the query has to load its tables again. False after an error, which is only
        logged. The query may then miss rows.
    """
    catalyst, names = Catalyst(spark), set()
    try:
        for leaf in catalyst.leaves(_read_analyzed_plan(frame)):
            name = catalyst.read_identifier(leaf) if catalyst.is_catalog_table(leaf) else None
            if name is None or leaf.catalog().isEmpty() or PLAN_MARK in name[-1] or _VERSION_LEVEL.fullmatch(name[-1]):
                continue
            catalog = leaf.catalog().get()
            if (
                catalyst.read_class_name(catalog) != _CATALOG_CLASS
                or catalyst.read_class_name(leaf.table()) != _TABLE_CLASS
            ):
                continue
            table = leaf.table().table()
            if _is_stream(catalyst, table) and catalyst.read_class_name(table) != _PLANNED_TABLE_CLASS:
                names.add((str(catalog.name()), name))
        flushed_rows = 0
        for catalog_name, name in sorted(names):
            uri, token = (
                str(spark.conf.get(f"spark.sql.catalog.{catalog_name}.{key}", "")) for key in ("uri", "token")
            )
            if uri.startswith("http"):
                flushed_rows += flush_stream(SeamarkClient(uri, token=token or None), name)
    except (PySparkException, Py4JError, ClientError) as error:
        _log.warning("The query may miss rows of stream tables that wait for a flush: %s", error)
        return False
    return flushed_rows > 0


def _is_stream(catalyst: Catalyst, table: Any) -> bool:
    return catalyst.read_property(table, STREAM_ENABLED).lower() == "true"


def plan_source(spark: SparkSession, text: str, args: Any, *, lease_s: int, max_kept_fraction: float) -> str:
    """Return the text of a statement that writes the rows of a query, with plan tables in the query if possible."""
    rewritten = rewrite_query(spark, text, args, lease_s=lease_s, max_kept_fraction=max_kept_fraction)
    _log.info("%s", rewritten.summary)
    return rewritten.statement if rewritten.statement is not None and _may_run(spark, rewritten) else text


def is_plan_gone(error: AnalysisException) -> bool:
    """Return whether Spark failed because it did not find a plan table. If so, Spark has run no job."""
    return "TABLE_OR_VIEW_NOT_FOUND" in str(error) and PLAN_MARK in str(error)


def _may_run(spark: SparkSession, rewritten: RewrittenQuery) -> bool:
    """Return whether Spark accepts the query of a writing statement with its plan tables.

    Only the query is analysed, so nothing is written. The tables must also still have the analysed schemas.
    """
    catalyst = Catalyst(spark)
    try:
        plan = catalyst.analyze(find_query(catalyst, catalyst.parse(str(rewritten.statement))))
        if _has_analyzed_schemas(catalyst, plan, rewritten):
            return True
        _log.warning("The original text runs, because its tables were altered after the analysis")
    except (PySparkException, Py4JError) as error:
        _log.warning("The original text runs, because Spark does not accept it with plan tables: %s", error)
    return False


def rewrite_query(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    lease_s: int = LEASE_S,
    max_kept_fraction: float = MAX_KEPT_FRACTION,
    cubes: str = OFF,
) -> RewrittenQuery:
    """Return the text with the names of plan tables, and create the plan tables.

    The function does not run the query, and it never raises.
    """
    try:
        return _Query(spark, text, args, lease_s, max_kept_fraction, cubes).rewrite()
    except (UnsupportedQuery, PlanTooLarge) as problem:
        return RewrittenQuery(None, f"unchanged; {problem or 'too large a plan'}")
    except (PySparkException, Py4JError) as error:
        return RewrittenQuery(None, f"unchanged; Spark cannot read it: {str(error).strip().partition(chr(10))[0]}")
    except Exception as error:  # noqa: BLE001  a bug here must not fail a query
        _log.warning("The original text runs, because of a bug in the analysis", exc_info=True)
        return RewrittenQuery(None, f"unchanged; {type(error).__name__}")


def run_text(spark: SparkSession, text: str, args: Any) -> DataFrame:
    return spark.sql(text) if args is None else spark.sql(text, args)


class _Query:
    """The analysis of one query."""

    def __init__(
        self, spark: SparkSession, text: str, args: Any, lease_s: int, max_kept_fraction: float, cubes: str
    ) -> None:
        self._spark = spark
        self._cubes = cubes
        self._text = text
        self._args = args
        self._lease_s = lease_s
        self._max_kept_fraction = max_kept_fraction
        self._catalyst = Catalyst(spark)
        self._is_write = False
        self._settings: dict[str, str] = {}
        self._tables: dict[int, _Table] = {}
        """The tables, by the numbers of the markers: aliases that are added to the references in the text."""
        self._markers: dict[int, int] = {}
        """The numbers of the markers, by the ids of the tables' attributes."""

    def rewrite(self) -> RewrittenQuery:
        if any(self._spark.conf.get(name, None) for name in _SETTINGS):
            raise UnsupportedQuery("the session reads a branch of a write-audit-publish workflow")
        statement = self._catalyst.parse(self._text)
        references = find_references(self._catalyst, self._text, statement)
        if not references:
            raise UnsupportedQuery("no table")
        self._is_write = is_write(self._catalyst, statement)
        if self._is_write and self._args:
            raise UnsupportedQuery("a statement that writes has parameters")
        if self._catalyst.has_cached() and self._reads_cached():
            raise UnsupportedQuery("the query reads data that the session has cached")
        plan = self._analyze_text(insert_markers(self._text, references))
        scans = self._find_scans(references, plan)
        cube = self._request_cube(references, scans)
        if isinstance(cube, RewrittenQuery):
            return cube
        try:
            has_stream = any(self._tables[marker].is_stream for marker in scans)
            if not has_stream and not any(scan.condition is not None or scan.joins for scan in scans.values()):
                raise UnsupportedQuery("the query has no table of a Seamark server whose files could be pruned")
            rewritten = self._request_plans(references, scans)
        except UnsupportedQuery as error:
            if cube is None:
                raise
            rewritten = RewrittenQuery(None, f"unchanged; {error}")
        return rewritten if cube is None else replace(rewritten, summary=f"{rewritten.summary}; {cube.text}", cube=cube)

    def _find_table_filter(self, name: str, alias: str, condition: str) -> Expression | None:
        """Return a filter that is true for each row of a table that meets a condition, or None if none is known.

        The condition is read like the WHERE clause of a query on the table.

        Args:
            name: The quoted name of the table.
            alias: The name by which the condition refers to the table.
            condition: The condition, in Spark's SQL.
        """
        text = f"SELECT 1 FROM {name} AS {backquote(alias)} WHERE {condition}"  # noqa: S608
        query = _Query(self._spark, text, None, self._lease_s, self._max_kept_fraction, OFF)
        try:
            references = find_references(self._catalyst, text, self._catalyst.parse(text))
            scans = query._find_scans(references, query._analyze_text(insert_markers(text, references)))
        except (UnsupportedQuery, PlanTooLarge, PySparkException, Py4JError):
            return None
        filters = [scan.filter for scan in scans.values()]
        return filters[0] if len(filters) == 1 else None

    def _request_cube(
        self, references: Sequence[ReferencePosition], scans: Mapping[int, Scan]
    ) -> RewrittenQuery | CubeSummary | None:
        """Return a query over a cube, or the reason why no cube is used, or None if no table has a cube.

        The query reads one table, or joins a fact table with dimension tables (a star join).

        Args:
            references: The references to tables in the text.
            scans: The scan of each table, by the number of its reference.
        """
        if self._cubes == OFF or self._is_write or self._args or len(references) != len(scans):
            return None
        tables = [self._tables[marker] for marker in scans]
        if len({table.catalog for table in tables}) != 1:
            return None
        table = tables[0]
        uri, token = self._read_setting(table.catalog, "uri"), self._read_setting(table.catalog, "token") or None

        async def request_cube() -> RewrittenQuery | None:
            async with (
                asyncio.timeout(BUDGET_S),
                open_seamark(uri, token=token, lease_s=self._lease_s) as seamark,
            ):
                star_scans = []
                for star_table, scan in zip(tables, scans.values(), strict=True):
                    state = await seamark.load_table(star_table.name)
                    if state is None:
                        return None
                    relation = f"{self._text[scan.start : scan.end]} VERSION AS OF {state.snapshot_id}"
                    star_scans.append(StarScan(scan, star_table.name, state, relation))
                if all(star_scan.table.cube_metadata is None for star_scan in star_scans):
                    return None
                number, statement = translate_text(self._spark, self._text, star_scans, floats=self._cubes != EXACT)
                facts, table = star_scans.pop(number), tables[number]
                scan, state = facts.scan, facts.table
                request = CubePlanRequest(
                    table.name,
                    statement.cube.id,
                    statement.columns,
                    scan.filter,
                    build_negated_filter(
                        statement, partial(self._find_table_filter, self._text[scan.start : scan.end])
                    ),
                    snapshot_id=scan.snapshot_id,
                    ref=scan.ref,
                    group_filter=find_group_condition(statement, star_scans),
                )
                answer = await scan_cube(seamark, statement, request, state)
                name = None if answer.name is None else (table.catalog, *table.name[:-1], answer.name)
                return RewrittenQuery(
                    None,
                    f"rewritten; {'.'.join(table.name)}={answer.summary.row_files}/{answer.considered_files}; "
                    f"{answer.summary.text}",
                    answer.summary.row_files,
                    answer.considered_files,
                    schemas={} if name is None else {name: table.schema_id},
                    cube=answer.summary,
                    over_cube=QueryOverCube(self._text, statement, answer.groups, name),
                )

        try:
            return run_in_thread(request_cube())
        except CUBE_FAILURES as error:
            return explain_failure(error)

    def _analyze_text(self, text: str) -> Node:
        """Analyse the query of the text without running it, and return the plan."""
        if self._is_write:
            return self._catalyst.analyze(find_query(self._catalyst, self._catalyst.parse(text)))
        return _read_analyzed_plan(run_text(self._spark, text, self._args))

    def _reads_cached(self) -> bool:
        """Return whether the query may read data that the session has cached."""
        if self._is_write:  # The text of a statement that writes must not run here.
            return True
        execution = run_text(self._spark, self._text, self._args)._jdf.queryExecution()
        return any(
            "InMemory" in self._catalyst.find_kind(leaf) for leaf in self._catalyst.leaves(execution.withCachedData())
        )

    # Tables of the query

    def _find_scans(self, references: Sequence[ReferencePosition], plan: Node) -> dict[int, Scan]:
        """Return the scans of the query, by the number of their reference to a table in the text.

        The analysed text has a marker, which is an alias with this number, at each reference (`insert_markers`).
        """
        plan = self._catalyst.inline_with(plan)
        if self._catalyst.has_current_time(plan):
            # A DataFrame may run later and several times. The bounds of conditions with the current time are valid for
            # one day (`relative_times.py`), so the plans must not be valid for longer.
            self._lease_s = min(self._lease_s, LEASE_S)
        self._find_tables(plan)
        reader = PlanReader(self._catalyst, self._find_marked_table)
        simplified_plan = self._catalyst.simplify(plan)
        reader.push_conditions_down(simplified_plan)
        uses = self._read_uses(simplified_plan)
        by_marker: defaultdict[int, list[Table]] = defaultdict(list)
        for read_table, marker in reader.tables.items():
            by_marker[marker].append(read_table)
        scans = {}
        for marker, table in sorted(self._tables.items()):
            marked_tables, reference = by_marker.get(marker, []), references[marker]
            # Literals of instants contain their zone, so the session's zone does not matter.
            condition = any_of(build_condition(part, utc=True) for part in marked_tables) if marked_tables else None
            scans[marker] = Scan(
                catalog=table.catalog,
                schema=".".join(table.name[:-1]),
                table=table.name[-1],
                start=reference.start,
                end=reference.end,
                name_start=reference.start,
                alias_needed=reference.alias,
                snapshot_id=reference.snapshot_id if table.snapshot_id is None else table.snapshot_id,
                version_span=None,
                condition=limit_text(condition),
                likes=list_string_likes(marked_tables),
                joins=intersect_joins(
                    [
                        build_joins(part, partial(_find_marker, reader.tables, marker), utc=True)
                        for part in marked_tables
                    ]
                ),
                ref=reference.ref if table.ref is None else table.ref,
                query_use=uses.get(marker, NO_USE),
            )
        return scans

    def _read_uses(self, plan: Node) -> dict[int, TableUse]:
        """Return the uses of the tables for the query history, by marker. They do not change the query."""
        try:
            return read_table_uses(self._catalyst, plan, self._markers)
        except (PySparkException, Py4JError) as error:
            _log.debug("the query history gets no columns and no aggregates of a query: %s", error)
            return {}

    def _find_tables(self, plan: Node) -> None:
        """Find the table of each marker, an alias that the text has at each reference to a table.

        Tables that a view in the query also reads are left out, because a table is read at one snapshot.
        """
        catalyst, unmarked_names = self._catalyst, set()
        for leaf, marker in catalyst.find_aliased_leaves(plan, parse_marker_number):
            table = self._read_table(leaf)
            if table is None:
                continue
            numbers = [number for number, _ in catalyst.list_attributes(leaf)]
            if marker is None:
                unmarked_names.add(table.qualified_name)
            elif self._tables.setdefault(marker, table) == table:
                self._markers |= dict.fromkeys(numbers, marker)
        self._tables = {
            marker: table for marker, table in self._tables.items() if table.qualified_name not in unmarked_names
        }

    def _find_marked_table(self, leaf: Node) -> MarkedTable | None:
        """Return the table of a leaf, or None if the leaf has no marker.

        Raises:
            UnsupportedQuery: The leaf has no marker, but reads the same table as a marker. Both would need the same
                plan.
        """
        if not self._catalyst.is_catalog_table(leaf):
            return None
        attributes = self._catalyst.list_attributes(leaf)
        markers = {self._markers.get(number) for number, _ in attributes}
        marker = markers.pop() if len(markers) == 1 else None
        table = None if marker is None else self._tables.get(marker)
        if table is not None and marker is not None:
            return MarkedTable(
                marker, {number: table.columns[name] for number, name in attributes if name in table.columns}
            )
        table = self._read_table(leaf) if marker is None else None
        if table is not None and table.qualified_name in {marked.qualified_name for marked in self._tables.values()}:
            raise UnsupportedQuery("two of its relations read the same table and cannot be distinguished")
        return None

    def _read_table(self, leaf: Node) -> _Table | None:
        """Return the table if the leaf is a table of an Iceberg REST catalog. Otherwise return None.

        A plan table is also not returned, because it is already the result of a plan.
        """
        if not self._catalyst.is_catalog_table(leaf):
            return None
        name, catalog = self._catalyst.read_identifier(leaf), leaf.catalog()
        if name is None or catalog.isEmpty():
            return None
        catalog = catalog.get()
        if self._catalyst.read_class_name(catalog) != _CATALOG_CLASS:
            return None
        catalog_name = str(catalog.name())
        if not self._read_setting(catalog_name, "uri").startswith("http") or PLAN_MARK in name[-1]:
            return None
        table = leaf.table().table()
        schema, snapshot = self._catalyst.read_iceberg_schema(table), self._catalyst.read_iceberg_snapshot(table)
        summary = {} if snapshot is None else snapshot.get("summary", {})
        state = KnownTable(
            "",
            None,
            None if snapshot is None else int(snapshot["snapshot-id"]),
            *(parse_count(summary, name, 0) for name in ("total-files-size", "total-data-files")),
        )
        columns = {column.name: column for column in list_spark_columns(schema["fields"])}
        name, number, ref = self._split_version(name, leaf.table())
        is_stream = number is None and ref is None and _is_stream(self._catalyst, table)
        return _Table(catalog_name, name, state, int(schema["schema-id"]), columns, number, ref, is_stream)

    def _split_version(self, name: Name, table: Node) -> tuple[Name, int | None, str | None]:
        """Split a name such as `db.t.snapshot_id_1` into the table's name and the version.

        Returns:
            The name of the table, the snapshot id, and the branch or tag. The name is unchanged if a table has this
            name, or if Iceberg does not read its last level as a version.
        """
        match = _VERSION_LEVEL.fullmatch(name[-1])
        if match is None or self._catalyst.read_class_name(table) != _TABLE_CLASS:
            return name, None, None
        kind, version = (group for group in match.groups() if group is not None)
        snapshot_id, branch = table.snapshotId(), table.branch()
        if kind == "branch":
            return (name, None, None) if branch != version else (name[:-1], None, version)
        if snapshot_id is None or branch is not None:
            return name, None, None
        if kind == "tag":
            ref = table.table().refs().get(version)
            is_read = ref is not None and int(ref.snapshotId()) == int(snapshot_id)
            return (name[:-1], None, version) if is_read else (name, None, None)
        return (name[:-1], int(snapshot_id), None) if int(version) == int(snapshot_id) else (name, None, None)

    def _read_setting(self, catalog: str, name: str) -> str:
        key = f"spark.sql.catalog.{catalog}.{name}"
        if key not in self._settings:
            self._settings[key] = str(self._spark.conf.get(key, "") or "")
        return self._settings[key]

    # Plan requests

    def _request_plans(self, references: Sequence[ReferencePosition], scans: Mapping[int, Scan]) -> RewrittenQuery:
        """Request plans from the server of each catalog, and put the names of the plan tables into the text.

        Args:
            references: The references to tables in the text. The index of a reference is the number of its marker.
            scans: The scans of these tables, by the number of the marker.

        Raises:
            UnsupportedQuery: There is no plan. The message is a server's reason, or that plans keep too many files.
        """
        markers: dict[joining.PlannedScan, int] = {}
        plans: dict[joining.PlannedScan, TablePlanResponse] = {}
        dimensions: dict[joining.PlannedScan, tuple[Dimension, ...]] = {}
        refusal_reason = ""
        for catalog in sorted({self._tables[marker].catalog for marker in scans}):
            own_scans = {marker: scan for marker, scan in scans.items() if scan.catalog == catalog}
            planned_scans = {
                marker: joining.PlannedScan(scan, catalog, self._tables[marker].name)
                for marker, scan in own_scans.items()
            }
            catalog_dimensions, catalog_plans, reason = self._request_catalog_plans(catalog, planned_scans)
            markers |= {planned_scan: marker for marker, planned_scan in planned_scans.items()}
            plans |= catalog_plans
            dimensions |= catalog_dimensions
            refusal_reason = refusal_reason or reason
        if not plans:
            raise UnsupportedQuery(refusal_reason or "plans keep too many of the files")
        names = {
            markers[planned_scan]: (planned_scan.catalog, *planned_scan.table[:-1], str(plan.name))
            for planned_scan, plan in plans.items()
        }
        return RewrittenQuery(
            replace_names(self._text, {references[marker]: name for marker, name in names.items()}),
            write_summary(plans, dimensions),
            sum(plan.files for plan in plans.values()),
            sum(plan.considered_files for plan in plans.values()),
            self._is_write,
            {name: self._tables[marker].schema_id for marker, name in names.items()},
        )

    def _request_catalog_plans(
        self,
        catalog: str,
        planned_scans: Mapping[int, joining.PlannedScan],
    ) -> tuple[dict[joining.PlannedScan, tuple[Dimension, ...]], dict[joining.PlannedScan, TablePlanResponse], str]:
        """Return the dimensions and the plans of the scans of a catalog, and the reason for the last missing plan.

        A dimension is a small joined table whose matching rows restrict the files of a scan.

        Args:
            catalog: The name of the catalog in the session.
            planned_scans: The scans of its tables, by their markers.
        """
        uri, token = self._read_setting(catalog, "uri"), self._read_setting(catalog, "token") or None

        streams = {self._tables[marker].name for marker in planned_scans if self._tables[marker].is_stream}

        async def request_plans() -> tuple[
            dict[joining.PlannedScan, tuple[Dimension, ...]], dict[joining.PlannedScan, TablePlanResponse], str
        ]:
            until_s = asyncio.get_running_loop().time() + BUDGET_S
            async with open_seamark(uri, token=token, lease_s=self._lease_s, engine=_ENGINE) as seamark:
                requests = PlanRequests(seamark, self._max_kept_fraction, until_s, streams=streams)
                # Spark has loaded a stream table without the rows that wait for a flush, but plans include these rows.
                stream_states = await requests.request_all({name: seamark.load_table(name) for name in streams})
                states = {}
                for marker, planned_scan in planned_scans.items():
                    state = (
                        stream_states.get(planned_scan.table)
                        if planned_scan.table in streams
                        else self._tables[marker].state
                    )
                    if state is not None:
                        states[planned_scan.scan.catalog, planned_scan.scan.schema, planned_scan.scan.table] = state
                dimensions = joining.find_dimensions(planned_scans, states)
                return (
                    dimensions,
                    await requests.request_plans(list(planned_scans.values()), dimensions),
                    requests.refusal_reason,
                )

        return run_in_thread(request_plans())


def _find_marker(markers: Mapping[Table, int], own_marker: int, table: Table) -> int | None:
    """Return the number of the reference to a joined table in the text.

    Each reference in the text has a marker, which is an alias with the number of the reference.

    Args:
        markers: The numbers of the markers of the tables.
        own_marker: The number of the marker of the table whose joins are read.
        table: The table on the other side of a join.

    Returns:
        The number, or None if `table` has the marker `own_marker` or no marker.
    """
    marker = markers.get(table)
    return None if marker == own_marker else marker


def _read_analyzed_plan(frame: DataFrame) -> Node:
    return frame._jdf.queryExecution().analyzed()


def _has_analyzed_schemas(catalyst: Catalyst, plan: Node, rewritten: RewrittenQuery) -> bool:
    """Return whether each plan table exists and has the schema with which its conditions were read."""
    schema_ids = {}
    for leaf in catalyst.leaves(plan):
        name = catalyst.read_identifier(leaf) if catalyst.is_catalog_table(leaf) else None
        if name is not None and PLAN_MARK in name[-1]:
            schema_ids[(str(leaf.catalog().get().name()), *name)] = int(leaf.table().table().schema().schemaId())
    return schema_ids == rewritten.schemas
