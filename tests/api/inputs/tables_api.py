"""Invalid changes, indexes, lookups and joins: the routes of Seamark's own API below a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.inputs.bad_input import BAD_REQUEST, BadInput


def list_bad_changes() -> Iterator[BadInput]:
    """Yield changes of table `t`, sent to the commit route of the tables API, that the server must refuse."""
    path = "/api/v1/tables/db/t/commit"

    def send(description: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Changes", description, "POST", path, body, status, type_)

    def add(**fields: Any) -> dict[str, Any]:
        file = {
            "content": "data",
            "file-path": "{warehouse}/db/f.parquet",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": [],
            "record-count": 1,
            "file-size-in-bytes": 100,
        }
        return {"add": [{name: value for name, value in (file | fields).items() if value is not None}]}

    conflict: dict[str, Any] = {"status": 409, "type_": "CommitFailedException"}
    remove = {"remove": [{"file-path": "{warehouse}/db/gone.parquet"}]}
    yield send("no change", {})
    yield send("unknown field", add() | {"appendix": 1})
    yield send("files that are numbers", {"add": [1]})
    yield send("a file without a path", add(**{"file-path": None}))
    yield send("a file outside of the warehouse", add(**{"file-path": "file:///etc/passwd"}))
    yield send(
        "a file at the URL of the cloud's metadata service", add(**{"file-path": "http://169.254.169.254/latest"})
    )
    yield send("unknown file format", add(**{"file-format": "csv"}))
    yield send("unknown file content", add(content="wishes"))
    yield send("unknown partition spec", add(**{"spec-id": 7}))
    yield send("a partition value for an unpartitioned spec", add(partition=[1]))
    yield send("a negative record count", add(**{"record-count": -1}))
    yield send("a size beyond 64 bits", add(**{"file-size-in-bytes": 2**64}))
    yield send("a bound of three bytes", add(**{"lower-bounds": {"keys": [1], "values": ["010203"]}}))
    yield send("a bound that is not hexadecimal", add(**{"lower-bounds": {"keys": [1], "values": ["zz"]}}))
    yield send("statistics of an unknown column", add(**{"value-counts": {"keys": [99], "values": [1]}}))
    yield send("row ids that the client assigns", add(**{"first-row-id": 5}))
    yield send("the same file twice", {"add": add()["add"] * 2})
    vector = {
        "content": "position-deletes",
        "file-format": "puffin",
        "referenced-data-file": "{warehouse}/db/f.parquet",
    }
    yield send(
        "a deletion vector for a table of version 2",
        add(**vector, **{"content-offset": 4, "content-size-in-bytes": 40}) | {"read-snapshot-id": None},
    )
    yield send("position deletes without a read snapshot", add(content="position-deletes"))
    yield send("equality deletes without columns", add(content="equality-deletes"))
    yield send("removed files without a read snapshot", remove)
    yield send("unknown read snapshot", {**remove, "read-snapshot-id": 5}, **conflict)
    yield send("removal of a file that is not live", {**remove, "read-snapshot-id": None}, **conflict)
    yield send("unknown branch", add() | {"branch": "none"}, **conflict)
    yield send("a branch with a NUL", add() | {"branch": "a\x00"})
    yield send("the UUID of another table", add() | {"table-uuid": "other"}, **conflict)
    yield send("unknown operation", add() | {"operation": "merge"})
    yield send("an append that removes files", {**remove, "operation": "append", "read-snapshot-id": None})
    yield send("a delete that adds data files", add() | {"operation": "delete"})
    yield send("an empty compaction", add() | {"operation": "replace"})
    yield send("unknown isolation level", add() | {"isolation": "dirty"})
    yield send("an empty scope", add() | {"scope": {}, "read-snapshot-id": None})
    whole_table = {"filter": True, "partitions": []}
    yield send("a scope with a filter and partitions", add() | {"scope": whole_table, "read-snapshot-id": None})
    yield send("a scope without a read snapshot", add() | {"scope": {"filter": True}})
    idd = {"type": "eq", "term": "idd", "value": 1}
    yield send("a scope on an unknown column", add() | {"scope": {"filter": idd}, "read-snapshot-id": None})
    partition = {"partitions": [{"spec-id": 0, "values": [1]}]}
    yield send("a scope with too many partition values", add() | {"scope": partition, "read-snapshot-id": None})
    partition = {"partitions": [{"spec-id": 9, "values": []}]}
    yield send("a scope with an unknown partition spec", add() | {"scope": partition, "read-snapshot-id": None})
    yield send("`replace` without added files", {"replace": {"partitions": "written"}})
    yield send("`replace.partitions` is `others`", add() | {"replace": {"partitions": "others"}})
    yield send("`replace` with an incomplete filter", {"replace": {"filter": {"type": "eq", "term": "id"}}})
    yield send("a filter nested 10,000 deep", b'{"replace": {"filter": ' + b'{"type":"not","child":' * 10_000 + b"}}")
    yield send("a producer without a sequence", add() | {"producer": {"id": "p"}})
    yield send("a producer with a negative sequence", add() | {"producer": {"id": "p", "sequence": -1}})
    yield send("a producer with an empty name", add() | {"producer": {"id": "", "sequence": 1}})
    yield send("a sequence beyond 64 bits", add() | {"producer": {"id": "p", "sequence": 2**63}})
    yield send("totals in the summary that the client computes", add() | {"summary": {"total-records": "1000000"}})
    yield send("a summary with a value that is not a string", add() | {"summary": {"a": 1}})
    yield send("a summary that is too long", add() | {"summary": {"a": "x" * 20_000}})
    index = {"location": "{warehouse}/x.puffin", "size-in-bytes": 10}
    yield send("an index file outside of the table's folder", add() | {"index-files": [index]})
    missing_table = add(), 404, "NoSuchTableException"
    yield BadInput("Changes", "unknown table", "POST", "/api/v1/tables/db/none/commit", *missing_table)


def list_bad_indexes() -> Iterator[BadInput]:
    """Yield definitions of an index that the server must refuse."""
    index = "/api/v1/tables/db/t/indexes/i"

    def put_index(
        description: str, body: Any, path: str = index, status: int = 400, type_: str = BAD_REQUEST
    ) -> BadInput:
        return BadInput("Indexes", description, "PUT", path, body, status, type_)

    def make_bloom_filter(*columns: Any, **fields: Any) -> dict[str, Any]:
        return {"kind": "bloom", "columns": list(columns), **fields}

    yield put_index("unknown index kind", {"kind": "btree", "columns": ["id"]})
    yield put_index("a bucket index, which only a partition spec defines", {"kind": "bucket", "columns": ["id"]})
    yield put_index("unknown column", make_bloom_filter("idd"))
    yield put_index("unknown function", make_bloom_filter("reverse(data)"))
    yield put_index("`lower` of a number", make_bloom_filter("lower(id)"))
    yield put_index("a bucket function with width 0", make_bloom_filter("bucket[0](id)"))
    yield put_index("a bloom index of two columns", make_bloom_filter("id", "data"))
    yield put_index("no column", make_bloom_filter())
    yield put_index("a false positive rate of 1", make_bloom_filter("id", fpp=1))
    yield put_index("a parameter of another index kind", {"kind": "bitmap", "columns": ["id"], "fpp": 0.1})
    yield put_index("unknown index state", make_bloom_filter("id", state="asleep"))
    yield put_index("pause of an undefined index", {"state": "paused"})
    yield put_index("unknown field", make_bloom_filter("id", columnz=1))
    yield put_index("a name with a slash", make_bloom_filter("id"), f"{index}%2Fj")
    yield put_index(
        "the name of an index of the partition spec", make_bloom_filter("id"), "/api/v1/tables/db/t/indexes/bucket:id"
    )
    missing_index = (404, "NotFoundException")
    yield BadInput("Indexes", "drop of an unknown index", "DELETE", index, None, *missing_index)
    yield BadInput("Indexes", "build of an unknown index", "POST", f"{index}/builds", None, *missing_index)
    yield BadInput("Indexes", "unknown build", "GET", f"{index}/builds/x", None, *missing_index)
    audit_report = {"location": "file:///x", "reason": "it lies"}
    yield BadInput(
        "Indexes", "quarantine of an unknown index file", "POST", f"{index}/quarantine", audit_report, *missing_index
    )
    yield BadInput(
        "Indexes", "audit of an unknown index", "POST", f"{index}/audits", {"index-files": 1}, *missing_index
    )
    yield BadInput("Indexes", "audit with a negative number of files", "POST", f"{index}/audits", {"index-files": -1})


def list_bad_row_queries() -> Iterator[BadInput]:
    """Yield invalid lookups and invalid queries for rows."""

    def ask(description: str, route: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Rows", description, "POST", f"/api/v1/tables/db/t/{route}", body, status, type_)

    yield ask("a lookup in an unknown index", "lookup", {"index": "i", "keys": [1]}, 404, "NotFoundException")
    yield ask("keys without an index or columns", "lookup", {"keys": [1]})
    yield ask("keys of columns without a record index", "lookup", {"keys": [{"id": 1}]})
    yield ask("keys of an unknown column", "lookup", {"columns": ["idd"], "keys": [1]})
    yield ask("no keys", "lookup", {"columns": ["id"]})
    yield ask("keys that are not a list", "lookup", {"columns": ["id"], "keys": {}})
    arrow = (("Content-Type", "application/vnd.apache.arrow.stream"),)
    path = "/api/v1/tables/db/t/lookup"
    yield BadInput("Rows", "a content type of Arrow with a JSON body", "POST", path, {"keys": [1]}, headers=arrow)
    yield ask("a predicate on an unknown column", "bitmap", {"where": "idd = 1"})
    yield ask("an incomplete predicate", "bitmap", {"where": "id ="})
    yield ask("both `where` and `filter`", "bitmap", {"where": "id = 1", "filter": True})
    yield ask("unknown `meaning`", "bitmap", {"where": "id = 1", "meaning": "mine"})
    yield ask("unknown row format", "bitmap", {"where": "id = 1", "rows": "bits"})
    yield ask("a page of 0 files", "bitmap", {"where": "id = 1", "limit": 0})
    yield ask("an invalid page token", "bitmap", {"where": "id = 1", "page-token": "AAAA"})
    yield ask("unknown snapshot", "bitmap", {"where": "id = 1", "snapshot-id": 5})


def list_bad_joins() -> Iterator[BadInput]:
    """Yield plan requests whose joins are invalid."""

    def ask(body: str, joins: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        path = "/api/v1/tables/db/t/plan-tables"
        return BadInput("Joins", body, "POST", path, {"joins": joins}, status, type_)

    def join(**extra_fields: Any) -> dict[str, Any]:
        fields = {"table": ["db", "t"], "on": {"id": "id"}} | extra_fields
        return {name.replace("_", "-"): value for name, value in fields.items() if value is not None}

    def nest_joins(depth: int) -> dict[str, Any]:
        text = join()
        for _ in range(depth - 1):
            text = join(joins=[text])
        return text

    yield ask("joins that are not in a list", join())
    yield ask("a join that is a number", [1])
    yield ask("a join that is null", [None])
    yield ask("a join without a table", [join(table=None)])
    yield ask("a table name as one string", [join(table="db.t")])
    yield ask("a table without a namespace", [join(table=["t"])])
    yield ask("an empty table name", [join(table=[])])
    yield ask("an empty name", [join(table=["db", ""])])
    yield ask("a NUL in a name", [join(table=["db", "t\x00"])])
    yield ask("a level `..`", [join(table=["..", "t"])])
    yield ask("a level that is a number", [join(table=["db", 5])])
    yield ask("a name of 256 characters", [join(table=["db", "x" * 256])])
    yield ask("unknown table", [join(table=["db", "none"])], 404, "NoSuchTableException")
    yield ask("unknown namespace", [join(table=["none", "t"])], 404, "NoSuchTableException")
    yield ask("a view instead of a table", [join(table=["db", "v"])], 404, "NoSuchTableException")
    yield ask("unknown plan table", [join(table=["db", "t~plan~x"])], 404, "NoSuchTableException")
    yield ask("a join without `on`", [join(on=None)])
    yield ask("an empty `on`", [join(on={})])
    yield ask("`on` as a list", [join(on=["id"])])
    yield ask("`on` with a number as a column", [join(on={"id": 1})])
    yield ask("`on` with an unknown column of this table", [join(on={"idd": "id"})])
    yield ask("`on` with an unknown column of the other table", [join(on={"id": "idd"})])
    yield ask("`on` with an empty column name", [join(on={"": ""})])
    yield ask("`on` with 17 columns", [join(on={f"c{number}": "id" for number in range(17)})])
    yield ask("an incomplete predicate", [join(predicate="id =")])
    yield ask("a predicate on an unknown column", [join(predicate="idd = 1")])
    yield ask("a predicate that is not a string", [join(predicate=True)])
    yield ask("an empty predicate", [join(predicate="")])
    yield ask("a predicate with a NUL", [join(predicate="data = 'a' \x00")])
    yield ask("a predicate nested 10,000 deep", [join(predicate="(" * 10_000 + "id = 1" + ")" * 10_000)])
    like = {"column": "data", "pattern": "%a"}
    yield ask("LIKE that is not a list of lists", [join(likes=[like])])
    yield ask("LIKE without a pattern", [join(likes=[[{"column": "data"}]])])
    yield ask("LIKE on an unknown column", [join(likes=[[like | {"column": "none"}]])])
    yield ask("LIKE on a number", [join(likes=[[like | {"column": "id"}]])])
    yield ask("LIKE with an unknown function", [join(likes=[[like | {"function": "trim"}]])])
    yield ask("LIKE with an escape of two characters", [join(likes=[[like | {"escape": "##"}]])])
    yield ask("LIKE with an escape at the end", [join(likes=[[like | {"escape": "#", "pattern": "a#"}]])])
    yield ask("LIKE with a pattern of 1,001 characters", [join(likes=[[like | {"pattern": "%" * 1001}]])])
    yield ask("17 LIKE predicates", [join(likes=[[like] * 17])])
    yield ask("unknown snapshot", [join(snapshot_id=5)])
    yield ask("a snapshot id beyond 64 bits", [join(snapshot_id=2**64)])
    yield ask("a snapshot id that is a string", [join(snapshot_id="1")])
    yield ask("unknown field", [join(kind="outer")])
    yield ask("nested joins that are an object", [join(joins={})])
    yield ask("an unknown column in a nested join", [join(joins=[join(predicate="idd = 1")])])
    yield ask("joins nested five levels deep", [nest_joins(5)])
    yield ask("33 joins", [join()] * 33)
    level = b'{"table": ["db", "t"], "on": {"id": "id"}, "joins": ['
    for description, depth in (("joins nested 400 levels deep", 400), ("joins nested 4,000 levels deep", 4_000)):
        deep_body = b'{"joins": [' + level * depth + b"]}" * (depth + 1)
        yield BadInput("Joins", description, "POST", "/api/v1/tables/db/t/plan-tables", deep_body)
    wrong_join = {"joins": [join(on={"id": "idd"})]}
    yield BadInput(
        "Joins", "an explained plan with an unknown column", "POST", "/api/v1/tables/db/t/explain", wrong_join
    )
