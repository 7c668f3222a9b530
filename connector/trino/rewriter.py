"""Rewrites a statement so that it reads plan snapshots, or returns the reason why the statement is sent unchanged.

If anything is uncertain or fails, the statement is sent unchanged. Rewriting has a time budget of milliseconds, after
which its result is not used. Plans are requested only for scans of tables in the configured catalogs, and only if the
analysis fully supports the statement (`scans.py`). Plans are requested again for each statement and never cached,
because a client must see its own commits. If no plan of a statement is useful, the proxy requests no plans for repeats
of the statement for a few seconds.

A plan is a version of its table: `FOR VERSION AS OF` follows the table's own name, so Trino's access control checks the
table in the client's statement. Views have no versions, so a plan view replaces the view. In addition, the original
view is read in a query of WITH that is never executed, so that Trino applies the access rules of the view (`views.py`).

All references of a statement to a table read the same snapshot, as in Trino. If a join prunes files by the rows of a
table, the statement reads this table at the same snapshot (`joins.py`, `plan_requests.py`). Statements in an explicit
transaction are unchanged, because Trino continues to read the snapshots that the transaction has read.

An aggregate query of a table with cubes, or a star join of this table, reads groups of a cube (`cube_rewrites.py`),
even if it has no condition.

Literals without a time zone are in the session's zone. The zone in the client's headers is the session's zone only if
Trino's `sql.forced-session-time-zone` is not set. With `RewriteLimits.trust_time_zone`, the operator declares this.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
from multidict import CIMultiDictProxy

from seamark.cache.memory import MemoryCache
from seamark.connector.analysis.lexer import parse_execute
from seamark.connector.analysis.queries import Names
from seamark.connector.analysis.relative_times import find_today
from seamark.connector.analysis.statement_cache import (
    ReadStatement,
    StatementReader,
    StatementText,
    set_client,
)
from seamark.connector.analysis.views import ExpandedView, ViewDefinitions, ViewPlanner
from seamark.connector.client.errors import ClientError
from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.plans import CUBE_FAILURES
from seamark.connector.cubes.summaries import EXACT, OFF, CubeSummary
from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import KnownTable, Name, Seamark, View
from seamark.connector.plans.joins import PlannedScan
from seamark.connector.plans.plan_requests import PlanRequests
from seamark.connector.plans.scan import Scan
from seamark.connector.trino.cube_rewrites import rewrite_over_cube, translate_scans
from seamark.connector.trino.protocol.circuit_breaker import Breaker
from seamark.connector.trino.protocol.held_statements import FORBIDDEN
from seamark.connector.trino.protocol.plan_withdrawal import PlanSnapshotRef, PlanWithdrawal
from seamark.connector.trino.protocol.sessions import (
    PARTITION_FILTER,
    Session,
    count_prepared_characters,
    is_hinted_off,
    read_session,
)
from seamark.connector.trino.rewrite_results import (
    RewriteResult,
    add_no_cube_reason,
    build_cube_result,
    build_result,
    explain_cube_failure,
)
from seamark.formats.protocol.wire import PLAN_MARK, PLANS_FOLDER

SCANS_MAX = 64
_KEEPS_TOO_MANY_FILES = "plans keep too many of the files"
_KEPT_TOO_MANY_FILES = "unchanged; plans kept too many of the files a few seconds ago"
_UNCHANGED_AFTER_USELESS_PLAN_S = 5.0
"""The time in seconds for which repeats of a statement are sent unchanged after its plans were not useful."""
_USELESS_STATEMENTS_BYTES_MAX = 4 << 20
_BREAKERS_BYTES_MAX = 1 << 20
DENIED = "PERMISSION_DENIED"
"""Trino's name of the error with which access control refuses a statement."""
_PREDICATE_WORDS = re.compile(r"\b(?:where|on|having|filter)\b", re.IGNORECASE)
"""Words of clauses with predicates. In a statement without these words, no file can be pruned, so it is not parsed."""
_AGGREGATE_WORDS = re.compile(r"\bgroup\s+by\b|\b(?:count|count_if|sum|avg|min|max)\s*\(|\bdistinct\b", re.IGNORECASE)
"""Words of aggregate queries, which may read a cube."""
_NO_CONDITION = "unchanged; the statement has no condition that can prune files"
_NEEDS_COLUMN_TYPES = re.compile(
    r"\b(?:values|unnest|like|lower|upper|coalesce|case|if|nullif|cast|date_add)\b|[\w\")]\s*+[+*-]\s*+[0-9]",
    re.IGNORECASE,
)
"""Constructs that give conditions only if the types of the columns are known."""
_TIME_WORDS = re.compile(r"\b(?:date|day|extract|hour|interval|month|time|timestamp|year)\b", re.IGNORECASE)
_METADATA_TABLE = re.compile(r"\$[a-z_]+\"", re.IGNORECASE)
"""Matches the names of Trino's metadata tables, such as `$snapshots`."""
_EXPLAIN = re.compile(r"(?:\s++|--[^\r\n]*+|/\*.*?\*/)*+explain\b", re.IGNORECASE | re.DOTALL)
"""Matches EXPLAIN. Without possessive quantifiers, backtracking on a line of 40 dashes would take seconds."""
_EXECUTE = re.compile(r"\bexecute\b", re.IGNORECASE)
_SYSTEM_OR_PLAN_NAME = re.compile(rf"[$@]|{re.escape(PLAN_MARK)}")
"""Matches the names of Trino's system tables and of plans."""
_SWITCHED_OFF, _READ_TOO_LATE = "unchanged; switched off", "unchanged; the statement was not parsed in time"
IsAccepted = Callable[[], Awaitable[bool]]
_log = structlog.get_logger("seamark.trino-proxy")


@dataclass(frozen=True, slots=True)
class RewriteLimits:
    """The limits of rewriting.

    Attributes:
        budget_s: The maximum time in seconds for which a statement waits for its plans.
        max_kept_fraction: The maximum fraction of the files that a plan may keep. If a plan keeps more, the scan is
            unchanged.
        trust_time_zone: Whether the time zone in the client's headers is the session's time zone.
        cubes: Whether aggregate queries read cubes: one of `CUBE_USES`.
    """

    budget_s: float = 0.25
    max_kept_fraction: float = 0.95
    trust_time_zone: bool = False
    cubes: str = OFF


@dataclass(frozen=True, slots=True)
class _TextProperties:
    """Properties of a statement that are found by searching its text, without parsing.

    Attributes:
        explains: Whether the statement is an EXPLAIN.
        has_conditions: Whether the text has a word with which conditions begin, such as WHERE.
    """

    reads_metadata_table: bool = False
    """Whether the statement may list the snapshots of a table."""
    unchanged_reason: str = ""
    """The reason why the statement is not rewritten, or "" if it has to be parsed."""
    needs_types: bool = False
    """Whether further conditions may be found if the types of columns are known."""
    explains: bool = False
    aggregates: bool = False
    """Whether the statement may read a cube."""
    has_conditions: bool = True


@dataclass(frozen=True, slots=True)
class _Sources:
    """The tables and views that a statement reads.

    Attributes:
        numbered: The scans of tables and views, by their number.
        tables: The scans of tables, by their number.
        expanded: The views, with the tables and views in their texts.
    """

    reading: ReadStatement
    known_tables: Mapping[Names, KnownTable]
    numbered: Mapping[int, PlannedScan]
    tables: Mapping[int, PlannedScan]
    expanded: Sequence[ExpandedView]


class Rewriter:
    """Rewrites statements. An instance belongs to one event loop.

    The caller runs a rewritten statement, and reports the outcome with `report_success` or `report_failure`.

    Attributes:
        catalogs: The names in Trino of the catalogs whose server is `seamark`.
    """

    def __init__(self, seamark: Seamark, catalogs: Collection[str], limits: RewriteLimits) -> None:
        self._client = seamark
        self._catalogs = frozenset(name.lower() for name in catalogs)
        self._catalog_pattern = re.compile("|".join(map(re.escape, self._catalogs)), re.IGNORECASE)
        self._limits = limits
        self._seamark_breaker = Breaker()
        self._failing_breakers: MemoryCache[int, Breaker] = MemoryCache(_BREAKERS_BYTES_MAX)
        """The breakers of statements that fail in Trino because of their plans, by `RewriteResult.breaker_key`.

        The key contains the sender, so that a sender cannot stop the plans of other senders.
        """
        self._plan_withdrawal = PlanWithdrawal(seamark.lease)
        self._reader = StatementReader()
        self._views = ViewPlanner(seamark, self._reader, self._resolve_name)
        self._useless_until_s: MemoryCache[tuple[StatementText, str | None, str | None], float] = MemoryCache(
            _USELESS_STATEMENTS_BYTES_MAX
        )
        """The times, on the loop's clock, until which no plans are requested, by text, catalog and schema."""

    async def close(self) -> None:
        await self._plan_withdrawal.close()

    async def rewrite_request(
        self,
        statement: str,
        headers: CIMultiDictProxy[str],
        address: str | None,
        is_accepted: IsAccepted | None = None,
    ) -> RewriteResult:
        """Rewrite a statement like `rewrite`, with the session in the headers.

        Args:
            statement: The text of the statement.
            headers: The headers of the request.
            address: The address of the client, or None.
            is_accepted: A function that returns whether Trino accepts the sender's login (`rewrite`).
        """
        until_s = asyncio.get_running_loop().time() + self._limits.budget_s
        with set_client(address or "", headers.get("X-Trino-User", "")):
            try:
                characters = count_prepared_characters(headers)
                session = await self._reader.run(characters, partial(read_session, headers), until_s)
            except TimeoutError:
                return RewriteResult(None, _READ_TOO_LATE)
            return await self.rewrite(statement, session, is_accepted)

    async def rewrite(self, statement: str, session: Session, is_accepted: IsAccepted | None = None) -> RewriteResult:
        """Rewrite a statement within the time budget. The method never raises an exception.

        Args:
            statement: The text of the statement.
            session: The session of the statement.
            is_accepted: A function that returns whether Trino accepts the sender's login. It is called before the first
                request to Seamark. The budget does not include its time.
        """
        if session.off:
            return RewriteResult(None, _SWITCHED_OFF)
        if session.in_transaction:
            return RewriteResult(None, "unchanged; the statement is in a transaction")
        if session.needs_partition_filter:
            return RewriteResult(None, f"unchanged; {PARTITION_FILTER}")
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        characters = len(statement) + sum(map(len, session.prepared.values()))
        try:
            search = partial(self._search_text, statement, session)
            text, properties = await self._reader.run(characters, search, begun_s + self._limits.budget_s)
        except TimeoutError:
            return RewriteResult(None, _READ_TOO_LATE)
        if properties.unchanged_reason and not properties.reads_metadata_table:
            return RewriteResult(None, properties.unchanged_reason)  # Such a statement needs no request to Seamark.
        if is_accepted is not None and not await is_accepted():
            return RewriteResult(None, "unchanged; Trino has not accepted the login")
        if properties.reads_metadata_table:
            await self._withdraw_idle()
        if properties.unchanged_reason:
            return RewriteResult(None, properties.unchanged_reason)
        begun_s = loop.time()
        key = (text, session.catalog, session.schema)
        # For a short time after plans that kept too many files, the same statement is sent unchanged.
        if (until_s := self._useless_until_s.get(key)) is not None and begun_s < until_s:
            return RewriteResult(None, _KEPT_TOO_MANY_FILES, depends_on_data=True)
        result = await self._rewrite_and_load_views(text, session, properties, begun_s + self._limits.budget_s)
        if properties.explains:  # The text of a prepared statement may also be an EXPLAIN.
            result = replace(result, used=replace(result.used, explains=True))
        if result.is_wasted:
            # Two bytes for each character are a high estimate, because most texts have one byte for each.
            self._useless_until_s.put(key, loop.time() + _UNCHANGED_AFTER_USELESS_PLAN_S, 2 * len(text.text))
        return replace(result, summary=f"{result.summary}; ms={1000 * (loop.time() - begun_s):.1f}")

    async def _withdraw_idle(self) -> None:
        """Withdraw unused plans, because the statement may list the snapshots of a table, which include plans."""
        try:
            async with asyncio.timeout(self._limits.budget_s):
                await self._plan_withdrawal.withdraw_unused()
        except TimeoutError:
            _log.warning("plans were not withdrawn", error="Seamark was too slow")

    async def renew(self, plans: Sequence[PlanSnapshotRef]) -> None:
        """Renew the leases of the plans of a statement that Trino has not yet analysed.

        A lease that cannot be renewed within the time budget ends as before.
        """
        by_name: defaultdict[Name, list[int]] = defaultdict(list)
        for name, plan_id in plans:
            by_name[name].append(plan_id)
        try:
            async with asyncio.timeout(self._limits.budget_s), asyncio.TaskGroup() as group:
                for name, ids in by_name.items():
                    group.create_task(self._renew(name, ids))
        except TimeoutError:
            _log.warning("leases of plans were not renewed", error="Seamark was too slow")

    async def _renew(self, name: Name, ids: list[int]) -> None:
        try:
            await self._client.lease(name, ids)
        except ClientError as error:
            _log.warning("leases of plans were not renewed", error=error.message)

    def release(self, rewrite: RewriteResult, *, is_analysed: bool = True) -> None:
        """Release the plans of a rewritten statement.

        Args:
            rewrite: The result of rewriting the statement.
            is_analysed: Whether Trino has analysed the statement or will never analyse it. If Trino may still analyse
                the statement, its plans exist until their leases end.
        """
        (self._plan_withdrawal.release if is_analysed else self._plan_withdrawal.forget)(rewrite.plans)

    def report_success(self, rewrite: RewriteResult) -> None:
        if (breaker := self._failing_breakers.get(rewrite.breaker_key)) is not None:
            breaker.record_success()

    def report_failure(self, rewrite: RewriteResult, error_name: str, message: str) -> None:
        """Report that a rewritten statement has failed, in Trino or because of Trino's access rules.

        Failures that the rewriting may have caused count against further rewriting of similar statements: access rules
        forbid pruning, or the message contains the name of a plan or of a file of a plan. A denied permission counts
        only if the statement reads plan views or groups of a cube instead of the tables of the original statement.
        """
        has_replaced_sources = rewrite.used.views or rewrite.used.aggregated
        is_denied = error_name == FORBIDDEN or (error_name == DENIED and has_replaced_sources)
        has_plan_id = any(str(plan_id) in message for _, plan_id in rewrite.plans)
        if is_denied or has_plan_id or PLAN_MARK in message or f"/{PLANS_FOLDER}/" in message:
            breaker = self._failing_breakers.get(rewrite.breaker_key) or Breaker()
            self._failing_breakers.put(rewrite.breaker_key, breaker, 0)
            breaker.record_failure()

    @property
    def open_breakers(self) -> list[str]:
        """The names of the services whose breakers are open after repeated failures.

        If `seamark` is among them, no plans are requested.
        """
        return ["seamark"] if self._seamark_breaker.is_open else []

    async def _rewrite_and_load_views(
        self, text: StatementText, session: Session, properties: _TextProperties, until_s: float
    ) -> RewriteResult:
        """Rewrite a statement. If a name may be an unknown view, load the view, and rewrite the statement again."""
        if not self._seamark_breaker.allow_request():
            return RewriteResult(None, "unchanged; Seamark has failed recently")
        requests = PlanRequests(self._client, self._limits.max_kept_fraction, until_s)
        result = await self._rewrite_with_plans(text, session, properties, requests, until_s)
        if requests.missing and not requests.has_failed():
            try:
                has_new_views = await self._views.load(requests.missing, requests, until_s)
            except TimeoutError:
                return result  # The next statement will use the view definitions that were loaded.
            if has_new_views:
                second_requests = PlanRequests(self._client, self._limits.max_kept_fraction, until_s)
                return await self._rewrite_with_plans(text, session, properties, second_requests, until_s)
        return result

    async def _rewrite_with_plans(
        self, text: StatementText, session: Session, properties: _TextProperties, requests: PlanRequests, until_s: float
    ) -> RewriteResult:
        """Rewrite a statement so that it reads the groups of a cube or, if no cube can be used, plans.

        Names of plan views belong to a user, so views are replaced only if the session names its user.
        """
        try:
            statement, known_tables, definitions = await self._parse_with_columns(
                text, session, properties, requests, until_s
            )
            all_scans = {number: self._to_planned_scan(scan, session) for number, scan in enumerate(statement.scans)}
            scans_by_number = {
                number: planned_scan for number, planned_scan in all_scans.items() if planned_scan is not None
            }
            tables = {
                number: planned_scan
                for number, planned_scan in scans_by_number.items()
                if planned_scan.table not in definitions.views
            }
            # Trino cannot read views at an earlier version.
            views = {
                number: planned_scan
                for number, planned_scan in scans_by_number.items()
                if planned_scan.table in definitions.views
                and planned_scan.scan.version_span is None
                and planned_scan.scan.renamable
                and session.user
            }
            expanded_views = await self._views.expand(views, definitions, until_s, utc=text.utc)
        except TimeoutError:
            return RewriteResult(None, _READ_TOO_LATE)
        if requests.has_failed():
            self._seamark_breaker.record_failure()
            return RewriteResult(None, f"unchanged; {requests.refusal_reason}")
        cube: RewriteResult | CubeSummary | None = None
        if properties.aggregates and len(all_scans) == len(tables) >= 1:
            cube = await self._rewrite_over_cube(text, session, list(tables.values()), known_tables, until_s)
        if isinstance(cube, RewriteResult):
            return cube
        if not properties.has_conditions:
            return add_no_cube_reason(RewriteResult(None, _NO_CONDITION), cube)
        sources = _Sources(statement, known_tables, scans_by_number, tables, expanded_views)
        return add_no_cube_reason(await self._rewrite_over_plans(text, session, sources, requests, until_s), cube)

    async def _rewrite_over_cube(
        self,
        text: StatementText,
        session: Session,
        scans: Sequence[PlannedScan],
        known_tables: Mapping[Names, KnownTable],
        until_s: float,
    ) -> RewriteResult | CubeSummary | None:
        """Return a statement that reads groups of a cube, or the reason why it cannot, or None without a cube."""
        if any(planned_scan.scan.quoted for planned_scan in scans):
            return None
        requested_s = time.monotonic()
        try:
            async with asyncio.timeout_at(until_s):
                read_tables = [
                    known_tables.get((planned_scan.scan.catalog, planned_scan.scan.schema, planned_scan.scan.table))
                    or await self._client.load_table(planned_scan.table)
                    for planned_scan in scans
                ]
                tables = [table for table in read_tables if table is not None]
                if len(tables) < len(scans) or all(table.cube_metadata is None for table in tables):
                    return None
                floats = self._limits.cubes != EXACT
                translate = partial(translate_scans, text, scans, tables, floats=floats)
                cube_position, statement = await self._reader.run(len(text.text), translate, until_s, in_loop_max=0)
                planned_scan, table = scans[cube_position], tables[cube_position]
                dimensions = [
                    scan_and_table
                    for number, scan_and_table in enumerate(zip(scans, tables, strict=True))
                    if number != cube_position
                ]
                # Access rules depend on the sender, the table and its columns, so these failures are counted together.
                breaker_key = hash((session.sender_hash, planned_scan.table, statement.columns))
                breaker = self._failing_breakers.get(breaker_key)
                if breaker is not None and not breaker.allow_request():
                    raise NotFromCube("recently, Trino could not read its plan, or access rules forbade the cube")
                cube = await rewrite_over_cube(
                    self._client, self._reader, text, planned_scan, statement, table, dimensions, until_s
                )
                result = replace(build_cube_result(planned_scan, cube), breaker_key=breaker_key)
                for plan in result.plans:  # Unused plans are withdrawn later.
                    self._plan_withdrawal.note(plan, requested_s)
                # Until Trino has analysed the statement, its plans must not be withdrawn.
                await self._plan_withdrawal.take(result.plans)
        except CUBE_FAILURES as error:
            return explain_cube_failure(error)
        except Exception as error:  # noqa: BLE001  a bug in the translation must fail no statement
            _log.warning("the groups of a cube are not read because of a bug", exc_info=True)
            return CubeSummary(None, 0, 0, f"the translation failed: {type(error).__name__}")
        return result

    async def _rewrite_over_plans(
        self, text: StatementText, session: Session, sources: _Sources, requests: PlanRequests, until_s: float
    ) -> RewriteResult:
        """Return the statement that reads plan snapshots, or the reason why it is unchanged."""
        tables, expanded_views = sources.tables, sources.expanded
        planned_scans = [*tables.values(), *(planned_scan for view in expanded_views for planned_scan in view.tables)]
        if not any(planned_scan.scan.is_restricted for planned_scan in planned_scans):
            return RewriteResult(None, "unchanged; the statement has no scan that can prune files")
        if len(planned_scans) + len(expanded_views) > SCANS_MAX:
            return RewriteResult(None, f"unchanged; the statement has more than {SCANS_MAX} scans")
        columns = frozenset(
            (planned_scan.table, planned_scan.scan.columns) for planned_scan in sources.numbered.values()
        )
        breaker_key = hash((session.sender_hash, columns))
        breaker = self._failing_breakers.get(breaker_key)
        if breaker is not None and not breaker.allow_request():
            return RewriteResult(
                None, "unchanged; recently, Trino could not read its plans, or its access rules forbade them"
            )
        dimensions = joining.find_dimensions(tables, sources.known_tables)
        for view in expanded_views:
            dimensions |= view.dimensions
        requested_s = time.monotonic()
        plans = await requests.request_plans(planned_scans, dimensions)
        plan_views, plans = await self._views.plan_views(
            expanded_views, plans, planned_scans, dimensions, requests, session.user
        )
        for plan in requests.plan_snapshots:
            self._plan_withdrawal.note(plan, requested_s)
        if requests.has_failed():
            self._seamark_breaker.record_failure()
        else:
            self._seamark_breaker.record_success()
        if not plans:
            refusal = requests.refusal_reason
            reason = f"unchanged; {refusal or _KEEPS_TOO_MANY_FILES}"
            # Without a refusal, all plans kept too many files, so repeats of the statement are unchanged for a while.
            return RewriteResult(None, reason, depends_on_data=True, is_wasted=not refusal)
        try:
            write = partial(build_result, text, sources.reading, planned_scans, plans, dimensions, plan_views)
            result = replace(await self._reader.run(len(text.text), write, until_s), breaker_key=breaker_key)
        except TimeoutError:
            return RewriteResult(None, _READ_TOO_LATE)
        try:
            async with asyncio.timeout_at(until_s):
                await self._plan_withdrawal.take(result.plans)
        except (ClientError, TimeoutError):
            return RewriteResult(None, "unchanged; the plans were withdrawn in the meantime")
        return result

    # Parsing

    def _search_text(self, statement: str, session: Session) -> tuple[StatementText, _TextProperties]:
        """Return the text to parse, and the properties of a statement that are found without parsing.

        A search of the text takes much less time than parsing, and often shows that a statement cannot be rewritten.
        """
        if is_hinted_off(statement):
            return StatementText(statement), _TextProperties(unchanged_reason=_SWITCHED_OFF)
        text = self._write_text(statement, session)
        reads_metadata_table = _METADATA_TABLE.search(text.text) is not None
        aggregates = self._limits.cubes != OFF and _AGGREGATE_WORDS.search(text.text) is not None
        has_conditions = _PREDICATE_WORDS.search(text.text) is not None
        if not has_conditions and not aggregates:
            return text, _TextProperties(reads_metadata_table, _NO_CONDITION)
        if session.catalog not in self._catalogs and not self._catalog_pattern.search(text.text):
            # The statement is not parsed.
            return text, _TextProperties(
                reads_metadata_table, "unchanged; the statement reads no table of the configured catalogs"
            )
        needs_types = _NEEDS_COLUMN_TYPES.search(text.text) or (not text.utc and _TIME_WORDS.search(text.text))
        explains = bool(_EXPLAIN.match(text.text))
        return text, _TextProperties(
            reads_metadata_table,
            needs_types=bool(needs_types),
            explains=explains,
            aggregates=aggregates and not explains,
            has_conditions=has_conditions,
        )

    def _write_text(self, statement: str, session: Session) -> StatementText:
        utc = session.utc and self._limits.trust_time_zone
        execution = parse_execute(statement) if session.prepared and _EXECUTE.search(statement) else None
        text = session.prepared.get(execution.name) if execution is not None else None
        if execution is None or text is None:
            return StatementText(statement, utc=utc, today=find_today(statement))
        today = find_today(text, *execution.parameters)
        return StatementText(text, execution.parameters, execution.name, utc, today)

    async def _parse_with_columns(
        self, text: StatementText, session: Session, properties: _TextProperties, requests: PlanRequests, until_s: float
    ) -> tuple[ReadStatement, dict[Names, KnownTable], ViewDefinitions]:
        """Return the parsed statement, the columns of its tables, and the definitions of its views.

        The columns are loaded only if further conditions may be found with them.
        """
        statement = await self._reader.read(text, {}, until_s)
        table_names: dict[Names, Name] = {}
        for names in statement.table_names:
            catalog_and_name = self._resolve_name(names, session)
            if catalog_and_name is not None:
                _, table_names[names] = catalog_and_name
        views = await self._views.open_cached_views(table_names.values(), until_s)
        if len(statement.table_names) < 2 and not views and not properties.needs_types:
            return statement, {}, ViewDefinitions({}, {})
        definitions = await self._views.load_definitions(table_names.values(), views, requests, until_s)
        definitions_by_names = {
            names: definitions.tables[name] for names, name in table_names.items() if name in definitions.tables
        }
        return (
            (await self._reader.read(text, definitions_by_names, until_s) if definitions_by_names else statement),
            definitions_by_names,
            definitions,
        )

    def _resolve_name(self, names: Names, default: Session | View) -> tuple[str, tuple[str, ...]] | None:
        """Return the catalog, and the name of the table in Seamark, or None if the catalog is not configured."""
        stated_catalog, stated_schema, table = names
        catalog, schema = stated_catalog or default.catalog, stated_schema or default.schema
        if catalog not in self._catalogs or not schema or _SYSTEM_OR_PLAN_NAME.search(table):
            return None
        return catalog, (*schema.split("."), table)

    def _to_planned_scan(self, scan: Scan, session: Session) -> PlannedScan | None:
        catalog_and_name = self._resolve_name((scan.catalog, scan.schema, scan.table), session)
        return None if catalog_and_name is None else PlannedScan(scan, *catalog_and_name)
