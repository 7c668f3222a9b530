"""Runs an SQL query in DuckDB on only the files that its conditions and joins need.

    import seamark.duckdb
    con = seamark.duckdb.connect("http://127.0.0.1:8181")
    seamark.duckdb.sql(con, "SELECT … FROM sea.shop.orders JOIN …").show()

DuckDB itself reads all manifests of a table, and prunes files only by column bounds. This module parses the query
(`statements.py`) and requests a plan table for each table (`connector/plans/`). It replaces the names of the tables in
the text by the names of the plan tables, and DuckDB runs the new text. Plan tables are Iceberg tables, so DuckDB
applies deletes and schemas as usual.

An aggregate query of a table with cubes reads groups of a cube instead of rows, if the cube can answer the query
(`connector.duckdb.cube_queries`).

If a statement is not supported, or planning fails, the statement runs unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import duckdb
import pyarrow as pa

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.queries import Names
from seamark.connector.analysis.relative_times import find_today
from seamark.connector.analysis.scans import find_scans
from seamark.connector.client.errors import ClientError, InvalidRequest
from seamark.connector.client.names import join_name
from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.plans import (
    CUBE_FAILURES,
    CubeScan,
    build_negated_filter,
    convert_uuids,
    explain_failure,
    find_cube_table,
    scan_cube,
)
from seamark.connector.cubes.summaries import EXACT, OFF, ON, CubeSummary, check_cube_use
from seamark.connector.duckdb.cube_queries import DuckDBCubeQuery
from seamark.connector.duckdb.session import AttachedCatalog, list_attached_catalogs
from seamark.connector.duckdb.statements import DuckDBStatement, NamedRelation, mark_name
from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import (
    CubePlanRequest,
    KnownTable,
    Name,
    Seamark,
    TablePlanResponse,
    open_seamark,
    run_in_thread,
)
from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.plans.plan_requests import PlanRequests
from seamark.connector.plans.quotes import quote_name, quote_text
from seamark.connector.plans.rewrites import BUDGET_S, LEASE_S, MAX_KEPT_FRACTION, RewrittenStatement, write_summary
from seamark.connector.plans.splices import Replacement, splice
from seamark.connector.plans.zones import is_utc
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.protocol.wire import PLAN_MARK

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedQuery(RewrittenStatement):
    """A query whose text reads plan tables, which have only the files that the query needs."""

    bytes: int = 0
    """The total size of `files` in bytes."""
    refusal: str = ""
    """The reason why DuckDB would read a table wrongly or crash, or empty if the statement can run."""
    groups: pa.Table | None = None
    """The groups of a cube, which the text reads as `cube_queries.GROUPS`."""
    cube: CubeSummary | None = None
    """The use of cubes by the statement, or None if its table has no cube."""


@dataclass(frozen=True)
class _CatalogTable:
    """A reference to a table of an attached catalog."""

    catalog: str
    name: Name
    reference: NamedRelation


@dataclass(frozen=True)
class _Session:
    """The settings of a connection on which the names and literals of a statement depend."""

    database: str
    schema: str
    search_path: str
    utc: bool


def sql(
    con: duckdb.DuckDBPyConnection,
    text: str,
    params: Any = None,
    *,
    lease_s: int = LEASE_S,
    max_kept_fraction: float = MAX_KEPT_FRACTION,
    cubes: str = ON,
) -> duckdb.DuckDBPyRelation:
    """Return the same relation as `con.sql(text, params=params)`, which reads fewer files if possible.

    The relation reads the current state of its tables. It is valid for at least half of `lease_s` seconds, if the
    server grants such a long lease. A relation that depends on the current time is valid for at most a day. Python
    variables cannot be used as tables. Use `con.register` instead.

    Args:
        con: A connection with a catalog that was attached by `seamark.duckdb.connect` or `attach`.
        text: The query.
        params: The parameters of the query.
        lease_s: The duration of the lease to request, in seconds.
        max_kept_fraction: The maximum fraction of files that a plan of a table may keep. If it keeps more, the table
            itself is read, unless DuckDB would then leave out files with rows of the query.
        cubes: Whether the query uses cubes: `on`, `exact` (except sums of floats, and averages) or `off`.

    Raises:
        ValueError: `cubes` has another value.
        InvalidRequest: DuckDB would read a table of the statement wrongly, or would crash.
    """
    check_cube_use(cubes)
    planned_query = rewrite_query(con, text, params, lease_s=lease_s, max_kept_fraction=max_kept_fraction, cubes=cubes)
    _log.info("%s", planned_query.summary)
    if planned_query.refusal:
        raise InvalidRequest(planned_query.refusal, status=400)
    if planned_query.statement is not None:
        try:
            if planned_query.groups is not None:
                seamark_cube_groups = planned_query.groups  # noqa: F841  DuckDB finds the variable by the name in the text.
                return con.sql(planned_query.statement)
            return con.sql(planned_query.statement, params=params)
        except duckdb.Error as error:
            _log.warning("The original statement is run, because DuckDB does not accept it with plan tables: %s", error)
    return con.sql(text, params=params)


def rewrite_query(
    con: duckdb.DuckDBPyConnection,
    text: str,
    params: Any = None,
    *,
    lease_s: int = LEASE_S,
    max_kept_fraction: float = MAX_KEPT_FRACTION,
    cubes: str = ON,
) -> PlannedQuery:
    """Rewrite a query so that it reads plan tables, and create the plan tables that do not exist yet.

    The function does not run the query, and never raises an exception.
    """
    try:
        return _Query(con, text, params, lease_s, max_kept_fraction, cubes).plan()
    except _Misread as reason:
        return PlannedQuery(None, f"refused; {reason}", refusal=str(reason))
    except UnsupportedStatement as reason:
        return PlannedQuery(None, f"unchanged; {reason}")
    except (duckdb.Error, ClientError) as error:
        return PlannedQuery(None, f"unchanged; {str(error).partition(chr(10))[0]}")
    except Exception as error:  # noqa: BLE001  a bug in planning must fail no query
        _log.warning("The original statement is run, because its planning failed with a bug", exc_info=True)
        return PlannedQuery(None, f"unchanged; {type(error).__name__}")


class _Misread(Exception):
    """Raised if DuckDB would read a table of the statement wrongly."""


class _Query:
    """The planning of one query."""

    def __init__(
        self, con: duckdb.DuckDBPyConnection, text: str, params: Any, lease_s: int, max_kept_fraction: float, cubes: str
    ) -> None:
        self._con = con
        self._cubes = cubes
        self._statement = DuckDBStatement(text, params)
        self._lease_s = lease_s
        self._max_kept_fraction = max_kept_fraction
        self._scans: dict[int, PlannedScan] | UnsupportedStatement | None = None

    def plan(self) -> PlannedQuery:
        catalogs = list_attached_catalogs(self._con)
        if not catalogs:
            raise UnsupportedStatement("the connection has no catalog of seamark.duckdb.attach")
        session = self._read_session()
        tables = {}
        for number, reference in enumerate(self._statement.references):
            table = None if reference is None else self._resolve_table(reference, session, catalogs)
            if table is not None:
                tables[number] = table
        if not tables:
            raise UnsupportedStatement("the statement reads no table of a Seamark catalog")
        return run_in_thread(self._plan_tables(tables, catalogs, utc=session.utc))

    # Names

    def _read_session(self) -> _Session:
        """Read the settings of the connection.

        Raises:
            UnsupportedStatement: A setting changes the meaning of conditions, or a transaction is open.
        """
        settings = "current_database(), current_schema()" + "".join(
            f", current_setting('{name}')"
            for name in ("search_path", "TimeZone", "default_collation", "old_implicit_casting")
        )
        database, schema, path, zone, collation, casts = self._fetch_row(f"SELECT {settings}")
        if collation or casts:
            raise UnsupportedStatement("default_collation or old_implicit_casting is set, which changes comparisons")
        # now() returns the start of the transaction, so it does not change in an explicit transaction.
        if self._fetch_row("SELECT epoch_us(now())") == self._fetch_row("SELECT epoch_us(now())"):
            raise UnsupportedStatement("the connection is in a transaction, which has its own view of the tables")
        return _Session(str(database), str(schema), str(path), is_utc(str(zone)))

    def _fetch_row(self, query: str) -> tuple[Any, ...]:
        row = self._con.sql(query).fetchone()
        return row or ()

    def _resolve_table(
        self, reference: NamedRelation, session: _Session, catalogs: Mapping[str, AttachedCatalog]
    ) -> _CatalogTable | None:
        """Return the table to which a name refers, or None if no attached catalog has it.

        A name with one qualifier is ambiguous in DuckDB: the qualifier is a database if there is one of this name, and
        otherwise a schema. A name without a qualifier may also be a temporary table.

        Raises:
            UnsupportedStatement: The name refers to a view of DuckDB, which may read the same tables at another
                snapshot.
        """
        *qualifiers, table = reference.parts
        database, schema = session.database, session.schema
        match qualifiers:
            case [database_name, schema_name]:
                database, schema = database_name, schema_name
            case [schema_name] if not self._is_database(schema_name):
                schema = schema_name
            case [_]:
                # The name has a database and no schema, so it refers to no table of an attached catalog.
                database = ""
            case []:
                if "," in session.search_path or self._is_temporary(table):
                    database = ""
        if database.lower() in catalogs and PLAN_MARK not in table:
            return _CatalogTable(database, (*schema.split("."), table), reference)
        if self._fetch_row(f"SELECT 1 FROM duckdb_views() WHERE NOT internal AND view_name ILIKE {quote_text(table)}"):  # noqa: S608
            raise UnsupportedStatement(f"{table} is a view")
        return None

    def _is_database(self, name: str) -> bool:
        return bool(self._fetch_row(f"SELECT 1 FROM duckdb_databases() WHERE database_name ILIKE {quote_text(name)}"))  # noqa: S608

    def _is_temporary(self, name: str) -> bool:
        """Return whether a temporary table or view has the name, which hides the tables of other catalogs."""
        try:
            # Without the schema, DuckDB also looks for a schema `temp` of the current catalog. `table()` ignores views.
            self._con.sql(f"FROM temp.main.{quote_name(name)}")
        except duckdb.CatalogException:
            return False
        return True

    # Plans

    async def _plan_tables(
        self, tables: Mapping[int, _CatalogTable], catalogs: Mapping[str, AttachedCatalog], *, utc: bool
    ) -> PlannedQuery:
        """Return a query that reads a cube or plan tables in place of the tables.

        A plan table is a read-only table with the files that the server has selected for the conditions of the query.
        Planning takes at most `BUDGET_S` seconds.
        """
        until_s = asyncio.get_running_loop().time() + BUDGET_S
        # A relation is run later, possibly several times. The bounds of conditions with the current time are valid for
        # one day (`relative_times.py`), so the plans must not be valid for longer.
        lease_s = self._lease_s if find_today(self._statement.text) is None else min(self._lease_s, LEASE_S)
        async with AsyncExitStack() as stack, asyncio.timeout_at(until_s):
            servers = {}
            for name in sorted({table.catalog.lower() for table in tables.values()}):
                catalog = catalogs[name]
                servers[name] = await stack.enter_async_context(
                    open_seamark(catalog.uri, token=catalog.token, lease_s=lease_s)
                )
            tables_before = await _load_tables(tables, servers)
            cube = await self._plan_cube(tables, tables_before, servers, utc=utc)
            if isinstance(cube, PlannedQuery):
                return cube
            try:
                planned_query = await self._plan_rows(tables, tables_before, catalogs, servers, until_s, utc=utc)
            except UnsupportedStatement as error:
                return _add_cube(PlannedQuery(None, f"unchanged; {error}"), cube)
            return _add_cube(planned_query, cube)

    async def _plan_cube(
        self,
        tables: Mapping[int, _CatalogTable],
        known_tables: Mapping[int, KnownTable],
        servers: Mapping[str, Seamark],
        *,
        utc: bool,
    ) -> PlannedQuery | CubeSummary | None:
        """Return a query over a cube, or a summary that explains why no cube is used.

        The result is None if no table of the query has a cube.
        """
        cubes = {
            number: find_cube_table(known_table, truncates_in_utc=utc) for number, known_table in known_tables.items()
        }
        if not any(cubes.values()):
            return None
        try:
            if self._cubes == OFF:
                raise NotFromCube("the caller does not use cubes")
            if len(self._statement.references) != 1 or len(cubes) != 1:
                raise NotFromCube("the statement is not one SELECT of one table")
            ((number, cube_table),) = cubes.items()
            assert cube_table is not None
            query = DuckDBCubeQuery(
                self._con, self._statement, tables[number].reference, cube_table, floats=self._cubes != EXACT
            )
            table, server = tables[number], servers[tables[number].catalog.lower()]
            request = CubePlanRequest(
                table.name,
                query.translated.cube.id,
                query.translated.columns,
                self._find_filter(tables, known_tables, utc=utc),
                build_negated_filter(
                    query.translated, partial(self._find_table_filter, table, known_tables[number], utc=utc)
                ),
                table.reference.snapshot_id,
                hide_partitions=True,
            )
            scan = await scan_cube(server, query.translated, request, known_tables[number])
        except CUBE_FAILURES as error:
            return explain_failure(error)
        except duckdb.Error as error:
            return CubeSummary(None, 0, 0, str(error).partition("\n")[0])
        return self._write_cube_query(query, table, scan)

    def _write_cube_query(self, query: DuckDBCubeQuery, table: _CatalogTable, scan: CubeScan) -> PlannedQuery:
        levels = (table.catalog, ".".join(table.name[:-1]), str(scan.name))
        rows = None if scan.name is None else ".".join(map(quote_name, levels))
        summary = f"rewritten; {'.'.join(table.name)}={scan.summary.row_files}/{scan.considered_files}"
        return PlannedQuery(
            query.write(rows),
            f"{summary}; {scan.summary.text}",
            scan.summary.row_files,
            scan.considered_files,
            scan.row_bytes,
            groups=convert_uuids(scan.groups, query.translated),
            cube=scan.summary,
        )

    def _find_filter(
        self, tables: Mapping[int, _CatalogTable], known_tables: Mapping[int, KnownTable], *, utc: bool
    ) -> Expression | None:
        """Return a condition that is true for all needed rows of the query's only table, or None if none is known.

        Args:
            tables: The references to tables, by number.
            known_tables: The states of the tables, by the same numbers.
            utc: Whether the session's time zone is UTC.
        """
        try:
            scans = self._find_scans(tables, known_tables, utc=utc)
        except UnsupportedStatement:
            return None
        filters = [planned_scan.scan.filter for planned_scan in scans.values()]
        return filters[0] if len(filters) == 1 else None

    def _find_table_filter(
        self, table: _CatalogTable, known_table: KnownTable, alias: str, condition: str, *, utc: bool
    ) -> Expression | None:
        """Return a filter that is true for each row that meets a condition, or None if no filter is known.

        The condition is analysed like the WHERE clause of a query on the table.

        Args:
            table: The reference to the table.
            known_table: The state of the table.
            alias: The name by which the condition refers to the table.
            condition: The condition in DuckDB's SQL.
            utc: Whether the session's time zone is UTC.
        """
        name = self._statement.text[table.reference.start : table.reference.end]
        try:
            statement = DuckDBStatement(f"SELECT 1 FROM {name} AS {quote_name(alias)} WHERE {condition}")  # noqa: S608
            scans = self._find_scans_of(statement, {0: table}, {0: known_table}, utc=utc)
        except UnsupportedStatement:
            return None
        return scans[0].scan.filter if len(scans) == 1 else None

    async def _plan_rows(
        self,
        tables: Mapping[int, _CatalogTable],
        tables_before: Mapping[int, KnownTable],
        catalogs: Mapping[str, AttachedCatalog],
        servers: Mapping[str, Seamark],
        until_s: float,
        *,
        utc: bool,
    ) -> PlannedQuery:
        """Return the query with plan tables in place of the tables.

        Raises:
            UnsupportedStatement: The query has to read the tables themselves.
        """
        scans = self._find_scans(tables, tables_before, utc=utc)
        plans: dict[PlannedScan, TablePlanResponse] = {}
        dimensions: dict[PlannedScan, tuple[Dimension, ...]] = {}
        refusal_reason = ""
        for catalog, server in servers.items():
            own_scans = {number: scan for number, scan in scans.items() if scan.catalog == catalog}
            catalog_dimensions = joining.find_dimensions(own_scans, _index_by_mark(tables_before))
            requests = PlanRequests(server, self._max_kept_fraction, until_s, hide_partitions=True)
            plans |= await requests.request_plans(list(own_scans.values()), catalog_dimensions)
            dimensions |= catalog_dimensions
            refusal_reason = refusal_reason or requests.refusal_reason
            for misread, reason in requests.misread.items():
                raise _Misread(
                    f"DuckDB {duckdb.__version__} cannot read {join_name(misread)}: {reason}. Read it with "
                    "`seamark sql` or `seamark.scan`"
                )
        marks = {mark_name(number): number for number in tables}
        if not plans and not any(scan.scan.predicate is not None or scan.scan.joins for scan in scans.values()):
            raise UnsupportedStatement("no condition or join of the statement can prune files")
        if not plans:
            raise UnsupportedStatement(refusal_reason or "plans keep too many of the files")
        planned_numbers = {marks[scan.scan.table] for scan in plans}
        if any(tables[number].reference.snapshot_id is not None for number in tables_before.keys() - planned_numbers):
            # The conditions were read with the current columns. A plan is requested only if the snapshot has the
            # same columns.
            raise UnsupportedStatement("there is no plan of an earlier snapshot")
        tables_after = await _load_tables(tables, servers)
        if any(
            tables_after[number].columns != tables_before[number].columns
            for number in tables_before
            if number in tables_after
        ):
            raise UnsupportedStatement("the columns of a table changed during planning")
        return self._splice_plans(
            tables, {number: scan for number, scan in scans.items() if scan in plans}, plans, dimensions
        )

    def _find_scans(
        self, tables: Mapping[int, _CatalogTable], known_tables: Mapping[int, KnownTable], *, utc: bool
    ) -> dict[int, PlannedScan]:
        """Return the scans of the statement. The result or the error is stored for further calls.

        The analysis runs only once, because it changes the tree of the statement.

        Args:
            tables: The references to tables, by number.
            known_tables: The states of the tables in their catalogs, by the same numbers.
            utc: Whether the session's time zone is UTC.

        Raises:
            UnsupportedStatement: The statement is not supported.
        """
        if self._scans is None:
            try:
                self._scans = self._find_scans_of(self._statement, tables, known_tables, utc=utc)
            except UnsupportedStatement as error:
                self._scans = error
        if isinstance(self._scans, UnsupportedStatement):
            raise self._scans
        return self._scans

    def _find_scans_of(
        self,
        statement: DuckDBStatement,
        tables: Mapping[int, _CatalogTable],
        known_tables: Mapping[int, KnownTable],
        *,
        utc: bool,
    ) -> dict[int, PlannedScan]:
        """Return the scans of a statement by their numbers in the analysis.

        The analysis reads Trino's SQL, so the statement is first translated. In the translation, marks replace the
        names of tables (`mark_name`), and identify the reference of a scan. Joins refer to a scan by its number.

        Raises:
            UnsupportedStatement: The statement is not supported.
        """
        columns = {number: table.columns for number, table in known_tables.items() if table.columns is not None}
        marked_text = statement.to_marked_text(columns, utc=utc)
        marks = {mark_name(number): number for number in columns}
        today = find_today(statement.text)

        def find_columns(names: Names) -> Mapping[str, str] | None:
            _, _, table_name = names
            return columns.get(marks.get(table_name, -1))

        found_scans = find_scans(marked_text, find_columns=find_columns, today=today)
        return {
            scan_number: PlannedScan(
                replace(scan, snapshot_id=tables[number].reference.snapshot_id),
                tables[number].catalog.lower(),
                tables[number].name,
            )
            for scan_number, scan in enumerate(found_scans)
            if (number := marks.get(scan.table)) is not None
        }

    def _splice_plans(
        self,
        tables: Mapping[int, _CatalogTable],
        scans: Mapping[int, PlannedScan],
        plans: Mapping[PlannedScan, TablePlanResponse],
        dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
    ) -> PlannedQuery:
        """Return the text in which the names of plan tables replace those of the tables.

        A plan table has only one snapshot, so a version clause of a table is removed.

        Args:
            tables: The references to tables, by number.
            scans: The scans that have plans.
            plans: The plans of the scans.
            dimensions: The joined tables that may have left out files, for the summary.
        """
        marks = {mark_name(number): table for number, table in tables.items()}
        replacements = []
        for scan in scans.values():
            table, plan = marks[scan.scan.table], plans[scan]
            levels = (table.catalog, ".".join(table.name[:-1]), str(plan.name))
            text = ".".join(map(quote_name, levels)) + (table.reference.alias_needed or "")
            replacements.append(Replacement(table.reference.start, table.reference.end, text))
            if table.reference.version_span is not None:
                replacements.append(Replacement(*table.reference.version_span, ""))
        return PlannedQuery(
            splice(self._statement.text, replacements),
            write_summary({scan: plans[scan] for scan in scans.values()}, dimensions),
            sum(plan.files for plan in plans.values()),
            sum(plan.considered_files for plan in plans.values()),
            sum(plan.bytes for plan in plans.values()),
        )


def _add_cube(planned_query: PlannedQuery, cube: CubeSummary | None) -> PlannedQuery:
    """Return the query with the reason why it uses no cube. If no cube was considered, the query is unchanged."""
    return (
        planned_query
        if cube is None
        else replace(planned_query, summary=f"{planned_query.summary}; {cube.text}", cube=cube)
    )


async def _load_tables(tables: Mapping[int, _CatalogTable], servers: Mapping[str, Seamark]) -> dict[int, KnownTable]:
    """Return the current state of each table by the number of its reference. Views are left out."""
    names = sorted({(table.catalog.lower(), table.name) for table in tables.values()})
    answers = await asyncio.gather(*(servers[catalog].load_table(name) for catalog, name in names))
    tables_by_name = {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}
    return {
        number: tables_by_name[table.catalog.lower(), table.name]
        for number, table in tables.items()
        if (table.catalog.lower(), table.name) in tables_by_name
    }


def _index_by_mark(tables: Mapping[int, KnownTable]) -> dict[tuple[str | None, str | None, str], KnownTable]:
    return {(None, None, mark_name(number)): table for number, table in tables.items()}
