"""A session that runs SQL: it parses a statement once, plans it, chooses an engine, and runs the statement there.

    with SqlSession("http://127.0.0.1:8181") as session:
        for batch in session.sql("SELECT … FROM shop.orders").batches:
            ...

Connections stay open. DuckDB's connection for queries, INSERT, UPDATE and DELETE has no extensions and opens no files,
because Seamark's reader and writer open the files. The connection for CREATE and DROP is opened at its first use, and
attaches the catalog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import duckdb
import pyarrow as pa
from sqlglot import exp

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.engines import build_catalog_conf
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import join_name
from seamark.connector.duckdb.session import connect
from seamark.connector.plans.async_client import Name
from seamark.connector.plans.quotes import quote_name
from seamark.connector.plans.splices import Replacement, splice
from seamark.connector.read.tables import OpenTable
from seamark.connector.sql.changes import DuckDBChange, translate_change
from seamark.connector.sql.choice import AUTO, DUCKDB, LARGE_BYTES, SPARK, TRINO, Choice, StatementProfile, choose
from seamark.connector.sql.cubes.computed_groups import ComputedGroups
from seamark.connector.sql.cubes.plans import CUBE_USES, ON, CubePlan, CubeSummary, plan_cube
from seamark.connector.sql.cubes.queries import DELETED_ROWS, GROUPS
from seamark.connector.sql.duckdb_engine import (
    DuckDBFailed,
    DuckDBLimits,
    execute,
    open_connection,
    register_stream,
    register_tables,
)
from seamark.connector.sql.prepared import PreparedQueries, PreparedQuery, prepare
from seamark.connector.sql.queries import DuckDBQuery
from seamark.connector.sql.reads import PlannedTableRead, ReadPlanner, SessionTables, StatementTables, find_scans
from seamark.connector.sql.row_changes import ComputedRows, change_rows, insert_rows
from seamark.connector.sql.scopes import StoredTable
from seamark.connector.sql.spark_engine import SparkStatements, write_spark_text
from seamark.connector.sql.statement import Kind, SqlStatement, parse
from seamark.connector.sql.statement_times import measure_time, report_times
from seamark.connector.sql.trino_engine import TrinoAddress, TrinoRows
from seamark.connector.sql.types import UnsupportedInDuckDB
from seamark.formats.iceberg.expressions.expression import TRUE

CATALOG = "sea"
_DONE_SCHEMA = pa.schema([("rows", pa.int64())])


@dataclass(frozen=True)
class Engines:
    """The engines in addition to DuckDB, and the settings that determine when they are used."""

    wanted: str = AUTO
    trino: str | None = None
    """The URL of a Trino coordinator or of Seamark's proxy: `http://user@host:port?catalog=name`."""
    trino_password: str | None = field(default=None, repr=False)
    spark: str | None = None
    """The URL of Spark Connect, `sc://host:port`, or the name of a Spark master, such as `local[2]`."""
    spark_catalog: str = CATALOG
    large_bytes: int = LARGE_BYTES

    @property
    def available(self) -> frozenset[str]:
        urls = {TRINO: self.trino, SPARK: self.spark}
        return frozenset({DUCKDB, *(name for name, url in urls.items() if url is not None)})


@dataclass(frozen=True)
class TableSummary:
    """The files and columns that a reference to a table reads.

    Attributes:
        name: The name of the table, with its schema.
        files: The number of files that are read.
        considered_files: The number of files of the table before pruning. At least `files`.
        bytes: The size of the files that are read.
        columns: The number of columns that are read.
        joins: The columns by which joins with other tables pruned files, each with the number of keys of the other
            table. The number is None if an index on attributes of the other table pruned the files.
    """

    name: tuple[str, ...]
    files: int
    considered_files: int
    bytes: int
    columns: int
    joins: tuple[tuple[str, int | None], ...] = ()

    @property
    def shown_name(self) -> str:
        return join_name(self.name)


@dataclass(frozen=True)
class ChosenPlan:
    """The chosen engine of a statement, and the reads that it plans."""

    engine: str
    why: str
    tables: tuple[TableSummary, ...] = ()
    text: str = ""
    """The text of the statement that the engine receives."""
    cube: CubeSummary | None = None
    """A summary of how the query uses cubes, or None if its tables have no cubes."""


@dataclass
class SqlResult:
    """The rows of a statement, as a stream from the engine.

    The caller reads the rows once, and then closes the result. The result of a writing statement is one row with the
    number of changed rows, which is null if the engine does not report it.
    """

    schema: pa.Schema
    types: tuple[str, ...]
    """The name of each column's type in the SQL dialect."""
    batches: Iterator[pa.RecordBatch]
    explanation: ChosenPlan
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()

    def to_arrow(self) -> pa.Table:
        try:
            return pa.Table.from_batches(list(self.batches), self.schema)
        finally:
            self.close()


@dataclass(frozen=True)
class _PlannedStatement:
    """A parsed statement with its engine and its plan."""

    statement: SqlStatement
    choice: Choice
    text: str
    query: DuckDBQuery | None = None
    reads: tuple[PlannedTableRead, ...] = ()
    change: DuckDBChange | None = None
    cube: CubePlan | CubeSummary | None = None

    @property
    def explanation(self) -> ChosenPlan:
        tables = tuple(map(_summarize, self.reads))
        summary = self.cube.summary if isinstance(self.cube, CubePlan) else self.cube
        return ChosenPlan(self.choice.engine, self.choice.why, tables, self.text, summary)


class SqlSession:
    """Runs one statement at a time, and keeps its connections open."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        catalog: str = CATALOG,
        schema: str | None = None,
        engines: Engines | None = None,
        limits: DuckDBLimits | None = None,
        on_s3: bool = False,
        writes: bool = True,
        check_tables: Callable[[list[OpenTable]], None] = lambda _: None,
        certificates: str = "",
        after: str = "",
        cubes: str = ON,
        reports_runs: bool = True,
        computes_groups: bool = True,
    ) -> None:
        """Create a session.

        Queries include the rows of stream tables that wait for a flush. Statements that change rows first flush these
        rows.

        Args:
            url: The URL of the server.
            token: A bearer token.
            catalog: The name of the catalog in statements.
            schema: The schema of table names without a schema.
            engines: The engines in addition to DuckDB.
            limits: The limits of DuckDB.
            check_tables: A function that is called with the tables of a query before their files are read. To refuse
                the tables, it raises an exception.
            on_s3: Whether the tables are in S3. Only CREATE and DROP need it.
            writes: Whether the session runs statements that write.
            certificates: See `SeamarkClient`.
            after: The tokens of writes whose rows every query has to include (`StreamTableWriter.token`).
            cubes: Whether queries use cubes: `on`, `exact` (without sums of floats and averages of integers) or `off`.
            reports_runs: Whether the session reports each query, with its tables, to the server as an OpenLineage run.
            computes_groups: Whether the session groups the rows of small files that a cube does not cover, and keeps
                the groups. It reads these files before the call of `check_tables`.

        Raises:
            ValueError: The URL is invalid.
        """
        self._client = SeamarkClient(url, token=token, certificates=certificates)
        self._fresh_client = self._client.with_fresh_rows(after)
        self._tables = SessionTables(self._fresh_client)
        self._prepared_queries = PreparedQueries()
        self._catalog, self._schema = catalog, schema
        self._engines = engines or Engines()
        self._trino = None if self._engines.trino is None else TrinoAddress.parse(self._engines.trino)
        if cubes not in CUBE_USES:
            raise ValueError(f"cubes must be one of {', '.join(CUBE_USES)}, not {cubes!r}")
        self._on_s3, self._writes, self._check_tables, self._cubes = on_s3, writes, check_tables, cubes
        self._reports_runs = reports_runs
        self._computed_groups = ComputedGroups() if computes_groups else None
        self._limits = limits or DuckDBLimits()
        self._sandbox_connection: duckdb.DuckDBPyConnection | None = None
        self._catalog_connection: duckdb.DuckDBPyConnection | None = None
        self._spark: SparkStatements | None = None

    def __enter__(self) -> SqlSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._sandbox_connection is not None:
            self._sandbox_connection.close()
        if self._catalog_connection is not None:
            self._catalog_connection.close()
        self._client.close()

    def explain(self, text: str) -> ChosenPlan:
        """Return the plan and the engine that `sql` would use, without running the statement."""
        return self._plan(text, is_counted=False).explanation

    def sql(self, text: str) -> SqlResult:
        """Run a statement.

        Raises:
            InvalidRequest: The statement is invalid.
            ClientError: The catalog or the engine fails.
        """
        planned_statement = self._plan(text)
        match planned_statement.choice.engine:
            case "trino":
                return self._run_on_trino(planned_statement)
            case "spark":
                if self._spark is None:
                    name = self._engines.spark_catalog
                    conf = build_catalog_conf(name, self._client.url, token=self._client.token or "")
                    self._spark = SparkStatements(self._engines.spark or "", name, conf)
                self._spark.run(planned_statement.text)
                return _report_rows(planned_statement, None)
        if planned_statement.query is not None:
            return self._run_query(planned_statement, planned_statement.query)
        assert planned_statement.change is not None
        return self._run_change(planned_statement, planned_statement.change)

    # Plans

    def _plan(self, text: str, *, is_counted: bool = True) -> _PlannedStatement:
        """Plan a statement, and choose its engine.

        Args:
            text: The statement.
            is_counted: Whether the reads of the statement are counted in the query history.
        """
        now = datetime.now(UTC)
        prepared_query = self._prepared_queries.find(text, now)
        if prepared_query is not None:
            return self._plan_prepared(prepared_query, is_counted=is_counted)
        statement = parse(text)
        if statement.kind is not Kind.QUERY:
            return self._plan_change(statement, is_counted=is_counted)
        reason = "the user has chosen another engine"
        if self._engines.wanted in (AUTO, DUCKDB):
            try:
                prepared_query = prepare(statement, self._make_tables(), now, self._cubes)
                self._prepared_queries.put(text, prepared_query)
                return self._plan_prepared(prepared_query, is_counted=is_counted)
            except UnsupportedInDuckDB as error:
                reason = str(error)
        choice = self._choose(StatementProfile(statement.kind, 0, reason))
        return _PlannedStatement(statement, choice, self._write_for_trino(statement))

    def _plan_prepared(self, prepared_query: PreparedQuery, *, is_counted: bool) -> _PlannedStatement:
        """Plan the reads of a translated query, and choose its engine by their size.

        If another engine runs the query, it receives the original text.
        """
        statement, query = prepared_query.statement, prepared_query.query
        planner = ReadPlanner(
            self._fresh_client, query.tables, prepared_query.tables, prepared_query.scans, is_counted=is_counted
        )
        planned_reads, cube = plan_cube(self._fresh_client, query, prepared_query.cube, planner, self._computed_groups)
        # The function may restrict this process to the files of the tables. Then the process can no longer open other
        # files such as certificates, so all requests are sent before.
        self._check_tables([table_read.named.open_table for table_read in planned_reads])
        reads = tuple(planned_reads)
        read_bytes = sum(table_read.bytes for table_read in reads)
        if isinstance(cube, CubePlan):
            query = cube.query
            read_bytes += cube.deleted.bytes if cube.deleted is not None else 0
        choice = self._choose(StatementProfile(statement.kind, read_bytes))
        if choice.engine == DUCKDB:
            return _PlannedStatement(statement, choice, query.text, query, reads, cube=cube)
        return _PlannedStatement(statement, choice, self._write_for_trino(statement), None, reads)

    def _make_tables(self) -> StatementTables:
        return StatementTables(self._tables, self._catalog, self._schema)

    def _choose(self, demand: StatementProfile) -> Choice:
        engines = self._engines
        return choose(demand, engines.wanted, engines.available, large_bytes=engines.large_bytes)

    def _plan_change(self, statement: SqlStatement, *, is_counted: bool) -> _PlannedStatement:
        """Choose an engine for a statement that writes, and translate the statement for it.

        Raises:
            InvalidRequest: The session runs only queries, or the statement is invalid.
        """
        if not self._writes:
            raise InvalidRequest(f"Only queries can be run here, not {statement.kind.value}; use `seamark sql`")
        choice = self._choose(StatementProfile(statement.kind))
        if choice.engine == SPARK:
            return _PlannedStatement(
                statement,
                choice,
                write_spark_text(statement.tree, self._catalog, self._engines.spark_catalog, self._schema),
            )
        if choice.engine == TRINO:
            return _PlannedStatement(statement, choice, self._write_for_trino(statement))
        tables = self._make_tables()
        now = datetime.now(UTC)
        change = self._translate_change(statement, tables, now)
        # UPDATE and DELETE plan their reads again when they run, so the reads of this plan are not counted.
        is_counted = is_counted and statement.kind is Kind.INSERT
        reads = self._plan_reads(change.query, change.tables, tables, now, is_counted=is_counted)
        return _PlannedStatement(statement, choice, change.text, None, reads, change)

    def _translate_change(self, statement: SqlStatement, tables: StatementTables, now: datetime) -> DuckDBChange:
        try:
            return translate_change(statement, tables.find_columns, tables.resolve_name, self._catalog, now)
        except UnsupportedInDuckDB as error:
            raise InvalidRequest(f"DuckDB does not run this statement: {error}") from None

    def _plan_reads(
        self,
        query: SqlStatement | None,
        tables: Sequence[StoredTable],
        catalog: StatementTables,
        now: datetime,
        *,
        is_counted: bool,
    ) -> tuple[PlannedTableRead, ...]:
        """Plan the reads of the tables, and call `check_tables`, which may refuse the tables.

        Args:
            query: The query of the statement, or None if it has no query.
            tables: The tables of the statement.
            catalog: The tables of the catalog.
            now: The current time of the statement.
            is_counted: Whether the reads are counted in the query history.
        """
        reads = []
        if query is not None:
            scans = find_scans(query, tables, catalog, now.date())
            reads = ReadPlanner(self._fresh_client, tables, catalog, scans, is_counted=is_counted).plan()
        self._check_tables([table_read.named.open_table for table_read in reads])
        return tuple(reads)

    def _write_for_trino(self, statement: SqlStatement) -> str:
        """Return the text of the statement, in which Trino's name of the catalog replaces the session's name of it."""
        assert self._trino is not None
        replacements = []
        for node in statement.tree.find_all(exp.Table):
            parts = node.parts
            if len(parts) == 3 and parts[0].name.lower() == self._catalog.lower():
                meta = parts[0].meta
                replacements.append(Replacement(meta["start"], meta["end"] + 1, quote_name(self._trino.catalog)))
        return splice(statement.text, replacements)

    # Engines

    @property
    def _sandbox(self) -> duckdb.DuckDBPyConnection:
        """The connection to a DuckDB database that cannot open files. It is opened at its first use."""
        # `check_tables` may restrict only the threads that start after its call. Opening the connection starts DuckDB's
        # threads, so it is opened after that call.
        if self._sandbox_connection is None:
            self._sandbox_connection = open_connection(self._limits)
        return self._sandbox_connection

    def _run_query(self, planned_statement: _PlannedStatement, query: DuckDBQuery) -> SqlResult:
        """Run a translated query in DuckDB."""
        stack = ExitStack()
        con, started_s = self._sandbox, time.perf_counter()
        try:
            # Registering a table takes a millisecond, and a query over groups may read no rows of a table.
            reads = [table_read for table_read in planned_statement.reads if table_read.table.name in query.text]
            streams = stack.enter_context(register_tables(con, reads))
            if isinstance(planned_statement.cube, CubePlan):
                con.register(GROUPS, planned_statement.cube.groups)
                stack.callback(con.unregister, GROUPS)
                if planned_statement.cube.deleted is not None:
                    streams = [
                        *streams,
                        stack.enter_context(register_stream(con, DELETED_ROWS, planned_statement.cube.deleted)),
                    ]
            rows = execute(con, query.text, [name for name, _ in query.columns], streams)
        except DuckDBFailed:
            # The database can no longer be used, so nothing is unregistered from it. The next query opens a database.
            self._sandbox_connection = None
            raise
        except BaseException:
            stack.close()
            raise
        types = tuple(str(kind) for _, kind in query.columns)
        batches: Iterator[pa.RecordBatch] = iter(rows)
        # With a cube, the time is not only that of the planned reads, so it is not reported for them.
        if not isinstance(planned_statement.cube, CubePlan):
            report = partial(report_times, self._client, planned_statement.reads, reports_run=self._reports_runs)
            batches = measure_time(batches, started_s, report)
        return SqlResult(rows.schema, types, batches, planned_statement.explanation, stack)

    def _run_change(self, planned_statement: _PlannedStatement, change: DuckDBChange) -> SqlResult:
        """Run a translated statement that writes in DuckDB.

        DuckDB computes the rows, and this process writes their files and commits them. After a fatal error of DuckDB,
        its database is discarded.
        """
        try:
            match planned_statement.statement.kind:
                case Kind.INSERT:
                    assert change.target is not None
                    with register_tables(self._sandbox, planned_statement.reads) as streams:
                        rows = execute(self._sandbox, change.text, change.names, streams)
                        return _report_rows(planned_statement, insert_rows(self._client, change.target, rows))
                case Kind.UPDATE | Kind.DELETE as kind:
                    assert change.target is not None
                    report = change_rows(
                        self._client,
                        change.target,
                        kind.value.lower(),
                        partial(self._compute_rows, planned_statement.statement, change.target),
                    )
                    return _report_rows(planned_statement, report.updated + report.deleted)
        except DuckDBFailed:
            self._sandbox_connection = None
            raise
        return self._run_definition(planned_statement)

    def _compute_rows(self, statement: SqlStatement, target: Name, source_table: OpenTable) -> ComputedRows:
        """Return the rows that the statement changes in an open table.

        The statement is translated again for each attempt of the commit, because the table may have changed.
        """
        tables, now = self._make_tables(), datetime.now(UTC)
        tables.hold(target, source_table)
        change = self._translate_change(statement, tables, now)
        reads = self._plan_reads(change.query, change.tables, tables, now, is_counted=True)
        with register_tables(self._sandbox, reads) as streams:
            rows = execute(self._sandbox, change.text, change.names, streams).read_all()
        changed_read = next(table_read for table_read in reads if table_read.table.place is not None)
        # If a subquery also reads the table, it may read rows that do not match the condition.
        is_read_again = any(table_read.named.name == target for table_read in reads if table_read is not changed_read)
        return ComputedRows(changed_read, rows, TRUE if is_read_again else changed_read.where)

    def _run_definition(self, planned_statement: _PlannedStatement) -> SqlResult:
        if self._catalog_connection is None:
            client = self._client
            self._catalog_connection = connect(client.url, name=self._catalog, token=client.token, on_s3=self._on_s3)
            self._catalog_connection.execute("SET TimeZone = 'UTC'")
        execute(self._catalog_connection, planned_statement.text, None, ()).read_all()
        return _report_rows(planned_statement, None)

    def _run_on_trino(self, planned_statement: _PlannedStatement) -> SqlResult:
        assert self._trino is not None
        rows = TrinoRows(
            self._trino, planned_statement.text, schema=self._schema, password=self._engines.trino_password
        )
        stack = ExitStack()
        stack.callback(rows.close)
        return SqlResult(rows.schema, rows.types, rows.read_batches(), planned_statement.explanation, stack)


def _report_rows(planned_statement: _PlannedStatement, rows: int | None) -> SqlResult:
    batch = pa.RecordBatch.from_arrays([pa.array([rows], pa.int64())], schema=_DONE_SCHEMA)
    return SqlResult(_DONE_SCHEMA, ("bigint",), iter([batch]), planned_statement.explanation)


def _summarize(table_read: PlannedTableRead) -> TableSummary:
    files = len(table_read.tasks)
    considered_files = max(table_read.named.files, files)
    return TableSummary(
        table_read.named.name, files, considered_files, table_read.bytes, len(table_read.table.used), table_read.joins
    )
