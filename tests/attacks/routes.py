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
from tests.attacks.world import EVIL, HOSTILE_PRINCIPALS, SCHEMA

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
    routes = [
        (operation.id, operation.method, operation.template.replace("/{prefix}/", "/"))
        for operation in (*read_operations(), *DRAFTS)
    ]
    for template, methods in json.loads(OPENAPI.read_text())["paths"].items():
        routes += [(operation["operationId"], method.upper(), template) for method, operation in methods.items()]
    return tuple(dict.fromkeys(routes))


async def attack_route(campaign: AttackCampaign, operation: str, method: str, template: str) -> None:
    """Send a random request of a random attacker to a route, with hints in its path, query, headers and body."""
    campaign.drawn_routes.add(operation)
    principal = campaign.rng.choice(HOSTILE_PRINCIPALS)
    values = _RandomValues(campaign)
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
        path = path.replace(f"{{{variable}}}", quote(values.draw_value(variable), safe=""))
    assert "{" not in path, path
    body = _BODIES[operation](values) if operation in _BODIES else None
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
        path += "?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query(values).items())
    await campaign.ask(principal, method, path, body, headers)


class _RandomValues:
    """A source of names and other values: the attacker's own, values from its hints, and guesses."""

    def __init__(self, campaign: AttackCampaign) -> None:
        self.campaign = campaign
        self.rng = campaign.rng

    def draw_value(self, variable: str) -> str:
        """Return a random value for a variable of the path, often a hint about an object of the victim."""
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

    def draw_location(self) -> str:
        """Return a location of the victim in a random spelling, often with a suffix that may lead elsewhere."""
        kinds = ("location", "metadata file", "manifest list", "manifest", "data file", "moved location")
        location = self.campaign.choose_hint(self.rng.choice(kinds), f"{self.campaign.world.warehouse}/elsewhere")
        location = self.rng.choice((location, location, location, *_list_spellings(location)))
        return location + self.rng.choice(
            ("", "", "/", "/x", "/../x", "%2F..%2Fx", "//x", "/./x", "/%2e%2e/x", "\\x", "?x")
        )

    def draw_identifier(self) -> dict[str, Any]:
        return {"namespace": self.draw_namespace(), "name": self.draw_value("table")}

    def draw_snapshot(self) -> int:
        text = self.campaign.choose_hint(self.rng.choice(("snapshot", "plan snapshot")), "1")
        return int(text) if text.isdigit() else 1

    def draw_join(self) -> dict[str, Any]:
        table_identifier = [*self.draw_namespace(), self.draw_value("table")]
        return {"table": table_identifier, "on": {"id": "id"}, "predicate": "data = 'x'"}

    def draw_query(self) -> str:
        left, right = (f'"{".".join(self.draw_namespace())}"."{self.draw_value("table")}"' for _ in range(2))
        return f"SELECT 1 FROM {left} a JOIN {right} b ON a.id = b.id WHERE b.data = 'x'"


def _list_spellings(location: str) -> tuple[str, ...]:
    """Return similar locations, with another scheme, host, letter case or encoding, or with other slashes.

    A careless comparison may take them for the same location.
    """
    scheme, _, path = location.partition("://")
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


_Body = Callable[[_RandomValues], Any]


_FILE_FUNCTIONS = (
    *("read_csv", "read_csv_auto", "read_parquet", "parquet_scan", "read_json", "read_text", "read_blob", "glob"),
    *("parquet_metadata", "iceberg_scan", "iceberg_metadata", "sniff_csv", "sqlite_scan", "getenv", "query_table"),
)
_CATALOG_TABLES = (
    *("duckdb_settings()", "duckdb_secrets()", "duckdb_databases()", "pragma_database_list()", "sqlite_master"),
    *("information_schema.tables", "pg_catalog.pg_tables", "TABLE(system.runtime.queries)", "t0", "w0", "arrow_0"),
)


_COMMANDS_WITH_FILES = ("INSTALL", "LOAD", "PRAGMA", "CALL", "EXPORT DATABASE", "IMPORT DATABASE")


def _choose_statement(values: _RandomValues) -> dict[str, Any]:
    """Return a statement that reads data without the right to read it, or that tries to bypass the catalog."""
    table = ".".join(f'"{part}"' for part in (".".join(values.draw_namespace()), values.draw_value("table")))
    location = values.draw_location().replace("'", "''")
    texts = (
        f"SELECT * FROM {table}",
        f"SELECT count(*) FROM {table} t WHERE t.id IN (SELECT id FROM {EVIL}.own)",
        f"SELECT * FROM {table} FOR VERSION AS OF {values.draw_snapshot()}",
        f"SELECT * FROM {EVIL}.own UNION ALL SELECT * FROM {table}",
        f"SELECT * FROM read_parquet('{location}')",
        f"SELECT * FROM '{location}'",
        f"COPY (SELECT * FROM {EVIL}.own) TO '{location}'",
        f"ATTACH '{location}' AS x",
        f"SELECT * FROM {values.rng.choice(_FILE_FUNCTIONS)}('{location}')",
        f"SELECT {values.rng.choice(_FILE_FUNCTIONS)}('{location}')",
        f"SELECT * FROM {EVIL}.own WHERE id = (SELECT max(id) FROM {table})",
        f"WITH own AS (SELECT * FROM {table}) SELECT * FROM own",
        f"SELECT * FROM {EVIL}.own o CROSS JOIN LATERAL (SELECT * FROM {table} t WHERE t.id = o.id) x",
        f"SELECT (SELECT count(*) FROM {table}), o.* FROM {EVIL}.own o",
        f'SELECT * FROM {".".join(table.split(".")[:-1])}."{values.draw_value("view")}"',
        f'SELECT * FROM {table[:-1]}$files"',
        f'SELECT * FROM {table[:-1]}~plan~0"',
        f"CREATE VIEW {EVIL}.v AS SELECT * FROM {table}",
        f"INSERT INTO {EVIL}.own SELECT * FROM {table}",
        f"{values.rng.choice(_COMMANDS_WITH_FILES)} '{location}'",
        f"SET {values.rng.choice(('secret_directory', 'home_directory', 'extension_directory'))} = '{location}'",
        f"SELECT * FROM {values.rng.choice(_CATALOG_TABLES)}",
        f"PREPARE p AS SELECT * FROM {table}; EXECUTE p",
        f"EXECUTE IMMEDIATE 'SELECT * FROM {table}'",
        f"DROP TABLE {table}",
    )
    body = {"statement": values.rng.choice(texts), "explain": values.rng.random() < 0.2}
    return body | ({"id": "mine"} if values.rng.random() < 0.3 else {})


def _choose_updates(values: _RandomValues) -> list[dict[str, Any]]:
    """Return a list with one random update for a commit of a table."""
    return [
        values.rng.choice(
            (
                {"action": "set-location", "location": values.draw_location()},
                {"action": "set-properties", "updates": {values.rng.choice(_PATHS): values.draw_location(), "x": "1"}},
                {"action": "set-properties", "updates": {"seamark.allowed-locations": values.draw_location()}},
                {"action": "set-partition-statistics", "partition-statistics": _build_partition_statistics(values)},
                {"action": "remove-statistics", "snapshot-id": values.draw_snapshot()},
                {"action": "add-encryption-key", "encryption-key": _build_encryption_key(values)},
                {"action": "remove-encryption-key", "key-id": values.campaign.choose_hint("uuid", "k")},
                {
                    "action": "set-snapshot-ref",
                    "ref-name": values.draw_value("table"),
                    "type": "tag",
                    "snapshot-id": values.draw_snapshot(),
                },
                {"action": "remove-snapshot-ref", "ref-name": "main"},
                {"action": "assign-uuid", "uuid": values.campaign.choose_hint("uuid", "0")},
                {"action": "set-statistics", "statistics": _build_statistics(values)},
                {
                    "action": "set-snapshot-ref",
                    "ref-name": "main",
                    "type": "branch",
                    "snapshot-id": values.draw_snapshot(),
                },
                {"action": "remove-snapshots", "snapshot-ids": [values.draw_snapshot()]},
            )
        )
    ]


def _build_statistics(values: _RandomValues) -> dict[str, Any]:
    return {
        "snapshot-id": values.draw_snapshot(),
        "statistics-path": values.draw_location(),
        "file-size-in-bytes": 100,
        "file-footer-size-in-bytes": 10,
        "blob-metadata": [],
    }


_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")


def _build_partition_statistics(values: _RandomValues) -> dict[str, Any]:
    return {"snapshot-id": values.draw_snapshot(), "statistics-path": values.draw_location(), "file-size-in-bytes": 100}


def _build_encryption_key(values: _RandomValues) -> dict[str, Any]:
    key = {
        "key-id": values.campaign.choose_hint("uuid", "k"),
        "encrypted-key-metadata": "AAAA",
        "encrypted-by-id": values.campaign.choose_hint("snapshot"),
    }
    return {**key, "properties": {"location": values.draw_location()}}


def _choose_view_updates(values: _RandomValues) -> list[dict[str, Any]]:
    """Return random updates for a commit of a view."""
    version = {
        **VIEW_VERSION,
        "default-namespace": values.draw_namespace(),
        "default-catalog": values.campaign.choose_hint("namespace"),
    }
    table = ".".join((*values.draw_namespace(), values.draw_value("table")))
    version["representations"] = [{"type": "sql", "sql": f"SELECT * FROM {table}", "dialect": "trino"}]
    return values.rng.choice(
        (
            [{"action": "set-location", "location": values.draw_location()}],
            [{"action": "assign-uuid", "uuid": values.campaign.choose_hint("uuid", "0")}],
            [
                {
                    "action": "set-properties",
                    "updates": {values.rng.choice((*_PATHS, "owner", "location")): values.draw_location()},
                }
            ],
            [
                {"action": "add-view-version", "view-version": version},
                {"action": "set-current-view-version", "view-version-id": -1},
            ],
        )
    )


def _choose_requirements(values: _RandomValues) -> list[dict[str, Any]]:
    uuid = {"type": "assert-table-uuid", "uuid": values.campaign.choose_hint("uuid", "0")}
    return values.rng.choice(([], [{"type": "assert-create"}], [uuid]))


def _build_snapshot_query(values: _RandomValues) -> dict[str, Any]:
    query: dict[str, Any] = {"limit": 1}
    if values.rng.random() < 0.5:
        query["page-token"] = values.campaign.choose_hint("page token")
    if values.rng.random() < 0.3:
        query["snapshot-id"] = values.draw_snapshot()
    return query


def _build_change(values: _RandomValues) -> dict[str, Any]:
    file = {
        "spec-id": 0,
        "content": "data",
        "file-path": values.draw_location(),
        "file-format": "parquet",
        "partition": [],
    }
    return {
        "add": [{**file, "file-size-in-bytes": 100, "record-count": 3}],
        "remove": [{"file-path": values.draw_location()}],
        "read-snapshot-id": values.draw_snapshot(),
        "index-files": [{"location": values.draw_location(), "size-in-bytes": 100}],
        "producer": {"id": values.campaign.choose_hint("uuid"), "sequence": 1},
        "repeats-only": values.rng.random() < 0.2,
    }


def _build_form(values: _RandomValues) -> bytes:
    token = values.rng.choice(
        (
            values.campaign.choose_hint("stage"),
            values.campaign.choose_hint("plan task"),
            values.campaign.world.tokens["nobody"],
        )
    )
    exchange = "urn:ietf:params:oauth:grant-type:token-exchange"
    grant = values.rng.choice((f"client_credentials&client_secret={token}", f"{exchange}&subject_token={token}"))
    return f"grant_type={grant}&scope=catalog".encode()


def _choose_page_token(values: _RandomValues) -> str:
    return values.rng.choice(("", values.campaign.choose_hint("page token"), "AAAA"))


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
    "createNamespace": lambda values: {
        "namespace": values.draw_namespace(),
        "properties": {"location": values.draw_location()},
    },
    "runStatement": _choose_statement,
    "aggregate": lambda values: {
        "namespace": values.draw_namespace(),
        "table": values.draw_value("table"),
        "measures": ["count(*)"],
    },
    "updateProperties": lambda values: {"removals": ["x"], "updates": {"location": values.draw_location()}},
    "createTable": lambda values: {
        "name": values.draw_value("table"),
        "schema": SCHEMA,
        "location": values.draw_location(),
        "stage-create": values.rng.random() < 0.5,
    },
    "registerTable": lambda values: {
        "name": values.draw_value("table"),
        "metadata-location": values.draw_location(),
        "overwrite": True,
    },
    "registerView": lambda values: {
        "name": values.draw_value("view"),
        "metadata-location": values.campaign.choose_hint("view file"),
    },
    "updateTable": lambda values: {"requirements": _choose_requirements(values), "updates": _choose_updates(values)},
    "renameTable": lambda values: {"source": values.draw_identifier(), "destination": values.draw_identifier()},
    "renameView": lambda values: {"source": values.draw_identifier(), "destination": values.draw_identifier()},
    "createView": lambda values: {
        "name": values.draw_value("view"),
        "schema": SCHEMA,
        "view-version": {**VIEW_VERSION, "default-namespace": values.draw_namespace()},
        "location": values.draw_location(),
        "properties": {},
    },
    "replaceView": lambda values: {"updates": _choose_view_updates(values), "requirements": []},
    "commitTransaction": lambda values: {
        "table-changes": [
            {
                "identifier": values.draw_identifier(),
                "requirements": _choose_requirements(values),
                "updates": _choose_updates(values),
            }
            for _ in range(2)
        ]
    },
    "reportMetrics": lambda values: {
        "report-type": "scan-report",
        "table-name": values.draw_value("table"),
        "snapshot-id": values.draw_snapshot(),
    },
    "signRequest": lambda values: {
        "region": "us-east-1",
        "uri": values.draw_location(),
        "method": "GET",
        "headers": {},
    },
    "planTableScan": lambda values: {"snapshot-id": values.draw_snapshot(), "filter": _TRUE},
    "fetchScanTasks": lambda values: {"plan-task": values.campaign.choose_hint("plan task")},
    "undrop": lambda values: values.rng.choice(
        (None, {"namespace": [EVIL], "name": "undropped"}, {"namespace": values.draw_namespace()})
    ),
    "putFunction": lambda values: {
        **build_function_document(),
        "function-uuid": str(UUID(int=values.rng.getrandbits(128), version=4)),
    },
    "getEvents": lambda values: (
        {"catalog-objects-by-name": [values.draw_namespace()]} if values.rng.random() < 0.3 else {"page-size": 100}
    ),
    "addGrant": lambda values: {"principal": "mallory", "role": "admin", "namespace": values.draw_namespace()},
    "createToken": lambda values: {"name": "mallory2", "grants": [{"role": "admin"}]},
    "createWarehouse": lambda values: {"name": "mallory", "location": values.draw_location()},
    "putWarehouse": lambda values: {
        "location": values.draw_location(),
        "settings": {"s3_endpoint": "http://127.0.0.1:1"},
    },
    "selectRows": lambda values: {"where": "id > 0", "snapshot-id": values.draw_snapshot()},
    "commitChange": _build_change,
    "appendRows": lambda values: {
        "rows": [{"id": values.rng.randrange(9), "name": values.draw_location()}, {values.draw_location(): None}]
    },
    "appendRowsToTables": lambda values: {
        "tables": [
            {
                "namespace": values.draw_namespace(),
                "name": values.draw_value("table"),
                "rows": [{"id": 1, "_op": values.draw_location()}],
            }
        ]
    },
    "getRows": lambda values: {
        "keys": [{"id": values.rng.randrange(9)}, {values.draw_location(): None}][: values.rng.randint(0, 2)]
    },
    "pauseStream": lambda values: {"reason": values.draw_location()},
    "drainStream": lambda values: {"reason": values.draw_location()},
    "expireSnapshots": lambda values: {
        "older-than-ms": 1 << 60,
        "retain-last": 1,
        "dry-run": values.rng.random() < 0.5,
    },
    "rewriteManifests": lambda values: {
        "min-count": values.rng.choice((0, 2, 5)),
        "dry-run": values.rng.random() < 0.5,
    },
    "takeRewriteLease": lambda values: {
        "holder": values.rng.choice(("a", "b", "")),
        "release": values.rng.random() < 0.5,
    },
    "removeOrphanFiles": lambda values: {
        "older-than-ms": values.rng.choice((0, 1, 1 << 40)),
        "dry-run": values.rng.random() < 0.5,
    },
    "explain": lambda values: {"where": "id > 0", "files": True, "joins": [values.draw_join()]},
    "explainQuery": lambda values: {
        "query": values.draw_query(),
        "dialect": values.rng.choice(("trino", "duckdb")),
        "namespace": [EVIL],
    },
    "putNamespace": lambda values: {
        "properties": values.rng.choice(({}, {"location": values.draw_location()}, {values.draw_location(): "x"}))
    },
    "putTable": lambda values: {
        "schema": SCHEMA,
        "location": values.draw_location(),
        "properties": {"write.data.path": values.draw_location()},
    },
    "putView": lambda values: {
        "schema": SCHEMA,
        "representations": [{"sql": values.draw_query(), "dialect": "trino"}],
        "default-namespace": values.draw_namespace(),
        "properties": {"trino.run-as-owner": "root"},
    },
    "importTable": lambda values: {"metadata-location": values.draw_location(), "dry-run": values.rng.random() < 0.5},
    "importTables": lambda values: {
        "metadata-locations": {values.draw_location(): values.draw_location(), EVIL: values.draw_location()}
    },
    "importView": lambda values: {"metadata-location": values.draw_location(), "keep-owner": True},
    "putTablePolicy": lambda values: {
        "properties": values.rng.choice(({}, {"seamark.compaction.enabled": values.draw_location()}))
    },
    "putIndex": lambda values: {"kind": "bloom", "columns": ["id"]},
    "recordIndexAudit": lambda values: {"index-files": 1},
    "recordStatementTime": lambda values: {"statement": "0" * 16, "seconds": 1.5, "files": 3, "bytes": 10_000},
    "recordAppliedAdvice": lambda values: {"proposal": _PROPOSAL},
    "applyAdvice": lambda values: {"id": values.draw_location()},
    "finishAdviceStep": lambda values: {
        "number": 1,
        "since-ms": 1,
        "outcome": values.rng.choice(("applied", "failed", "busy")),
        "reason": EVIL,
    },
    "registerIndexFiles": lambda values: {"index-files": [{"location": values.draw_location(), "size-in-bytes": 100}]},
    "finishIndexBuild": lambda values: {"outcome": "rolled-back", "reason": "x"},
    "quarantineIndexFile": lambda values: {"location": values.draw_location(), "reason": "x", "check": True},
    "listUnheldFiles": lambda values: {"index-files": [values.draw_location()]},
    "renewPlanTable": lambda values: {"lease-s": 60},
    "makeCubePlan": lambda values: {
        "definition-id": EVIL,
        "columns": ["d0", "m0"],
        "predicate": "id > 0",
        "snapshot-id": values.draw_snapshot(),
        "lease-s": values.rng.choice((1, 600)),
    },
    "readCubeGroups": lambda values: {"definition-id": EVIL, "columns": ["d0", "m0"], "files": ""},
    "lookupKeys": lambda values: {"columns": ["id"], "keys": [[1]], "snapshot-id": values.draw_snapshot()},
    "leasePlanSnapshots": lambda values: {
        "snapshot-ids": [values.draw_snapshot()],
        "lease-s": values.rng.choice((0, 600)),
    },
    "makePlanTable": lambda values: {"predicate": "id > 0", "joins": [values.draw_join()]},
    "makePlanView": lambda values: {
        "metadata-location": values.campaign.choose_hint("view file"),
        "predicate": "id > 0",
        "tables": [
            {"start": 0, "end": 1, "plan": [*values.draw_namespace(), values.campaign.choose_hint("plan table")]}
        ],
    },
    "getToken": _build_form,
}

_QUERIES: dict[str, Callable[[_RandomValues], dict[str, Any]]] = {
    "getConfig": lambda values: {"warehouse": values.draw_location()},
    "appendRows": lambda values: (
        {"producer": values.campaign.choose_hint("uuid"), "sequence": 0} if values.rng.random() < 0.5 else {}
    ),
    "readRows": lambda values: {"after": values.draw_location(), "wait": 0},
    "loadStreamPosition": lambda values: {
        "at": values.rng.choice(("earliest", "latest", "snapshot:1", values.draw_location()))
    },
    "listNamespaces": lambda values: (
        {"parent": values.draw_value("namespace"), "pageToken": _choose_page_token(values)}
        if values.rng.random() < 0.5
        else {"pageToken": _choose_page_token(values), "pageSize": 1}
    ),
    "listTables": lambda values: {"pageToken": _choose_page_token(values), "pageSize": 1},
    "listViews": lambda values: {"pageToken": _choose_page_token(values), "pageSize": 1},
    "dropTable": lambda values: {"purgeRequested": "true"},
    "signRequest": lambda values: {"stage": values.campaign.choose_hint("stage")} if values.rng.random() < 0.5 else {},
    "listDropped": lambda values: (
        ({"namespace": values.draw_value("namespace")} if values.rng.random() < 0.7 else {})
        | ({"retained": "true"} if values.rng.random() < 0.3 else {})
    ),
    "purgeDropped": lambda values: {"release": "true"} if values.rng.random() < 0.3 else {},
    "listGrants": lambda values: (
        {"principal": values.rng.choice(("mallory", "rita", "root"))} if values.rng.random() < 0.5 else {}
    ),
    "removeGrant": lambda values: {"principal": "rita", "role": "reader", "namespace": values.draw_value("namespace")},
    "listTimeline": lambda values: {"limit": 100},
    "listTableTimeline": lambda values: {"limit": 100, "order": values.rng.choice(("asc", "desc"))},
    "listFiles": _build_snapshot_query,
    "listColumnStats": _build_snapshot_query,
    "loadColumnLayout": lambda values: (
        _build_snapshot_query(values) | ({"compare-to": values.draw_snapshot()} if values.rng.random() < 0.5 else {})
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
