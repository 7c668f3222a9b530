"""Invalid changes, indexes, lookups and joins: the routes of Seamark's own API below a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.inputs.bad_input import BAD_REQUEST, BadInput


def list_bad_changes() -> Iterator[BadInput]:
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
    whole_table = {"filter": True, "partitions": []}
    yield send("a scope of two kinds", add() | {"scope": whole_table, "read-snapshot-id": None})
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


def list_bad_indexes() -> Iterator[BadInput]:
    index = "/api/v1/tables/db/t/indexes/i"

    def put_index(
        description: str, body: Any, path: str = index, status: int = 400, type_: str = BAD_REQUEST
    ) -> BadInput:
        return BadInput("Indexes", description, "PUT", path, body, status, type_)

    def make_bloom_filter(*columns: Any, **fields: Any) -> dict[str, Any]:
        return {"kind": "bloom", "columns": list(columns), **fields}

    yield put_index("a kind that there is not", {"kind": "btree", "columns": ["id"]})
    yield put_index("a bucket index, which is the partition spec's", {"kind": "bucket", "columns": ["id"]})
    yield put_index("a column that there is not", make_bloom_filter("idd"))
    yield put_index("a function that there is not", make_bloom_filter("reverse(data)"))
    yield put_index("lower of a number", make_bloom_filter("lower(id)"))
    yield put_index("a bucket of no width", make_bloom_filter("bucket[0](id)"))
    yield put_index("two columns in a bloom index", make_bloom_filter("id", "data"))
    yield put_index("no column", make_bloom_filter())
    yield put_index("a share of false positives of 1", make_bloom_filter("id", fpp=1))
    yield put_index("what another kind is told", {"kind": "bitmap", "columns": ["id"], "fpp": 0.1})
    yield put_index("a state that there is not", make_bloom_filter("id", state="asleep"))
    yield put_index("pausing what was never defined", {"state": "paused"})
    yield put_index("a field nobody knows", make_bloom_filter("id", columnz=1))
    yield put_index("a name with a slash", make_bloom_filter("id"), f"{index}%2Fj")
    yield put_index(
        "the name of what a partition spec makes", make_bloom_filter("id"), "/api/v1/tables/db/t/indexes/bucket:id"
    )
    missing = (404, "NotFoundException")
    yield BadInput("Indexes", "dropping what is not there", "DELETE", index, None, *missing)
    yield BadInput("Indexes", "building what is not there", "POST", f"{index}/builds", None, *missing)
    yield BadInput("Indexes", "a build of nobody", "GET", f"{index}/builds/x", None, *missing)
    audited = {"location": "file:///x", "reason": "it lies"}
    yield BadInput("Indexes", "an index file of nobody put aside", "POST", f"{index}/quarantine", audited, *missing)
    yield BadInput("Indexes", "an audit of nobody", "POST", f"{index}/audits", {"index-files": 1}, *missing)
    yield BadInput("Indexes", "an audit of less than nothing", "POST", f"{index}/audits", {"index-files": -1})


def list_bad_row_queries() -> Iterator[BadInput]:
    def ask(description: str, route: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Rows", description, "POST", f"/api/v1/tables/db/t/{route}", body, status, type_)

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


def list_bad_joins() -> Iterator[BadInput]:
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
    yield ask("five levels", [nest_joins(5)])
    yield ask("33 joins", [join()] * 33)
    level = b'{"table": ["db", "t"], "on": {"id": "id"}, "joins": ['
    for description, depth in (("400 levels", 400), ("4,000 levels", 4_000)):
        deep_body = b'{"joins": [' + level * depth + b"]}" * (depth + 1)
        yield BadInput("Joins", description, "POST", "/api/v1/tables/db/t/plan-tables", deep_body)
    wrong = {"joins": [join(on={"id": "idd"})]}
    yield BadInput(
        "Joins", "a plan explained, by a column that there is not", "POST", "/api/v1/tables/db/t/explain", wrong
    )
