"""Tests of POST …/commit on a real server. PyIceberg reads the committed tables."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seamark.formats.protocol.wire import decode_as
from seamark.metaserver.commit.change_requests.change_body import ChangeBody
from seamark.metaserver.store.model import IndexFileState
from tests.api.client import Api, create_key
from tests.api.indexes.indexed import build_index_file, define_index, load_index, write_index_file
from tests.api.rest.test_permissions import UsersApi, users_api
from tests.commits.lake import BY_PART, CommitTable, Row
from tests.commits.reader import check_snapshots, find_snapshot, list_live_files, read_manifests, read_snapshot_rows
from tests.connector.lake import open_catalog
from tests.planner.lakes.lake import DataFile
from tests.server.rig import run_server

__all__ = ["users_api"]


async def read_rows(api: Api, name: str = "t", **options: Any) -> list[Row]:
    """Return the rows that PyIceberg reads, in order."""

    def scan_rows() -> list[Row]:
        with open_catalog(api.server.url) as catalog:
            rows = catalog.load_table(f"db.{name}").scan(**options).to_arrow()
        return sorted(
            zip(*(rows.column(column).to_pylist() for column in ("id", "part", "value")), strict=True), key=repr
        )

    return await asyncio.to_thread(scan_rows)


def sort_rows(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=repr)


async def test_append_to_an_empty_table_is_read_by_pyiceberg(api: Api) -> None:
    table = await CommitTable.create(api)
    rows = [(1, 0, "a"), (2, 0, None), (None, 1, "c")]
    answer = await table.append(rows)
    assert await read_rows(api) == sort_rows(rows)
    metadata = await table.read_metadata()
    assert metadata["current-snapshot-id"] == answer["snapshot-id"]
    assert answer["parent-snapshot-id"] is None
    assert (answer["operation"], answer["sequence-number"], answer["duplicate"]) == ("append", 1, False)
    assert answer["summary"]["added-records"] == answer["summary"]["total-records"] == "3"
    assert metadata["refs"]["main"] == {"type": "branch", "snapshot-id": answer["snapshot-id"]}


async def test_appends_accumulate_in_a_partitioned_table(api: Api) -> None:
    table = await CommitTable.create(api, spec=BY_PART)
    first_answer = await table.append([(1, 0, "a")], [(2, 1, "b")])
    second_answer = await table.append([(3, 0, "c")])
    assert second_answer["parent-snapshot-id"] == first_answer["snapshot-id"]
    assert second_answer["summary"]["total-data-files"] == "3"
    assert second_answer["summary"]["changed-partition-count"] == "1"
    assert await read_rows(api) == [(1, 0, "a"), (2, 1, "b"), (3, 0, "c")]
    assert await read_rows(api, row_filter="part = 0") == [(1, 0, "a"), (3, 0, "c")]


async def test_repeat_with_its_idempotency_key_gets_the_first_answer(api: Api) -> None:
    table = await CommitTable.create(api)
    body, key = {"add": [table.write_data_file([(1, 0, "a")])]}, create_key()
    first_answer = await table.commit(body, key=key)
    await table.append([(2, 0, "b")])
    second_answer = await table.commit(body, key=key)
    assert {**second_answer, "metadata-location": ""} == {**first_answer, "metadata-location": ""}
    assert await read_rows(api) == [(1, 0, "a"), (2, 0, "b")]
    refusal = await table.send({"add": [table.write_data_file([(9, 0, "z")])]}, key=key)
    assert refusal.status == 422


async def read_by_specification(table: CommitTable, branch: str = "main") -> list[Row]:
    """Return the rows that a reader of the specification sees, and check that the snapshot is valid."""
    metadata = await table.read_metadata()
    snapshot_id = metadata["refs"][branch]["snapshot-id"]
    check_snapshots(metadata, snapshot_id)
    return read_snapshot_rows(find_snapshot(metadata, snapshot_id))


def build_overwrite(read_snapshot: Any, **options: Any) -> dict[str, Any]:
    return {"read-snapshot-id": read_snapshot["snapshot-id"], **options}


@pytest.mark.parametrize("version", [2, 3])
async def test_files_are_removed_by_path_and_replaced_by_new_files(api: Api, version: int) -> None:
    table = await CommitTable.create(api, version=version)
    data, second_file = table.write_data_file([(1, 0, "a"), (2, 0, "b")]), table.write_data_file([(3, 1, "c")])
    first_answer = await table.commit({"add": [data, second_file]})
    body = build_overwrite(
        first_answer, remove=[{"file-path": data["file-path"]}], add=[table.write_data_file([(1, 0, "A")])]
    )
    second_answer = await table.commit(body)
    assert (second_answer["operation"], second_answer["summary"]["deleted-data-files"]) == ("overwrite", "1")
    assert await read_by_specification(table) == [(1, 0, "A"), (3, 1, "c")]
    third_answer = await table.commit(build_overwrite(second_answer, remove=[{"file-path": second_file["file-path"]}]))
    assert third_answer["operation"] == "delete"
    assert await read_by_specification(table) == [(1, 0, "A")]
    if version == 2:
        assert await read_rows(api) == [(1, 0, "A")]
    refusal = await table.send(build_overwrite(third_answer, remove=[{"file-path": second_file["file-path"]}]))
    assert refusal.error[:2] == (409, "CommitFailedException")


async def test_position_deletes_remove_rows(api: Api) -> None:
    table = await CommitTable.create(api, spec=BY_PART)
    data, second_file = (
        table.write_data_file([(1, 0, "a"), (2, 0, "b")]),
        table.write_data_file([(3, 0, "c"), (4, 0, "d")]),
    )
    first_answer = await table.commit({"add": [data, second_file]})
    shared_deletes = table.write_position_deletes([(data["file-path"], 0), (second_file["file-path"], 1)], 0)
    second_answer = await table.commit(build_overwrite(first_answer, add=[shared_deletes]))
    assert (second_answer["operation"], second_answer["summary"]["added-position-deletes"]) == ("delete", "2")
    assert await read_by_specification(table) == await read_rows(api) == [(2, 0, "b"), (3, 0, "c")]
    position_deletes = table.write_position_deletes([(second_file["file-path"], 0)], 0, names_data_file=True)
    third_answer = await table.commit(build_overwrite(second_answer, add=[position_deletes]))
    assert await read_by_specification(table) == await read_rows(api) == [(2, 0, "b")]
    await table.commit(build_overwrite(third_answer, remove=[{"file-path": second_file["file-path"]}]))
    paths = {live_file.path for live_file in list_live_files(find_snapshot(await table.read_metadata()))}
    assert paths == {data["file-path"], shared_deletes["file-path"]}, "deletes for only this file are removed with it"


async def test_equality_deletes_remove_earlier_rows(api: Api) -> None:
    table = await CommitTable.create(api)
    await table.append([(1, 0, "a"), (2, 0, "b")])
    upsert = {"add": [table.write_equality_deletes([1, 3]), table.write_data_file([(1, 0, "A"), (3, 0, "C")])]}
    answer = await table.commit(upsert)
    assert (answer["operation"], answer["summary"]["added-equality-deletes"]) == ("overwrite", "2")
    assert await read_by_specification(table) == [(1, 0, "A"), (2, 0, "b"), (3, 0, "C")]


async def test_new_deletion_vector_replaces_the_vector_of_its_data_file(api: Api) -> None:
    table = await CommitTable.create(api, version=3, spec=BY_PART)
    data, second_file = (
        table.write_data_file([(1, 0, "a"), (2, 0, "b"), (3, 0, "c")]),
        table.write_data_file([(4, 0, "d")]),
    )
    first_answer = await table.commit({"add": [data, second_file]})
    vectors = table.write_vectors({data["file-path"]: {0}, second_file["file-path"]: {0}}, 0)
    second_answer = await table.commit(build_overwrite(first_answer, add=vectors))
    assert (second_answer["summary"]["added-dvs"], second_answer["operation"]) == ("2", "delete")
    assert await read_by_specification(table) == [(2, 0, "b"), (3, 0, "c")]
    (merged_vector,) = table.write_vectors({data["file-path"]: {0, 2}}, 0)
    refusal = await table.send(build_overwrite(second_answer, add=[merged_vector]))
    assert refusal.error[:2] == (409, "CommitFailedException")
    old_vector = {"file-path": vectors[0]["file-path"], "content-offset": vectors[0]["content-offset"]}
    third_answer = await table.commit(build_overwrite(second_answer, add=[merged_vector], remove=[old_vector]))
    assert (third_answer["summary"]["removed-dvs"], third_answer["summary"]["total-position-deletes"]) == ("1", "3")
    assert await read_by_specification(table) == [(2, 0, "b")]
    fourth_answer = await table.commit(build_overwrite(third_answer, remove=[{"file-path": data["file-path"]}]))
    assert fourth_answer["summary"]["removed-dvs"] == "1", "a data file's deletion vector is removed with the data file"
    assert await read_by_specification(table) == []


async def test_written_partitions_are_replaced(api: Api) -> None:
    table = await CommitTable.create(api, spec=BY_PART)
    await table.append([(1, 0, "a")], [(2, 0, "b")], [(3, 1, "c")], [(4, None, "d")])
    answer = await table.commit({"add": [table.write_data_file([(9, 0, "z")])], "replace": {"partitions": "written"}})
    assert answer["operation"] == "overwrite"
    assert answer["summary"]["deleted-data-files"] == "2"
    assert (
        await read_by_specification(table)
        == await read_rows(api)
        == sorted([(9, 0, "z"), (3, 1, "c"), (4, None, "d")], key=repr)
    )
    await table.commit({"add": [table.write_data_file([(5, None, "e")])], "replace": {"partitions": "written"}})
    assert await read_by_specification(table) == sorted([(9, 0, "z"), (3, 1, "c"), (5, None, "e")], key=repr)


async def test_files_that_match_a_filter_are_replaced_and_partial_matches_are_rejected(api: Api) -> None:
    table = await CommitTable.create(api)
    await table.append([(1, 0, "a"), (5, 0, "b")], [(6, 0, "c")], [(None, 0, "d")])
    range_filter = {"type": "lt-eq", "term": "id", "value": 5}
    answer = await table.commit({"replace": {"filter": range_filter}, "add": [table.write_data_file([(2, 0, "n")])]})
    assert answer["summary"]["deleted-data-files"] == "1"
    assert await read_by_specification(table) == sorted([(2, 0, "n"), (6, 0, "c"), (None, 0, "d")], key=repr)
    await table.append([(7, 0, "e"), (None, 0, "f")])
    refusal = await table.send({"replace": {"filter": {"type": "gt", "term": "id", "value": 5}}})
    assert refusal.status == 400
    assert "may match the filter" in refusal.error[2]
    await table.commit({"replace": {"filter": True}})
    assert await read_by_specification(table) == []


async def test_commit_to_a_branch_leaves_main_unchanged(api: Api) -> None:
    table = await CommitTable.create(api)
    first_answer = await table.append([(1, 0, "a")])
    ref = {
        "action": "set-snapshot-ref",
        "ref-name": "dev",
        "type": "branch",
        "snapshot-id": first_answer["snapshot-id"],
    }
    ref |= {"min-snapshots-to-keep": 3}
    assert (await api("POST", "/v1/namespaces/db/tables/t", {"requirements": [], "updates": [ref]})).status == 200
    second_answer = await table.append([(2, 0, "b")], branch="dev")
    assert second_answer["parent-snapshot-id"] == first_answer["snapshot-id"]
    assert await read_by_specification(table) == [(1, 0, "a")]
    assert await read_by_specification(table, "dev") == [(1, 0, "a"), (2, 0, "b")]
    refs = (await table.read_metadata())["refs"]
    assert refs["dev"] == {"snapshot-id": second_answer["snapshot-id"], "type": "branch", "min-snapshots-to-keep": 3}
    refusal = await table.send({"branch": "none", "add": [table.write_data_file([(3, 0, "c")])]})
    assert refusal.error[:2] == (409, "CommitFailedException")


async def test_version_1_accepts_appends(api: Api) -> None:
    table = await CommitTable.create(api, version=1)
    await table.append([(1, 0, "a")])
    await table.append([(2, 0, "b")])
    assert await read_by_specification(table) == await read_rows(api) == [(1, 0, "a"), (2, 0, "b")]
    refusal = await table.send({"replace": {"filter": True}, "read-snapshot-id": None})
    assert refusal.status == 400


@pytest.mark.slow
async def test_small_manifests_are_merged(api: Api) -> None:
    for version in (2, 3):
        properties = {"commit.manifest.min-count-to-merge": "4"}
        table = await CommitTable.create(api, f"t{version}", version=version, **properties)
        for number in range(9):
            await table.append([(number, 0, "a")])
            metadata = await table.read_metadata()
            check_snapshots(metadata)
        snapshot_count = len({live_file.snapshot_id for live_file in list_live_files(find_snapshot(metadata))})
        assert snapshot_count == 9, "a merged manifest keeps the snapshot that added each file"
        snapshot = find_snapshot(metadata)
        assert snapshot is not None
        assert len(read_manifests(snapshot)) < 6
        assert [row[0] for row in read_snapshot_rows(snapshot)] == list(range(9))


async def test_live_file_is_not_added_twice(api: Api) -> None:
    table = await CommitTable.create(api)
    body = {"add": [table.write_data_file([(1, 0, "a")])]}
    await table.commit(body)
    refusal = await table.send(body)
    assert refusal.error[:2] == (409, "AlreadyExistsException")
    assert await read_by_specification(table) == [(1, 0, "a")]


async def _build_index_registration(api: Api, table: CommitTable, data: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Write an index file of the index `i` for one data file, and return its registration for a commit.

    Args:
        data: The data file's entry of a commit request.
        other: Fields that replace those of a valid index file.
    """
    metadata = await table.read_metadata()
    definition = (await define_index(api))["definition-id"]
    build = {
        "definition-id": definition,
        "kind": "bloom",
        "table-uuid": metadata["table-uuid"],
        "folder": f"{metadata['location']}/_seamark/index/w",
        "index": "i",
    }
    path, count, size = data["file-path"], data["record-count"], data["file-size-in-bytes"]
    file = DataFile(
        path, content=0, format="PARQUET", spec_id=0, partition=(), record_count=count, size=size, metrics={}
    )
    return write_index_file(build, f"{count}.puffin", build_index_file(build, [file], **other))


async def test_error_names_an_invalid_file_by_its_number(api: Api) -> None:
    await api.create_table()
    valid_file = {"content": "data", "spec-id": 0, "file-path": "x", "file-format": "parquet", "partition": []}
    valid_json = json.dumps(
        valid_file | {"file-size-in-bytes": 1, "record-count": 1, "file-path": await _choose_data_path(api)}
    ).encode()
    invalid_values: list[bytes] = [
        b"null",
        b"7",
        b"[]",
        b"{}",
        b'{"file-path":"\xff"}',
        b'{"file-path":1}',
        b"[" * 900 + b"]" * 900,
    ]
    for invalid_json in invalid_values:
        answer = await api("POST", "/api/v1/tables/db/t/commit", b'{"add":[' + valid_json + b"," + invalid_json + b"]}")
        assert answer.status == 400, (invalid_json, answer.raw)
        assert b"add[1]" in answer.raw or b"The request body is malformed" in answer.raw, invalid_json


def test_files_to_add_are_not_decoded_with_the_body() -> None:
    """If one call decoded all files, it would hold the interpreter lock and stop the server for seconds."""
    body = decode_as(b'{"add": [{"file-path": "a"}, {"file-path": "b"}]}', ChangeBody, "The body")
    assert [type(added_file) for added_file in body.add] == [msgspec.Raw, msgspec.Raw]


async def _choose_data_path(api: Api) -> str:
    loaded_table = (await api("GET", "/v1/namespaces/db/tables/t")).json
    return f"{loaded_table['metadata']['location']}/data/a.parquet"


async def test_index_files_are_registered_with_the_snapshot_and_not_before(api: Api) -> None:
    table = await CommitTable.create(api)
    data = table.write_data_file([(1, 0, "a")])
    file = await _build_index_registration(api, table, data)
    refusal = await table.send(
        {"remove": [{"file-path": "file:///x"}], "read-snapshot-id": None, "index-files": [file]}
    )
    assert refusal.status == 409
    assert (await load_index(api))["index-files"] == []
    answer = await table.commit({"add": [data], "index-files": [file]})
    metadata = await table.read_metadata()
    (known_index_file,) = await api.server.components.store.index_files(metadata["table-uuid"])
    assert (known_index_file.location, known_index_file.state) == (file["location"], IndexFileState.LIVE)
    assert known_index_file.snapshot_id == answer["snapshot-id"]
    assert (await load_index(api))["files"] == 1


async def test_index_file_of_another_table_is_rejected(api: Api) -> None:
    table = await CommitTable.create(api)
    data = table.write_data_file([(1, 0, "a")])
    foreign_file = await _build_index_registration(api, table, data, table_uuid="00000000-0000-4000-8000-000000000000")
    for file, message in (
        (foreign_file, "it belongs to the table"),
        ({**foreign_file, "size-in-bytes": 5}, "Cannot register"),
        ({**foreign_file, "location": "file:///etc/passwd"}, "is not in the folder"),
    ):
        answer = await table.send({"add": [data], "index-files": [file]})
        assert answer.status == 400
        assert message in answer.error[2]
    assert (await table.read_metadata()).get("current-snapshot-id") in (None, -1)


async def test_writer_of_a_namespace_adds_only_files_of_its_tables(users_api: UsersApi) -> None:
    """If a writer could add any file, it could read and delete another table's files through its own table."""

    async def read_location(namespace: str) -> str:
        answer = await users_api("root", "GET", f"/v1/namespaces/{namespace}/tables/t")
        location: str = answer.json["metadata"]["location"]
        return location

    async def add_file(principal: str, namespace: str, folder: str) -> tuple[int, str]:
        file = {
            "content": "data",
            "file-path": f"{folder}/data/{principal}.parquet",
            "file-format": "parquet",
            "spec-id": 0,
        }
        file |= {"partition": [], "record-count": 1, "file-size-in-bytes": 100}
        answer = await users_api(principal, "POST", f"/api/v1/tables/{namespace}/t/commit", {"add": [file]})
        return answer.status, "" if answer.status == 200 else answer.error[1]

    own_location, other_location = await read_location("db"), await read_location("other")
    assert await add_file("wendy", "db", own_location) == (200, "")
    assert await add_file("wendy", "db", other_location) == (403, "ForbiddenException")
    assert await add_file("wendy", "db", f"{own_location}-beside") == (403, "ForbiddenException")
    assert await add_file("wendy", "other", other_location) == (403, "ForbiddenException")
    assert await add_file("rita", "db", own_location) == (403, "ForbiddenException")
    assert await add_file("root", "db", other_location) == (200, "")


async def test_change_for_a_table_that_was_dropped_and_recreated_is_rejected(api: Api) -> None:
    table = await CommitTable.create(api)
    uuid = (await table.append([(1, 0, "a")]))["table-uuid"]
    body = {"add": [table.write_data_file([(2, 0, "b")])], "table-uuid": uuid}
    assert (await api("DELETE", "/v1/namespaces/db/tables/t")).status == 204
    assert (await table.send(body)).error[:2] == (404, "NoSuchTableException")
    recreated_table = await CommitTable.create(api)
    assert (await recreated_table.send(body)).error[:2] == (409, "CommitFailedException")
    # The index file is in the folder of the dropped table. The answer is a conflict, because the client is not at
    # fault.
    index_file = {"location": f"file://{table.folder}/_seamark/index/w/x.puffin", "size-in-bytes": 10}
    assert (await recreated_table.send({**body, "index-files": [index_file]})).error[:2] == (
        409,
        "CommitFailedException",
    )
    assert (await recreated_table.commit({**body, "table-uuid": None}))["table-uuid"] != uuid


async def test_properties_of_writers_are_in_the_summary_and_on_the_timeline(api: Api) -> None:
    table = await CommitTable.create(api)
    summary = {"engine-name": "spark", "spark.app.id": "local-1"}
    answer = await table.append([(1, 0, "a")], summary=summary)
    assert summary.items() <= answer["summary"].items()
    instants = (await api("GET", "/api/v1/tables/db/t/timeline")).json["instants"]
    assert [instant["action"] for instant in instants] == ["create", "commit"]
    assert instants[1]["snapshot-id"] == answer["snapshot-id"]
    assert instants[1]["summary"]["added-records"] == "1"


@pytest.mark.slow
async def test_many_files_are_split_into_several_manifests(api: Api) -> None:
    table = await CommitTable.create(api, **{"commit.manifest.target-size-bytes": "6000"})
    data = table.write_data_file([(1, 0, "a")])
    files = [{**data, "file-path": f"{data['file-path']}-{number}"} for number in range(2000)]
    answer = await table.commit({"add": files})
    metadata = await table.read_metadata()
    check_snapshots(metadata)
    snapshot = find_snapshot(metadata)
    assert snapshot is not None
    sizes = [manifest["manifest_length"] for manifest in read_manifests(snapshot)]
    assert len(sizes) > 2
    assert max(sizes) < 12_000
    removals = [{"file-path": file["file-path"]} for file in files[::2]]
    second_answer = await table.commit({"remove": removals, "read-snapshot-id": answer["snapshot-id"]})
    assert second_answer["summary"]["total-data-files"] == "1000"
    check_snapshots(await table.read_metadata())


async def _set_default_spec(api: Api, table: CommitTable, *fields: dict[str, Any]) -> int:
    """Add a new default partition spec, and return its id."""
    updates = [
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": list(fields)}},
        {"action": "set-default-spec", "spec-id": -1},
    ]
    answer = await api("POST", f"/v1/namespaces/db/tables/{table.name}", {"requirements": [], "updates": updates})
    assert answer.status == 200, answer.raw
    default_spec_id: int = answer.json["metadata"]["default-spec-id"]
    return default_spec_id


def _set_partition(file: dict[str, Any], spec_id: int, *values: Any) -> dict[str, Any]:
    return {**file, "spec-id": spec_id, "partition": list(values)}


async def test_writers_of_other_buckets_continue_while_buckets_are_doubled(api: Api) -> None:
    """A change that read some partitions conflicts only with files that can have rows of these partitions.

    A file of bucket 3 of 8 can have only rows of buckets 3 and 11 of 16. So only changes that read one of these two
    buckets conflict with it.
    """
    bucket = {"name": "b", "transform": "bucket[8]", "source-id": 1}
    table = await CommitTable.create(api, spec=[bucket])
    table.spec = ()
    base_answer = await table.commit({"add": [_set_partition(table.write_data_file([(1, 0, "a")]), 0, 3)]})
    doubled_spec = await _set_default_spec(api, table, {"name": "b16", "transform": "bucket[16]", "source-id": 1})
    await table.commit({"add": [_set_partition(table.write_data_file([(2, 0, "b")]), 0, 3)]})
    for value, status in ((3, 409), (11, 409), (4, 200), (12, 200)):
        scope = {"partitions": [{"spec-id": doubled_spec, "values": [value]}]}
        added_files = [_set_partition(table.write_data_file([(value, 0, "c")]), doubled_spec, value)]
        answer = await table.send({"add": added_files, "scope": scope, "read-snapshot-id": base_answer["snapshot-id"]})
        assert answer.status == status, (value, answer.raw)
    metadata = await table.read_metadata()
    check_snapshots(metadata)
    refusal = await table.send(
        {
            "add": [_set_partition(table.write_data_file([(3, 0, "d")]), doubled_spec, 3)],
            "replace": {"partitions": "written"},
        }
    )
    assert refusal.status == 400
    assert "has partition spec 0" in refusal.error[2]
    all_changes = await table.commit(
        {"add": [_set_partition(table.write_data_file([(9, 0, "e")]), 0, 4)], "replace": {"partitions": "written"}}
    )
    assert all_changes["summary"]["deleted-data-files"] == "2", "bucket 4 of 8 contains buckets 4 and 12 of 16"
    check_snapshots(await table.read_metadata())


async def test_table_upgraded_to_version_3_gets_row_ids(api: Api) -> None:
    table = await CommitTable.create(api, version=2)
    data = table.write_data_file([(1, 0, "a"), (2, 0, "b")])
    await table.commit({"add": [data]})
    old_deletes = table.write_position_deletes([(data["file-path"], 0)], names_data_file=True)
    head_answer = await table.commit(
        {"add": [old_deletes], "read-snapshot-id": (await table.read_metadata())["current-snapshot-id"]}
    )
    upgrade = {"requirements": [], "updates": [{"action": "upgrade-format-version", "format-version": 3}]}
    assert (await api("POST", "/v1/namespaces/db/tables/t", upgrade)).status == 200
    await table.append([(3, 0, "c")])
    assert await read_by_specification(table) == [(2, 0, "b"), (3, 0, "c")]
    (vector,) = table.write_vectors({data["file-path"]: {0, 1}})
    removals = [{"file-path": old_deletes["file-path"]}]
    scope = {"filter": {"type": "lt", "term": "id", "value": 3}}
    body = {"add": [vector], "remove": removals, "read-snapshot-id": head_answer["snapshot-id"], "scope": scope}
    answer = await table.commit(body)
    assert (answer["summary"]["added-dvs"], answer["summary"]["removed-position-delete-files"]) == ("1", "1")
    assert await read_by_specification(table) == [(3, 0, "c")]


async def test_snapshot_that_was_read_must_be_a_known_ancestor(api: Api) -> None:
    table = await CommitTable.create(api)
    snapshot_ids = [(await table.append([(n, 0, "a")]))["snapshot-id"] for n in range(4)]
    removal = {"requirements": [], "updates": [{"action": "remove-snapshots", "snapshot-ids": snapshot_ids[:2]}]}
    assert (await api("POST", "/v1/namespaces/db/tables/t", removal)).status == 200
    scope = {"filter": {"type": "eq", "term": "id", "value": 77}}
    for read_snapshot_id, status in (
        (snapshot_ids[0], 409),
        # This snapshot was removed, but the metadata still names it as the parent of the oldest snapshot.
        (snapshot_ids[1], 200),
        (snapshot_ids[2], 200),
        (None, 409),
        (12345, 409),
    ):
        body = {"add": [table.write_data_file([(9, 0, "z")])], "scope": scope, "read-snapshot-id": read_snapshot_id}
        answer = await table.send(body)
        assert answer.status == status, (read_snapshot_id, answer.raw)
    # A change without a scope that only adds files does not depend on the snapshot that was read.
    assert (await table.send({"add": [table.write_data_file([(5, 0, "y")])], "read-snapshot-id": 12345})).status == 200


async def test_too_many_intermediate_snapshots_are_a_conflict(tmp_path: Path) -> None:
    async with run_server(tmp_path, commit_history_limit=2) as server:
        table = await CommitTable.create(Api(server))
        snapshot_ids = [(await table.append([(n, 0, "a")]))["snapshot-id"] for n in range(4)]
        scope = {"filter": {"type": "eq", "term": "id", "value": 77}}
        body = {"add": [table.write_data_file([(9, 0, "z")])], "scope": scope}
        assert (await table.send({**body, "read-snapshot-id": snapshot_ids[0]})).status == 409
        assert (await table.send({**body, "read-snapshot-id": snapshot_ids[1]})).status == 200
        collisions = server.components.metrics.registry.get_sample_value(
            "seamark_commit_collisions_total", {"reason": "history"}
        )
        assert collisions == 1


async def test_error_names_a_missing_manifest_and_the_commit_changes_nothing(api: Api) -> None:
    table = await CommitTable.create(api)
    first_file = table.write_data_file([(1, 0, "a")])
    head_answer = await table.commit({"add": [first_file]})
    snapshot = find_snapshot(await table.read_metadata())
    assert snapshot is not None
    (manifest,) = read_manifests(snapshot)
    Path(manifest["manifest_path"].removeprefix("file://")).unlink()
    async with run_server(
        table.folder.parent / "other", warehouse=api.server.components.settings.make_warehouse_uri()
    ) as server:
        other_api = Api(server)
        body = {"name": "t", "metadata-location": head_answer["metadata-location"]}
        assert (await other_api("POST", "/v1/namespaces/db/register", body)).status == 200
        table.api = other_api
        removal = {"remove": [{"file-path": first_file["file-path"]}], "read-snapshot-id": head_answer["snapshot-id"]}
        refusal = await table.send(removal)
        assert refusal.error[:2] == (500, "CorruptMetadataException")
        assert manifest["manifest_path"] in refusal.error[2]
        assert (await table.read_metadata())["current-snapshot-id"] == head_answer["snapshot-id"]
        await table.append([(2, 0, "b")])


async def test_second_deletion_vector_for_a_file_is_rejected(api: Api) -> None:
    table = await CommitTable.create(api, version=3)
    data, second_file = (
        table.write_data_file([(1, 0, "a"), (2, 0, "b")]),
        table.write_data_file([(3, 0, "c"), (4, 0, "d")]),
    )
    head_answer = await table.commit({"add": [data, second_file]})
    options = {"read-snapshot-id": head_answer["snapshot-id"], "isolation": "snapshot"}
    first_answer = await table.send({"add": table.write_vectors({data["file-path"]: {0}}), **options})
    second_answer = await table.send({"add": table.write_vectors({data["file-path"]: {1}}), **options})
    other_answer = await table.send({"add": table.write_vectors({second_file["file-path"]: {0}}), **options})
    assert [answer.status for answer in (first_answer, second_answer, other_answer)] == [200, 409, 200]
    assert await read_by_specification(table) == [(2, 0, "b"), (4, 0, "d")]


async def test_request_for_an_earlier_answer_never_commits(api: Api) -> None:
    table = await CommitTable.create(api)
    body = {"add": [table.write_data_file([(1, 0, "a")])], "producer": {"id": "job", "sequence": 7}}
    repeat_request = {"producer": body["producer"], "repeats-only": True}
    assert (await table.send(repeat_request)).error[:2] == (409, "CommitFailedException")
    first_answer = await table.commit(body)
    second_answer = await table.commit(repeat_request)
    assert (second_answer["snapshot-id"], second_answer["duplicate"]) == (first_answer["snapshot-id"], True)
    later_request = {
        **repeat_request,
        "producer": {"id": "job", "sequence": 8},
        "add": [table.write_data_file([(2, 0, "b")])],
    }
    assert (await table.send(later_request)).status == 409
    assert (await table.send({"repeats-only": True})).error[0] == 400
    assert len((await table.read_metadata())["snapshots"]) == 1
