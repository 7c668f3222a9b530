"""Invalid metadata for Iceberg's routes: new tables, commits, views and transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.client import SCHEMA, VIEW_VERSION
from tests.api.inputs.bad_input import BAD_REQUEST, BEYOND_LONG, BadInput, D, T, V, build_table_commit, make_table


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

    def make(description: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("New tables", description, "POST", T, body, status, type_)

    yield make("no schema", {"name": "new"})
    yield make("a schema that is not an object", make_table(schema=[]))
    yield make("a schema without fields", make_table(schema={"type": "struct"}))
    yield make("a schema that is a list", make_table(schema={"type": "list", "fields": []}))
    yield make("unknown type", _make_table_with_field("quaternion"))
    yield make("a decimal of 39 digits", _make_table_with_field("decimal(39, 2)"))
    yield make("a decimal with a precision of 20 digits", _make_table_with_field("decimal(99999999999999999999, 2)"))
    yield make("a fixed type of negative length", _make_table_with_field("fixed[-1]"))
    yield make("a type nested 200 deep", _make_table_with_field(_make_nested_list_type(200)))
    yield make("a type nested 450 deep", _make_table_with_field(_make_nested_list_type(450)))
    yield make("a type that is a number", _make_table_with_field(5))
    yield make("a type that is an empty object", _make_table_with_field({}))
    yield make("a field id beyond 32 bits", _make_table_with_field("int", id=2**31))
    yield make("a field id beyond 64 bits", _make_table_with_field("int", id=2**64))
    yield make("a field without a name", _make_table_with_field("int", name=None))
    repeated_fields = [{"id": n, "name": "same", "required": False, "type": "int"} for n in (1, 2)]
    yield make("two fields with the same name", make_table(schema={"type": "struct", "fields": repeated_fields}))
    fields_with_one_id = [{"id": 1, "name": n, "required": False, "type": "int"} for n in ("a", "b")]
    yield make("two fields with the same id", make_table(schema={"type": "struct", "fields": fields_with_one_id}))
    yield make(
        "a field name with a lone surrogate",
        b'{"name": "new", "schema": {"type": "struct", "fields": '
        b'[{"id": 1, "name": "\\udfff", "required": false, "type": "int"}]}}',
    )

    def make_table_with_spec(**field: Any) -> dict[str, Any]:
        return make_table(**{"partition-spec": {"spec-id": 0, "fields": [{"name": "p", "source-id": 1, **field}]}})

    yield make("a partition transform that is a number", make_table_with_spec(transform=5))
    yield make("a bucket transform with 0 buckets", make_table_with_spec(transform="bucket[0]"))
    yield make("a number of buckets beyond 32 bits", make_table_with_spec(transform="bucket[99999999999]"))
    yield make("a truncate transform with width 0", make_table_with_spec(transform="truncate[0]"))
    yield make("a year transform of a long column", make_table_with_spec(transform="year"))
    yield make(
        "a partition field of an unknown column", make_table_with_spec(transform="identity", **{"source-id": 77})
    )
    order = {
        "order-id": 1,
        "fields": [{"transform": "identity", "source-id": 1, "direction": "up", "null-order": "nulls-first"}],
    }
    yield make("unknown sort direction", make_table(**{"write-order": order}))
    yield make("format version 0", make_table(properties={"format-version": "0"}))
    yield make("format version 99", make_table(properties={"format-version": "99"}))
    yield make("a format version that is not a number", make_table(properties={"format-version": "two"}))
    yield make("unknown codec", make_table(properties={"write.metadata.compression-codec": "rar"}))
    yield make("a name that another table has", make_table(name="t"), 409, "AlreadyExistsException")
    yield make("a name that a view has", make_table(name="v"), 409, "AlreadyExistsException")


def list_bad_commits() -> Iterator[BadInput]:
    """Yield commits to table `t` that the server must refuse, some of them with a conflict."""

    def send(description: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Commits", description, "POST", f"{T}/t", body, status, type_)

    conflict: dict[str, Any] = {"status": 409, "type_": "CommitFailedException"}
    yield send("no updates", {"requirements": []})
    yield send("no requirements", {"updates": []})
    yield send("updates that are an object", {"requirements": [], "updates": {}})
    yield send("an update that is null", {"requirements": [], "updates": [None]})
    yield send("an update without an action", build_table_commit({"spec-id": 1}))
    yield send("unknown update", build_table_commit({"action": "levitate"}))
    yield send("an action that is a number", build_table_commit({"action": 5}))
    yield send("unknown requirement", build_table_commit(requirements=[{"type": "assert-calm"}]))
    yield send("a requirement without a value", build_table_commit(requirements=[{"type": "assert-table-uuid"}]))
    yield send(
        "a requirement with the UUID of another table",
        build_table_commit(requirements=[{"type": "assert-table-uuid", "uuid": "other"}]),
        **conflict,
    )
    yield send(
        "`assert-create` for an existing table",
        build_table_commit(requirements=[{"type": "assert-create"}]),
        **conflict,
    )
    yield send(
        "a requirement beyond 64 bits",
        build_table_commit(requirements=[{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 2**64}]),
    )
    yield send(
        "another UUID for the table",
        build_table_commit({"action": "assign-uuid", "uuid": "00000000-0000-4000-8000-000000000000"}),
    )
    yield send("an invalid UUID", build_table_commit({"action": "assign-uuid", "uuid": "x"}))
    yield send(
        "unknown format version",
        build_table_commit({"action": "upgrade-format-version", "format-version": 9}),
    )
    yield send(
        "an earlier format version", build_table_commit({"action": "upgrade-format-version", "format-version": 1})
    )
    yield send("unknown current schema", build_table_commit({"action": "set-current-schema", "schema-id": 99}))
    yield send(
        "the last added schema without an added schema",
        build_table_commit({"action": "set-current-schema", "schema-id": -1}),
    )
    yield send("unknown default spec", build_table_commit({"action": "set-default-spec", "spec-id": 99}))
    yield send(
        "unknown default sort order",
        build_table_commit({"action": "set-default-sort-order", "sort-order-id": 99}),
    )
    yield send("removal of the current schema", build_table_commit({"action": "remove-schemas", "schema-ids": [0]}))
    yield send("removal of the default spec", build_table_commit({"action": "remove-partition-specs", "spec-ids": [0]}))
    yield send("a snapshot without an id", build_table_commit(_make_snapshot_update(**{"snapshot-id": None})))
    yield send(
        "a snapshot id beyond 64 bits", build_table_commit(_make_snapshot_update(**{"snapshot-id": BEYOND_LONG}))
    )
    yield send("a snapshot id that is a fraction", build_table_commit(_make_snapshot_update(**{"snapshot-id": 1.5})))
    yield send(
        "a snapshot time that is not finite",
        b'{"requirements": [], "updates": [{"action": "add-snapshot", '
        b'"snapshot": {"snapshot-id": 1, "timestamp-ms": 1e400, "summary": {}}}]}',
    )
    yield send(
        "a snapshot without a manifest list", build_table_commit(_make_snapshot_update(**{"manifest-list": None}))
    )
    yield send(
        "a summary with a value that is not a string",
        build_table_commit(_make_snapshot_update(summary={"operation": 1})),
    )
    yield send("the same snapshot twice", build_table_commit(_make_snapshot_update(), _make_snapshot_update()))
    branch = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch"}
    yield send("a branch at an unknown snapshot", build_table_commit({**branch, "snapshot-id": 99}))
    yield send(
        "a reference that is neither branch nor tag",
        build_table_commit(_make_snapshot_update(), {**branch, "type": "twig", "snapshot-id": 1}),
    )
    yield send(
        "a tag named main", build_table_commit(_make_snapshot_update(), {**branch, "type": "tag", "snapshot-id": 1})
    )
    yield send("a property that is not a string", build_table_commit({"action": "set-properties", "updates": {"a": 1}}))
    yield send(
        "an invalid value of a reserved property",
        build_table_commit({"action": "set-properties", "updates": {"write.metadata.previous-versions-max": "many"}}),
    )
    missing_table = BadInput(
        "Commits", "unknown table", "POST", f"{T}/none", build_table_commit(), 404, "NoSuchTableException"
    )
    yield missing_table


def list_other_inputs() -> Iterator[BadInput]:
    """Yield invalid requests for views, transactions, metrics, signing and properties of namespaces."""

    def send(
        description: str, path: str, body: Any, status: int = 400, type_: str = BAD_REQUEST, group: str = "Views"
    ) -> BadInput:
        return BadInput(group, description, "POST", path, body, status, type_)

    view = {"name": "new", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    yield send("no version", V, {"name": "new", "schema": SCHEMA})
    yield send("a version without SQL", V, {**view, "view-version": {**VIEW_VERSION, "representations": []}})
    repeated_representations = [
        {"type": "sql", "sql": "SELECT 1", "dialect": dialect} for dialect in ("spark", "SPARK")
    ]
    yield send(
        "two queries in the same dialect",
        V,
        {**view, "view-version": {**VIEW_VERSION, "representations": repeated_representations}},
        type_="IllegalArgumentException",
    )
    yield send("unknown update", f"{V}/v", {"updates": [{"action": "levitate"}]})
    yield send("an update for tables", f"{V}/v", {"updates": [{"action": "set-default-spec", "spec-id": 0}]})
    yield send(
        "unknown version",
        f"{V}/v",
        {"updates": [{"action": "set-current-view-version", "view-version-id": 9}]},
    )
    group = "Transactions"
    change = {"identifier": {"namespace": ["db"], "name": "t"}, **build_table_commit()}
    yield send("no changes", "/v1/transactions/commit", {"table-changes": []}, group=group)
    yield send(
        "a change without a table", "/v1/transactions/commit", {"table-changes": [build_table_commit()]}, group=group
    )
    yield send("the same table twice", "/v1/transactions/commit", {"table-changes": [change, change]}, group=group)
    group = "Metrics and signing"
    yield send("a report without a type", f"{T}/t/metrics", {}, group=group)
    yield send("unknown report type", f"{T}/t/metrics", {"report-type": "gossip"}, group=group)
    yield send(
        "a report with a snapshot id that is a string",
        f"{T}/t/metrics",
        {"report-type": "scan-report", "snapshot-id": "1"},
        group=group,
    )
    yield send(
        "a report with a snapshot id beyond 64 bits",
        f"{T}/t/metrics",
        {"report-type": "scan-report", "snapshot-id": BEYOND_LONG},
        group=group,
    )
    sign = {"region": "us-east-1", "uri": "http://169.254.169.254/latest", "method": "GET", "headers": {}}
    yield send("a signature for a table in local files", f"{T}/t/sign", sign, group=group)
    yield send(
        "the same property set and removed",
        f"{D}/properties",
        {"updates": {"a": "1"}, "removals": ["a"]},
        422,
        "UnprocessableEntityException",
        "Namespaces",
    )
