"""An asynchronous client of the server that requests plans and loads tables and views.

It does not repeat requests, because a query waits for the responses, and can run without plans.
Plans are not cached, because only the server knows the latest commits. Columns are cached. Before each use of cached
columns, the server confirms that the table has not changed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from seamark.cache.memory import MemoryCache
from seamark.connector.client.errors import NoSuchResource, ServerFailed, Unreachable, parse_error
from seamark.connector.client.names import (
    check_url,
    find_standard_root,
    hide_credentials,
    make_standard_path,
    make_table_path,
)
from seamark.connector.client.policies import make_time_report
from seamark.connector.plans.column_types import list_column_types, read_column_type
from seamark.connector.plans.conditions import Like
from seamark.connector.plans.scan import NO_USE, TableUse
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import FRESH_HEADER, PROXY_ENGINE
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import SeamarkError
from seamark.formats.runtime.tls import build_seamark_context, trust_only

_ANSWER_BYTES_MAX = 16 << 20
_COLUMNS_BYTES = 8 << 20
_BYTES_PER_COLUMN = 200
_CONNECTIONS_MAX = 64
_AUDIENCE = re.compile(r"[!-~]{1,100}")
_GROUPS_BYTES_MAX = 256 << 20
"""The maximum size of a response that contains groups of a cube."""
_INDEX_PREFIX = "seamark.index."
"""The prefix of the properties that define indexes (`formats/index/definitions.py`, which takes long to import)."""
_TIMEOUT_S = 30.0
"""The timeout of a request. Callers give up much earlier."""

Name = tuple[str, ...]
"""The name of a table or view, with the levels of its namespace."""


class JoinResult(msgspec.Struct, frozen=True, rename="kebab"):
    """The outcome of a requested join.

    If the join was `used`, `keys` is the number of values by which files were left out, or None if an index on
    attributes of the other table left them out.
    """

    snapshot_id: int | None
    keys: int | None
    used: bool


class TablePlanResponse(msgspec.Struct, frozen=True, rename="kebab"):
    """The replacement of a scan: a plan table (`name`), or a snapshot of the table (`plan_snapshot_id`).

    Both are None if the plan would keep a larger fraction of the files than the request allows.
    """

    name: str | None
    snapshot_id: int | None
    files: int
    bytes: int
    considered_files: int
    joins: tuple[JoinResult, ...] = ()
    """The outcomes of the joins, in the order of the request. Nested joins follow the join that contains them."""
    plan_snapshot_id: int | None = None
    misread: str = ""
    """The reason why DuckDB would read the table wrongly. It is empty if DuckDB reads the table correctly."""
    statement: str = ""
    """The fingerprint of the statement in the query history, or empty if the history does not count it."""

    @property
    def is_made(self) -> bool:
        return self.name is not None or self.plan_snapshot_id is not None


T = TypeVar("T")


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop in another thread, and return its result.

    The caller's thread may already run an event loop, for example in a notebook.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A join in a plan request, which restricts the needed rows of a table.

    A row is needed only if the joined table has a row with equal values that meets `filter`, `likes` and `joins`. `on`
    has pairs of a column of the table with the needed rows and a column of the joined table.
    """

    table: Name
    on: tuple[tuple[str, str], ...]
    filter: Expression | None
    snapshot_id: int
    joins: tuple[JoinRequest, ...] = ()
    likes: tuple[tuple[Like, ...], ...] = ()
    transform: str = IDENTITY
    any_of: int | None = None
    exempt_condition: Expression | None = None
    ops: tuple[str, ...] = ()
    exact: bool = False
    """`transform`, `any_of`, `exempt_condition`, `ops` and `exact` have the same meanings as in `scan.Join`."""

    def build_body(self) -> dict[str, Any]:
        # A join with a range has one pair, or two pairs with the same column. The second pair has the end of the range.
        pairs = self.on[:1] if self.ops else self.on
        body: dict[str, Any] = {"table": list(self.table), "on": dict(pairs), "snapshot-id": self.snapshot_id}
        if self.filter is not None:
            body["filter"] = encode_expression(self.filter)
        if self.transform != IDENTITY:
            body["transform"] = self.transform
        if self.ops:
            body["operator"] = self.ops[0]
        if len(self.ops) > 1:
            _, end_column = self.on[1]
            body |= {"end": end_column, "end-operator": self.ops[1]}
        if self.exact:
            body["exact"] = True
        if self.any_of is not None:
            body["any-of"] = self.any_of
        if self.exempt_condition is not None:
            body["unless"] = encode_expression(self.exempt_condition)
        if self.likes:
            body["likes"] = [[_encode_like(like) for like in alternatives] for alternatives in self.likes]
        if self.joins:
            body["joins"] = [join.build_body() for join in self.joins]
        return body


def _encode_like(like: Like) -> dict[str, Any]:
    body = {"column": like.column[1], "pattern": like.pattern, "escape": like.escape, "function": like.function}
    return {**{name: value for name, value in body.items() if value is not None}, "negated": like.negated}


@dataclass(frozen=True, slots=True)
class TablePlanRequest:
    """A scan for which a plan is requested.

    Attributes:
        filter: An expression, which may have typed literals. If it is None, the plan keeps every file.
        snapshot_id, ref: The snapshot, or a branch or tag. If both are None, the current snapshot is planned.
        max_kept_fraction: The maximum fraction of the files that the plan may keep. If it keeps more, no plan table is
            created.
        uses_snapshot_schema: Whether the engine reads with the schema of the snapshot. If this is not the current
            schema, no plan table is created.
    """

    table: Name
    filter: Expression | None
    snapshot_id: int | None
    max_kept_fraction: float
    uses_snapshot_schema: bool = False
    joins: tuple[JoinRequest, ...] = ()
    ref: str | None = None
    hide_partitions: bool = False
    """Whether the plan table hides partition fields and bounds by which DuckDB would wrongly leave out files."""
    use: TableUse = NO_USE


@dataclass(frozen=True, slots=True)
class CubePlanRequest:
    """A request for groups of a cube, and for a plan of the files without groups.

    Attributes:
        table, filter, snapshot_id, ref, hide_partitions: See `TablePlanRequest`.
        definition_id: The id of the cube.
        columns: The columns of the cube's entries.
        unless: A condition on rows. Files that may have rows that meet it are planned instead of read from the cube.
        group_filter: A condition on groups (`group_conditions.py`). Only groups that meet it are returned.
        groups_max: The maximum number of groups. With more groups, the cube is not used.
    """

    table: Name
    definition_id: str
    columns: tuple[str, ...]
    filter: Expression | None = None
    unless: Expression | None = None
    snapshot_id: int | None = None
    ref: str | None = None
    hide_partitions: bool = False
    groups_max: int = 1_000_000
    group_filter: Expression = TRUE


@dataclass(frozen=True, slots=True)
class View:
    """A stored view.

    Attributes:
        text: The text in Trino's dialect.
        columns: The declared columns in lower case.
        catalog, schema: The defaults for names in the text.
    """

    location: str
    """The location of the view's metadata file, which changes with each version of the view."""
    text: str
    columns: Mapping[str, str]
    catalog: str | None
    schema: str | None


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a table or view in a view's text, at the characters [start, end), and its replacement.

    The replacement reads only planned files: the snapshot `plan_snapshot_id` of `table`, or the temporary view `plan`.
    If `alias` is set, the replacement has the original name as its alias.
    """

    start: int
    end: int
    table: Name = ()
    plan_snapshot_id: int | None = None
    plan: Name = ()
    alias: bool = False

    def build_body(self) -> dict[str, Any]:
        position = {"start": self.start, "end": self.end}
        if self.plan:
            return {**position, "plan": list(self.plan), "alias": self.alias}
        return {**position, "table": list(self.table), "plan-snapshot-id": self.plan_snapshot_id}


@dataclass(frozen=True, slots=True)
class PlanView:
    """A view that reads plans instead of tables.

    Attributes:
        plan_id: The id of the view for `Seamark.lease`.
        columns: The columns of the view.
    """

    name: str
    plan_id: int
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownTable:
    """The columns and the state of a table, as the server has returned them.

    Attributes:
        columns: The Iceberg types of the columns by their lower-case names, or None if two names differ only in case.
        version: A value that changes with each change of the table.
    """

    version: str
    columns: Mapping[str, str] | None

    snapshot_id: int | None = None
    """The id of the current snapshot."""
    size_bytes: int = 0
    files: int = 0
    """The number of data files in the snapshot's summary, or 0 if the summary does not contain it."""
    refs: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    """The snapshots of branches and tags."""
    cube_metadata: TableMetadata | None = field(default=None, kw_only=True)
    """The metadata of a table that may have cubes, or None."""
    fields: tuple[tuple[int, str, str], ...] = field(default=(), kw_only=True)
    """The id, name and type of each column. The type of a nested column is `NESTED`."""
    snapshot_has_current_schema: bool = field(default=True, kw_only=True)
    """Whether the current snapshot was written with the current schema.

    Engines read a snapshot that is selected by its id with the schema of the snapshot, in which a name may belong to
    another column.
    """

    def resolve_snapshot_id(self, ref: str | None) -> int | None:
        """Return the snapshot of a branch or tag, or the current snapshot if `ref` is None.

        The result is None if there is no such branch or tag, or no snapshot.
        """
        return self.snapshot_id if ref is None else self.refs.get(ref)


class _Field(msgspec.Struct):
    id: int
    name: str
    type: Any


class _Schema(msgspec.Struct, rename="kebab"):
    schema_id: int
    fields: list[_Field]


class _Snapshot(msgspec.Struct, rename="kebab"):
    snapshot_id: int
    schema_id: int | None = None
    summary: dict[str, str] = {}


class _Ref(msgspec.Struct, rename="kebab"):
    snapshot_id: int


class _Metadata(msgspec.Struct, rename="kebab"):
    current_schema_id: int
    schemas: list[_Schema]
    current_snapshot_id: int | None = None
    snapshots: list[_Snapshot] = []
    refs: dict[str, _Ref] = {}
    properties: dict[str, str] = {}

    @property
    def may_have_cubes(self) -> bool:
        return any(key.startswith(_INDEX_PREFIX) and "cube" in value for key, value in self.properties.items())


class _Loaded(msgspec.Struct):
    metadata: _Metadata


class _RawLoaded(msgspec.Struct):
    metadata: msgspec.Raw


class _Representation(msgspec.Struct):
    dialect: str = ""
    sql: str = ""


class _Version(msgspec.Struct, rename="kebab"):
    version_id: int
    schema_id: int
    representations: list[_Representation]
    default_namespace: list[str]
    default_catalog: str | None = None


class _ViewMetadata(msgspec.Struct, rename="kebab"):
    current_version_id: int
    schemas: list[_Schema]
    versions: list[_Version]


class _LoadedView(msgspec.Struct, rename="kebab"):
    metadata_location: str
    metadata: _ViewMetadata


class _PlanView(msgspec.Struct, rename="kebab"):
    name: str | None
    plan_snapshot_id: int | None = None


class _Config(msgspec.Struct):
    defaults: dict[str, str] = {}
    overrides: dict[str, str] = {}


class Seamark:
    """An asynchronous client of the server at `url`, with the credentials of `http`."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, *, lease_s: int, audience: str | None = None, engine: str = ""
    ) -> None:
        """Create a client.

        Args:
            lease_s: The duration of the leases of plans, in seconds.
            engine: The engine that runs the statements, for the query history. If empty, the server derives it.
            audience: The value of the header `X-Seamark-Plans`. If it is set, plans are snapshots of the table, and
                only requests with this value see them.
        """
        self._http = http
        self.url = url
        self._shown_url = hide_credentials(url)
        self._lease_s = lease_s
        self._engine = engine
        self._plan_headers = {FRESH_HEADER: "true"} | ({} if audience is None else {"X-Seamark-Plans": audience})
        # Only requests with the same `holder` share identical plans, so a process can withdraw its plans.
        self._holder_fields = {} if audience is None else {"holder": secrets.token_hex(8)}
        self._root: str | None = None
        self._known_tables: MemoryCache[Name, KnownTable] = MemoryCache(_COLUMNS_BYTES)

    async def plan_table(self, request: TablePlanRequest) -> TablePlanResponse:
        """Request a plan of a table. The fields of the request are those of createPlanTable in the OpenAPI document.

        Raises:
            InvalidRequest: The filter cannot be bound.
            ClientError: The server refuses the request or does not respond.
        """
        body: dict[str, Any] = {"kept-max": request.max_kept_fraction, "lease-s": self._lease_s, **self._holder_fields}
        if request.filter is not None:
            body |= {"filter": encode_expression(request.filter), "case-sensitive": False}
        body |= {} if request.snapshot_id is None else {"snapshot-id": request.snapshot_id}
        body |= {} if request.ref is None else {"ref": request.ref}
        body |= {"use-snapshot-schema": True} if request.uses_snapshot_schema else {}
        body |= {"joins": [join.build_body() for join in request.joins]} if request.joins else {}
        body |= {"hide-partitions": True} if request.hide_partitions else {}
        body |= request.use.build_body()
        body |= {"engine": self._engine} if self._engine else {}
        path = f"{make_table_path(request.table)}/plan-tables"
        _, raw = await self._send("POST", path, msgspec.json.encode(body), headers=self._plan_headers)
        return self._decode(raw, TablePlanResponse, "a plan table")

    async def request_cube_plan(self, request: CubePlanRequest) -> bytes:
        """Request groups of a cube, and a plan of the files without groups.

        Returns:
            An Arrow IPC stream (`connector/cubes/plans.py`).

        Raises:
            NoSuchResource: The table has no such cube.
            ClientError: The server refuses the request or does not respond.
        """
        body: dict[str, Any] = {
            "definition-id": request.definition_id,
            "case-sensitive": False,
            "columns": list(request.columns),
            "groups-max": request.groups_max,
            "lease-s": self._lease_s,
            **self._holder_fields,
        }
        if request.filter is not None:
            body |= {"filter": encode_expression(request.filter)}
        if request.unless is not None:
            body |= {"unless": encode_expression(request.unless)}
        body |= {} if request.group_filter == TRUE else {"group-filter": encode_expression(request.group_filter)}
        body |= {} if request.snapshot_id is None else {"snapshot-id": request.snapshot_id}
        body |= {} if request.ref is None else {"ref": request.ref}
        body |= {"hide-partitions": True} if request.hide_partitions else {}
        path = f"{make_table_path(request.table)}/cube-plans"
        data = msgspec.json.encode(body)
        _, raw = await self._send("POST", path, data, headers=self._plan_headers, answer_bytes_max=_GROUPS_BYTES_MAX)
        return raw

    async def lease(self, name: Name, plan_ids: Collection[int], lease_s: int | None = None) -> None:
        """Renew the leases of plans of a table or view, or withdraw the plans if `lease_s` is 0."""
        body = {"snapshot-ids": list(plan_ids), "lease-s": self._lease_s if lease_s is None else lease_s}
        path = f"{make_table_path(name)}/plan-snapshots"
        await self._send("POST", path, msgspec.json.encode(body), headers=self._plan_headers)

    async def report_scan(self, table: Name, snapshot_id: int, columns: Collection[str]) -> None:
        """Report the columns of a table that a statement has read at a plan snapshot, as engines do.

        The report is a ScanReport of the Iceberg REST specification.
        """
        body = {
            "report-type": "scan-report",
            "table-name": ".".join(table),
            "snapshot-id": snapshot_id,
            "filter": True,  # The specification requires all these fields. `True` is the filter of all rows.
            "schema-id": -1,  # The id is unknown.
            "projected-field-ids": [],
            "projected-field-names": list(columns),
            "metrics": {},
            "metadata": {"engine-name": PROXY_ENGINE},
        }
        path = f"{await self._make_path(table, 'tables')}/metrics"
        await self._send("POST", path, msgspec.json.encode(body), headers={"Content-Type": "application/json"})

    async def report_time(
        self,
        table: Name,
        statement: str,
        *,
        seconds: float,
        files: int,
        size_bytes: int,
        run_tables: Sequence[Name] = (),
    ) -> None:
        """Report the time that an engine needed for a statement, and the files and bytes that it read of a table.

        `run_tables` are all tables that the statement read, for its OpenLineage events. Pass them in one report only.
        """
        body = make_time_report(statement, seconds, files, size_bytes, run_tables)
        await self._send("POST", f"{make_table_path(table)}/history/times", msgspec.json.encode(body))

    async def view(self, name: Name) -> View | None:
        """Return the current version of a view, or None if it does not exist or has no text in Trino's dialect."""
        try:
            _, raw = await self._send("GET", await self._make_path(name, "views"))
        except NoSuchResource:
            return None
        try:
            loaded_view = convert_json(raw, _LoadedView)
            metadata = loaded_view.metadata
            version = next(
                version for version in metadata.versions if version.version_id == metadata.current_version_id
            )
            schema = next(schema for schema in metadata.schemas if schema.schema_id == version.schema_id)
        except (msgspec.MsgspecError, StopIteration) as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not a view: {error!r}") from None
        text = next(
            (
                representation.sql
                for representation in version.representations
                if representation.dialect.lower() == "trino"
            ),
            None,
        )
        columns = list_column_types([(field.name, field.type) for field in schema.fields])
        if text is None or columns is None:
            return None
        catalog = version.default_catalog and version.default_catalog.lower()
        return View(
            loaded_view.metadata_location, text, columns, catalog, ".".join(version.default_namespace).lower() or None
        )

    async def plan_view(
        self, name: Name, view: View, predicate: str, references: Sequence[Reference], reader: str
    ) -> PlanView | None:
        """Create a temporary view that reads planned files in place of the tables of another view.

        Only one user of the engine, `reader`, can read it. Return None if the server creates no more such views.

        Raises:
            NoSuchResource: The view has changed.
        """
        body = {
            "metadata-location": view.location,
            "predicate": predicate,
            "tables": [reference.build_body() for reference in references],
            "reader": reader,
            "lease-s": self._lease_s,
            **self._holder_fields,
        }
        # The path of a view differs from the path of a table only in this level.
        path = f"{make_table_path(name).replace('/tables/', '/views/', 1)}/plan-views"
        _, raw = await self._send("POST", path, msgspec.json.encode(body), headers=self._plan_headers)
        answer = self._decode(raw, _PlanView, "a plan view")
        if answer.name is None or answer.plan_snapshot_id is None:
            return None
        return PlanView(answer.name, answer.plan_snapshot_id, tuple(view.columns))

    async def load_table(self, table: Name) -> KnownTable | None:
        """Return the current state of a table, or None if there is no table of this name."""
        cached_table = self._known_tables.get(table)
        path = f"{await self._make_path(table, 'tables')}?snapshots=refs"
        try:
            version, raw = await self._send(
                "GET", path, known_version=cached_table.version if cached_table else "", headers={FRESH_HEADER: "true"}
            )
        except NoSuchResource:
            self._known_tables.discard(table)
            return None
        if cached_table is not None and not raw:  # The server sends no table if the known version is current.
            return cached_table
        try:
            metadata = convert_json(raw, _Loaded).metadata
            schema = next(schema for schema in metadata.schemas if schema.schema_id == metadata.current_schema_id)
        except (msgspec.MsgspecError, StopIteration) as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not a table: {error!r}") from None
        cube_metadata = self._decode_metadata(raw) if metadata.may_have_cubes else None
        snapshots = (
            snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id == metadata.current_snapshot_id
        )
        snapshot = next(snapshots, None)
        current = KnownTable(
            version,
            list_column_types([(field.name, field.type) for field in schema.fields]),
            None if snapshot is None else snapshot.snapshot_id,
            *(_read_total(snapshot, name) for name in ("total-files-size", "total-data-files")),
            refs={name: ref.snapshot_id for name, ref in metadata.refs.items()},
            cube_metadata=cube_metadata,
            fields=tuple((field.id, field.name, read_column_type(field.type)) for field in schema.fields),
            # If a snapshot states no schema, engines read it with the current schema.
            snapshot_has_current_schema=snapshot is None or snapshot.schema_id in (None, metadata.current_schema_id),
        )
        if version:
            size = _BYTES_PER_COLUMN * (1 + len(schema.fields) + len(metadata.refs))
            self._known_tables.put(table, current, size if cube_metadata is None else size + 2 * len(raw))
        return current

    def _decode_metadata(self, raw: bytes) -> TableMetadata:
        try:
            return decode_table(bytes(convert_json(raw, _RawLoaded).metadata), self._shown_url)
        except (msgspec.MsgspecError, SeamarkError) as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not a table: {error}") from None

    async def _make_path(self, name: Name, kind: str) -> str:
        """Return the path of a table or view in Iceberg's REST routes."""
        if self._root is None:
            _, raw = await self._send("GET", "/v1/config")
            config = self._decode(raw, _Config, "a configuration")
            self._root = find_standard_root(config.defaults, config.overrides)
        return make_standard_path(self._root, kind, name)

    def _decode(self, raw: bytes, kind: type[T], description: str) -> T:
        """Decode a response. `description` names the expected content in the error message."""
        try:
            return convert_json(raw, kind)
        except msgspec.MsgspecError as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not {description}: {error}") from None

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        known_version: str = "",
        headers: Mapping[str, str] | None = None,
        answer_bytes_max: int = _ANSWER_BYTES_MAX,
    ) -> tuple[str, bytes]:
        """Send a request, and return the ETag and body of the response.

        The body is empty if the current version is `known_version`. It is cut off after `answer_bytes_max`.
        """
        url = URL(self.url + path, encoded=True)
        headers = {**(headers or {}), **({"If-None-Match": known_version} if known_version else {})}
        try:
            async with self._http.request(method, url, data=body, headers=headers, allow_redirects=False) as answer:
                parts, size = list[bytes](), 0
                while not answer.content.at_eof() and size < answer_bytes_max:
                    parts.append(await answer.content.readany())
                    size += len(parts[-1])
                raw = b"".join(parts)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"No answer from {self._shown_url}: {error or type(error).__name__}") from error
        if answer.status == 304 and known_version:
            return known_version, b""
        if answer.status not in (200, 204):
            raise parse_error(answer.status, raw, answer.headers.get("X-Request-Id", ""))
        return answer.headers.get("ETag", ""), raw


def _read_total(snapshot: _Snapshot | None, name: str) -> int:
    return 0 if snapshot is None else parse_count(snapshot.summary, name, 0)


def check_audience(value: str) -> None:
    """Check a value of `X-Seamark-Plans`.

    Raises:
        ValueError: The server refuses the value.
    """
    if not _AUDIENCE.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a valid value of X-Seamark-Plans; it must have 1 to 100 visible ASCII "
            "characters, without spaces"
        )


@asynccontextmanager
async def open_seamark(
    url: str,
    *,
    token: str | None,
    lease_s: int,
    audience: str | None = None,
    authorities: str | None = None,
    certificates: str = "",
    engine: str = "",
) -> AsyncIterator[Seamark]:
    """Connect to a server.

    Args:
        audience: The value of the header `X-Seamark-Plans` in requests to which plans are visible, or None.
        authorities: A PEM file with the authorities of the server's certificate. The default is the file of SEAMARK_CA,
            or the system's authorities.
        certificates: The only certificates (PEM) of a server that are accepted, or an empty text.
        engine: The name of the engine for the query history.

    Raises:
        ValueError: The URL is invalid.
    """
    check_url(url)
    tls = trust_only(certificates) if certificates else build_seamark_context(authorities) or True
    headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "seamark-plans"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX, keepalive_timeout=10, ssl=tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
    )
    async with session:
        yield Seamark(session, url.rstrip("/"), lease_s=lease_s, audience=audience, engine=engine)
