"""Plans the read of each table in a query: the snapshot, the files that may contain needed rows, and the columns.

The analysis of Trino's statements (`connector/analysis/`) provides the conditions. A scan without joins is planned with
Iceberg's planTableScan. If joins with other tables can prune files of a scan, a plan table is requested, and is read
instead of the table.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

from sqlglot import exp

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.queries import parse_version
from seamark.connector.analysis.scans import collect_scans, use_parsed_query
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, InvalidRequest, NoSuchResource
from seamark.connector.client.values import CURRENT, At, EngineTable
from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import KnownTable, Name, TablePlanResponse, open_seamark, run_in_thread
from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.plans.plan_requests import PlanRequests, find_used_joins
from seamark.connector.plans.rewrites import MAX_KEPT_FRACTION
from seamark.connector.plans.scan import UNCOUNTED_USE, Scan
from seamark.connector.read.tables import OpenTable, ScanTask, load_table, open_loaded_table, open_table, plan
from seamark.connector.sql.scopes import StoredTable
from seamark.connector.sql.statement import SqlStatement
from seamark.connector.sql.types import SqlType, UnsupportedInDuckDB, from_iceberg
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.comparisons import resolve_literals
from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    And,
    Expression,
    collect_predicates,
    join_by_and,
    replace_predicates,
)
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.protocol.wire import PLAN_MARK
from seamark.formats.runtime.errors import RequestError

_NO_TABLE = ("NoSuchTableException", "NoSuchNamespaceException")
JOINS_S = 5.0
"""The time limit of all requests for joins of one statement. Closing the connection may take as long again."""
LEASE_S = 600
"""The time for which the server keeps a plan table."""
_OPENED_TABLES_MAX = 64
"""The maximum number of tables that a session keeps open."""
_ENGINE = "seamark"
"""The name of `seamark sql` in the query history."""


@dataclass(frozen=True)
class NamedTable:
    """A table in the statement, at one snapshot."""

    name: Name
    open_table: OpenTable
    columns: Mapping[str, SqlType]
    files: int
    """The number of data files in the summary of the snapshot."""
    bytes: int
    loaded: EngineTable | None = None
    """The server's response from which the table was opened, without metadata.

    If it is None, the table is not reused.
    """


@dataclass(frozen=True)
class PlannedTableRead:
    """The rows to read for one reference to a table."""

    table: StoredTable
    named: NamedTable
    open_table: OpenTable
    where: Expression
    """A condition that is true for all needed rows. It may be true for more rows than the statement's condition."""
    tasks: tuple[ScanTask, ...]
    joins: tuple[tuple[str, int | None], ...] = ()
    """The columns by which other tables have left out files, each with the number of keys.

    The number is None if an index on attributes of the other table has left out the files.
    """
    statement: str = ""
    """The fingerprint of the statement in the query history, or "" if the read is not counted."""

    @property
    def bytes(self) -> int:
        return sum(task.size_bytes for task in self.tasks)


@dataclass(frozen=True)
class AnalyzedReference:
    """The conditions on one reference to a table, which were read from the text of the query, before it is planned.

    Attributes:
        scan: The conditions and joins of the reference, or None if they could not be read.
        where: A condition that is true for all needed rows.
    """

    scan: Scan | None
    where: Expression


class SessionTables:
    """Opens the tables of a session, and caches those that have not changed."""

    def __init__(self, client: SeamarkClient) -> None:
        self._client = client
        self._open_tables: OrderedDict[tuple[Name, int | str | None], NamedTable] = OrderedDict()

    def open(self, name: Name, version: int | str | None) -> NamedTable:
        """Return an open table: the cached object if the table has not changed.

        Args:
            name: The name of the table.
            version: A snapshot id, the name of a branch or tag, or None for the current state.

        Raises:
            NoSuchResource: The table does not exist.
        """
        try:
            return self._open(name, version)
        except NoSuchResource as error:
            if error.kind not in _NO_TABLE:  # The URL may belong to a server that is not Seamark.
                raise
            raise NoSuchResource(
                f"Table does not exist: {'.'.join(name)}", status=404, kind="NoSuchTableException"
            ) from None

    def _open(self, name: Name, version: int | str | None) -> NamedTable:
        """Load a table, and return the cached object if the server reports that nothing has changed since then."""
        key = (name, version)
        cached_table = self._open_tables.get(key)
        snapshot_choice = At(snapshot_id=version) if isinstance(version, int) else At(ref=version)
        is_named = snapshot_choice.ref is not None
        loaded_before = None if cached_table is None else cached_table.loaded
        engine_table = load_table(self._client, name, snapshot_choice, history=is_named, loaded_before=loaded_before)
        if cached_table is not None and engine_table is cached_table.loaded:
            self._open_tables.move_to_end(key)
            return cached_table
        source_table = open_loaded_table(engine_table, name, snapshot_choice)
        if is_named:  # As in Trino, a branch is read with the schema of its snapshot.
            source_table = open_loaded_table(engine_table, name, At(snapshot_id=source_table.snapshot_id))
        # A table may have many thousands of snapshots. The session stores only the snapshot that it reads.
        snapshots = tuple(
            snapshot for snapshot in source_table.history if snapshot.snapshot_id == source_table.snapshot_id
        )
        table = _to_named_table(name, replace(source_table, history=snapshots), replace(engine_table, metadata=b""))
        self._open_tables[key] = table
        if len(self._open_tables) > _OPENED_TABLES_MAX:
            self._open_tables.popitem(last=False)
        return table


class StatementTables:
    """The tables of one statement. Each table is opened once, so all references to it read the same snapshot."""

    def __init__(self, session_tables: SessionTables, catalog: str, schema: str | None = None) -> None:
        """Create the tables of a statement.

        Args:
            session_tables: The tables of the session.
            catalog: The name of the catalog in the statement.
            schema: The schema of names without a schema.
        """
        self._session_tables = session_tables
        self._catalog, self._schema = catalog, schema
        self._tables_by_version: dict[tuple[Name, int | str | None], NamedTable] = {}
        self.of_node: dict[int, NamedTable] = {}
        """The tables, by the `id` of the node that refers to them."""

    def hold(self, name: Name, source_table: OpenTable) -> None:
        """Use this open table for all references to the current state of the table."""
        self._tables_by_version[name, None] = _to_named_table(name, source_table)

    def resolve_name(self, node: exp.Table) -> Name:
        return parse_table_name(node, self._catalog, self._schema)

    def find_columns(self, node: exp.Table) -> Mapping[str, SqlType]:
        table = self._open_once(self.resolve_name(node), _read_version(node))
        self.of_node[id(node)] = table
        return table.columns

    def are_unchanged(self) -> bool:
        """Return whether no table has changed since it was opened.

        The tables are opened again. If a table was set with `hold`, the result is False.

        Raises:
            NoSuchResource: A table no longer exists.
        """
        return all(
            table.loaded is not None and self._session_tables.open(name, version) is table
            for (name, version), table in self._tables_by_version.items()
        )

    def _open_once(self, name: Name, version: int | str | None) -> NamedTable:
        """Return a table. Open it at its first use, so that all references in the statement read one snapshot.

        Args:
            name: The name of the table.
            version: The id of a snapshot, the name of a branch or tag, or None for the current state.

        Raises:
            UnsupportedInDuckDB: The statement also reads another branch, tag or the current state of the table.
        """
        table = self._tables_by_version.get((name, version))
        if table is None:
            # An integer is the id of a snapshot. A branch, a tag or None (the current state) may refer to any snapshot.
            has_open_branch = any(
                open_name == name and not isinstance(open_version, int)
                for open_name, open_version in self._tables_by_version
            )
            if has_open_branch and not isinstance(version, int):
                raise UnsupportedInDuckDB(f"{'.'.join(name)} is read at a branch or tag, and also at a second snapshot")
            table = self._tables_by_version[name, version] = self._session_tables.open(name, version)
        return table


def parse_table_name(node: exp.Table, catalog: str, schema: str | None = None) -> Name:
    """Return the name of the table in a reference `[[catalog.]schema.]table`.

    Dots in a quoted schema separate the levels of its name.

    Args:
        node: The reference.
        catalog: The name of the catalog.
        schema: The schema of a reference without a schema.

    Raises:
        InvalidRequest: The reference has no schema, its catalog is not `catalog`, or it cannot be the name of a table.
    """
    parts = [part.name for part in node.parts]
    if len(parts) == 1 and schema is not None:
        parts.insert(0, schema)
    if len(parts) == 3 and parts[0].lower() != catalog.lower():
        raise InvalidRequest(
            f"{'.'.join(parts)[:200]}: the catalog is {catalog!r}. Write schema.name for a table, and write "
            'the levels of a nested namespace in quotes: "a.b".orders'
        )
    if len(parts) not in (2, 3):
        raise InvalidRequest(
            f"{'.'.join(parts)[:200]}: a table must be written as schema.name or {catalog}.schema.name"
        )
    *_, levels, name = parts
    if PLAN_MARK in name or not all(levels.split(".")) or not name:
        raise InvalidRequest(f"{'.'.join(parts)[:200]} is not the name of a table")
    return (*levels.split("."), name)


class ReadPlanner:
    """Plans the reads of one run of a statement. A reference is counted once, even if it is planned again."""

    def __init__(
        self,
        client: SeamarkClient,
        tables: Sequence[StoredTable],
        statement_tables: StatementTables,
        scans: Sequence[AnalyzedReference],
        *,
        is_counted: bool = True,
    ) -> None:
        """Create a planner.

        Args:
            client: The client of the catalog.
            tables: The references to tables.
            statement_tables: The open tables of the statement.
            scans: The analysis of each reference (`find_scans`).
            is_counted: Whether the reads are counted in the query history, and as reads of their columns.
        """
        self._client, self._tables, self._statement_tables, self._scans = client, tables, statement_tables, scans
        self._uncounted_numbers = set(range(len(tables))) if is_counted else set[int]()
        """The numbers of the references that the query history has not counted yet."""

    def plan(self, *, joins: bool = True, skipped_numbers: Collection[int] = ()) -> list[PlannedTableRead]:
        """Plan the read of each reference to a table, and return the reads in the order of the references.

        The server's query history counts each reference once, even if the reads are planned several times. Therefore
        the requests after the first request of a reference are marked as not counted (`UNCOUNTED_USE`).

        Args:
            joins: Whether joins with other tables may prune files.
            skipped_numbers: The numbers of references that are not planned. Their reads have no files.
        """
        client, statement_tables = self._client, self._statement_tables
        scans = [
            reference.scan
            if reference.scan is None or number in self._uncounted_numbers
            else replace(reference.scan, query_use=UNCOUNTED_USE)
            for number, reference in enumerate(self._scans)
        ]
        scans_by_number = {number: scan for number, scan in enumerate(scans) if scan is not None} if joins else {}
        plans_by_number, counted_numbers = _request_join_plans(client, scans_by_number, self._tables, statement_tables)
        reads = []
        for number, (table, scan) in enumerate(zip(self._tables, scans, strict=True)):
            named_table = statement_tables.of_node[id(table.node)]
            used_joins: tuple[tuple[str, int | None], ...] = ()
            statements: list[str] = []  # The fingerprint of the statement, if the server has counted it.
            source_table = named_table.open_table
            condition = self._scans[number].where
            if number in plans_by_number:
                name, used_joins, statement = plans_by_number[number]
                statements.append(statement)
                source_table = open_table(client, (*named_table.name[:-1], name), CURRENT)
            tasks: tuple[ScanTask, ...] = ()
            if number not in skipped_numbers:
                columns = tuple(table.used) if number in self._uncounted_numbers else None
                # The request for a plan table has already counted the statement, even if no plan table was created.
                use = UNCOUNTED_USE.build_body() if number in counted_numbers else _describe_use(scan)
                tasks = tuple(
                    plan(client, source_table, condition, columns=columns, use=use, note_statement=statements.append)
                )
                self._uncounted_numbers.discard(number)
            statement = next(iter(statements), "")
            reads.append(
                PlannedTableRead(
                    table, named_table, source_table, drop_functions(condition), tasks, used_joins, statement
                )
            )
        return reads


def _describe_use(scan: Scan | None) -> dict[str, object]:
    """Return the fields of a plan request that describe how the statement uses a table, for the query history.

    The read columns are left out, because a plan request has them in a separate field.
    """
    fields = {} if scan is None else {name: value for name, value in scan.use.build_body().items() if name != "columns"}
    return {"engine": _ENGINE, **fields}


def drop_functions(where: Expression) -> Expression:
    """Return the condition without comparisons of functions of columns.

    Comparisons of functions can only prune files, because the reader cannot evaluate them on rows.
    """
    return replace_predicates(where, lambda predicate: TRUE if is_function(predicate.transform) else predicate)


def extract_row_filter(where: Expression) -> Expression:
    """Return the parts of a condition by which the reader can select rows.

    Conditions on floats are left out, because Iceberg's expressions compare NaN differently. The engine evaluates them.
    """
    parts = where.children if isinstance(where, And) else (where,)
    return join_by_and(
        *(part for part in parts if not any(predicate.result in FLOATS for predicate in collect_predicates(part)))
    )


def _to_named_table(name: Name, source_table: OpenTable, engine_table: EngineTable | None = None) -> NamedTable:
    columns = {field.name: from_iceberg(field.type) for field in source_table.schema.fields}
    if len({column.lower() for column in columns}) != len(columns):
        raise UnsupportedInDuckDB(f"{'.'.join(name)} has columns whose names differ only in case")
    snapshot = next(
        (candidate for candidate in source_table.history if candidate.snapshot_id == source_table.snapshot_id), None
    )
    summary = {} if snapshot is None else snapshot.build_summary_map()
    files, size = (parse_count(summary, key, 0) for key in ("total-data-files", "total-files-size"))
    return NamedTable(name, source_table, columns, files, size, engine_table)


def _read_version(node: exp.Table) -> int | str | None:
    version = node.args.get("version")
    if version is None:
        return None
    number = parse_version(version)
    if number is None:
        raise UnsupportedInDuckDB("Time travel supports only FOR VERSION AS OF a snapshot's number, a branch or a tag")
    return number


def _bind_filter(scan: Scan, source_table: OpenTable) -> Expression:
    if scan.filter is None:
        return TRUE
    try:
        filter = resolve_literals(scan.filter, source_table.schema, ())
        return bind(filter, source_table.schema, (), case_sensitive=False)
    except RequestError:
        return TRUE


def find_scans(
    query: SqlStatement, tables: Sequence[StoredTable], statement_tables: StatementTables, today: date
) -> list[AnalyzedReference]:
    """Return the analysis of each reference to a table.

    Args:
        query: The query whose tree contains the references.
        tables: The references.
        statement_tables: The tables of the statement. They are open.
        today: The date in UTC at which the statement runs.
    """
    scans = []
    for table, scan in zip(tables, _find_scans(query, tables, statement_tables, today), strict=True):
        source_table = statement_tables.of_node[id(table.node)].open_table
        scans.append(AnalyzedReference(scan, TRUE if scan is None else _bind_filter(scan, source_table)))
    return scans


def _find_scans(
    query: SqlStatement, tables: Sequence[StoredTable], statement_tables: StatementTables, today: date
) -> list[Scan | None]:
    """Return the scan of each reference, or None if the analysis of conditions does not find the reference.

    If two references with the same name have different columns, as at two snapshots, the columns of the name are
    unknown. A scan is matched to its reference by the position of the name in the text.
    """
    kinds: dict[tuple[str, ...], dict[str, str] | None] = {}
    for table in tables:
        key = tuple(part.name.lower() for part in table.node.parts)
        named_table = statement_tables.of_node[id(table.node)]
        columns = {
            field.name.lower(): field.type if isinstance(field.type, str) else "nested"
            for field in named_table.open_table.schema.fields
        }
        kinds[key] = columns if kinds.get(key, columns) == columns else None
    try:
        parsed_query = use_parsed_query(query.text, query.tree, query.words)
    except UnsupportedStatement:
        return [None for _ in tables]
    query_scans = collect_scans(
        parsed_query,
        find_columns=lambda names: kinds.get(tuple(part for part in names if part is not None)),
        utc=True,
        today=today,
    )
    by_start = {scan.start: scan for scan in query_scans}
    return [by_start.get(table.node.parts[0].meta.get("start", -1)) for table in tables]


# Joins


def _request_join_plans(
    client: SeamarkClient, scans: Mapping[int, Scan], tables: Sequence[StoredTable], statement_tables: StatementTables
) -> tuple[dict[int, tuple[str, tuple[tuple[str, int | None], ...], str]], set[int]]:
    """Request plan tables if joins can leave out files.

    Returns:
        Two values. The first has the name of each plan table, with the used joins and the fingerprint of the statement,
        by the number of the reference. The second has the numbers of all references for which the server has answered.
    """
    if not any(scan.joins for scan in scans.values()):
        return {}, set()
    numbers = sorted(scans, key=lambda number: scans[number].start)
    planned_scans, known_tables = {}, {}
    for position, number in enumerate(numbers):
        scan, named_table = scans[number], statement_tables.of_node[id(tables[number].node)]
        if scan.ref is not None:  # The branch may have moved since the table was opened.
            scan = replace(scan, ref=None, snapshot_id=named_table.open_table.snapshot_id)
        planned_scans[position] = PlannedScan(scan, "", named_table.name)
        if named_table.open_table.snapshot_id is not None:
            known_tables[scan.catalog, scan.schema, scan.table] = KnownTable(
                version="",
                columns=None,
                snapshot_id=named_table.open_table.snapshot_id,
                size_bytes=named_table.bytes,
                files=named_table.files,
            )
    dimensions = joining.find_dimensions(planned_scans, known_tables)
    if not dimensions:
        return {}, set()
    plans, answered_scans = run_in_thread(_plan_tables(client, list(planned_scans.values()), dimensions))
    plans_by_number = {
        numbers[position]: (plan.name, tuple(find_used_joins(dimensions.get(planned_scan, ()), plan)), plan.statement)
        for position, planned_scan in planned_scans.items()
        if (plan := plans.get(planned_scan)) is not None and plan.name is not None
    }
    return plans_by_number, {
        numbers[position] for position, planned_scan in planned_scans.items() if planned_scan in answered_scans
    }


async def _plan_tables(
    client: SeamarkClient, planned_scans: Sequence[PlannedScan], dimensions: Mapping[PlannedScan, tuple[Dimension, ...]]
) -> tuple[dict[PlannedScan, TablePlanResponse], set[PlannedScan]]:
    """Request the plans of scans. Return the created plans, and the scans whose requests were answered."""
    until_s = asyncio.get_running_loop().time() + JOINS_S
    try:
        # The requests themselves end at `until_s`, so that the plans that have arrived are used. The timeout of this
        # block would discard these plans, so it is later.
        async with (
            asyncio.timeout_at(until_s + JOINS_S),
            open_seamark(
                client.url, token=client.token, lease_s=LEASE_S, certificates=client.certificates, engine=_ENGINE
            ) as server,
        ):
            requests = PlanRequests(server, MAX_KEPT_FRACTION, until_s)
            return await requests.request_plans(planned_scans, dimensions), requests.answered
    except (ClientError, TimeoutError):
        return {}, set()
