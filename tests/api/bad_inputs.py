"""Inputs that no client should send, and what each is answered. `docs/reference/bad-inputs.md` is made of this table:

    python -m tests.api.bad_inputs

writes it from the answers of a real server; a test compares the two. In a body, `{location}` and `{view}` stand for the
metadata files of the table `db.t` and the view `db.v`, `{warehouse}` for the warehouse.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.api.client import SCHEMA, VIEW_VERSION, Answer, Api
from tests.server.rig import running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "bad-inputs.md"
BODY_LIMIT_BYTES = 1 << 18

N = "/v1/namespaces"
D = f"{N}/db"
T = f"{D}/tables"
V = f"{D}/views"
BAD = "BadRequestException"
COMMIT_LIMIT = 2**63


@dataclass(frozen=True)
class BadInput:
    group: str
    what: str
    method: str
    path: str
    body: Any = None
    """JSON, or bytes as they are."""
    status: int = 400
    type: str = BAD
    headers: tuple[tuple[str, str], ...] = ()


def _commit(*updates: Any, requirements: Any = ()) -> dict[str, Any]:
    return {"requirements": list(requirements), "updates": list(updates)}


def _table(**more: Any) -> dict[str, Any]:
    return {"name": "new", "schema": SCHEMA, **more}


def _field(type_: Any, **more: Any) -> dict[str, Any]:
    return _table(
        schema={"type": "struct", "fields": [{"id": 1, "name": "a", "required": False, "type": type_, **more}]}
    )


def _nested(depth: int) -> Any:
    type_: Any = "int"
    for number in range(depth):
        type_ = {"type": "list", "element-id": number + 2, "element-required": False, "element": type_}
    return type_


def _snapshot(**more: Any) -> dict[str, Any]:
    snapshot = {
        "snapshot-id": 1,
        "sequence-number": 1,
        "timestamp-ms": 1_700_000_000_000,
        "manifest-list": "file:///x.avro",
        "summary": {"operation": "append"},
    }
    return {"action": "add-snapshot", "snapshot": {**snapshot, **more}}


def _bodies() -> Iterator[BadInput]:
    def post(what: str, body: Any, path: str = N, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Bodies", what, "POST", path, body, status, type_)

    yield post("no body", None)
    yield post("an empty body", b"")
    yield post("text that is no JSON", b"namespace=db")
    yield post("JSON that breaks off", b'{"namespace": ["a"')
    yield post("JSON with something after it", b'{"namespace": ["a"]} {}')
    yield post("bytes that are no UTF-8", b'{"namespace": ["\xff\xfe"]}')
    yield post("UTF-16", '{"namespace": ["a"]}'.encode("utf-16"))
    yield post("a lone surrogate", b'{"namespace": ["\\ud800"]}')
    yield post("a NUL in a name", b'{"namespace": ["a\\u0000b"]}')
    yield post("an array in place of the object", b"[]")
    yield post("null", b"null")
    yield post("a number", b"1e999")
    yield post("an object with nothing in it", b"{}")
    yield post("a field of the wrong type", {"namespace": "db"})
    yield post("a wrong type deep inside", {"namespace": ["a", 5]})
    yield post("a property that is no string", {"namespace": ["n"], "properties": {"a": 1}})
    yield post("a key twice, the second of the wrong type", b'{"namespace": ["a"], "namespace": 5}')
    yield post("nested 100,000 arrays deep", b"[" * 100_000)
    yield post("nested 100,000 arrays deep, in a field that is ignored", b'{"x":' + b"[" * 100_000)
    yield post("a number of 5,000 digits", b'{"namespace": [' + b"9" * 5_000 + b"]}")
    large = b'{"namespace": ["' + b"a" * BODY_LIMIT_BYTES + b'"]}'
    yield post("more than `body_limit_bytes`", large, status=413, type_="PayloadTooLargeException")
    yield BadInput("Bodies", "gzip announced, none sent", "POST", N, b"x" * 50, headers=(("Content-Encoding", "gzip"),))
    unknown, media = (("Content-Encoding", "lzw"),), "UnsupportedMediaTypeException"
    yield BadInput("Bodies", "an encoding nobody knows", "POST", N, b"x" * 50, 415, media, unknown)


def _names() -> Iterator[BadInput]:
    def get(what: str, path: str, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Names and paths", what, "GET", path, None, status, type_)

    def post(what: str, path: str, body: Any, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Names and paths", what, "POST", path, body, status, type_)

    yield get("a NUL in a path", f"{N}/a%00b")
    yield get("a line break in a path", f"{N}/a%0D%0Ab")
    yield get("an escape that is cut off", f"{N}/a%2")
    yield get("an escape that is none", f"{N}/%zz")
    yield get("a path that is no UTF-8", f"{N}/%FF")
    yield get("an overlong UTF-8 slash", f"{N}/%C0%AF")
    yield get("an encoded surrogate", f"{N}/%ED%A0%80")
    yield get("an empty level", f"{N}/a%1F%1Fb")
    yield get("only a separator", f"{N}/%1F")
    yield get("a name of 256 characters", f"{T}/{'x' * 256}")
    yield get("dots for a path", f"{N}/..%2F..%2Fetc%2Fpasswd", 404, "NoSuchNamespaceException")
    yield get("dots as a table", f"{T}/..%2F..%2F..%2Fetc%2Fpasswd", 404, "NoSuchTableException")
    yield get("dots that are not encoded", f"{T}/../../../../etc/passwd", 404, "NotFoundException")
    yield get("no name at all", f"{N}//tables", 404, "NotFoundException")
    yield get("a prefix that is not ours", "/v1/other/namespaces", 404, "NotFoundException")
    yield get("a route that does not exist", "/v2/namespaces", 404, "NotFoundException")
    yield BadInput(
        "Names and paths", "a method that is not served", "PUT", N, None, 405, "UnsupportedOperationException"
    )
    yield post("a namespace without levels", N, {"namespace": []})
    yield post("a level that URLs take for the parent folder", N, {"namespace": [".."]})
    yield post("a table's name that URLs take for nothing", T, _table(name="."))
    yield post("an empty level in a body", N, {"namespace": ["a", ""]})
    yield post("the separator inside a level", N, {"namespace": ["a\x1fb"]})
    yield post("a level of 256 characters", N, {"namespace": ["n" * 256]})
    yield post("10,000 levels", N, {"namespace": ["n"] * 10_000})
    yield post("a table without a name", T, _table(name=""))
    yield post("a table's name with a tabulator", T, _table(name="a\tb"))
    yield post("a table's name of 256 characters", T, _table(name="x" * 256))
    yield post("a view's name with a NUL", V, {"name": "a\x00", "schema": SCHEMA, "view-version": VIEW_VERSION})
    ends = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "\x00"}}
    yield post("a rename to a control character", "/v1/tables/rename", ends)
    yield post("a rename to no name", "/v1/tables/rename", {**ends, "destination": {"namespace": ["db"], "name": ""}})
    yield post("a rename to no namespace", "/v1/tables/rename", {**ends, "destination": {"namespace": [], "name": "x"}})


def _locations() -> Iterator[BadInput]:
    for what, location in (
        ("elsewhere on the disk", "file:///etc/passwd"),
        ("above the warehouse, by dots", "{warehouse}/../outside"),
        ("above the warehouse, by encoded dots", "{warehouse}/%2e%2e/outside"),
        ("above the warehouse, by doubly encoded dots", "{warehouse}/%252e%252e/outside"),
        ("above the warehouse, by backslashes", "{warehouse}/..\\outside"),
        ("beside the warehouse, sharing its beginning", "{warehouse}-other/t"),
        ("the warehouse itself", "{warehouse}"),
        ("a relative path", "db/t"),
        ("another host", "file://host/t"),
        ("a web address", "http://127.0.0.1/t"),
        ("the cloud's metadata service", "http://169.254.169.254/latest/meta-data"),
        ("a bucket that is not the warehouse's", "s3://somebody/else"),
        ("credentials in the address", "s3://key:secret@bucket/t"),
        ("a NUL", "{warehouse}/a\x00b"),
        ("a query", "{warehouse}/t?x=1"),
        ("5,000 characters", "{warehouse}/" + "x" * 5_000),
    ):
        yield BadInput("Locations", f"a table at: {what}", "POST", T, _table(location=location))
        update = {"action": "set-location", "location": location}
        yield BadInput("Locations", f"a table moved to: {what}", "POST", f"{T}/t", _commit(update))
        body = {"name": "new", "metadata-location": location}
        yield BadInput("Locations", f"a registered file at: {what}", "POST", f"{D}/register", body)
    outside = {"name": "new", "schema": SCHEMA, "view-version": VIEW_VERSION, "location": "file:///etc"}
    yield BadInput("Locations", "a view elsewhere on the disk", "POST", V, outside)
    view = {"name": "new", "metadata-location": "file:///etc/passwd"}
    yield BadInput("Locations", "a registered view elsewhere", "POST", f"{D}/register-view", view)
    properties = {"updates": {"location": "file:///etc"}}
    yield BadInput("Locations", "a namespace's location elsewhere", "POST", f"{D}/properties", properties)
    path = _commit({"action": "set-properties", "updates": {"write.metadata.path": "file:///etc"}})
    yield BadInput("Locations", "metadata files written elsewhere", "POST", f"{T}/t", path)
    missing = {"name": "new", "metadata-location": "{warehouse}/db/none.metadata.json"}
    yield BadInput(
        "Locations", "a registered file that is not there", "POST", f"{D}/register", missing, 404, "NotFoundException"
    )
    view_as_table = {"name": "new", "metadata-location": "{view}"}
    yield BadInput("Locations", "a view registered as a table", "POST", f"{D}/register", view_as_table)
    table_as_view = {"name": "new", "metadata-location": "{location}"}
    yield BadInput("Locations", "a table registered as a view", "POST", f"{D}/register-view", table_as_view)


def _queries() -> Iterator[BadInput]:
    for what, query in (
        ("a page token we never gave out", "pageToken=%21%21"),
        ("a page token that is no text", "pageToken=_w"),
        ("a page token with a NUL", "pageToken=AA"),
        ("a page size of zero", "pageSize=0"),
        ("a negative page size", "pageSize=-1"),
        ("a page size that is no number", "pageSize=ten"),
        ("a page size in other digits", "pageSize=%D9%A3"),
        ("a page size of 5,000 digits", "pageSize=" + "9" * 5_000),
        ("an empty page size", "pageSize="),
    ):
        for path in (N, T, V, f"{D}/functions"):
            kind = path.rsplit("/", 1)[1]
            yield BadInput("Queries", f"{what}, listing {kind}", "GET", f"{path}?{query}")
    yield BadInput("Queries", "a parent with a control character", "GET", f"{N}?parent=a%00")
    yield BadInput("Queries", "a parent with an empty level", "GET", f"{N}?parent=a%1F")
    yield BadInput("Queries", "snapshots neither all nor refs", "GET", f"{T}/t?snapshots=some")
    yield BadInput("Queries", "a purge flag that is no boolean", "DELETE", f"{T}/t?purgeRequested=1")
    yield BadInput(
        "Queries",
        "a warehouse elsewhere",
        "GET",
        "/v1/config?warehouse=s3://other",
        None,
        404,
        "NoSuchWarehouseException",
    )


def _headers() -> Iterator[BadInput]:
    for what, key in (
        ("that is no UUID", "abc"),
        ("of version 4", "017f22e2-79b0-4cc3-98c4-dc0c0c07398f"),
        ("with a forbidden variant", "017f22e2-79b0-7cc3-18c4-dc0c0c07398f"),
        ("that is empty", ""),
        ("of 10,000 characters", "0" * 8_000),
    ):
        header = (("Idempotency-Key", key),)
        yield BadInput("Headers", f"an idempotency key {what}", "DELETE", f"{T}/t", headers=header)


def _schemas() -> Iterator[BadInput]:
    def make(what: str, body: Any, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("New tables", what, "POST", T, body, status, type_)

    yield make("no schema", {"name": "new"})
    yield make("a schema that is no object", _table(schema=[]))
    yield make("a schema without fields", _table(schema={"type": "struct"}))
    yield make("a schema that is a list", _table(schema={"type": "list", "fields": []}))
    yield make("a type nobody knows", _field("quaternion"))
    yield make("a decimal of 39 digits", _field("decimal(39, 2)"))
    yield make("a decimal without bounds", _field("decimal(99999999999999999999, 2)"))
    yield make("a fixed type of negative length", _field("fixed[-1]"))
    yield make("a type nested 200 deep", _field(_nested(200)))
    yield make("a type nested 450 deep", _field(_nested(450)))
    yield make("a type that is a number", _field(5))
    yield make("a type that is an empty object", _field({}))
    yield make("a field id beyond 32 bits", _field("int", id=2**31))
    yield make("a field id beyond 64 bits", _field("int", id=2**64))
    yield make("a field without a name", _field("int", name=None))
    twice = [{"id": n, "name": "same", "required": False, "type": "int"} for n in (1, 2)]
    yield make("two fields of one name", _table(schema={"type": "struct", "fields": twice}))
    same_id = [{"id": 1, "name": n, "required": False, "type": "int"} for n in ("a", "b")]
    yield make("two fields of one id", _table(schema={"type": "struct", "fields": same_id}))
    yield make(
        "a field name that is a lone surrogate",
        b'{"name": "new", "schema": {"type": "struct", "fields": '
        b'[{"id": 1, "name": "\\udfff", "required": false, "type": "int"}]}}',
    )

    def spec(**field: Any) -> dict[str, Any]:
        return _table(**{"partition-spec": {"spec-id": 0, "fields": [{"name": "p", "source-id": 1, **field}]}})

    yield make("a partition transform that is a number", spec(transform=5))
    yield make("zero buckets", spec(transform="bucket[0]"))
    yield make("more buckets than 32 bits hold", spec(transform="bucket[99999999999]"))
    yield make("a width of zero", spec(transform="truncate[0]"))
    yield make("a year of a long", spec(transform="year"))
    yield make("a partition on no column", spec(transform="identity", **{"source-id": 77}))
    order = {
        "order-id": 1,
        "fields": [{"transform": "identity", "source-id": 1, "direction": "up", "null-order": "nulls-first"}],
    }
    yield make("a sort direction nobody knows", _table(**{"write-order": order}))
    yield make("format version 0", _table(properties={"format-version": "0"}))
    yield make("format version 99", _table(properties={"format-version": "99"}))
    yield make("a format version that is no number", _table(properties={"format-version": "two"}))
    yield make("a codec nobody knows", _table(properties={"write.metadata.compression-codec": "rar"}))
    yield make("a name that is taken", _table(name="t"), 409, "AlreadyExistsException")
    yield make("a name that a view has", _table(name="v"), 409, "AlreadyExistsException")


def _commits() -> Iterator[BadInput]:
    def send(what: str, body: Any, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Commits", what, "POST", f"{T}/t", body, status, type_)

    conflict: dict[str, Any] = {"status": 409, "type_": "CommitFailedException"}
    yield send("no updates", {"requirements": []})
    yield send("no requirements", {"updates": []})
    yield send("updates that are an object", {"requirements": [], "updates": {}})
    yield send("an update that is null", {"requirements": [], "updates": [None]})
    yield send("an update without an action", _commit({"spec-id": 1}))
    yield send("an update nobody knows", _commit({"action": "levitate"}))
    yield send("an action that is a number", _commit({"action": 5}))
    yield send("a requirement nobody knows", _commit(requirements=[{"type": "assert-calm"}]))
    yield send("a requirement without its value", _commit(requirements=[{"type": "assert-table-uuid"}]))
    yield send(
        "a requirement of another table",
        _commit(requirements=[{"type": "assert-table-uuid", "uuid": "other"}]),
        **conflict,
    )
    yield send("a create where the table is there", _commit(requirements=[{"type": "assert-create"}]), **conflict)
    yield send(
        "a requirement beyond 64 bits",
        _commit(requirements=[{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 2**64}]),
    )
    yield send(
        "another UUID for the table", _commit({"action": "assign-uuid", "uuid": "00000000-0000-4000-8000-000000000000"})
    )
    yield send("a UUID that is none", _commit({"action": "assign-uuid", "uuid": "x"}))
    yield send(
        "a format version that does not exist", _commit({"action": "upgrade-format-version", "format-version": 9})
    )
    yield send("a format version of old", _commit({"action": "upgrade-format-version", "format-version": 1}))
    yield send("a current schema that does not exist", _commit({"action": "set-current-schema", "schema-id": 99}))
    yield send("the last added schema, none being added", _commit({"action": "set-current-schema", "schema-id": -1}))
    yield send("a default spec that does not exist", _commit({"action": "set-default-spec", "spec-id": 99}))
    yield send(
        "a default order that does not exist", _commit({"action": "set-default-sort-order", "sort-order-id": 99})
    )
    yield send("the current schema removed", _commit({"action": "remove-schemas", "schema-ids": [0]}))
    yield send("the default spec removed", _commit({"action": "remove-partition-specs", "spec-ids": [0]}))
    yield send("a snapshot without an id", _commit(_snapshot(**{"snapshot-id": None})))
    yield send("a snapshot id beyond 64 bits", _commit(_snapshot(**{"snapshot-id": COMMIT_LIMIT})))
    yield send("a snapshot id that is a fraction", _commit(_snapshot(**{"snapshot-id": 1.5})))
    yield send(
        "a snapshot time that is not finite",
        b'{"requirements": [], "updates": [{"action": "add-snapshot", '
        b'"snapshot": {"snapshot-id": 1, "timestamp-ms": 1e400, "summary": {}}}]}',
    )
    yield send("a snapshot without a manifest list", _commit(_snapshot(**{"manifest-list": None})))
    yield send("a summary that holds no strings", _commit(_snapshot(summary={"operation": 1})))
    yield send("one snapshot twice", _commit(_snapshot(), _snapshot()))
    branch = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch"}
    yield send("a branch to no snapshot", _commit({**branch, "snapshot-id": 99}))
    yield send(
        "a reference that is neither branch nor tag", _commit(_snapshot(), {**branch, "type": "twig", "snapshot-id": 1})
    )
    yield send("main as a tag", _commit(_snapshot(), {**branch, "type": "tag", "snapshot-id": 1}))
    yield send("a property that is no string", _commit({"action": "set-properties", "updates": {"a": 1}}))
    yield send(
        "a reserved property that is nonsense",
        _commit({"action": "set-properties", "updates": {"write.metadata.previous-versions-max": "many"}}),
    )
    missing = BadInput(
        "Commits", "a table that is not there", "POST", f"{T}/none", _commit(), 404, "NoSuchTableException"
    )
    yield missing


def _changes() -> Iterator[BadInput]:
    path = "/api/v1/tables/db/t/commit"

    def send(what: str, body: Any, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Changes", what, "POST", path, body, status, type_)

    def add(**more: Any) -> dict[str, Any]:
        file = {
            "content": "data",
            "file-path": "{warehouse}/db/f.parquet",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": [],
            "record-count": 1,
            "file-size-in-bytes": 100,
        }
        return {"add": [{name: value for name, value in (file | more).items() if value is not None}]}

    conflict: dict[str, Any] = {"status": 409, "type_": "CommitFailedException"}
    remove = {"remove": [{"file-path": "{warehouse}/db/gone.parquet"}]}
    yield send("nothing to do", {})
    yield send("a field nobody knows", add() | {"appendix": 1})
    yield send("files that are numbers", {"add": [1]})
    yield send("a file without a path", add(**{"file-path": None}))
    yield send("a file elsewhere on the disk", add(**{"file-path": "file:///etc/passwd"}))
    yield send("a file in the cloud's metadata service", add(**{"file-path": "http://169.254.169.254/latest"}))
    yield send("a file of a format that there is not", add(**{"file-format": "csv"}))
    yield send("a file of another content", add(content="wishes"))
    yield send("a file of a spec that the table has not", add(**{"spec-id": 7}))
    yield send("a partition where the spec has none", add(partition=[1]))
    yield send("less than no rows", add(**{"record-count": -1}))
    yield send("a size beyond 64 bits", add(**{"file-size-in-bytes": 2**64}))
    yield send("a bound of three bytes", add(**{"lower-bounds": {"keys": [1], "values": ["010203"]}}))
    yield send("a bound that is no hexadecimal", add(**{"lower-bounds": {"keys": [1], "values": ["zz"]}}))
    yield send("statistics of a column that there is not", add(**{"value-counts": {"keys": [99], "values": [1]}}))
    yield send("row ids of one's own", add(**{"first-row-id": 5}))
    yield send("one file twice", {"add": add()["add"] * 2})
    vector = {
        "content": "position-deletes",
        "file-format": "puffin",
        "referenced-data-file": "{warehouse}/db/f.parquet",
    }
    yield send(
        "a deletion vector for a table of version 2",
        add(**vector, **{"content-offset": 4, "content-size-in-bytes": 40}) | {"read-snapshot-id": None},
    )
    yield send("position deletes of no snapshot", add(content="position-deletes"))
    yield send("equality deletes on no column", add(content="equality-deletes"))
    yield send("removing files of no snapshot", remove)
    yield send("a snapshot that was never there", {**remove, "read-snapshot-id": 5}, **conflict)
    yield send("a file that is not live", {**remove, "read-snapshot-id": None}, **conflict)
    yield send("a branch that there is not", add() | {"branch": "none"}, **conflict)
    yield send("a branch with a NUL", add() | {"branch": "a\x00"})
    yield send("another table's UUID", add() | {"table-uuid": "other"}, **conflict)
    yield send("an operation that there is not", add() | {"operation": "merge"})
    yield send("an append that removes", {**remove, "operation": "append", "read-snapshot-id": None})
    yield send("a delete that adds data", add() | {"operation": "delete"})
    yield send("a compaction of nothing", add() | {"operation": "replace"})
    yield send("an isolation of nobody's", add() | {"isolation": "dirty"})
    yield send("a scope of nothing", add() | {"scope": {}, "read-snapshot-id": None})
    both = {"filter": True, "partitions": []}
    yield send("a scope of two kinds", add() | {"scope": both, "read-snapshot-id": None})
    yield send("a scope of no snapshot", add() | {"scope": {"filter": True}})
    idd = {"type": "eq", "term": "idd", "value": 1}
    yield send("a scope on a column that there is not", add() | {"scope": {"filter": idd}, "read-snapshot-id": None})
    partition = {"partitions": [{"spec-id": 0, "values": [1]}]}
    yield send("a scope of too many values", add() | {"scope": partition, "read-snapshot-id": None})
    partition = {"partitions": [{"spec-id": 9, "values": []}]}
    yield send("a scope of a spec that there is not", add() | {"scope": partition, "read-snapshot-id": None})
    yield send("replacing what nobody writes", {"replace": {"partitions": "written"}})
    yield send("replacing all but what is written", add() | {"replace": {"partitions": "others"}})
    yield send("replacing by half a filter", {"replace": {"filter": {"type": "eq", "term": "id"}}})
    yield send("a filter nested 10,000 deep", b'{"replace": {"filter": ' + b'{"type":"not","child":' * 10_000 + b"}}")
    yield send("a producer without a sequence", add() | {"producer": {"id": "p"}})
    yield send("a producer that counts below zero", add() | {"producer": {"id": "p", "sequence": -1}})
    yield send("a producer without a name", add() | {"producer": {"id": "", "sequence": 1}})
    yield send("a sequence beyond 64 bits", add() | {"producer": {"id": "p", "sequence": 2**63}})
    yield send("totals of one's own", add() | {"summary": {"total-records": "1000000"}})
    yield send("a summary that holds no strings", add() | {"summary": {"a": 1}})
    yield send("a summary without end", add() | {"summary": {"a": "x" * 20_000}})
    index = {"location": "{warehouse}/x.puffin", "size-in-bytes": 10}
    yield send("an index file outside the table's folder", add() | {"index-files": [index]})
    missing = add(), 404, "NoSuchTableException"
    yield BadInput("Changes", "a table that is not there", "POST", "/api/v1/tables/db/none/commit", *missing)


def _indexes() -> Iterator[BadInput]:
    index = "/api/v1/tables/db/t/indexes/i"

    def put(what: str, body: Any, path: str = index, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Indexes", what, "PUT", path, body, status, type_)

    def bloom(*columns: Any, **more: Any) -> dict[str, Any]:
        return {"kind": "bloom", "columns": list(columns), **more}

    yield put("a kind that there is not", {"kind": "btree", "columns": ["id"]})
    yield put("a bucket index, which is the partition spec's", {"kind": "bucket", "columns": ["id"]})
    yield put("a column that there is not", bloom("idd"))
    yield put("a function that there is not", bloom("upper(data)"))
    yield put("lower of a number", bloom("lower(id)"))
    yield put("a bucket of no width", bloom("bucket[0](id)"))
    yield put("two columns in a bloom index", bloom("id", "data"))
    yield put("no column", bloom())
    yield put("a share of false positives of 1", bloom("id", fpp=1))
    yield put("what another kind is told", {"kind": "bitmap", "columns": ["id"], "fpp": 0.1})
    yield put("a state that there is not", bloom("id", state="asleep"))
    yield put("pausing what was never defined", {"state": "paused"})
    yield put("a field nobody knows", bloom("id", columnz=1))
    yield put("a name with a slash", bloom("id"), f"{index}%2Fj")
    yield put("the name of what a partition spec makes", bloom("id"), "/api/v1/tables/db/t/indexes/bucket:id")
    missing = (404, "NotFoundException")
    yield BadInput("Indexes", "dropping what is not there", "DELETE", index, None, *missing)
    yield BadInput("Indexes", "building what is not there", "POST", f"{index}/builds", None, *missing)
    yield BadInput("Indexes", "a build of nobody", "GET", f"{index}/builds/x", None, *missing)
    audited = {"location": "file:///x", "reason": "it lies"}
    yield BadInput("Indexes", "an index file of nobody put aside", "POST", f"{index}/quarantine", audited, *missing)
    yield BadInput("Indexes", "an audit of nobody", "POST", f"{index}/audits", {"index-files": 1}, *missing)
    yield BadInput("Indexes", "an audit of less than nothing", "POST", f"{index}/audits", {"index-files": -1})


def _rows() -> Iterator[BadInput]:
    def ask(what: str, route: str, body: Any, status: int = 400, type_: str = BAD) -> BadInput:
        return BadInput("Rows", what, "POST", f"/api/v1/tables/db/t/{route}", body, status, type_)

    yield ask("a lookup in an index that there is not", "lookup", {"index": "i", "keys": [1]}, 404, "NotFoundException")
    yield ask("keys of no index", "lookup", {"keys": [1]})
    yield ask("keys of columns that no record index is on", "lookup", {"keys": [{"id": 1}]})
    yield ask("keys of a column that there is not", "lookup", {"columns": ["idd"], "keys": [1]})
    yield ask("no keys", "lookup", {"columns": ["id"]})
    yield ask("keys that are no list", "lookup", {"columns": ["id"], "keys": {}})
    arrow = (("Content-Type", "application/vnd.apache.arrow.stream"),)
    path = "/api/v1/tables/db/t/lookup"
    yield BadInput("Rows", "Arrow announced, JSON sent", "POST", path, {"keys": [1]}, headers=arrow)
    yield ask("a predicate on a column that there is not", "bitmap", {"where": "idd = 1"})
    yield ask("half a predicate", "bitmap", {"where": "id ="})
    yield ask("a predicate said twice", "bitmap", {"where": "id = 1", "filter": True})
    yield ask("a meaning of nobody's", "bitmap", {"where": "id = 1", "meaning": "mine"})
    yield ask("rows in a form that there is not", "bitmap", {"where": "id = 1", "rows": "bits"})
    yield ask("a page of no files", "bitmap", {"where": "id = 1", "limit": 0})
    yield ask("a token of nobody's", "bitmap", {"where": "id = 1", "page-token": "AAAA"})
    yield ask("a snapshot that there is not", "bitmap", {"where": "id = 1", "snapshot-id": 5})


def _joins() -> Iterator[BadInput]:
    def ask(what: str, joins: Any, status: int = 400, type_: str = BAD) -> BadInput:
        path = "/api/v1/tables/db/t/plan-tables"
        return BadInput("Joins", what, "POST", path, {"joins": joins}, status, type_)

    def join(**more: Any) -> dict[str, Any]:
        fields = {"table": ["db", "t"], "on": {"id": "id"}} | more
        return {name.replace("_", "-"): value for name, value in fields.items() if value is not None}

    def nested(depth: int) -> dict[str, Any]:
        made = join()
        for _ in range(depth - 1):
            made = join(joins=[made])
        return made

    yield ask("one that is not in a list", join())
    yield ask("one that is a number", [1])
    yield ask("one that is null", [None])
    yield ask("no table", [join(table=None)])
    yield ask("a table in one text", [join(table="db.t")])
    yield ask("a table without a namespace", [join(table=["t"])])
    yield ask("a table of no name", [join(table=[])])
    yield ask("an empty name", [join(table=["db", ""])])
    yield ask("a NUL in a name", [join(table=["db", "t\x00"])])
    yield ask("a level that URLs take for the parent folder", [join(table=["..", "t"])])
    yield ask("a level that is a number", [join(table=["db", 5])])
    yield ask("a name of 256 characters", [join(table=["db", "x" * 256])])
    yield ask("a table that is not there", [join(table=["db", "none"])], 404, "NoSuchTableException")
    yield ask("a namespace that is not there", [join(table=["none", "t"])], 404, "NoSuchTableException")
    yield ask("a view", [join(table=["db", "v"])], 404, "NoSuchTableException")
    yield ask("a plan table of nobody", [join(table=["db", "t~plan~x"])], 404, "NoSuchTableException")
    yield ask("on nothing said", [join(on=None)])
    yield ask("on no column", [join(on={})])
    yield ask("on a list", [join(on=["id"])])
    yield ask("on a column that is a number", [join(on={"id": 1})])
    yield ask("on a column of this table that there is not", [join(on={"idd": "id"})])
    yield ask("on a column of the other table that there is not", [join(on={"id": "idd"})])
    yield ask("on a column with no name", [join(on={"": ""})])
    yield ask("on 17 columns", [join(on={f"c{number}": "id" for number in range(17)})])
    yield ask("half a predicate", [join(predicate="id =")])
    yield ask("a predicate on a column that there is not", [join(predicate="idd = 1")])
    yield ask("a predicate that is no text", [join(predicate=True)])
    yield ask("a predicate of nothing", [join(predicate="")])
    yield ask("a predicate with a NUL", [join(predicate="data = 'a' \x00")])
    yield ask("a predicate nested 10,000 deep", [join(predicate="(" * 10_000 + "id = 1" + ")" * 10_000)])
    like = {"column": "data", "pattern": "%a"}
    yield ask("LIKE that is no list of lists", [join(likes=[like])])
    yield ask("LIKE without a pattern", [join(likes=[[{"column": "data"}]])])
    yield ask("LIKE on a column that there is not", [join(likes=[[like | {"column": "none"}]])])
    yield ask("LIKE on a number", [join(likes=[[like | {"column": "id"}]])])
    yield ask("LIKE with a function that there is not", [join(likes=[[like | {"function": "trim"}]])])
    yield ask("LIKE with an escape of two characters", [join(likes=[[like | {"escape": "##"}]])])
    yield ask("LIKE with an escape at the end", [join(likes=[[like | {"escape": "#", "pattern": "a#"}]])])
    yield ask("LIKE with a pattern of 1,001 characters", [join(likes=[[like | {"pattern": "%" * 1001}]])])
    yield ask("17 LIKE predicates", [join(likes=[[like] * 17])])
    yield ask("a snapshot that there is not", [join(snapshot_id=5)])
    yield ask("a snapshot beyond 64 bits", [join(snapshot_id=2**64)])
    yield ask("a snapshot that is text", [join(snapshot_id="1")])
    yield ask("a field nobody knows", [join(kind="outer")])
    yield ask("joins within joins that are none", [join(joins={})])
    yield ask("a mistake two levels down", [join(joins=[join(predicate="idd = 1")])])
    yield ask("five levels", [nested(5)])
    yield ask("33 joins", [join()] * 33)
    level = b'{"table": ["db", "t"], "on": {"id": "id"}, "joins": ['
    for what, depth in (("400 levels", 400), ("4,000 levels", 4_000)):
        deep = b'{"joins": [' + level * depth + b"]}" * (depth + 1)
        yield BadInput("Joins", what, "POST", "/api/v1/tables/db/t/plan-tables", deep)
    wrong = {"joins": [join(on={"id": "idd"})]}
    yield BadInput(
        "Joins", "a plan explained, by a column that there is not", "POST", "/api/v1/tables/db/t/explain", wrong
    )


def _others() -> Iterator[BadInput]:
    def send(what: str, path: str, body: Any, status: int = 400, type_: str = BAD, group: str = "Views") -> BadInput:
        return BadInput(group, what, "POST", path, body, status, type_)

    view = {"name": "new", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    yield send("no version", V, {"name": "new", "schema": SCHEMA})
    yield send("a version without SQL", V, {**view, "view-version": {**VIEW_VERSION, "representations": []}})
    double = [{"type": "sql", "sql": "SELECT 1", "dialect": dialect} for dialect in ("spark", "SPARK")]
    yield send(
        "two queries of one dialect",
        V,
        {**view, "view-version": {**VIEW_VERSION, "representations": double}},
        type_="IllegalArgumentException",
    )
    yield send("an update nobody knows", f"{V}/v", {"updates": [{"action": "levitate"}]})
    yield send("a table's update", f"{V}/v", {"updates": [{"action": "set-default-spec", "spec-id": 0}]})
    yield send(
        "a version that does not exist",
        f"{V}/v",
        {"updates": [{"action": "set-current-view-version", "view-version-id": 9}]},
    )
    group = "Transactions"
    change = {"identifier": {"namespace": ["db"], "name": "t"}, **_commit()}
    yield send("no changes", "/v1/transactions/commit", {"table-changes": []}, group=group)
    yield send("a change of no table", "/v1/transactions/commit", {"table-changes": [_commit()]}, group=group)
    yield send("one table twice", "/v1/transactions/commit", {"table-changes": [change, change]}, group=group)
    group = "Metrics and signing"
    yield send("a report of no type", f"{T}/t/metrics", {}, group=group)
    yield send("a report nobody knows", f"{T}/t/metrics", {"report-type": "gossip"}, group=group)
    yield send(
        "a report of a snapshot that is text",
        f"{T}/t/metrics",
        {"report-type": "scan-report", "snapshot-id": "1"},
        group=group,
    )
    yield send(
        "a report of a snapshot beyond 64 bits",
        f"{T}/t/metrics",
        {"report-type": "scan-report", "snapshot-id": COMMIT_LIMIT},
        group=group,
    )
    sign = {"region": "us-east-1", "uri": "http://169.254.169.254/latest", "method": "GET", "headers": {}}
    yield send("a signature for a table on files", f"{T}/t/sign", sign, group=group)
    yield send(
        "properties to set and remove at once",
        f"{D}/properties",
        {"updates": {"a": "1"}, "removals": ["a"]},
        422,
        "UnprocessableEntityException",
        "Namespaces",
    )


BAD_INPUTS = tuple(
    one
    for many in (
        _bodies,
        _names,
        _locations,
        _queries,
        _headers,
        _schemas,
        _commits,
        _changes,
        _indexes,
        _rows,
        _joins,
        _others,
    )
    for one in many()
)


@dataclass(frozen=True)
class Prepared:
    """A server with the table `db.t` and the view `db.v`, and what bodies may refer to."""

    api: Api
    stands_for: dict[str, str]

    async def send(self, bad: BadInput) -> Answer:
        body = self._filled(bad.body)
        return await self.api(bad.method, bad.path, body, headers=dict(bad.headers))

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            for name, meaning in self.stands_for.items():
                value = value.replace(f"{{{name}}}", meaning)
            return value
        if isinstance(value, dict):
            return {key: self._filled(one) for key, one in value.items()}
        return [self._filled(one) for one in value] if isinstance(value, list) else value


async def prepare(api: Api) -> Prepared:
    location = (await api.table())["metadata-location"]
    view = (await api.view())["metadata-location"]
    warehouse = api.server.parts.settings.warehouse_uri()
    return Prepared(api, {"location": location, "view": view, "warehouse": warehouse})


def page(answers: list[tuple[BadInput, Answer]], warehouse: str) -> str:
    """The reference page. Values that differ between runs are replaced by their names."""
    lines = [
        "# Bad inputs and their answers",
        "",
        "`python -m tests.api.bad_inputs` generates this page from the answers of a server; a test compares them.",
        "The tests also fuzz all routes from the Iceberg REST specification and Seamark's OpenAPI document. No input",
        "receives a 5xx (`tests/api/test_fuzz.py`).",
    ]
    group = ""
    for bad, answer in answers:
        if bad.group != group:
            group = bad.group
            lines += [
                "",
                f"## {group}",
                "",
                "| request | what is wrong | answer | type | message |",
                "|---|---|---|---|---|",
            ]
        shown = bad.path if len(bad.path) <= 70 else bad.path[:67] + "…"
        message = _stable(answer.json["error"]["message"], warehouse)
        cells = (f"`{bad.method} {shown}`", bad.what, str(answer.status), answer.json["error"]["type"], message)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _stable(message: str, warehouse: str) -> str:
    message = message.replace(warehouse, "<warehouse>").replace(warehouse.removeprefix("file://"), "<warehouse>")
    message = re.sub(r"\.[0-9a-f]{40}\.metadata", ".<digest>.metadata", message)
    message = re.sub(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", "<uuid>", message)
    message = re.sub(r"\b1[789]\d{11}\b", "<time>", message)
    message = re.sub(r"has 5\d{3} characters", "has 5… characters", message)  # the warehouse's own path is among them
    message = message.encode("unicode_escape").decode() if any(ch < " " for ch in message) else message
    return message if len(message) <= 240 else message[:237] + "…"


async def ask(home: Path) -> tuple[list[tuple[BadInput, Answer]], str]:
    """The answers to all of the table, from one server, and its warehouse."""
    async with running(home, body_limit_bytes=BODY_LIMIT_BYTES) as server:
        prepared = await prepare(Api(server))
        answers = [(bad, await prepared.send(bad)) for bad in BAD_INPUTS]
    return answers, prepared.stands_for["warehouse"]


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        answers, warehouse = asyncio.run(ask(Path(home)))
    PAGE.write_text(page(answers, warehouse))


if __name__ == "__main__":
    main()
