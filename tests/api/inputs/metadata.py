"""Invalid metadata for Iceberg's routes: new tables, commits, views and transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.client import SCHEMA, VIEW_VERSION
from tests.api.inputs.bad_input import (
    BAD_REQUEST,
    BEYOND_LONG,
    NAMESPACE_PATH,
    TABLES_PATH,
    VIEWS_PATH,
    BadInput,
    build_table_commit,
    make_table,
)


def _make_table_with_field(type_: Any, **fields: Any) -> dict[str, Any]:
    return make_table(
        schema={"type": "struct", "fields": [{"id": 1, "name": "a", "required": False, "type": type_, **fields}]}
    )


def _make_nested_list_type(depth: int) -> Any:
    type_: Any = "int"
    for number in range(depth):
        type_ = {"type": "list", "element-id": number + 2, "element-required": False, "element": type_}
    return type_


def _make_snapshot_update(**fields: Any) -> dict[str, Any]:
    snapshot = {
        "snapshot-id": 1,
        "sequence-number": 1,
        "timestamp-ms": 1_700_000_000_000,
        "manifest-list": "file:///x.avro",
        "summary": {"operation": "append"},
    }
    return {"action": "add-snapshot", "snapshot": {**snapshot, **fields}}


def list_bad_schemas() -> Iterator[BadInput]:
    """Yield requests for new tables that the server must refuse, most of them for their schema or partition spec."""

    def build_input(description: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("New tables", description, "POST", TABLES_PATH, body, status, type_)

    yield build_input("no schema", {"name": "new"})
    yield build_input("a schema that is not an object", make_table(schema=[]))
    yield build_input("a schema without fields", make_table(schema={"type": "struct"}))
    yield build_input("a schema that is a list", make_table(schema={"type": "list", "fields": []}))
    yield build_input("unknown type", _make_table_with_field("quaternion"))
    yield build_input("a decimal of 39 digits", _make_table_with_field("decimal(39, 2)"))
    yield build_input(
        "a decimal with a precision of 20 digits", _make_table_with_field("decimal(99999999999999999999, 2)")
    )
    yield build_input("a fixed type of negative length", _make_table_with_field("fixed[-1]"))
    yield build_input("a type nested 200 deep", _make_table_with_field(_make_nested_list_type(200)))
    yield build_input("a type nested 450 deep", _make_table_with_field(_make_nested_list_type(450)))
    yield build_input("a type that is a number", _make_table_with_field(5))
    yield build_input("a type that is an empty object", _make_table_with_field({}))
    yield build_input("a field id beyond 32 bits", _make_table_with_field("int", id=2**31))
    yield build_input("a field id beyond 64 bits", _make_table_with_field("int", id=2**64))
    yield build_input("a field without a name", _make_table_with_field("int", name=None))
    repeated_fields = [{"id": n, "name": "same", "required": False, "type": "int"} for n in (1, 2)]
    yield build_input("two fields with the same name", make_table(schema={"type": "struct", "fields": repeated_fields}))
    fields_with_one_id = [{"id": 1, "name": n, "required": False, "type": "int"} for n in ("a", "b")]
    yield build_input(
        "two fields with the same id", make_table(schema={"type": "struct", "fields": fields_with_one_id})
    )
    yield build_input(
        "a field name with a lone surrogate",
        b'{"name": "new", "schema": {"type": "struct", "fields": '
        b'[{"id": 1, "name": "\\udfff", "required": false, "type": "int"}]}}',
    )

    def make_table_with_spec(**field: Any) -> dict[str, Any]:
        return make_table(**{"partition-spec": {"spec-id": 0, "fields": [{"name": "p", "source-id": 1, **field}]}})

    yield build_input("a partition transform that is a number", make_table_with_spec(transform=5))
    yield build_input("a bucket transform with 0 buckets", make_table_with_spec(transform="bucket[0]"))
    yield build_input("a number of buckets beyond 32 bits", make_table_with_spec(transform="bucket[99999999999]"))
    yield build_input("a truncate transform with width 0", make_table_with_spec(transform="truncate[0]"))
    yield build_input("a year transform of a long column", make_table_with_spec(transform="year"))
    yield build_input(
        "a partition field of an unknown column", make_table_with_spec(transform="identity", **{"source-id": 77})
    )
    order = {
        "order-id": 1,
        "fields": [{"transform": "identity", "source-id": 1, "direction": "up", "null-order": "nulls-first"}],
    }
    yield build_input("unknown sort direction", make_table(**{"write-order": order}))
    yield build_input("format version 0", make_table(properties={"format-version": "0"}))
    yield build_input("format version 99", make_table(properties={"format-version": "99"}))
    yield build_input("a format version that is not a number", make_table(properties={"format-version": "two"}))
    yield build_input("unknown codec", make_table(properties={"write.metadata.compression-codec": "rar"}))
    yield build_input("a name that another table has", make_table(name="t"), 409, "AlreadyExistsException")
    yield build_input("a name that a view has", make_table(name="v"), 409, "AlreadyExistsException")


def list_bad_commits() -> Iterator[BadInput]:
    """Yield commits to table `t` that the server must refuse, some of them with a conflict."""

    def build_input(description: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Commits", description, "POST", f"{TABLES_PATH}/t", body, status, type_)

    conflict: dict[str, Any] = {"status": 409, "type_": "CommitFailedException"}
    yield build_input("no updates", {"requirements": []})
    yield build_input("no requirements", {"updates": []})
    yield build_input("updates that are an object", {"requirements": [], "updates": {}})
    yield build_input("an update that is null", {"requirements": [], "updates": [None]})
    yield build_input("an update without an action", build_table_commit({"spec-id": 1}))
    yield build_input("unknown update", build_table_commit({"action": "levitate"}))
    yield build_input("an action that is a number", build_table_commit({"action": 5}))
    yield build_input("unknown requirement", build_table_commit(requirements=[{"type": "assert-calm"}]))
    yield build_input("a requirement without a value", build_table_commit(requirements=[{"type": "assert-table-uuid"}]))
    yield build_input(
        "a requirement with the UUID of another table",
        build_table_commit(requirements=[{"type": "assert-table-uuid", "uuid": "other"}]),
        **conflict,
    )
    yield build_input(
        "`assert-create` for an existing table",
        build_table_commit(requirements=[{"type": "assert-create"}]),
        **conflict,
    )
    yield build_input(
        "a requirement beyond 64 bits",
        build_table_commit(requirements=[{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 2**64}]),
    )
    yield build_input(
        "another UUID for the table",
        build_table_commit({"action": "assign-uuid", "uuid": "00000000-0000-4000-8000-000000000000"}),
    )
    yield build_input("an invalid UUID", build_table_commit({"action": "assign-uuid", "uuid": "x"}))
    yield build_input(
        "unknown format version",
        build_table_commit({"action": "upgrade-format-version", "format-version": 9}),
    )
    yield build_input(
        "an earlier format version", build_table_commit({"action": "upgrade-format-version", "format-version": 1})
    )
    yield build_input("unknown current schema", build_table_commit({"action": "set-current-schema", "schema-id": 99}))
    yield build_input(
        "the last added schema without an added schema",
        build_table_commit({"action": "set-current-schema", "schema-id": -1}),
    )
    yield build_input("unknown default spec", build_table_commit({"action": "set-default-spec", "spec-id": 99}))
    yield build_input(
        "unknown default sort order",
        build_table_commit({"action": "set-default-sort-order", "sort-order-id": 99}),
    )
    yield build_input(
        "removal of the current schema", build_table_commit({"action": "remove-schemas", "schema-ids": [0]})
    )
    yield build_input(
        "removal of the default spec", build_table_commit({"action": "remove-partition-specs", "spec-ids": [0]})
    )
    yield build_input("a snapshot without an id", build_table_commit(_make_snapshot_update(**{"snapshot-id": None})))
    yield build_input(
        "a snapshot id beyond 64 bits", build_table_commit(_make_snapshot_update(**{"snapshot-id": BEYOND_LONG}))
    )
    yield build_input(
        "a snapshot id that is a fraction", build_table_commit(_make_snapshot_update(**{"snapshot-id": 1.5}))
    )
    yield build_input(
        "a snapshot time that is not finite",
        b'{"requirements": [], "updates": [{"action": "add-snapshot", '
        b'"snapshot": {"snapshot-id": 1, "timestamp-ms": 1e400, "summary": {}}}]}',
    )
    yield build_input(
        "a snapshot without a manifest list", build_table_commit(_make_snapshot_update(**{"manifest-list": None}))
    )
    yield build_input(
        "a summary with a value that is not a string",
        build_table_commit(_make_snapshot_update(summary={"operation": 1})),
    )
    yield build_input("the same snapshot twice", build_table_commit(_make_snapshot_update(), _make_snapshot_update()))
    branch = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch"}
    yield build_input("a branch at an unknown snapshot", build_table_commit({**branch, "snapshot-id": 99}))
    yield build_input(
        "a reference that is neither branch nor tag",
        build_table_commit(_make_snapshot_update(), {**branch, "type": "twig", "snapshot-id": 1}),
    )
    yield build_input(
        "a tag named main", build_table_commit(_make_snapshot_update(), {**branch, "type": "tag", "snapshot-id": 1})
    )
    yield build_input(
        "a property that is not a string", build_table_commit({"action": "set-properties", "updates": {"a": 1}})
    )
    yield build_input(
        "an invalid value of a reserved property",
        build_table_commit({"action": "set-properties", "updates": {"write.metadata.previous-versions-max": "many"}}),
    )
    missing_table = BadInput(
        "Commits", "unknown table", "POST", f"{TABLES_PATH}/none", build_table_commit(), 404, "NoSuchTableException"
    )
    yield missing_table


def list_other_inputs() -> Iterator[BadInput]:
    """Yield invalid requests for views, transactions, metrics, signing and properties of namespaces."""

    def build_input(
        description: str, path: str, body: Any, status: int = 400, type_: str = BAD_REQUEST, group: str = "Views"
    ) -> BadInput:
        return BadInput(group, description, "POST", path, body, status, type_)

    view = {"name": "new", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    yield build_input("no version", VIEWS_PATH, {"name": "new", "schema": SCHEMA})
    yield build_input(
        "a version without SQL", VIEWS_PATH, {**view, "view-version": {**VIEW_VERSION, "representations": []}}
    )
    repeated_representations = [
        {"type": "sql", "sql": "SELECT 1", "dialect": dialect} for dialect in ("spark", "SPARK")
    ]
    yield build_input(
        "two queries in the same dialect",
        VIEWS_PATH,
        {**view, "view-version": {**VIEW_VERSION, "representations": repeated_representations}},
        type_="IllegalArgumentException",
    )
    yield build_input("unknown update", f"{VIEWS_PATH}/v", {"updates": [{"action": "levitate"}]})
    yield build_input(
        "an update for tables", f"{VIEWS_PATH}/v", {"updates": [{"action": "set-default-spec", "spec-id": 0}]}
    )
    yield build_input(
        "unknown version",
        f"{VIEWS_PATH}/v",
        {"updates": [{"action": "set-current-view-version", "view-version-id": 9}]},
    )
    group = "Transactions"
    change = {"identifier": {"namespace": ["db"], "name": "t"}, **build_table_commit()}
    yield build_input("no changes", "/v1/transactions/commit", {"table-changes": []}, group=group)
    yield build_input(
        "a change without a table", "/v1/transactions/commit", {"table-changes": [build_table_commit()]}, group=group
    )
    yield build_input(
        "the same table twice", "/v1/transactions/commit", {"table-changes": [change, change]}, group=group
    )
    group = "Metrics and signing"
    yield build_input("a report without a type", f"{TABLES_PATH}/t/metrics", {}, group=group)
    yield build_input("unknown report type", f"{TABLES_PATH}/t/metrics", {"report-type": "gossip"}, group=group)
    yield build_input(
        "a report with a snapshot id that is a string",
        f"{TABLES_PATH}/t/metrics",
        {"report-type": "scan-report", "snapshot-id": "1"},
        group=group,
    )
    yield build_input(
        "a report with a snapshot id beyond 64 bits",
        f"{TABLES_PATH}/t/metrics",
        {"report-type": "scan-report", "snapshot-id": BEYOND_LONG},
        group=group,
    )
    sign_request = {"region": "us-east-1", "uri": "http://169.254.169.254/latest", "method": "GET", "headers": {}}
    yield build_input("a signature for a table in local files", f"{TABLES_PATH}/t/sign", sign_request, group=group)
    yield build_input(
        "the same property set and removed",
        f"{NAMESPACE_PATH}/properties",
        {"updates": {"a": "1"}, "removals": ["a"]},
        422,
        "UnprocessableEntityException",
        "Namespaces",
    )
