"""A session of the SQL entry: it parses a statement once, plans it, chooses an engine, and runs it there.

    with SqlSession("http://127.0.0.1:8181") as session:
        for batch in session.sql("SELECT … FROM shop.orders").batches:
            ...

Connections stay open. DuckDB's connection for queries, INSERT, UPDATE and DELETE has no extensions and opens no files:
our reader reads, and our writer writes. The connection for CREATE and DROP has the catalog attached, and is made when
it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import duckdb
import pyarrow as pa
from sqlglot import exp

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.engines import catalog_conf
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.names import join_name
from seamark.connector.duckdb.session import connect
from seamark.connector.plans.async_client import Name
from seamark.connector.plans.quotes import quoted_name
from seamark.connector.plans.splices import Replacement, splice
from seamark.connector.read.tables import OpenTable
from seamark.connector.sql.changes import DuckDBChange, translate_change
from seamark.connector.sql.choice import AUTO, DUCKDB, LARGE_BYTES, SPARK, TRINO, Choice, Demand, choose
from seamark.connector.sql.duckdb_engine import DuckDBFailed, DuckDBLimits, execute, open_connection, registered
from seamark.connector.sql.queries import DuckDBQuery, translate
from seamark.connector.sql.reads import CatalogTables, TableRead, plan_reads
from seamark.connector.sql.row_changes import ComputedRows, change_rows, insert_rows
from seamark.connector.sql.scopes import StoredTable, UnsupportedInDuckDB
from seamark.connector.sql.spark_engine import SparkStatements, spark_text
from seamark.connector.sql.statement import Kind, Statement, parse
from seamark.connector.sql.trino_engine import TrinoAddress, TrinoRows
from seamark.formats.iceberg.expressions.expression import TRUE

CATALOG = "sea"
_DONE = pa.schema([("rows", pa.int64())])


@dataclass(frozen=True)
class Engines:
    """Which engines there are besides DuckDB, and when one is used."""

    wanted: str = AUTO
    trino: str | None = None
    """`http://user@host:port?catalog=name`, of a coordinator or of Seamark's proxy."""
    trino_password: str | None = field(default=None, repr=False)
    spark: str | None = None
    """`sc://host:port` of Spark Connect, or a master such as `local[2]`."""
    spark_catalog: str = CATALOG
    large_bytes: int = LARGE_BYTES

    @property
    def available(self) -> frozenset[str]:
        given = {TRINO: self.trino, SPARK: self.spark}
        return frozenset({DUCKDB, *(name for name, url in given.items() if url is not None)})


@dataclass(frozen=True)
class TableSummary:
    """What is read of one reference to a table."""

    name: tuple[str, ...]
    files: int
    considered_files: int
    bytes: int
    columns: int
    joins: tuple[tuple[str, int], ...] = ()

    @property
    def shown_name(self) -> str:
        return join_name(self.name)


@dataclass(frozen=True)
class ChosenPlan:
    engine: str
    why: str
    tables: tuple[TableSummary, ...] = ()
    text: str = ""
    """The statement as the engine gets it."""


@dataclass
class SqlResult:
    """Rows, as the engine makes them.

    To be read once and closed. A statement that writes has one row, with the number of rows if the engine reports it.
    """

    schema: pa.Schema
    types: tuple[str, ...]
    """The types of the columns in the dialect."""
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
class _Planned:
    statement: Statement
    choice: Choice
    text: str
    query: DuckDBQuery | None = None
    reads: tuple[TableRead, ...] = ()
    change: DuckDBChange | None = None

    @property
    def explanation(self) -> ChosenPlan:
        return ChosenPlan(self.choice.engine, self.choice.why, tuple(map(_summary, self.reads)), self.text)


class SqlSession:
    """Keeps its connections open.

    One statement at a time.
    """

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
        checked: Callable[[list[OpenTable]], None] = lambda _: None,
        certificates: str = "",
    ) -> None:
        """`catalog`: the name that a statement may have before the schema; `schema`: that of tables that are named
        without one.

        `checked` gets the tables of a query before their files are read, and may refuse them.

        Args:
            on_s3: Tables are in S3, for statements that write.
            writes: Whether it runs them.
            certificates: As for `SeamarkClient`.

        Raises:
            ValueError: For an invalid URL.
        """
        self._client = SeamarkClient(url, token=token, certificates=certificates)
        self._catalog, self._schema = catalog, schema
        self._engines = engines or Engines()
        self._trino = None if self._engines.trino is None else TrinoAddress.parse(self._engines.trino)
        self._on_s3, self._writes, self._checked = on_s3, writes, checked
        self._limits = limits or DuckDBLimits()
        self._con: duckdb.DuckDBPyConnection | None = None
        self._attached: duckdb.DuckDBPyConnection | None = None
        self._spark: SparkStatements | None = None

    def __enter__(self) -> SqlSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._con is not None:
            self._con.close()
        if self._attached is not None:
            self._attached.close()
        self._client.close()

    def explain(self, text: str) -> ChosenPlan:
        """Return what `sql` would do.

        The statement is planned, and not run.
        """
        return self._planned(parse(text)).explanation

    def sql(self, text: str) -> SqlResult:
        """BadRequest for an invalid statement; the errors of the client."""
        planned = self._planned(parse(text))
        match planned.choice.engine:
            case "trino":
                return self._on_trino(planned)
            case "spark":
                if self._spark is None:
                    name = self._engines.spark_catalog
                    conf = catalog_conf(name, self._client.url, token=self._client.token or "")
                    self._spark = SparkStatements(self._engines.spark or "", name, conf)
                self._spark.run(planned.text)
                return _done(planned, None)
        if planned.query is not None:
            return self._query(planned, planned.query)
        assert planned.change is not None
        return self._change(planned, planned.change)

    # Plans

    def _planned(self, statement: Statement) -> _Planned:
        engines, now = self._engines, datetime.now(UTC)
        if statement.kind is not Kind.QUERY:
            return self._planned_change(statement)
        tables = CatalogTables(self._client, self._catalog, self._schema)
        query: DuckDBQuery | None = None
        reads: tuple[TableRead, ...] = ()
        reason = ""
        if engines.wanted in (AUTO, DUCKDB):
            try:
                query = translate(statement.tree, tables.columns_of, now)
            except UnsupportedInDuckDB as why:
                reason = str(why)
        else:
            reason = "it was not asked for"
        if query is not None:
            reads = self._reads(statement.query_text, query.tables, tables, now)
        demand = Demand(statement.kind, sum(read.bytes for read in reads), reason)
        choice = choose(demand, engines.wanted, engines.available, large_bytes=engines.large_bytes)
        if choice.engine == DUCKDB and query is not None:
            return _Planned(statement, choice, query.text, query, reads)
        return _Planned(statement, choice, self._trino_text(statement), None, reads)

    def _planned_change(self, statement: Statement) -> _Planned:
        if not self._writes:
            raise BadRequest(f"Only queries are run here; this is {statement.kind.value}. `seamark sql` runs it")
        demand = Demand(statement.kind)
        choice = choose(demand, self._engines.wanted, self._engines.available)
        if choice.engine == SPARK:
            return _Planned(
                statement, choice, spark_text(statement.tree, self._catalog, self._engines.spark_catalog, self._schema)
            )
        if choice.engine == TRINO:
            return _Planned(statement, choice, self._trino_text(statement))
        tables = CatalogTables(self._client, self._catalog, self._schema)
        now = datetime.now(UTC)
        change = self._translated(statement, tables, now)
        reads = self._reads(change.query_text, change.tables, tables, now)
        return _Planned(statement, choice, change.text, None, reads, change)

    def _translated(self, statement: Statement, tables: CatalogTables, now: datetime) -> DuckDBChange:
        try:
            return translate_change(statement, tables.columns_of, tables.name_of, self._catalog, now)
        except UnsupportedInDuckDB as why:
            raise BadRequest(f"DuckDB does not run this statement: {why}") from None

    def _reads(
        self, text: str, tables: Sequence[StoredTable], catalog: CatalogTables, now: datetime
    ) -> tuple[TableRead, ...]:
        reads = plan_reads(self._client, text, tables, catalog, now.date())
        self._checked([read.named.opened for read in reads])
        return tuple(reads)

    def _trino_text(self, statement: Statement) -> str:
        """Return the text with Trino's name of the catalog."""
        assert self._trino is not None
        new = []
        for node in statement.tree.find_all(exp.Table):
            parts = node.parts
            if len(parts) == 3 and parts[0].name.lower() == self._catalog.lower():
                place = parts[0].meta
                new.append(Replacement(place["start"], place["end"] + 1, quoted_name(self._trino.catalog)))
        return splice(statement.text, new)

    # Engines

    @property
    def _sandbox(self) -> duckdb.DuckDBPyConnection:
        if self._con is None:  # opened after `checked`, which may confine what its threads do
            self._con = open_connection(self._limits)
        return self._con

    def _query(self, planned: _Planned, query: DuckDBQuery) -> SqlResult:
        stack = ExitStack()
        con = self._sandbox
        try:
            streams = stack.enter_context(registered(con, planned.reads))
            rows = execute(con, query.text, [name for name, _ in query.columns], streams)
        except DuckDBFailed:
            self._con = None
            raise
        except BaseException:
            stack.close()
            raise
        types = tuple(str(kind) for _, kind in query.columns)
        return SqlResult(rows.schema, types, iter(rows), planned.explanation, stack)

    def _change(self, planned: _Planned, change: DuckDBChange) -> SqlResult:
        try:
            match planned.statement.kind:
                case Kind.INSERT:
                    assert change.target is not None
                    with registered(self._sandbox, planned.reads) as streams:
                        rows = execute(self._sandbox, change.text, change.names, streams)
                        return _done(planned, insert_rows(self._client, change.target, rows))
                case Kind.UPDATE | Kind.DELETE as kind:
                    assert change.target is not None
                    report = change_rows(
                        self._client,
                        change.target,
                        kind.value.lower(),
                        partial(self._computed, planned.statement, change.target),
                    )
                    return _done(planned, report.updated + report.deleted)
        except DuckDBFailed:
            self._con = None
            raise
        return self._defined(planned)

    def _computed(self, statement: Statement, target: Name, opened: OpenTable) -> ComputedRows:
        """Return the rows that the statement changes in the open table."""
        tables, now = CatalogTables(self._client, self._catalog, self._schema), datetime.now(UTC)
        tables.hold(target, opened)
        change = self._translated(statement, tables, now)
        reads = self._reads(change.query_text, change.tables, tables, now)
        with registered(self._sandbox, reads) as streams:
            rows = execute(self._sandbox, change.text, change.names, streams).read_all()
        changed = next(read for read in reads if read.table.place is not None)
        # A subquery that reads the same table may have read other rows than those of the condition.
        is_read_again = any(read.named.name == target for read in reads if read is not changed)
        return ComputedRows(changed, rows, TRUE if is_read_again else changed.where)

    def _defined(self, planned: _Planned) -> SqlResult:
        if self._attached is None:
            client = self._client
            self._attached = connect(client.url, name=self._catalog, token=client.token, on_s3=self._on_s3)
            self._attached.execute("SET TimeZone = 'UTC'")
        execute(self._attached, planned.text, None, ()).read_all()
        return _done(planned, None)

    def _on_trino(self, planned: _Planned) -> SqlResult:
        assert self._trino is not None
        rows = TrinoRows(self._trino, planned.text, schema=self._schema, password=self._engines.trino_password)
        stack = ExitStack()
        stack.callback(rows.close)
        return SqlResult(rows.schema, rows.types, rows.batches(), planned.explanation, stack)


def _done(planned: _Planned, rows: int | None) -> SqlResult:
    batch = pa.RecordBatch.from_arrays([pa.array([rows], pa.int64())], schema=_DONE)
    return SqlResult(_DONE, ("bigint",), iter([batch]), planned.explanation)


def _summary(read: TableRead) -> TableSummary:
    files = len(read.tasks)
    considered = max(read.named.files, files)
    return TableSummary(read.named.name, files, considered, read.bytes, len(read.table.used), read.joins)
