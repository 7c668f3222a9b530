"""Invalid changes, indexes, lookups and joins: the routes of Seamark's own API below a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.inputs.bad_input import BAD_REQUEST, BadInput


def list_bad_changes() -> Iterator[BadInput]:
    """Yield changes of table `t`, sent to the commit route of the tables API, that the server must refuse."""
    path = "/api/v1/tables/db/t/commit"

    def build_input(description: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Changes", description, "POST", path, body, status, type_)

    def build_addition(**fields: Any) -> dict[str, Any]:
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
    removal = {"remove": [{"file-path": "{warehouse}/db/gone.parquet"}]}
    yield build_input("no change", {})
    yield build_input("unknown field", build_addition() | {"appendix": 1})
    yield build_input("files that are numbers", {"add": [1]})
    yield build_input("a file without a path", build_addition(**{"file-path": None}))
    yield build_input("a file outside of the warehouse", build_addition(**{"file-path": "file:///etc/passwd"}))
    yield build_input(
        "a file at the URL of the cloud's metadata service",
        build_addition(**{"file-path": "http://169.254.169.254/latest"}),
    )
    yield build_input("unknown file format", build_addition(**{"file-format": "csv"}))
    yield build_input("unknown file content", build_addition(content="wishes"))
    yield build_input("unknown partition spec", build_addition(**{"spec-id": 7}))
    yield build_input("a partition value for an unpartitioned spec", build_addition(partition=[1]))
    yield build_input("a negative record count", build_addition(**{"record-count": -1}))
    yield build_input("a size beyond 64 bits", build_addition(**{"file-size-in-bytes": 2**64}))
    yield build_input("a bound of three bytes", build_addition(**{"lower-bounds": {"keys": [1], "values": ["010203"]}}))
    yield build_input(
        "a bound that is not hexadecimal", build_addition(**{"lower-bounds": {"keys": [1], "values": ["zz"]}})
    )
    yield build_input(
        "statistics of an unknown column", build_addition(**{"value-counts": {"keys": [99], "values": [1]}})
    )
    yield build_input("row ids that the client assigns", build_addition(**{"first-row-id": 5}))
    yield build_input("the same file twice", {"add": build_addition()["add"] * 2})
    vector = {
        "content": "position-deletes",
        "file-format": "puffin",
        "referenced-data-file": "{warehouse}/db/f.parquet",
    }
    yield build_input(
        "a deletion vector for a table of version 2",
        build_addition(**vector, **{"content-offset": 4, "content-size-in-bytes": 40}) | {"read-snapshot-id": None},
    )
    yield build_input("position deletes without a read snapshot", build_addition(content="position-deletes"))
    yield build_input("equality deletes without columns", build_addition(content="equality-deletes"))
    yield build_input("removed files without a read snapshot", removal)
    yield build_input("unknown read snapshot", {**removal, "read-snapshot-id": 5}, **conflict)
    yield build_input("removal of a file that is not live", {**removal, "read-snapshot-id": None}, **conflict)
    yield build_input("unknown branch", build_addition() | {"branch": "none"}, **conflict)
    yield build_input("a branch with a NUL", build_addition() | {"branch": "a\x00"})
    yield build_input("the UUID of another table", build_addition() | {"table-uuid": "other"}, **conflict)
    yield build_input("unknown operation", build_addition() | {"operation": "merge"})
    yield build_input("an append that removes files", {**removal, "operation": "append", "read-snapshot-id": None})
    yield build_input("a delete that adds data files", build_addition() | {"operation": "delete"})
    yield build_input("an empty compaction", build_addition() | {"operation": "replace"})
    yield build_input("unknown isolation level", build_addition() | {"isolation": "dirty"})
    yield build_input("an empty scope", build_addition() | {"scope": {}, "read-snapshot-id": None})
    whole_table = {"filter": True, "partitions": []}
    yield build_input(
        "a scope with a filter and partitions", build_addition() | {"scope": whole_table, "read-snapshot-id": None}
    )
    yield build_input("a scope without a read snapshot", build_addition() | {"scope": {"filter": True}})
    filter_on_unknown_column = {"type": "eq", "term": "idd", "value": 1}
    yield build_input(
        "a scope on an unknown column",
        build_addition() | {"scope": {"filter": filter_on_unknown_column}, "read-snapshot-id": None},
    )
    partition = {"partitions": [{"spec-id": 0, "values": [1]}]}
    yield build_input(
        "a scope with too many partition values", build_addition() | {"scope": partition, "read-snapshot-id": None}
    )
    partition = {"partitions": [{"spec-id": 9, "values": []}]}
    yield build_input(
        "a scope with an unknown partition spec", build_addition() | {"scope": partition, "read-snapshot-id": None}
    )
    yield build_input("`replace` without added files", {"replace": {"partitions": "written"}})
    yield build_input("`replace.partitions` is `others`", build_addition() | {"replace": {"partitions": "others"}})
    yield build_input("`replace` with an incomplete filter", {"replace": {"filter": {"type": "eq", "term": "id"}}})
    yield build_input(
        "a filter nested 10,000 deep", b'{"replace": {"filter": ' + b'{"type":"not","child":' * 10_000 + b"}}"
    )
    yield build_input("a producer without a sequence", build_addition() | {"producer": {"id": "p"}})
    yield build_input(
        "a producer with a negative sequence", build_addition() | {"producer": {"id": "p", "sequence": -1}}
    )
    yield build_input("a producer with an empty name", build_addition() | {"producer": {"id": "", "sequence": 1}})
    yield build_input("a sequence beyond 64 bits", build_addition() | {"producer": {"id": "p", "sequence": 2**63}})
    yield build_input(
        "totals in the summary that the client computes", build_addition() | {"summary": {"total-records": "1000000"}}
    )
    yield build_input("a summary with a value that is not a string", build_addition() | {"summary": {"a": 1}})
    yield build_input("a summary that is too long", build_addition() | {"summary": {"a": "x" * 20_000}})
    index = {"location": "{warehouse}/x.puffin", "size-in-bytes": 10}
    yield build_input("an index file outside of the table's folder", build_addition() | {"index-files": [index]})
    missing_table = build_addition(), 404, "NoSuchTableException"
    yield BadInput("Changes", "unknown table", "POST", "/api/v1/tables/db/none/commit", *missing_table)


def list_bad_indexes() -> Iterator[BadInput]:
    """Yield definitions of an index that the server must refuse."""
    index = "/api/v1/tables/db/t/indexes/i"

    def build_input(
        description: str, body: Any, path: str = index, status: int = 400, type_: str = BAD_REQUEST
    ) -> BadInput:
        return BadInput("Indexes", description, "PUT", path, body, status, type_)

    def make_bloom_filter(*columns: Any, **fields: Any) -> dict[str, Any]:
        return {"kind": "bloom", "columns": list(columns), **fields}

    yield build_input("unknown index kind", {"kind": "btree", "columns": ["id"]})
    yield build_input("a bucket index, which only a partition spec defines", {"kind": "bucket", "columns": ["id"]})
    yield build_input("unknown column", make_bloom_filter("idd"))
    yield build_input("unknown function", make_bloom_filter("reverse(data)"))
    yield build_input("`lower` of a number", make_bloom_filter("lower(id)"))
    yield build_input("a bucket function with width 0", make_bloom_filter("bucket[0](id)"))
    yield build_input("a bloom index of two columns", make_bloom_filter("id", "data"))
    yield build_input("no column", make_bloom_filter())
    yield build_input("a false positive rate of 1", make_bloom_filter("id", fpp=1))
    yield build_input("a parameter of another index kind", {"kind": "bitmap", "columns": ["id"], "fpp": 0.1})
    yield build_input("unknown index state", make_bloom_filter("id", state="asleep"))
    yield build_input("pause of an undefined index", {"state": "paused"})
    yield build_input("unknown field", make_bloom_filter("id", columnz=1))
    yield build_input("a name with a slash", make_bloom_filter("id"), f"{index}%2Fj")
    yield build_input(
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

    def build_input(description: str, route: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Rows", description, "POST", f"/api/v1/tables/db/t/{route}", body, status, type_)

    yield build_input("a lookup in an unknown index", "lookup", {"index": "i", "keys": [1]}, 404, "NotFoundException")
    yield build_input("keys without an index or columns", "lookup", {"keys": [1]})
    yield build_input("keys of columns without a record index", "lookup", {"keys": [{"id": 1}]})
    yield build_input("keys of an unknown column", "lookup", {"columns": ["idd"], "keys": [1]})
    yield build_input("no keys", "lookup", {"columns": ["id"]})
    yield build_input("keys that are not a list", "lookup", {"columns": ["id"], "keys": {}})
    arrow = (("Content-Type", "application/vnd.apache.arrow.stream"),)
    path = "/api/v1/tables/db/t/lookup"
    yield BadInput("Rows", "a content type of Arrow with a JSON body", "POST", path, {"keys": [1]}, headers=arrow)
    yield build_input("a predicate on an unknown column", "bitmap", {"where": "idd = 1"})
    yield build_input("an incomplete predicate", "bitmap", {"where": "id ="})
    yield build_input("both `where` and `filter`", "bitmap", {"where": "id = 1", "filter": True})
    yield build_input("unknown `meaning`", "bitmap", {"where": "id = 1", "meaning": "mine"})
    yield build_input("unknown row format", "bitmap", {"where": "id = 1", "rows": "bits"})
    yield build_input("a page of 0 files", "bitmap", {"where": "id = 1", "limit": 0})
    yield build_input("an invalid page token", "bitmap", {"where": "id = 1", "page-token": "AAAA"})
    yield build_input("unknown snapshot", "bitmap", {"where": "id = 1", "snapshot-id": 5})


def list_bad_joins() -> Iterator[BadInput]:
    """Yield plan requests whose joins are invalid."""

    def build_input(description: str, joins: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        path = "/api/v1/tables/db/t/plan-tables"
        return BadInput("Joins", description, "POST", path, {"joins": joins}, status, type_)

    def build_join(**extra_fields: Any) -> dict[str, Any]:
        fields = {"table": ["db", "t"], "on": {"id": "id"}} | extra_fields
        return {name.replace("_", "-"): value for name, value in fields.items() if value is not None}

    def nest_joins(depth: int) -> dict[str, Any]:
        nested_join = build_join()
        for _ in range(depth - 1):
            nested_join = build_join(joins=[nested_join])
        return nested_join

    yield build_input("joins that are not in a list", build_join())
    yield build_input("a join that is a number", [1])
    yield build_input("a join that is null", [None])
    yield build_input("a join without a table", [build_join(table=None)])
    yield build_input("a table name as one string", [build_join(table="db.t")])
    yield build_input("a table without a namespace", [build_join(table=["t"])])
    yield build_input("an empty table name", [build_join(table=[])])
    yield build_input("an empty name", [build_join(table=["db", ""])])
    yield build_input("a NUL in a name", [build_join(table=["db", "t\x00"])])
    yield build_input("a level `..`", [build_join(table=["..", "t"])])
    yield build_input("a level that is a number", [build_join(table=["db", 5])])
    yield build_input("a name of 256 characters", [build_join(table=["db", "x" * 256])])
    yield build_input("unknown table", [build_join(table=["db", "none"])], 404, "NoSuchTableException")
    yield build_input("unknown namespace", [build_join(table=["none", "t"])], 404, "NoSuchTableException")
    yield build_input("a view instead of a table", [build_join(table=["db", "v"])], 404, "NoSuchTableException")
    yield build_input("unknown plan table", [build_join(table=["db", "t~plan~x"])], 404, "NoSuchTableException")
    yield build_input("a join without `on`", [build_join(on=None)])
    yield build_input("an empty `on`", [build_join(on={})])
    yield build_input("`on` as a list", [build_join(on=["id"])])
    yield build_input("`on` with a number as a column", [build_join(on={"id": 1})])
    yield build_input("`on` with an unknown column of this table", [build_join(on={"idd": "id"})])
    yield build_input("`on` with an unknown column of the other table", [build_join(on={"id": "idd"})])
    yield build_input("`on` with an empty column name", [build_join(on={"": ""})])
    yield build_input("`on` with 17 columns", [build_join(on={f"c{number}": "id" for number in range(17)})])
    yield build_input("an incomplete predicate", [build_join(predicate="id =")])
    yield build_input("a predicate on an unknown column", [build_join(predicate="idd = 1")])
    yield build_input("a predicate that is not a string", [build_join(predicate=True)])
    yield build_input("an empty predicate", [build_join(predicate="")])
    yield build_input("a predicate with a NUL", [build_join(predicate="data = 'a' \x00")])
    yield build_input("a predicate nested 10,000 deep", [build_join(predicate="(" * 10_000 + "id = 1" + ")" * 10_000)])
    like = {"column": "data", "pattern": "%a"}
    yield build_input("LIKE that is not a list of lists", [build_join(likes=[like])])
    yield build_input("LIKE without a pattern", [build_join(likes=[[{"column": "data"}]])])
    yield build_input("LIKE on an unknown column", [build_join(likes=[[like | {"column": "none"}]])])
    yield build_input("LIKE on a number", [build_join(likes=[[like | {"column": "id"}]])])
    yield build_input("LIKE with an unknown function", [build_join(likes=[[like | {"function": "trim"}]])])
    yield build_input("LIKE with an escape of two characters", [build_join(likes=[[like | {"escape": "##"}]])])
    yield build_input("LIKE with an escape at the end", [build_join(likes=[[like | {"escape": "#", "pattern": "a#"}]])])
    yield build_input("LIKE with a pattern of 1,001 characters", [build_join(likes=[[like | {"pattern": "%" * 1001}]])])
    yield build_input("17 LIKE predicates", [build_join(likes=[[like] * 17])])
    yield build_input("unknown snapshot", [build_join(snapshot_id=5)])
    yield build_input("a snapshot id beyond 64 bits", [build_join(snapshot_id=2**64)])
    yield build_input("a snapshot id that is a string", [build_join(snapshot_id="1")])
    yield build_input("unknown field", [build_join(kind="outer")])
    yield build_input("nested joins that are an object", [build_join(joins={})])
    yield build_input("an unknown column in a nested join", [build_join(joins=[build_join(predicate="idd = 1")])])
    yield build_input("joins nested five levels deep", [nest_joins(5)])
    yield build_input("33 joins", [build_join()] * 33)
    level = b'{"table": ["db", "t"], "on": {"id": "id"}, "joins": ['
    for description, depth in (("joins nested 400 levels deep", 400), ("joins nested 4,000 levels deep", 4_000)):
        deep_body = b'{"joins": [' + level * depth + b"]}" * (depth + 1)
        yield BadInput("Joins", description, "POST", "/api/v1/tables/db/t/plan-tables", deep_body)
    wrong_join = {"joins": [build_join(on={"id": "idd"})]}
    yield BadInput(
        "Joins", "an explained plan with an unknown column", "POST", "/api/v1/tables/db/t/explain", wrong_join
    )
