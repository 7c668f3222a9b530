"""The route that creates plan tables, which engines without scan planning read by name.

Identical requests share one name, which is derived from the table's pointer, its indexes and the bound filter before
the scan is planned. With joins, the row of the plan has the joined tables, and each use of the plan requires the right
on them (`joined_tables.py`). A secret of the server is a part of such a name, so that no client can compute it.
Concurrent identical requests share one plan. As for planning, the caller needs only the right to read: the stored files
are small, refer only to files that the reader may read, and are deleted automatically.

With `X-Seamark-Plans` the plan has no name. The answer contains the id of a snapshot, which loadTable adds for requests
with the same value (`plan_audience.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import FRESH_HEADER, PLANS_FOLDER
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.api.http.bodies import parse_body
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.fresh_reads import load_to_read
from seamark.metaserver.api.http.parameters.fresh import AFTER, FRESH
from seamark.metaserver.api.http.parameters.plan_audience import AUDIENCE
from seamark.metaserver.api.http.parameters.snapshots import resolve_snapshot_id
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.plans.joins import JoinOutcomes, Joins, add_joins, evaluate_joins, parse_filter
from seamark.metaserver.api.plans.plan_leases import check_lease, grant_lease_s
from seamark.metaserver.api.plans.statement_reads import (
    REPORTED_COLUMNS_MAX,
    REPORTED_KEYS_MAX,
    ReportedAggregate,
    ReportedUse,
    build_shape,
    count_statement,
    find_history,
    make_sampler,
)
from seamark.metaserver.catalog.plans.plan_tables import Holder, make_plan_snapshot, parse_digest, plan_name
from seamark.metaserver.catalog.pointers import get_files_folder
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.history.history import StatementRead, StatementSampler
from seamark.metaserver.planner.lookup.lookup import find_files_at, find_files_by_prefix
from seamark.metaserver.planner.lookup.partition_times import find_oldest_end_ms
from seamark.metaserver.planner.plan.plan_writer import KeptManifests, PlanWriter, find_kept_manifests
from seamark.metaserver.planner.plan.reader_quirks import explain_misread_deletes, has_misleading_values
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.store.model import PlanJoin, StoredPlanTable
from seamark.metaserver.streams.fresh_snapshots import is_fresh

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")

_IN_LOOP_BYTES_MAX = 4000
"""The maximum size of a request that is decoded and bound in the event loop, in bytes."""
_IN_LOOP_FILES_MAX, _IN_LOOP_MANIFESTS_MAX = 100_000, 200
"""The maximum numbers of files and manifests of a snapshot whose plans are measured in the event loop."""
_DECODED_REQUESTS_BYTES = 1 << 20
_NAMES_PURPOSE = "plan-names"
"""The purpose of the key that is a part of the names of plan tables with joins."""
_DECLINED_BYTES, _DECLINED_EACH_BYTES = 1 << 20, 500
"""The memory for requests that get no plan table, and the memory of one of them."""


class PlanTableRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for a plan table or a plan snapshot."""

    filter: Annotated[
        msgspec.Raw,
        doc(
            "An expression of the Iceberg REST specification. Without filter and predicate, the plan keeps all "
            "files. A literal with a `data-type` is compared as in SQL. A comparison about which engines differ is "
            "not used. The functions `lower` and `upper` of a string are written as transforms, and indexes on them "
            "leave files out."
        ),
    ] = msgspec.field(default_factory=msgspec.Raw)
    predicate: Annotated[
        str | None,
        doc("A predicate in SQL, instead of `filter`.", examples=["id = 5 AND day >= '2024-01-01'"]),
    ] = None
    case_sensitive: Annotated[bool, doc("Whether names in `filter` are case-sensitive. Names in SQL are not.")] = True
    snapshot_id: int | None = None
    ref: Annotated[str | None, doc("A branch or tag, instead of snapshot-id.")] = None
    use_snapshot_schema: Annotated[
        bool,
        doc(
            "Whether the reader uses the snapshot's schema. A plan table is read with the current schema, so no plan "
            "table is created if the schemas differ."
        ),
    ] = False
    max_kept_fraction: Annotated[
        float | None,
        doc(
            "The maximum share of the snapshot's files that a plan keeps. If the plan keeps more, no plan table is "
            "created.",
            minimum=0,
            maximum=1,
        ),
    ] = msgspec.field(default=None, name="kept-max")
    lease_s: Annotated[
        int | None,
        doc("The lease of the plan in seconds. Settings determine the default and the maximum.", minimum=1),
    ] = None
    joins: Joins = []
    hide_partitions: Annotated[
        bool,
        doc(
            "Whether the reader leaves out files by rules that differ from Iceberg's, as DuckDB 1.5.5 does. The plan "
            "table then has only identity partition fields, and no bounds of columns that may have NaN. If the table "
            "would mislead such a reader, a plan table is created for any kept-max."
        ),
    ] = False
    engine: Annotated[
        str,
        msgspec.Meta(
            max_length=20,
            description="The engine that runs the statement, for the query history: spark, trino, duckdb or seamark. "
            "All other names are recorded as `other`.",
        ),
    ] = ""
    columns: Annotated[
        list[str],
        msgspec.Meta(
            max_length=REPORTED_COLUMNS_MAX,
            description="The columns that the statement reads, for the query history. Unknown names are left out.",
        ),
    ] = []
    counts: Annotated[
        bool, doc("Whether the statement counts in the query history. It does not count if it is only explained.")
    ] = True
    join_columns: Annotated[
        list[str],
        msgspec.Meta(
            max_length=REPORTED_KEYS_MAX,
            description="The columns by which the statement joins other tables, in addition to the columns of "
            "`joins`, for the query history.",
        ),
    ] = []
    grouping: Annotated[
        list[str],
        msgspec.Meta(
            max_length=REPORTED_KEYS_MAX,
            description="The columns by which the statement groups, for the query history. Unknown names are left out.",
        ),
    ] = []
    aggregates: Annotated[
        list[ReportedAggregate],
        msgspec.Meta(
            max_length=REPORTED_KEYS_MAX,
            description="The aggregates of the statement, for the query history. Unknown columns are left out.",
        ),
    ] = []
    holder: Annotated[
        str,
        msgspec.Meta(
            max_length=100,
            description="With X-Seamark-Plans: a text that identifies the client process. Only requests of one holder "
            "share identical plans, so that a holder can withdraw its plans.",
        ),
    ] = ""


class PlanTableResponse(msgspec.Struct, rename="kebab"):
    """A plan table or a plan snapshot."""

    name: Annotated[
        str | None,
        doc(
            "The name of the plan table in the table's namespace. It is null if no plan table was created, because the "
            "table has no snapshot, the snapshot has a different schema, the plan keeps more than kept-max, too many "
            "files would have to be listed again, or there are too many plan tables."
        ),
    ]
    snapshot_id: int | None
    expires_at_ms: Annotated[
        int | None,
        doc("The end of the lease in ms. It is at least half of lease-s from now, because plans are shared."),
    ]
    files: Annotated[int, doc("The number of data files that the plan keeps.")]
    bytes: int
    considered_files: Annotated[int, doc("The number of data files of the snapshot.")]
    considered_bytes: Annotated[
        int | None, doc("The bytes of the snapshot. It is null if unknown, because excluded manifests are not read.")
    ]
    joins: JoinOutcomes = msgspec.UNSET
    plan_snapshot_id: Annotated[
        int | msgspec.UnsetType,
        doc(
            "With X-Seamark-Plans, instead of the name: the id of the snapshot that loadTable adds for requests with "
            "the same value of the header."
        ),
    ] = msgspec.UNSET
    misread: Annotated[
        str | msgspec.UnsetType,
        doc(
            "With hide-partitions: why such a reader reads the table wrongly even so, or why the plan table that it "
            "needs is not created. Then there is no plan table, and such a reader must not read the table."
        ),
    ] = msgspec.UNSET
    statement: Annotated[
        str | msgspec.UnsetType,
        doc("The fingerprint of the statement in the query history, if it counts. `recordStatementTime` takes it."),
    ] = msgspec.UNSET


WRITER: web.AppKey[PlanWriter] = web.AppKey("plan-writer", PlanWriter)
RUNNING_ANSWERS: web.AppKey[SingleFlight[tuple[object, ...], PlanTableResponse]] = web.AppKey("plan-tables-making")
_DecodedRequest = tuple[PlanTableRequest, Expression]
DECODED_REQUESTS: web.AppKey[MemoryCache[tuple[str, bytes], _DecodedRequest]] = web.AppKey("plan-tables-read")
"""A cache of decoded requests. The key is the table's metadata file, which defines the column names, and the body."""
DECLINED_ANSWERS: web.AppKey[MemoryCache[tuple[str, float | None], PlanTableResponse]] = web.AppKey(
    "plan-tables-declined"
)
"""A cache of the answers to requests that get no plan table.

The key is the name that the plan table would have, which covers all values on which the plan depends, and `kept-max`.
"""


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/plan-tables",
    "makePlanTable",
    "Create a plan table: the files that a plan keeps, as a table that any engine can read by its name "
    "until its lease ends",
    tags=("metadata",),
    parameters=(AUDIENCE, FRESH, AFTER),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The plan, and its name", PlanTableResponse),
        ResponseSpec(400, "The filter, a join or the snapshot is invalid; the message states the reason"),
        ResponseSpec(404, "No such table, or a table of a join does not exist"),
    ),
).takes_bytes(PlanTableRequest)
async def make_plan_table(call: Call, data: bytes) -> PlanTableResponse:
    """Create a plan table, which has only the files that a plan keeps, or return the plan table of equal requests.

    With an audience, the value of the header X-Seamark-Plans, the plan is a snapshot of the table instead.
    """
    named_snapshot = _read_named_snapshot(call, data)
    loaded_table = await load_to_read(
        call, call.namespace, call.name, named_snapshot.snapshot_id, is_named=named_snapshot.ref is not None
    )
    await call.components.catalog.check_writable(loaded_table)
    audience = call.audience
    body, bound_scan = await _read_bound_request(call, data, loaded_table)
    if body.hide_partitions and audience is not None:
        raise BadRequest("hide-partitions is for plan tables; with X-Seamark-Plans a plan is a snapshot of the table")
    holder = None if audience is None else Holder(audience, body.holder)
    filters, outcomes, joined_tables = await evaluate_joins(call, bound_scan, loaded_table.entry, body.joins)
    bound_scan = filters.apply_to(bound_scan)
    new_plan_table = NewPlanTable(call, loaded_table, body, bound_scan, holder, joined_tables)
    answer = await new_plan_table.find_or_make()
    statement = count_requested_statement(call, loaded_table, body, bound_scan, answer, new_plan_table.sampler)
    if holder is not None:  # With an audience, the plan is a snapshot of the table and has no name.
        answer = msgspec.structs.replace(answer, name=None)
    return msgspec.structs.replace(answer, joins=outcomes, statement=statement)


def count_requested_statement(
    call: Call,
    loaded_table: LoadedTable,
    body: PlanTableRequest,
    bound_scan: BoundScan,
    answer: PlanTableResponse,
    sampler: StatementSampler | None,
) -> str | msgspec.UnsetType:
    """Count the statement of a request in the query history, even if its plan table was shared or not created.

    Returns:
        The fingerprint of the statement, or UNSET if it does not count.
    """
    assert loaded_table.entry is not None
    if find_history(call) is None or not body.counts:
        return msgspec.UNSET
    # Only DuckDB needs hidden partitions, and the proxy of Trino sends an audience.
    engine = "duckdb" if body.hide_partitions else "other" if call.audience is None else "trino"
    shape = build_shape(
        bound_scan,
        engine,
        select=body.columns,
        use=ReportedUse(
            body.engine,
            body.grouping,
            [*body.join_columns, *(column for join in body.joins for column in join.on)],
            body.aggregates,
        ),
    )
    considered_bytes = -1 if answer.considered_bytes is None else answer.considered_bytes
    count_statement(
        call,
        StatementRead(
            loaded_table.entry.uuid,
            shape,
            answer.considered_files,
            answer.files,
            considered_bytes,
            answer.bytes,
            hash(bound_scan.text),
        ),
        sampler,
    )
    return shape.fingerprint


class _NamedSnapshot(msgspec.Struct, rename="kebab"):
    """The snapshot that a request names."""

    snapshot_id: int | None = None
    ref: str | None = None


def _read_named_snapshot(call: Call, data: bytes) -> _NamedSnapshot:
    """Return the snapshot that a request names, if the request may read rows that are not in files yet.

    Such a request must load the table with these rows first. The other fields of the body are decoded later.
    """
    if FRESH_HEADER not in call.headers:
        return _NamedSnapshot()
    return parse_body(data, _NamedSnapshot)


async def _read_bound_request(call: Call, data: bytes, loaded_table: LoadedTable) -> tuple[PlanTableRequest, BoundScan]:
    """Return the decoded request and the bound scan. Recent short requests are cached.

    Raises:
        BadRequest: A field, the filter or the snapshot is invalid.
    """
    decoded_requests, entry, metadata = call.app[DECODED_REQUESTS], loaded_table.entry, loaded_table.metadata
    assert entry is not None
    if len(data) > _IN_LOOP_BYTES_MAX:
        return await read_in_turn(call, len(data), lambda: bind_request(_decode_request(data, metadata), metadata))
    key = (entry.metadata_location, data)
    decoded_request = decoded_requests.get(key)
    if decoded_request is None:
        decoded_request = await read_in_turn(call, len(data), lambda: _decode_request(data, metadata))
        decoded_requests.put(key, decoded_request, measure_object_bytes(decoded_request) + len(data))
    return bind_request(decoded_request, metadata)


def _decode_request(data: bytes, metadata: TableMetadata) -> _DecodedRequest:
    """Return the request and its filter.

    Raises:
        BadRequest: A field is invalid.
    """
    body = parse_body(data, PlanTableRequest)
    check_lease(body.lease_s)
    if body.max_kept_fraction is not None and not 0 <= body.max_kept_fraction <= 1:
        raise BadRequest(f"kept-max is {body.max_kept_fraction}; it must be a share from 0 to 1")
    return body, read_filter(body, metadata)


def bind_request(decoded_request: _DecodedRequest, metadata: TableMetadata) -> tuple[PlanTableRequest, BoundScan]:
    """Return the request, and the scan with its snapshot and its bound filter.

    Raises:
        BadRequest: The filter or the snapshot is invalid.
    """
    body, filter = decoded_request
    snapshot_id = resolve_snapshot_id(metadata, body.snapshot_id, body.ref, None)
    request = ScanRequest(
        filter=filter,
        snapshot_id=snapshot_id,
        case_sensitive=body.case_sensitive,
        nan_above=True,  # Spark and DuckDB order NaN above all numbers, so NaN matches > and >=.
    )
    return body, BoundScan.bind(metadata, request)


def read_filter(body: PlanTableRequest, metadata: TableMetadata) -> Expression:
    """Return the filter of a request, from SQL or from an Iceberg expression.

    Raises:
        BadRequest: The request has both, or the filter is invalid.
    """
    filter_json = bytes(body.filter)
    if body.predicate is None:
        return parse_filter(filter_json, metadata, functions=True)
    if filter_json:
        raise BadRequest("The request has both predicate and filter; send SQL or an Iceberg expression")
    return sql.parse_sql(body.predicate, metadata.current_schema, metadata.schemas, functions=True).expression


class NewPlanTable:
    """Makes the plan table of a request, or finds the plan table that equal requests share."""

    __slots__ = (
        "_app",
        "_body",
        "_bound_scan",
        "_entry",
        "_holder",
        "_identity",
        "_joined_tables",
        "_lease_s",
        "_principal_name",
        "sampler",
    )

    def __init__(
        self,
        call: Call,
        loaded_table: LoadedTable,
        body: PlanTableRequest,
        bound_scan: BoundScan,
        holder: Holder | None,
        joined_tables: Sequence[PlanJoin] = (),
    ) -> None:
        assert loaded_table.entry is not None
        self._app = call.app
        self._principal_name = call.principal.name
        self._entry = loaded_table.entry
        self._body = body
        self._bound_scan = bound_scan
        self._holder = holder
        self._joined_tables = tuple(joined_tables)
        self._lease_s = grant_lease_s(body.lease_s, call.components.settings)
        if bound_scan.snapshot is not None and is_fresh(bound_scan.snapshot):
            # Fresh files exist for a limited time. Half of it is for the lease, and half for queries that run.
            self._lease_s = min(self._lease_s, max(1, call.components.settings.stream_fresh_retention_s // 2))
        self.sampler: StatementSampler | None = None
        """The sampler of the filter's values, if this request was planned."""
        # Requests with equal texts share a plan table.
        self._identity = f"{bound_scan.text} {'hidden' if body.hide_partitions else ''}".rstrip()
        if joined_tables:
            # A reader of this table may not be allowed to read the joined tables. It must not learn their values by
            # guessing the names of plans, so the names depend on a secret key.
            # Equal plans that depend on different tables have different names, because different callers may use them.
            tables = msgspec.json.encode(self._joined_tables)
            _, key = call.components.keyring.find_signing_key(_NAMES_PURPOSE)
            self._identity += f" {hmac.digest(key, self._identity.encode() + tables, hashlib.sha256).hex()}"

    async def find_or_make(self) -> PlanTableResponse:
        """Return the shared plan table of equal requests, or make the plan table.

        The answer has no plan table if the table has no snapshot, or if the request requires the schema of the snapshot
        and the table has another schema now. A recent refusal to make the same plan table is repeated. Equal concurrent
        requests share one plan.
        """
        body, entry, snapshot = self._body, self._entry, self._bound_scan.snapshot
        if snapshot is None:
            return _make_empty_answer(None)
        if body.use_snapshot_schema and snapshot.schema_id not in (None, self._bound_scan.metadata.current_schema_id):
            return _make_empty_answer(snapshot.snapshot_id)
        name = plan_name(entry, snapshot.snapshot_id, self._identity, self._holder)
        if name is not None:
            # `DECLINED_ANSWERS` caches recent refusals, and `RUNNING_ANSWERS` shares the result of equal requests that
            # run now.
            refusal = self._app[DECLINED_ANSWERS].get((name, body.max_kept_fraction))
            if refusal is not None:
                return refusal
            audience = None if self._holder is None else self._holder.audience
            plan_tables = self._app[COMPONENTS].catalog.plan_tables
            shared_plan = await plan_tables.find_and_renew(
                entry.namespace, name, self._lease_s, self._principal_name, audience
            )
            if shared_plan is not None:
                limit = None if body.hide_partitions else body.max_kept_fraction
                return _drop_name_of_large_plan(limit, _describe_plan_table(shared_plan))
        key = (entry.namespace, name or self._identity, self._lease_s, body.max_kept_fraction)
        return await self._app[RUNNING_ANSWERS].run(key, self._make)

    async def _make(self) -> PlanTableResponse:
        """Plan the scan, and make its plan table.

        The sampler later samples the values of the filter for the query history.
        """
        components = self._app[COMPONENTS]
        scan_plan = await components.planner.plan(self._bound_scan, self._entry)
        self.sampler = make_sampler(components, self._bound_scan, scan_plan, has_sizes=True)
        return await self.make_plan_table(scan_plan)

    async def make_plan_table(self, scan_plan: ScanPlan, *, is_shared: bool = True) -> PlanTableResponse:
        """Make the plan table of a plan of the request. The answer has no name if no plan table is made.

        If the request hides partitions, the engine is DuckDB. It could apply the equality deletes of a plan wrongly
        (`misread_reason`: the plan is refused). Or it could leave out needed files of the table itself
        (`misleads_duckdb`: the plan table is made even if it keeps most files).

        Args:
            scan_plan: The plan.
            is_shared: Whether equal requests may share the plan table. If not, it has a new name.
        """
        app, entry, body = self._app, self._entry, self._body
        metadata, snapshot = self._bound_scan.metadata, self._bound_scan.snapshot
        assert snapshot is not None
        name = plan_name(entry, snapshot.snapshot_id, self._identity, self._holder)
        manifest_count = len(scan_plan.view.blocks) + len(scan_plan.view.delete_blocks)
        is_small = scan_plan.considered <= _IN_LOOP_FILES_MAX and manifest_count <= _IN_LOOP_MANIFESTS_MAX
        misleads_duckdb = False
        if body.hide_partitions:
            misread_reason, misleads_duckdb = (
                _find_hazards(scan_plan) if is_small else await asyncio.to_thread(_find_hazards, scan_plan)
            )
            if misread_reason:
                return msgspec.structs.replace(_make_empty_answer(snapshot.snapshot_id), misread=misread_reason)
        max_kept_fraction = None if misleads_duckdb else body.max_kept_fraction
        sizes = measure_plan(scan_plan) if is_small else await asyncio.to_thread(measure_plan, scan_plan)
        answer = _drop_name_of_large_plan(
            max_kept_fraction, PlanTableResponse(name, snapshot.snapshot_id, None, *sizes)
        )
        if answer.name is None:
            if name is not None and scan_plan.complete and is_shared:
                app[DECLINED_ANSWERS].put((name, max_kept_fraction), answer, _DECLINED_EACH_BYTES)
            return answer
        plan_id = str(app[COMPONENTS].clock.uuid7())
        if not scan_plan.complete or not is_shared:  # A plan after an incomplete plan may keep fewer files.
            name = plan_name(entry, snapshot.snapshot_id, f"{self._identity} {plan_id}", self._holder)
            answer = msgspec.structs.replace(answer, name=name)
        find_manifests = partial(
            find_kept_manifests, scan_plan, metadata.format_version, hides_misleading_values=body.hide_partitions
        )
        manifests_of_plan = find_manifests() if is_small else await asyncio.to_thread(find_manifests)
        refusal = ""
        if manifests_of_plan.entries > (limit := app[COMPONENTS].settings.plan_table_files_limit):
            refusal = (
                f"the plan table would list {manifests_of_plan.entries:,} files; the limit is {limit:,} "
                "(plan_table_files_limit)"
            )
        elif not await app[COMPONENTS].catalog.plan_tables.check_or_count_refusal(self._principal_name):
            refusal = "there is no room for its plan table now (plan_tables_limit, plan_tables_bytes)"
        if refusal:
            return msgspec.structs.replace(answer, name=None, misread=refusal if misleads_duckdb else msgspec.UNSET)
        plan_table = await self._store_plan_table(manifests_of_plan, answer, plan_id)
        usage = app[COMPONENTS].catalog.column_usage
        if plan_table.plan_snapshot_id is not None and usage.is_on:
            end_ms = find_oldest_end_ms(scan_plan.view, scan_plan.entry_ids, scan_plan.metadata)
            usage.plans.put(plan_table.plan_snapshot_id, end_ms, 0)
        return _describe_plan_table(plan_table)

    async def _store_plan_table(
        self, manifests: KeptManifests, answer: PlanTableResponse, plan_id: str
    ) -> StoredPlanTable:
        """Write the files of the plan, and store the plan table."""
        app, entry, holder = self._app, self._entry, self._holder
        metadata, snapshot, name = self._bound_scan.metadata, self._bound_scan.snapshot, answer.name
        assert snapshot is not None
        assert name is not None
        folder = get_files_folder(app[COMPONENTS].settings, metadata)
        location = f"{folder}/{PLANS_FOLDER}/{parse_digest(name)}"
        plan_files = await app[WRITER].encode(manifests, metadata, snapshot, location, plan_id)
        file_paths = tuple(path for path, _ in plan_files.files)
        plan_table = StoredPlanTable(
            id=plan_id,
            namespace=entry.namespace,
            name=name,
            of_name=entry.name,
            uuid=entry.uuid,
            location=file_paths[-1],
            files=file_paths,
            snapshot_id=snapshot.snapshot_id,
            file_count=answer.files,
            size_bytes=answer.bytes,
            considered_count=answer.considered_files,
            considered_bytes=answer.considered_bytes,
            expires_ms=0,
            joined_tables=self._joined_tables,
        )
        if holder is not None:
            (planned_snapshot,) = plan_files.metadata.snapshots
            plan_snapshot = make_plan_snapshot(plan_id, metadata, planned_snapshot, is_fresh=is_fresh(snapshot))
            snapshot_json = msgspec.json.encode(plan_snapshot).decode()
            plan_table = msgspec.structs.replace(
                plan_table,
                audience=holder.audience,
                plan_snapshot_id=plan_snapshot.snapshot_id,
                snapshot_or_fingerprint=snapshot_json,
            )
        return await app[COMPONENTS].catalog.plan_tables.store_and_register(
            plan_table, plan_files.metadata, plan_files.files, self._lease_s, self._principal_name
        )


def _make_empty_answer(snapshot_id: int | None) -> PlanTableResponse:
    """Return the answer for a request that gets no plan table and whose plan is not measured."""
    return PlanTableResponse(
        name=None,
        snapshot_id=snapshot_id,
        expires_at_ms=None,
        files=0,
        bytes=0,
        considered_files=0,
        considered_bytes=0,
    )


def _find_hazards(scan_plan: ScanPlan) -> tuple[str, bool]:
    """Return the problems that DuckDB would have with the snapshot of a plan.

    Returns:
        Two values: the reason why DuckDB would apply the equality deletes of the snapshot wrongly, or an empty text,
        and whether DuckDB could leave out files of the table that a query needs. With a reason, the second value is
        False.
    """
    misread_reason = explain_misread_deletes(scan_plan.view, scan_plan.metadata)
    return misread_reason, not misread_reason and has_misleading_values(scan_plan.view, scan_plan.metadata)


def measure_plan(scan: ScanPlan) -> tuple[int, int, int, int | None]:
    """Return the numbers of files and bytes that the plan keeps, and the numbers of the snapshot.

    The bytes of the snapshot are None if the plan did not load all of its manifests.
    """
    kept_bytes = int(find_files_at(scan.view, scan.entry_ids).read_longs("file_size_in_bytes").sum())
    all_bytes = None
    if scan.view.file_count == scan.considered:
        all_bytes = int(find_files_by_prefix(scan.view).read_longs("file_size_in_bytes").sum())
    return scan.files, kept_bytes, scan.considered, all_bytes


def _describe_plan_table(plan: StoredPlanTable) -> PlanTableResponse:
    """Return a plan table in the form of the answer."""
    return PlanTableResponse(
        plan.name,
        plan.snapshot_id,
        plan.expires_ms,
        plan.file_count,
        plan.size_bytes,
        plan.considered_count,
        plan.considered_bytes,
        plan_snapshot_id=msgspec.UNSET if plan.plan_snapshot_id is None else plan.plan_snapshot_id,
    )


def _drop_name_of_large_plan(max_kept_fraction: float | None, answer: PlanTableResponse) -> PlanTableResponse:
    """Return the answer, without its name if the plan keeps more than this fraction of the files."""
    if max_kept_fraction is not None and answer.files > max_kept_fraction * answer.considered_files:
        return msgspec.structs.replace(answer, name=None, expires_at_ms=None, plan_snapshot_id=msgspec.UNSET)
    return answer


async def _open_components(app: web.Application) -> None:
    settings = app[COMPONENTS].settings
    budget_bytes, limit_bytes = settings.plan_table_memory_bytes, settings.plan_manifest_limit_bytes
    app[WRITER] = PlanWriter(app[COMPONENTS].objects, budget_bytes=budget_bytes, limit_bytes=limit_bytes)


def add_components(app: web.Application) -> None:
    """Add the caches of plan requests to the application, and the plan writer when the application starts."""
    add_joins(app)
    app[RUNNING_ANSWERS] = SingleFlight()
    app[DECODED_REQUESTS] = MemoryCache(_DECODED_REQUESTS_BYTES, "statements")
    app[DECLINED_ANSWERS] = MemoryCache(_DECLINED_BYTES, "statements")
    app.on_startup.append(_open_components)
