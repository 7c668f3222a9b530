"""Attacks on each route: any principal, names of both tenants, valid and invalid bodies.

The routes are those that the server publishes: the operations of the Iceberg REST specification, and of our own OpenAPI
document. A test fails if a new route has no entry here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

from tests.api.client import VIEW_VERSION, build_function_document, create_key
from tests.api.rest.standard import DRAFTS, read_operations
from tests.attacks.campaign import AttackCampaign
from tests.attacks.world import EVIL, HOSTILE, SCHEMA

OPENAPI = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
HARMLESS = {
    "healthz": "only says that the process lives",
    "readyz": "only says whether the parts answer",
    "openapi": "is the published document",
}
"""Operations that are not attacked, with the reasons."""
_TRUE: dict[str, Any] = {"type": "true"}


@cache
def list_routes() -> tuple[tuple[str, str, str], ...]:
    """Return (operation id, method, template) of all published routes."""
    results = [
        (operation.id, operation.method, operation.template.replace("/{prefix}/", "/"))
        for operation in (*read_operations(), *DRAFTS)
    ]
    for template, methods in json.loads(OPENAPI.read_text())["paths"].items():
        results += [(operation["operationId"], method.upper(), template) for method, operation in methods.items()]
    return tuple(dict.fromkeys(results))


async def attack_route(campaign: AttackCampaign, operation: str, method: str, template: str) -> None:
    """Send one request to one route."""
    campaign.drawn_routes.add(operation)
    principal = campaign.rng.choice(HOSTILE)
    names = _Names(campaign)
    path = template
    for variable in (
        "namespace",
        "table",
        "view",
        "function",
        "index",
        "build",
        "column",
        "id",
        "name",
        "plan-id",
        "statement",
        "warehouse",
    ):
        path = path.replace(f"{{{variable}}}", quote(names.draw_value(variable), safe=""))
    assert "{" not in path, path
    body = _BODIES[operation](names) if operation in _BODIES else None
    headers = {}
    if method == "POST" and campaign.rng.random() < 0.3:
        headers["Idempotency-Key"] = campaign.choose_hint("idempotency key", create_key())
    if operation == "getToken":
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    if operation == "leasePlanSnapshots" or campaign.rng.random() < 0.2:
        headers["X-Seamark-Plans"] = campaign.choose_hint("audience")
    if campaign.rng.random() < 0.1:
        headers["Accept"] = "application/vnd.apache.arrow.stream"
    if campaign.rng.random() < 0.05 and isinstance(body, dict):
        body = {**body, "unknown": [campaign.choose_hint("location"), campaign.choose_hint("uuid")]}
    query = _QUERIES.get(operation)
    if query is not None:
        path += "?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query(names).items())
    await campaign.ask(principal, method, path, body, headers)


class _Names:
    """A source of names: the attacker's names, names from its hints, and guesses."""

    def __init__(self, campaign: AttackCampaign) -> None:
        self.campaign = campaign
        self.rng = campaign.rng

    def draw_value(self, variable: str) -> str:
        """Return a random value for a variable of the path, often a handle of the victim."""
        campaign, rng = self.campaign, self.rng
        match variable:
            case "namespace":
                namespace_below = (f"{EVIL}\x1fsub", f"{EVIL}\x1f{campaign.choose_hint('namespace')}")
                return rng.choice((EVIL, EVIL, campaign.choose_hint("namespace"), *namespace_below))
            case "table":
                hints = (
                    campaign.choose_hint("table"),
                    campaign.choose_hint("plan table"),
                    campaign.choose_hint("dropped name"),
                    campaign.choose_hint("view"),
                )
                return rng.choice(("own", "own", "moved", *hints))
            case "view":
                return rng.choice(("own_view", campaign.choose_hint("view"), campaign.choose_hint("table")))
            case "function":
                return rng.choice(("own_function", campaign.choose_hint("function")))
            case "index":
                return rng.choice(("own_index", campaign.choose_hint("index")))
            case "build" | "plan-id":
                return campaign.choose_hint("build") if variable == "build" else campaign.choose_hint("plan task")
            case "id":
                return campaign.choose_hint("dropped")
            case "warehouse":
                return rng.choice(("sales", EVIL, campaign.choose_hint("namespace")))
            case "statement":
                return rng.choice(("mine", campaign.choose_hint("uuid")))
            case "name":
                return rng.choice(("mallory", "root", "nobody", "rita"))
            case "column":
                return rng.choice(("id", "data", campaign.choose_hint("uuid")))
        raise AssertionError(variable)

    def draw_namespace(self) -> list[str]:
        return self.draw_value("namespace").split("\x1f")

    def place(self) -> str:
        kinds = ("location", "metadata file", "manifest list", "manifest", "data file", "moved location")
        place = self.campaign.choose_hint(self.rng.choice(kinds), f"{self.campaign.world.warehouse}/elsewhere")
        place = self.rng.choice((place, place, place, *_list_spellings(place)))
        return place + self.rng.choice(
            ("", "", "/", "/x", "/../x", "%2F..%2Fx", "//x", "/./x", "/%2e%2e/x", "\\x", "?x")
        )

    def choose_identifier(self) -> dict[str, Any]:
        return {"namespace": self.draw_namespace(), "name": self.draw_value("table")}

    def draw_snapshot(self) -> int:
        text = self.campaign.choose_hint(self.rng.choice(("snapshot", "plan snapshot")), "1")
        return int(text) if text.isdigit() else 1

    def join(self) -> dict[str, Any]:
        table_identifier = [*self.draw_namespace(), self.draw_value("table")]
        return {"table": table_identifier, "on": {"id": "id"}, "predicate": "data = 'x'"}

    def query(self) -> str:
        left, right = (f'"{".".join(self.draw_namespace())}"."{self.draw_value("table")}"' for _ in range(2))
        return f"SELECT 1 FROM {left} a JOIN {right} b ON a.id = b.id WHERE b.data = 'x'"


def _list_spellings(place: str) -> tuple[str, ...]:
    """Return spellings of a location that may look equal with other letters, schemes, slashes or characters."""
    scheme, _, path = place.partition("://")
    folder, _, name = path.rpartition("/")
    other_schemes = {"s3": ("s3a", "s3n", "S3"), "file": ("FILE", "File", "s3")}.get(scheme, ("s3a",))
    full_width_name = "".join(
        chr(ord(letter) + 0xFEE0) if letter.isascii() and letter.isalnum() else letter for letter in name
    )
    return (
        *(f"{other_scheme}://{path}" for other_scheme in other_schemes),
        f"{scheme}:{path}",
        f"{scheme}://{folder}//{name}",
        f"{scheme}://{folder}/{name.upper()}",
        f"{scheme}://{folder}/{full_width_name}",
        f"{scheme}://{folder}/{name}\u200b",
        f"{scheme}://{folder}/{''.join(f'%{byte:02x}' for byte in name.encode())}",
        f"{scheme}://localhost/{path.lstrip('/')}",
        f"{scheme}://user@{path.lstrip('/')}",
    )


_Body = Callable[[_Names], Any]


_FILE_FUNCTIONS = (
    *("read_csv", "read_csv_auto", "read_parquet", "parquet_scan", "read_json", "read_text", "read_blob", "glob"),
    *("parquet_metadata", "iceberg_scan", "iceberg_metadata", "sniff_csv", "sqlite_scan", "getenv", "query_table"),
)
_CATALOG_TABLES = (
    *("duckdb_settings()", "duckdb_secrets()", "duckdb_databases()", "pragma_database_list()", "sqlite_master"),
    *("information_schema.tables", "pg_catalog.pg_tables", "TABLE(system.runtime.queries)", "t0", "w0", "arrow_0"),
)


def _choose_statement(n: _Names) -> dict[str, Any]:
    """Return a statement that reads data without the right to read it, or that tries to bypass the catalog."""
    table = ".".join(f'"{part}"' for part in (".".join(n.draw_namespace()), n.draw_value("table")))
    place = n.place().replace("'", "''")
    texts = (
        f"SELECT * FROM {table}",
        f"SELECT count(*) FROM {table} t WHERE t.id IN (SELECT id FROM {EVIL}.own)",
        f"SELECT * FROM {table} FOR VERSION AS OF {n.draw_snapshot()}",
        f"SELECT * FROM {EVIL}.own UNION ALL SELECT * FROM {table}",
        f"SELECT * FROM read_parquet('{place}')",
        f"SELECT * FROM '{place}'",
        f"COPY (SELECT * FROM {EVIL}.own) TO '{place}'",
        f"ATTACH '{place}' AS x",
        f"SELECT * FROM {n.rng.choice(_FILE_FUNCTIONS)}('{place}')",
        f"SELECT {n.rng.choice(_FILE_FUNCTIONS)}('{place}')",
        f"SELECT * FROM {EVIL}.own WHERE id = (SELECT max(id) FROM {table})",
        f"WITH own AS (SELECT * FROM {table}) SELECT * FROM own",
        f"SELECT * FROM {EVIL}.own o CROSS JOIN LATERAL (SELECT * FROM {table} t WHERE t.id = o.id) x",
        f"SELECT (SELECT count(*) FROM {table}), o.* FROM {EVIL}.own o",
        f'SELECT * FROM {".".join(table.split(".")[:-1])}."{n.draw_value("view")}"',
        f'SELECT * FROM {table[:-1]}$files"',
        f'SELECT * FROM {table[:-1]}~plan~0"',
        f"CREATE VIEW {EVIL}.v AS SELECT * FROM {table}",
        f"INSERT INTO {EVIL}.own SELECT * FROM {table}",
        f"{n.rng.choice(('INSTALL', 'LOAD', 'PRAGMA', 'CALL', 'EXPORT DATABASE', 'IMPORT DATABASE'))} '{place}'",
        f"SET {n.rng.choice(('secret_directory', 'home_directory', 'extension_directory'))} = '{place}'",
        f"SELECT * FROM {n.rng.choice(_CATALOG_TABLES)}",
        f"PREPARE p AS SELECT * FROM {table}; EXECUTE p",
        f"EXECUTE IMMEDIATE 'SELECT * FROM {table}'",
        f"DROP TABLE {table}",
    )
    body = {"statement": n.rng.choice(texts), "explain": n.rng.random() < 0.2}
    return body | ({"id": "mine"} if n.rng.random() < 0.3 else {})


def _choose_updates(n: _Names) -> list[dict[str, Any]]:
    """Return random updates for a commit of a table."""
    return [
        n.rng.choice(
            (
                {"action": "set-location", "location": n.place()},
                {"action": "set-properties", "updates": {n.rng.choice(_PATHS): n.place(), "x": "1"}},
                {"action": "set-properties", "updates": {"seamark.allowed-locations": n.place()}},
                {"action": "set-partition-statistics", "partition-statistics": _partition_statistics(n)},
                {"action": "remove-statistics", "snapshot-id": n.draw_snapshot()},
                {"action": "add-encryption-key", "encryption-key": _build_encryption_key(n)},
                {"action": "remove-encryption-key", "key-id": n.campaign.choose_hint("uuid", "k")},
                {
                    "action": "set-snapshot-ref",
                    "ref-name": n.draw_value("table"),
                    "type": "tag",
                    "snapshot-id": n.draw_snapshot(),
                },
                {"action": "remove-snapshot-ref", "ref-name": "main"},
                {"action": "assign-uuid", "uuid": n.campaign.choose_hint("uuid", "0")},
                {"action": "set-statistics", "statistics": _build_statistics(n)},
                {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": n.draw_snapshot()},
                {"action": "remove-snapshots", "snapshot-ids": [n.draw_snapshot()]},
            )
        )
    ]


def _build_statistics(n: _Names) -> dict[str, Any]:
    return {
        "snapshot-id": n.draw_snapshot(),
        "statistics-path": n.place(),
        "file-size-in-bytes": 100,
        "file-footer-size-in-bytes": 10,
        "blob-metadata": [],
    }


_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")


def _partition_statistics(n: _Names) -> dict[str, Any]:
    return {"snapshot-id": n.draw_snapshot(), "statistics-path": n.place(), "file-size-in-bytes": 100}


def _build_encryption_key(n: _Names) -> dict[str, Any]:
    key = {
        "key-id": n.campaign.choose_hint("uuid", "k"),
        "encrypted-key-metadata": "AAAA",
        "encrypted-by-id": n.campaign.choose_hint("snapshot"),
    }
    return {**key, "properties": {"location": n.place()}}


def _choose_view_updates(n: _Names) -> list[dict[str, Any]]:
    """Return random updates for a commit of a view."""
    version = {
        **VIEW_VERSION,
        "default-namespace": n.draw_namespace(),
        "default-catalog": n.campaign.choose_hint("namespace"),
    }
    table = ".".join((*n.draw_namespace(), n.draw_value("table")))
    version["representations"] = [{"type": "sql", "sql": f"SELECT * FROM {table}", "dialect": "trino"}]
    return n.rng.choice(
        (
            [{"action": "set-location", "location": n.place()}],
            [{"action": "assign-uuid", "uuid": n.campaign.choose_hint("uuid", "0")}],
            [{"action": "set-properties", "updates": {n.rng.choice((*_PATHS, "owner", "location")): n.place()}}],
            [
                {"action": "add-view-version", "view-version": version},
                {"action": "set-current-view-version", "view-version-id": -1},
            ],
        )
    )


def _choose_requirements(n: _Names) -> list[dict[str, Any]]:
    uuid = {"type": "assert-table-uuid", "uuid": n.campaign.choose_hint("uuid", "0")}
    return n.rng.choice(([], [{"type": "assert-create"}], [uuid]))


def _build_snapshot_query(n: _Names) -> dict[str, Any]:
    query: dict[str, Any] = {"limit": 1}
    if n.rng.random() < 0.5:
        query["page-token"] = n.campaign.choose_hint("page token")
    if n.rng.random() < 0.3:
        query["snapshot-id"] = n.draw_snapshot()
    return query


def _build_change(n: _Names) -> dict[str, Any]:
    file = {"spec-id": 0, "content": "data", "file-path": n.place(), "file-format": "parquet", "partition": []}
    return {
        "add": [{**file, "file-size-in-bytes": 100, "record-count": 3}],
        "remove": [{"file-path": n.place()}],
        "read-snapshot-id": n.draw_snapshot(),
        "index-files": [{"location": n.place(), "size-in-bytes": 100}],
        "producer": {"id": n.campaign.choose_hint("uuid"), "sequence": 1},
        "repeats-only": n.rng.random() < 0.2,
    }


def _build_form(n: _Names) -> bytes:
    token = n.rng.choice(
        (n.campaign.choose_hint("stage"), n.campaign.choose_hint("plan task"), n.campaign.world.tokens["nobody"])
    )
    exchange = "urn:ietf:params:oauth:grant-type:token-exchange"
    grant = n.rng.choice((f"client_credentials&client_secret={token}", f"{exchange}&subject_token={token}"))
    return f"grant_type={grant}&scope=catalog".encode()


def _choose_token(n: _Names) -> str:
    return n.rng.choice(("", n.campaign.choose_hint("page token"), "AAAA"))


_READS: dict[str, Any] = {"files": 1.0, "bytes": 1, "seconds": 0.1}
_PROPOSAL: dict[str, Any] = {
    "id": "x",
    "kind": "cluster",
    "title": "x",
    "commands": [],
    "change": {},
    "before": _READS,
    "predicted": _READS,
    "cost-bytes": 1,
    "cost-seconds": 0.1,
    "saved-bytes-per-day": 1,
    "pays-after-days": None,
}
_BODIES: dict[str, _Body] = {
    "createNamespace": lambda n: {"namespace": n.draw_namespace(), "properties": {"location": n.place()}},
    "runStatement": _choose_statement,
    "aggregate": lambda n: {"namespace": n.draw_namespace(), "table": n.draw_value("table"), "measures": ["count(*)"]},
    "updateProperties": lambda n: {"removals": ["x"], "updates": {"location": n.place()}},
    "createTable": lambda n: {
        "name": n.draw_value("table"),
        "schema": SCHEMA,
        "location": n.place(),
        "stage-create": n.rng.random() < 0.5,
    },
    "registerTable": lambda n: {"name": n.draw_value("table"), "metadata-location": n.place(), "overwrite": True},
    "registerView": lambda n: {"name": n.draw_value("view"), "metadata-location": n.campaign.choose_hint("view file")},
    "updateTable": lambda n: {"requirements": _choose_requirements(n), "updates": _choose_updates(n)},
    "renameTable": lambda n: {"source": n.choose_identifier(), "destination": n.choose_identifier()},
    "renameView": lambda n: {"source": n.choose_identifier(), "destination": n.choose_identifier()},
    "createView": lambda n: {
        "name": n.draw_value("view"),
        "schema": SCHEMA,
        "view-version": {**VIEW_VERSION, "default-namespace": n.draw_namespace()},
        "location": n.place(),
        "properties": {},
    },
    "replaceView": lambda n: {"updates": _choose_view_updates(n), "requirements": []},
    "commitTransaction": lambda n: {
        "table-changes": [
            {
                "identifier": n.choose_identifier(),
                "requirements": _choose_requirements(n),
                "updates": _choose_updates(n),
            }
            for _ in range(2)
        ]
    },
    "reportMetrics": lambda n: {
        "report-type": "scan-report",
        "table-name": n.draw_value("table"),
        "snapshot-id": n.draw_snapshot(),
    },
    "signRequest": lambda n: {"region": "us-east-1", "uri": n.place(), "method": "GET", "headers": {}},
    "planTableScan": lambda n: {"snapshot-id": n.draw_snapshot(), "filter": _TRUE},
    "fetchScanTasks": lambda n: {"plan-task": n.campaign.choose_hint("plan task")},
    "undrop": lambda n: n.rng.choice(
        (None, {"namespace": [EVIL], "name": "undropped"}, {"namespace": n.draw_namespace()})
    ),
    "putFunction": lambda n: {
        **build_function_document(),
        "function-uuid": str(UUID(int=n.rng.getrandbits(128), version=4)),
    },
    "getEvents": lambda n: (
        {"catalog-objects-by-name": [n.draw_namespace()]} if n.rng.random() < 0.3 else {"page-size": 100}
    ),
    "addGrant": lambda n: {"principal": "mallory", "role": "admin", "namespace": n.draw_namespace()},
    "createToken": lambda n: {"name": "mallory2", "grants": [{"role": "admin"}]},
    "createWarehouse": lambda n: {"name": "mallory", "location": n.place()},
    "putWarehouse": lambda n: {"location": n.place(), "settings": {"s3_endpoint": "http://127.0.0.1:1"}},
    "selectRows": lambda n: {"where": "id > 0", "snapshot-id": n.draw_snapshot()},
    "commitChange": _build_change,
    "appendRows": lambda n: {"rows": [{"id": n.rng.randrange(9), "name": n.place()}, {n.place(): None}]},
    "appendRowsToTables": lambda n: {
        "tables": [
            {"namespace": n.draw_namespace(), "name": n.draw_value("table"), "rows": [{"id": 1, "_op": n.place()}]}
        ]
    },
    "getRows": lambda n: {"keys": [{"id": n.rng.randrange(9)}, {n.place(): None}][: n.rng.randint(0, 2)]},
    "pauseStream": lambda n: {"reason": n.place()},
    "drainStream": lambda n: {"reason": n.place()},
    "expireSnapshots": lambda n: {"older-than-ms": 1 << 60, "retain-last": 1, "dry-run": n.rng.random() < 0.5},
    "rewriteManifests": lambda n: {"min-count": n.rng.choice((0, 2, 5)), "dry-run": n.rng.random() < 0.5},
    "takeRewriteLease": lambda n: {"holder": n.rng.choice(("a", "b", "")), "release": n.rng.random() < 0.5},
    "removeOrphanFiles": lambda n: {"older-than-ms": n.rng.choice((0, 1, 1 << 40)), "dry-run": n.rng.random() < 0.5},
    "explain": lambda n: {"where": "id > 0", "files": True, "joins": [n.join()]},
    "explainQuery": lambda n: {"query": n.query(), "dialect": n.rng.choice(("trino", "duckdb")), "namespace": [EVIL]},
    "putNamespace": lambda n: {"properties": n.rng.choice(({}, {"location": n.place()}, {n.place(): "x"}))},
    "putTable": lambda n: {"schema": SCHEMA, "location": n.place(), "properties": {"write.data.path": n.place()}},
    "putView": lambda n: {
        "schema": SCHEMA,
        "representations": [{"sql": n.query(), "dialect": "trino"}],
        "default-namespace": n.draw_namespace(),
        "properties": {"trino.run-as-owner": "root"},
    },
    "importTable": lambda n: {"metadata-location": n.place(), "dry-run": n.rng.random() < 0.5},
    "importView": lambda n: {"metadata-location": n.place(), "keep-owner": True},
    "putTablePolicy": lambda n: {"properties": n.rng.choice(({}, {"seamark.compaction.enabled": n.place()}))},
    "putIndex": lambda n: {"kind": "bloom", "columns": ["id"]},
    "recordIndexAudit": lambda n: {"index-files": 1},
    "recordStatementTime": lambda n: {"statement": "0" * 16, "seconds": 1.5, "files": 3, "bytes": 10_000},
    "recordAppliedAdvice": lambda n: {"proposal": _PROPOSAL},
    "applyAdvice": lambda n: {"id": n.place()},
    "finishAdviceStep": lambda n: {
        "number": 1,
        "since-ms": 1,
        "outcome": n.rng.choice(("applied", "failed", "busy")),
        "reason": EVIL,
    },
    "registerIndexFiles": lambda n: {"index-files": [{"location": n.place(), "size-in-bytes": 100}]},
    "finishIndexBuild": lambda n: {"outcome": "rolled-back", "reason": "x"},
    "quarantineIndexFile": lambda n: {"location": n.place(), "reason": "x", "check": True},
    "listUnheldFiles": lambda n: {"index-files": [n.place()]},
    "renewPlanTable": lambda n: {"lease-s": 60},
    "makeCubePlan": lambda n: {
        "definition-id": EVIL,
        "columns": ["d0", "m0"],
        "predicate": "id > 0",
        "snapshot-id": n.draw_snapshot(),
        "lease-s": n.rng.choice((1, 600)),
    },
    "readCubeGroups": lambda n: {"definition-id": EVIL, "columns": ["d0", "m0"], "files": ""},
    "lookupKeys": lambda n: {"columns": ["id"], "keys": [[1]], "snapshot-id": n.draw_snapshot()},
    "leasePlanSnapshots": lambda n: {"snapshot-ids": [n.draw_snapshot()], "lease-s": n.rng.choice((0, 600))},
    "makePlanTable": lambda n: {"predicate": "id > 0", "joins": [n.join()]},
    "makePlanView": lambda n: {
        "metadata-location": n.campaign.choose_hint("view file"),
        "predicate": "id > 0",
        "tables": [{"start": 0, "end": 1, "plan": [*n.draw_namespace(), n.campaign.choose_hint("plan table")]}],
    },
    "getToken": _build_form,
}

_QUERIES: dict[str, Callable[[_Names], dict[str, Any]]] = {
    "getConfig": lambda n: {"warehouse": n.place()},
    "appendRows": lambda n: {"producer": n.campaign.choose_hint("uuid"), "sequence": 0} if n.rng.random() < 0.5 else {},
    "readRows": lambda n: {"after": n.place(), "wait": 0},
    "loadStreamPosition": lambda n: {"at": n.rng.choice(("earliest", "latest", "snapshot:1", n.place()))},
    "listNamespaces": lambda n: (
        {"parent": n.draw_value("namespace"), "pageToken": _choose_token(n)}
        if n.rng.random() < 0.5
        else {"pageToken": _choose_token(n), "pageSize": 1}
    ),
    "listTables": lambda n: {"pageToken": _choose_token(n), "pageSize": 1},
    "listViews": lambda n: {"pageToken": _choose_token(n), "pageSize": 1},
    "dropTable": lambda n: {"purgeRequested": "true"},
    "signRequest": lambda n: {"stage": n.campaign.choose_hint("stage")} if n.rng.random() < 0.5 else {},
    "listDropped": lambda n: (
        ({"namespace": n.draw_value("namespace")} if n.rng.random() < 0.7 else {})
        | ({"retained": "true"} if n.rng.random() < 0.3 else {})
    ),
    "purgeDropped": lambda n: {"release": "true"} if n.rng.random() < 0.3 else {},
    "listGrants": lambda n: {"principal": n.rng.choice(("mallory", "rita", "root"))} if n.rng.random() < 0.5 else {},
    "removeGrant": lambda n: {"principal": "rita", "role": "reader", "namespace": n.draw_value("namespace")},
    "listTimeline": lambda n: {"limit": 100},
    "listTableTimeline": lambda n: {"limit": 100, "order": n.rng.choice(("asc", "desc"))},
    "listFiles": _build_snapshot_query,
    "listColumnStats": _build_snapshot_query,
    "loadColumnLayout": lambda n: (
        _build_snapshot_query(n) | ({"compare-to": n.draw_snapshot()} if n.rng.random() < 0.5 else {})
    ),
    "listPartitions": _build_snapshot_query,
    "listIndexBuildFiles": _build_snapshot_query,
}
_BODILESS = """
    getConfig listNamespaces loadNamespaceMetadata namespaceExists dropNamespace listTables loadTable
    tableExists dropTable unregisterTable loadCredentials listViews loadView viewExists dropView listFunctions
    loadFunction fetchPlanningResult cancelPlanning listAudit listDropped purgeDropped dropFunction listGrants
    removeGrant listFiles listIndexes rebuildIndexRegistry loadIndex dropIndex startIndexBuild loadIndexBuild
    listIndexBuildFiles listTableMetrics listPartitions listColumnStats loadColumnLayout listTableTimeline listTimeline
    listReplicas listWarehouses loadWarehouse dropWarehouse
    listTokens revokeToken loadTableHealth loadTablePolicy cancelStatement adviseTtl listRunningJobs
    loadQueryHistory listQueryHistory adviseTable takeAdviceStep
    listRunningTableJobs loadSqlState loadStream flushRows listStreams
    loadStreamPosition loadStreamTopic readRows resumeStream
"""
BODILESS = frozenset(_BODILESS.split())
"""Operations without a body. Only their path and query are drawn."""
OPERATIONS_WITH_BODY = frozenset(_BODIES)
