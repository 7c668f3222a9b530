"""Request bodies and table metadata that several benchmarks use.

They have the shapes of the Polaris benchmarks, or a long history of snapshots.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.wire import Request, build_request

COLUMNS = 10
PROPERTIES = 10
"""The number of columns of a table or view, and of initial properties. The defaults of apache/polaris-tools."""


def build_schema() -> dict[str, Any]:
    fields = [{"id": n, "name": f"column{n}", "type": "int", "required": True} for n in range(1, COLUMNS + 1)]
    return {"type": "struct", "schema-id": 0, "fields": fields, "identifier-field-ids": [1]}


def build_properties() -> dict[str, str]:
    return {f"InitialAttribute_{n}": str(n) for n in range(PROPERTIES)}


def create_namespace(namespace: tuple[str, ...]) -> Request:
    return build_request(
        "POST", "/v1/namespaces", {"namespace": namespace, "properties": build_properties()}, label="create namespace"
    )


def create_table(namespace_url: str, name: str) -> Request:
    body = {"name": name, "stage-create": False, "schema": build_schema(), "properties": build_properties()}
    return build_request("POST", f"/v1/namespaces/{namespace_url}/tables", body, label="create table")


def create_view(namespace_url: str, name: str) -> Request:
    version = {
        "version-id": 1,
        "timestamp-ms": 1_700_000_000_000,
        "schema-id": 0,
        "summary": {"engine-name": "spark", "engine-version": "4.1.4"},
        "default-namespace": ["default"],
        "representations": [{"type": "sql", "sql": f"SELECT * FROM {name}_base", "dialect": "spark"}],
    }
    body = {"name": name, "view-version": version, "schema": build_schema(), "properties": build_properties()}
    return build_request("POST", f"/v1/namespaces/{namespace_url}/views", body, label="create view")


def build_table_path(namespace_url: str, name: str) -> str:
    return f"/v1/namespaces/{namespace_url}/tables/{quote(name, safe='')}"


def build_view_path(namespace_url: str, name: str) -> str:
    return f"/v1/namespaces/{namespace_url}/views/{quote(name, safe='')}"


def set_property(namespace_url: str, name: str, key: str, value: str) -> Request:
    """Return a commit request that sets one property and has no requirements.

    Without requirements, the commit fits every state of the table. A catalog may still answer 409 if another commit is
    made at the same time. This is not counted as a failure.
    """
    body = {"requirements": [], "updates": [{"action": "set-properties", "updates": {key: value}}]}
    return build_request(
        "POST", build_table_path(namespace_url, name), body, label="set property", tolerated_statuses=(409,)
    )


def build_snapshot(snapshot_id: int, parent: int | None, sequence: int, location: str, at_ms: int) -> dict[str, Any]:
    """Return a snapshot as an append of an engine writes it.

    Its manifest list does not exist, because catalogs do not read that file.
    """
    document: dict[str, Any] = {
        "sequence-number": sequence,
        "snapshot-id": snapshot_id,
        "timestamp-ms": at_ms,
        "summary": {
            "operation": "append",
            "spark.app.id": "local-1700000000000",
            "added-data-files": "4",
            "added-records": "100000",
            "added-files-size": "4194304",
            "changed-partition-count": "1",
            "total-records": str(100_000 * sequence),
            "total-files-size": str(4_194_304 * sequence),
            "total-data-files": str(4 * sequence),
            "total-delete-files": "0",
            "total-position-deletes": "0",
            "total-equality-deletes": "0",
            "engine-name": "spark",
            "engine-version": "4.1.4",
        },
        "manifest-list": f"{location}/metadata/snap-{snapshot_id}-1-{uuid.UUID(int=snapshot_id)}.avro",
        "schema-id": 0,
    }
    return document if parent is None else {**document, "parent-snapshot-id": parent}


def build_append(
    namespace_url: str,
    name: str,
    uuid_: str,
    location: str,
    parent: int | None,
    new: int,
    sequence: int,
    at_ms: int,
) -> Request:
    """Return the commit request of an append, which adds one snapshot and makes it the head of `main`.

    The commit has the requirements that engines send. The request accepts 409 as an answer.
    """
    body = {
        "requirements": [
            {"type": "assert-table-uuid", "uuid": uuid_},
            {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": parent},
        ],
        "updates": [
            {"action": "add-snapshot", "snapshot": build_snapshot(new, parent, sequence, location, at_ms)},
            {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": new},
        ],
    }  # fmt: skip
    return build_request("POST", build_table_path(namespace_url, name), body, label="append", tolerated_statuses=(409,))


def write_long_history(folder: Path, snapshots: int) -> str:
    """Write the metadata file of a v2 table with `snapshots` snapshots into `folder`, and return its URI."""
    location = f"file://{folder}"
    start = 1_600_000_000_000
    ids = [3_000_000_000_000_000_000 + n * 7919 for n in range(1, snapshots + 1)]
    new_snapshots = [
        build_snapshot(new_file, ids[n - 1] if n else None, n + 1, location, start + n * 60_000)
        for n, new_file in enumerate(ids)
    ]
    columns = build_schema()
    metadata = {
        "format-version": 2,
        "table-uuid": str(uuid.uuid4()),
        "location": location,
        "last-sequence-number": snapshots,
        "last-updated-ms": start + snapshots * 60_000,
        "last-column-id": COLUMNS,
        "current-schema-id": 0,
        "schemas": [columns],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": build_properties(),
        "current-snapshot-id": ids[-1],
        "refs": {
            "main": {"snapshot-id": ids[-1], "type": "branch"},
            "audit": {"snapshot-id": ids[snapshots // 2], "type": "tag"},
        },
        "snapshots": new_snapshots,
        "snapshot-log": [{"timestamp-ms": s["timestamp-ms"], "snapshot-id": s["snapshot-id"]} for s in new_snapshots],
        "metadata-log": [
            {
                "timestamp-ms": start + n * 60_000,
                "metadata-file": f"{location}/metadata/{n:05d}-{uuid.UUID(int=n)}.metadata.json",
            }
            for n in range(max(0, snapshots - 100), snapshots)
        ],
        "statistics": [],
        "partition-statistics": [],
    }
    file = folder / "metadata" / f"{snapshots:05d}-{uuid.uuid4()}.metadata.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(metadata, separators=(",", ":")))
    return f"file://{file}"
