"""A synchronous client of Seamark's own API: metadata of a table's files, scan plans, and lookups.

Invariant: every call can be repeated, because it only reads or is idempotent (`indexes.py`). The client repeats a call
up to a maximum number of times if a connection fails, or if the server is busy (503, after the seconds in
`Retry-After`). All pages of a listing are read from the same snapshot.

A client can be pickled, and can be used by threads and forked processes. Each process opens its own connections.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import pyarrow as pa
import urllib3
from urllib3.exceptions import HTTPError

from seamark.connector.client.connections import ClientConnections, compute_wait_s, make_connection_retries
from seamark.connector.client.errors import ServerFailed, ServerStorageFull, Unreachable, describe_cause, parse_error
from seamark.connector.client.names import (
    Name,
    check_url,
    find_standard_root,
    hide_credentials,
    make_namespace_path,
    make_standard_path,
    make_table_path,
    split_table,
)
from seamark.connector.client.row_answers import (
    FileRows,
    Keys,
    LookupAnswer,
    encode_keys,
    join_pages,
    parse_file_rows,
    parse_lookup,
)
from seamark.connector.client.values import CURRENT, At, EngineTable, Explanation, PlanTable, TimelineInstant, omit_none
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.protocol.wire import AFTER_HEADER, FRESH_HEADER, NAMESPACE_SEPARATOR
from seamark.formats.runtime.decoding import convert_json, convert_values

T = TypeVar("T")

ARROW_STREAM = "application/vnd.apache.arrow.stream"
_EXPIRATION_S = 900.0
"""The timeout of `expire_snapshots`, in seconds. The server reads the manifests of all snapshots of the table."""
_NO_QUERY: Mapping[str, Any] = {}
_NAMES_PER_PAGE = 1000
_REPORTED_WAIT_S = 5.0
"""The minimum wait in seconds before a repeated request for which the client logs the reason."""
_log = logging.getLogger(__name__)


class _LoadTableResult(msgspec.Struct, rename="kebab"):
    """The response to loadTable of Iceberg's REST specification."""

    metadata: msgspec.Raw
    config: dict[str, str] = {}
    storage_credentials: list[dict[str, Any]] = []


class SeamarkClient:
    """A client of one server.

    Attributes:
        url: The URL of the server, as engines use it for their catalog.
        token: A bearer token.
        timeout_s: The maximum time of each wait for the server.
        retries: The maximum number of times that one request is repeated.
        fence: The fencing number that the client sends with commits of a job of the table services.
        certificates: The only certificates (PEM) that the client accepts, for processes that the server starts. The
            host name of the server is then not checked. If it is empty, the authorities of the system are trusted.

        The environment variable SEAMARK_CA is the path of a file with further trusted authorities.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
        fence: int | None = None,
        certificates: str = "",
    ) -> None:
        check_url(url)
        self.url = url.rstrip("/")
        self._shown_url = hide_credentials(self.url)
        self.token = token or None  # A shell replaces an unset variable by an empty string.
        self._timeout_s = timeout_s
        self._retries = retries
        self.fence = fence
        self.certificates = certificates
        self._connections = ClientConnections(self._make_timeout(timeout_s), certificates)
        self._roots: dict[str, str] = {}
        """The roots of the routes of Iceberg's REST specification, by URL.

        The copies of a client share this mapping.
        """
        self._read_headers: Mapping[str, str] = {}

    def with_fresh_rows(self, after: str = "") -> SeamarkClient:
        """Return a client of the same server that also reads the rows of stream tables that wait for a flush.

        Its plans may contain files that no snapshot of the table has. Use it only for queries: a commit must not be
        based on these files.

        Args:
            after: The tokens of writes whose rows each result has to include, separated by spaces
                (`StreamTableWriter.token`).
        """
        client = copy.copy(self)
        client._read_headers = {FRESH_HEADER: "true", **({AFTER_HEADER: after} if after else {})}
        return client

    def reading_committed_rows(self) -> SeamarkClient:
        """Return a client of the same server that reads only committed rows."""
        client = copy.copy(self)
        client._read_headers = {}  # These headers request rows that wait for a flush (`with_fresh_rows`).
        return client

    def __repr__(self) -> str:
        return f"<SeamarkClient {self._shown_url}>"

    @property
    def has_token(self) -> bool:
        return self.token is not None

    def close(self) -> None:
        """Close the idle connections of the client and its copies. All of them can still be used."""
        self._connections.close_idle()

    def ping(self) -> None:
        """Send a request that changes nothing.

        Raises:
            ClientError: The server does not respond, or refuses the login.
        """
        self._request_json("GET", "/v1/config")

    # Contents of a table

    def files(
        self, table: Name, partition: str | Mapping[str, Any] = "", *, content: str = "all", at: At = CURRENT
    ) -> pa.Table:
        """Return the files of a snapshot, or of some of its partitions.

        Args:
            partition: The partition whose files are returned, or "" for all partitions.
            content: `all`, `data` or `deletes`.
            at: The snapshot.
        """
        return join_pages(self.iter_files(table, partition, content=content, at=at))

    def iter_files(
        self,
        table: Name,
        partition: str | Mapping[str, Any] = "",
        *,
        content: str = "all",
        at: At = CURRENT,
        page_files: int | None = None,
    ) -> Iterator[pa.Table]:
        """Yield the pages of the table that `files` returns."""
        return self._read_pages(table, "files", partition, at, page_files, {"content": content})

    def stats(
        self,
        table: Name,
        column: str,
        partition: str | Mapping[str, Any] = "",
        *,
        fields: Sequence[str] | None = None,
        at: At = CURRENT,
    ) -> pa.Table:
        """Return the statistics of one column for each file: counts, and bounds as values of the column's type.

        Args:
            column: The name of the column.
            partition: The partition whose files are returned, or "" for all partitions.
            fields: The fields to return, such as `("file", "lower-bound")`. The paths of the files take most of the
                bytes, so leave out `file-path` if possible.
            at: The snapshot.
        """
        return join_pages(self.iter_stats(table, column, partition, fields=fields, at=at))

    def iter_stats(
        self,
        table: Name,
        column: str,
        partition: str | Mapping[str, Any] = "",
        *,
        fields: Sequence[str] | None = None,
        at: At = CURRENT,
        page_files: int | None = None,
    ) -> Iterator[pa.Table]:
        """Yield the pages of the table that `stats` returns."""
        parameters = {} if fields is None else {"fields": ",".join(fields)}
        return self._read_pages(table, f"stats/{quote(column, safe='')}", partition, at, page_files, parameters)

    def partitions(
        self,
        table: Name,
        partition: str | Mapping[str, Any] = "",
        *,
        at: At = CURRENT,
        page_partitions: int | None = None,
    ) -> pa.Table:
        """Return the partitions with at least one file, and the totals of their files."""
        return join_pages(self._read_pages(table, "partitions", partition, at, page_partitions, {}))

    def timeline(
        self,
        table: Name | None = None,
        *,
        since: str | None = None,
        action: str | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Iterator[TimelineInstant]:
        """Yield the instants of a table or of the whole catalog up to now. An instant is an action on a table.

        Args:
            table: The table, or None for the whole catalog.
            since: The position after which the instants are read, or None for all instants.
            action: The only action to return, or None for all actions.
            newest_first: Whether the newest instant is first.
            limit: The maximum number of instants.
        """
        query = {"order": "desc" if newest_first else "asc", **omit_none({"action": action})}
        path = "/api/v1/timeline" if table is None else f"{make_table_path(table)}/timeline"
        remaining_count = limit
        while remaining_count is None or remaining_count > 0:
            answer = self._request_json("GET", path, {**query, **omit_none({"since": since, "limit": remaining_count})})
            yield from self._convert(answer["instants"], list[TimelineInstant])
            if not answer["instants"] or answer["next-since"] is None:
                return
            since = answer["next-since"]
            remaining_count = None if remaining_count is None else remaining_count - len(answer["instants"])

    # Contents of the catalog

    def namespaces(self) -> Iterator[tuple[str, ...]]:
        """Yield all namespaces, parents first."""
        parents: list[tuple[str, ...]] = [()]
        while parents:
            parent = parents.pop()
            for levels in self._list_names("namespaces", "namespaces", NAMESPACE_SEPARATOR.join(parent)):
                parents.append(tuple(levels))
                yield tuple(levels)

    def tables(self, namespace: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the names of the tables of one namespace. Each name has all levels."""
        for identifier in self._list_names(f"namespaces/{make_namespace_path(namespace)}/tables", "identifiers"):
            yield (*identifier["namespace"], identifier["name"])

    def load_table(
        self, table: Name, *, history: bool = False, loaded_before: EngineTable | None = None
    ) -> EngineTable:
        """Return the metadata of a table, with the settings and keys for access to its files.

        Args:
            history: Whether to return all snapshots of the table, and not only those of branches and tags.
            loaded_before: An earlier result of the same call, which is returned if the table has not changed.

        Raises:
            NoSuchResource: The table does not exist.
            ServerFailed: The response is not a table.
        """
        path = self._make_standard_path(table)
        headers = {"X-Iceberg-Access-Delegation": "vended-credentials"}
        if loaded_before is not None and loaded_before.etag:
            headers["If-None-Match"] = loaded_before.etag
        response = self._send("GET", path, {"snapshots": "all" if history else "refs"}, headers=headers)
        if response.status == HTTPStatus.NOT_MODIFIED and loaded_before is not None:
            return loaded_before
        answer = response.data
        try:
            result = convert_json(answer, _LoadTableResult)
            location = str(msgspec.json.decode(result.metadata)["location"])
        except (msgspec.MsgspecError, KeyError) as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not a table: {error}") from None
        # The keys for the longest matching prefix are applied last, because they are the most specific.
        storage = dict(result.config)
        for keys in sorted(result.storage_credentials, key=lambda credential: len(credential["prefix"])):
            storage |= keys["config"] if f"{location}/".startswith(keys["prefix"]) else {}
        return EngineTable(bytes(result.metadata), location, storage, response.headers.get("ETag", ""))

    def _list_names(self, path: str, key: str, parent: str = "") -> Iterator[Any]:
        query = {"pageSize": _NAMES_PER_PAGE, "pageToken": "", **({"parent": parent} if parent else {})}
        for page in self._list_pages(f"{self._get_catalog()}/{path}", query, "pageToken"):
            yield from page[key]

    def _get_catalog(self) -> str:
        """Return the root of the routes of Iceberg's REST specification. It is requested once for each URL."""
        root = self._roots.get(self.url)
        if root is None:
            config = self._request_json("GET", "/v1/config")
            root = self._roots[self.url] = find_standard_root(config.get("defaults", {}), config.get("overrides", {}))
        return root

    def _make_standard_path(self, table: Name) -> str:
        """Return the path of a table in the routes of Iceberg's REST specification."""
        return make_standard_path(self._get_catalog(), "tables", split_table(table))

    # Plans and other uses of a filter

    def plan(self, table: Name, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Plan a scan with the route of Iceberg's REST specification, and yield the pages of the plan.

        Each page has `file-scan-tasks`, and the `delete-files` to which the tasks refer.

        Args:
            body: A PlanTableScanRequest of the specification.

        Raises:
            InvalidRequest: The body is invalid.
            ServerFailed: The plan was not completed.
        """
        path = self._make_standard_path(table)
        answer = self._request_json("POST", f"{path}/plan", {}, dict(body))
        plan_id = answer.get("plan-id", "")
        # The server answers each poll when the plan is ready, or after a time limit.
        while answer["status"] == "submitted":
            answer = self._request_json("GET", f"{path}/plan/{quote(plan_id, safe='')}")
        if answer["status"] != "completed":
            raise ServerFailed(
                f"The plan of {'.'.join(split_table(table))} has the status {answer['status']}: {answer.get('error')}"
            )
        yield answer
        remaining_tasks = list(answer.get("plan-tasks") or ())
        while remaining_tasks:
            page = self._request_json("POST", f"{path}/tasks", {}, {"plan-task": remaining_tasks.pop(0)})
            remaining_tasks += page.get("plan-tasks") or ()
            yield page

    def explain(
        self,
        table: Name,
        where: str | None = None,
        *,
        filter: Any = None,
        at: At = CURRENT,
        files: bool = False,
        limit: int | None = None,
        joins: Sequence[Mapping[str, Any]] = (),
    ) -> Explanation:
        """Return an explanation of the plan for a predicate.

        Args:
            where: The predicate in SQL.
            filter: The predicate as an Iceberg expression in JSON.
            files: Whether to include the first `limit` files that the plan keeps.
            joins: Inner joins that restrict the rows: `table` (levels of the name), `on` (columns of this table and of
                the joined table), and optionally `predicate`, `snapshot-id` and nested `joins`.

        Raises:
            InvalidRequest: The predicate is invalid.
        """
        optional_fields = omit_none({"where": where, "filter": filter, "limit": limit, "joins": list(joins) or None})
        body = {**at.to_query(), "files": files, **optional_fields}
        explanation = self._request_json("POST", f"{make_table_path(table)}/explain", {}, body)
        return self._convert({**explanation, "json": explanation}, Explanation)

    def plan_table(
        self,
        table: Name,
        predicate: str | None = None,
        *,
        filter: Any = None,
        case_sensitive: bool = True,
        at: At = CURRENT,
        max_kept_fraction: float | None = None,
        lease_s: int | None = None,
        joins: Sequence[Mapping[str, Any]] = (),
    ) -> PlanTable:
        """Create a plan table: a read-only table with the files that the plan for a predicate keeps.

        The name of the plan table is valid for at least half of `lease_s`.

        Args:
            predicate: The predicate in SQL.
            filter: The predicate as an Iceberg expression in JSON.
            at: The id of a snapshot, or a branch or tag.
            max_kept_fraction: The maximum fraction of files that the plan may keep. If the plan keeps more, no plan
                table is created.
            joins: Inner joins in the form of the request: `table` (levels of the name), `on` (columns of this table and
                of the joined table), and optionally `predicate`, `snapshot-id` and nested `joins`.

        Raises:
            InvalidRequest: The predicate is invalid.
            NoSuchResource: The table does not exist.
        """
        optional_fields = {"predicate": predicate, "filter": filter, "kept-max": max_kept_fraction, "lease-s": lease_s}
        body = {
            "case-sensitive": case_sensitive,
            **at.to_query(),
            **omit_none({**optional_fields, "joins": list(joins) or None}),
        }
        return self._convert(self._request_json("POST", f"{make_table_path(table)}/plan-tables", {}, body), PlanTable)

    def health(self, table: Name) -> dict[str, Any]:
        """Return the health of a table: counts and sizes of the current snapshot, and the `problems` of the table.

        docs/reference/openapi.json defines the form of the result (loadTableHealth).

        Raises:
            NoSuchResource: The table does not exist.
        """
        return self._request_json("GET", f"{make_table_path(table)}/health")

    def expire_snapshots(
        self,
        table: Name,
        *,
        older_than_ms: int | None = None,
        retain_last: int | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Remove expired snapshots, and delete the files that no remaining snapshot needs.

        Repeat the call until `snapshots-left` in the result is 0. Arguments that are None default to the properties of
        the table.

        Raises:
            InvalidRequest: The table's properties forbid the deletion of files.
            Conflict: Concurrent commits conflicted in every attempt.
        """
        body = omit_none({"older-than-ms": older_than_ms, "retain-last": retain_last, "dry-run": dry_run})
        return self._request_json(
            "POST", f"{make_table_path(table)}/expire-snapshots", {}, body, timeout_s=_EXPIRATION_S
        )

    def remove_orphan_files(
        self, table: Name, *, older_than_ms: int | None = None, dry_run: bool = False
    ) -> dict[str, Any]:
        """Delete files to which no snapshot refers and that were last modified before `older_than_ms`.

        If `older_than_ms` is None, the policy of the table determines the time. Repeat the call while `files-left` in
        the result is true.

        Raises:
            InvalidRequest: The table's properties forbid the deletion of files, or `older_than_ms` is less than a day
                ago.
        """
        body = omit_none({"older-than-ms": older_than_ms, "dry-run": dry_run})
        return self._request_json(
            "POST", f"{make_table_path(table)}/remove-orphan-files", {}, body, timeout_s=_EXPIRATION_S
        )

    # Positions of rows

    def lookup(
        self, table: Name, keys: Keys, *, index: str | None = None, partitions: bool = False, at: At = CURRENT
    ) -> LookupAnswer:
        """Return the rows that have these keys, according to a record index.

        Args:
            keys: The keys, at most a million.
            index: The name of the index. The default is an index on the columns of the keys.
            partitions: Whether to return the partition of each row.

        Raises:
            InvalidRequest: The columns or types of the keys differ from those of the index.
            Refused: There are too many keys, or they have too many rows.
            ServerFailed: The response is not the result of a lookup.
        """
        query = {**at.to_query(), "partitions": str(partitions).lower(), **omit_none({"index": index})}
        headers = {"Content-Type": ARROW_STREAM}
        body = self._request(
            "POST", f"{make_table_path(table)}/lookup", query, encode_keys(keys), accept=ARROW_STREAM, headers=headers
        )
        try:
            return parse_lookup(self._decode_table(body))
        except (KeyError, ValueError) as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not a lookup: {error}") from None

    def bitmap(
        self,
        table: Name,
        where: str | None = None,
        *,
        filter: Any = None,
        meaning: str | None = None,
        deletes: bool = False,
        schema_id: int | None = None,
        at: At = CURRENT,
    ) -> Iterator[FileRows]:
        """Yield the files that may contain matching rows, each with the rows that match according to bitmap indexes.

        Args:
            meaning: The semantics of the predicate, `sql` or `iceberg`. The default is `sql` for `where` and `iceberg`
                for `filter`.
            deletes: Whether to leave out deleted rows.
            schema_id: The schema to which the column names refer. The default is the current schema.

        Raises:
            InvalidRequest: The predicate is invalid.
        """
        optional_fields = omit_none({"where": where, "filter": filter, "meaning": meaning, "schema-id": schema_id})
        parameters = {"deletes": deletes, **optional_fields, **at.to_query()}
        while True:
            body = json.dumps(parameters).encode()
            page = self._decode_table(
                self._request("POST", f"{make_table_path(table)}/bitmap", {}, body, accept=ARROW_STREAM)
            )
            yield from parse_file_rows(page)
            token = (page.schema.metadata or {}).get(b"next-page-token")
            if token is None:
                return
            parameters["page-token"] = token.decode()

    def cube_groups(
        self, table: Name, definition_id: str, columns: Sequence[str], files: bytes, filter: Expression = TRUE
    ) -> tuple[pa.Table, bytes]:
        """Return the groups of a cube for data files, and the files that the groups cover.

        Args:
            definition_id: The id of the cube's index definition.
            columns: The columns of the cube's entries to return.
            files: The ids of the files (`compute_file_ids`), 16 bytes each.
            filter: A condition on groups (`group_conditions.py`). The server leaves out groups that do not meet it.

        Returns:
            The groups, several of which may have equal dimensions, and a bitmap. The bit of a file is 1 if the groups
            cover the file. The first file has the lowest bit of the first byte.

        Raises:
            NoSuchResource: The table has no such cube.
        """
        body: dict[str, Any] = {"definition-id": definition_id, "columns": list(columns)}
        body["files"] = base64.b64encode(files).decode()
        body |= {} if filter == TRUE else {"filter": encode_expression(filter)}
        data = json.dumps(body).encode()
        answer = self._decode_table(
            self._request("POST", f"{make_table_path(table)}/cube-groups", {}, data, accept=ARROW_STREAM)
        )
        covered_files = (answer.schema.metadata or {}).get(b"covered", b"")
        return answer.replace_schema_metadata(None), base64.b64decode(covered_files)

    # Requests

    def _convert(self, values: Any, kind: type[T]) -> T:
        try:
            return convert_values(values, kind)
        except msgspec.ValidationError as error:
            raise ServerFailed(f"{self._shown_url} sent a response of an unexpected form: {error}") from None

    def _decode_table(self, body: bytes) -> pa.Table:
        try:
            return pa.ipc.open_stream(body).read_all()
        except pa.ArrowInvalid as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not an Arrow stream: {error}") from None

    def _read_pages(
        self,
        table: Name,
        resource: str,
        partition: str | Mapping[str, Any],
        at: At,
        limit: int | None,
        parameters: Mapping[str, Any],
    ) -> Iterator[pa.Table]:
        """Yield the pages of a resource of a table, as Arrow tables.

        The token of the next page selects the same snapshot, so only the first request has the parameters of `at`.

        Args:
            resource: The last part of the path, such as `files`.
            partition: The values of the first partition fields, or "" for all partitions.
            limit: The maximum number of items of a page.
            parameters: The other parameters of the query.
        """
        prefix = partition if isinstance(partition, str) else json.dumps(dict(partition))
        query = {**parameters, **({"partition": prefix} if prefix else {}), **omit_none({"limit": limit})}
        page: dict[str, Any] = at.to_query()
        while True:
            body = self._request("GET", f"{make_table_path(table)}/{resource}", {**query, **page}, accept=ARROW_STREAM)
            rows = self._decode_table(body)
            metadata = dict(rows.schema.metadata or {})
            token = metadata.pop(b"next-page-token", None)
            yield rows.replace_schema_metadata(metadata)
            if token is None:
                return
            page = {"page-token": token.decode()}

    def _list_pages(self, path: str, query: Mapping[str, Any], token: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing.

        Args:
            token: The name of the query parameter that requests the next page.
        """
        parameters = dict(query)
        while True:
            page = self._request_json("GET", path, parameters)
            yield page
            parameters[token] = page.get("next-page-token")
            if not parameters[token]:
                return

    def _request_json(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] = _NO_QUERY,
        body: Any = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        payload = None if body is None else json.dumps(body).encode()
        raw = self._request(method, path, query, payload, timeout_s=timeout_s)
        try:
            result: dict[str, Any] = json.loads(raw)
            return result
        except ValueError as error:
            raise ServerFailed(f"{self._shown_url} sent a response that is not JSON: {error}") from None

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: bytes | None = None,
        *,
        accept: str = "application/json",
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a request, and return the body of the response. See `_send`."""
        response = self._send(
            method, path, query, body, accept=accept, headers=headers, repeatable=repeatable, timeout_s=timeout_s
        )
        return response.data

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: bytes | None = None,
        *,
        accept: str = "application/json",
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        timeout_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, and return the response.

        Args:
            repeatable: Whether the request may be repeated after any failure. If not, it is repeated only if the server
                has certainly not processed it: the connection was refused, or the server was busy.
            timeout_s: A timeout that replaces the client's timeout.

        Raises:
            Unreachable: The server did not answer.
            ClientError: The last response has an error. Its status and type determine the subclass (`parse_error`).
        """
        content = {} if body is None else {"Content-Type": "application/json"}
        own_headers = {"Accept": accept, "Accept-Encoding": "gzip", "User-Agent": "seamark-client"}
        headers = {**own_headers, **content, **self._read_headers, **(headers or {})}
        headers |= {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        address = f"{self.url}{path}" + (f"?{urlencode(query, quote_via=quote)}" if query else "")
        own_timeout: dict[str, Any] = {} if timeout_s is None else {"timeout": self._make_timeout(timeout_s)}
        for number in range(self._retries + 1):
            retries = make_connection_retries(self._retries - number, repeatable=repeatable)
            try:
                answer = self._connections.get().request(
                    method, address, body=body, headers=headers, redirect=False, retries=retries, **own_timeout
                )
            except HTTPError as error:
                raise Unreachable(f"No answer from {self._shown_url}: {describe_cause(error, self.url)}") from error
            if answer.status in (200, 201, 204, HTTPStatus.NOT_MODIFIED):
                return answer
            failure = parse_error(answer.status, answer.data, answer.headers.get("X-Request-Id", ""))
            wait_s = compute_wait_s(answer.status, answer.headers.get("Retry-After"), number, repeatable=repeatable)
            if wait_s is None or number == self._retries or isinstance(failure, ServerStorageFull):
                raise failure
            if wait_s >= _REPORTED_WAIT_S:
                _log.warning(
                    "%s is busy; the request is repeated in %.0f s: %s", self._shown_url, wait_s, failure.message
                )
            time.sleep(wait_s)
        raise AssertionError("the loop returns or raises")

    def _make_timeout(self, read_s: float) -> urllib3.Timeout:
        return urllib3.Timeout(total=None, connect=self._timeout_s, read=read_s)
