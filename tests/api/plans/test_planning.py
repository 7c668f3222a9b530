"""Tests of scan planning over HTTP: requests, complete answers, modes and errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import StorageError
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.api.formats import pieces
from seamark.metaserver.planner.answer import answer as answers
from seamark.metaserver.planner.answer.answer import ScanTaskWriter
from seamark.metaserver.planner.scan import request
from seamark.metaserver.planner.scan.request import BoundScan, ScanOptions, bind_for_java
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import RemoveGrant
from tests.api.client import SCHEMA, Api, build_property_commit, create_key
from tests.api.client import Answer as Response
from tests.api.plans.planned import (
    EQ_5,
    PYICEBERG,
    T,
    append_files,
    build_data_file,
    build_ten_id_files,
    list_paths,
    list_planned_numbers,
    read_all_pages,
)
from tests.server.rig import run_server


async def test_plan_without_a_filter_has_every_file(api_with_files: Api) -> None:
    answer = await api_with_files("POST", f"{T}/plan", {})
    assert list_planned_numbers(answer) == list(range(30))
    assert set(answer.json) == {"status", "file-scan-tasks"}
    assert answer.json["status"] == "completed"
    assert all(task["residual-filter"] is True for task in answer.json["file-scan-tasks"])


async def test_plan_has_the_files_that_may_match_and_their_residuals(api_with_files: Api) -> None:
    answer = await api_with_files("POST", f"{T}/plan", {"filter": EQ_5, "select": ["id"], "case-sensitive": True})
    assert list_planned_numbers(answer) == [0]
    assert answer.json["file-scan-tasks"][0]["residual-filter"] == EQ_5
    assert list_planned_numbers(
        await api_with_files("POST", f"{T}/plan", {"filter": {"type": "gt", "term": "id", "value": 285}})
    ) == [
        28,
        29,
    ]
    empty_plan = await api_with_files("POST", f"{T}/plan", {"filter": {"type": "lt", "term": "id", "value": 0}})
    assert empty_plan.json == {"status": "completed", "file-scan-tasks": []}


async def test_size_of_a_cached_answer_includes_the_headers_in_its_key(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged_sizes: list[int] = []
    put = MemoryCache.put

    def record_size(cache: MemoryCache[Any, Any], key: object, value: object, size_bytes: int) -> bool:
        if isinstance(key, tuple) and "u" * 8000 in key and "c" * 8000 in key:
            charged_sizes.append(size_bytes)
        return put(cache, key, value, size_bytes)

    monkeypatch.setattr(MemoryCache, "put", record_size)
    headers = {"User-Agent": "u" * 8000, "X-Client-Version": "c" * 8000}
    assert (await api_with_files("POST", f"{T}/plan", {"filter": EQ_5}, headers=headers)).status == 200
    assert len(charged_sizes) == 1
    assert charged_sizes[0] > 16_000


async def test_plan_of_a_table_without_a_snapshot_has_no_files(api: Api) -> None:
    await api.create_table()
    assert (await api("POST", f"{T}/plan", {"filter": EQ_5})).json == {"status": "completed", "file-scan-tasks": []}


async def test_names_ignore_case_on_request(api_with_files: Api) -> None:
    upper_case_filter = {"type": "eq", "term": "ID", "value": 5}
    assert (await api_with_files("POST", f"{T}/plan", {"filter": upper_case_filter})).error[:2] == (
        400,
        "BadRequestException",
    )
    assert list_planned_numbers(
        await api_with_files("POST", f"{T}/plan", {"filter": upper_case_filter, "case-sensitive": False})
    ) == [0]


async def test_snapshot_and_range_of_snapshots_can_be_planned(api: Api) -> None:
    await api.create_table()
    files = build_ten_id_files(6)
    await append_files(api, "t", files[:2], snapshot_id=1)
    await append_files(api, "t", files[2:4], snapshot_id=2, parent=1)
    await append_files(api, "t", files[4:], snapshot_id=3, parent=2)
    assert list_planned_numbers(await api("POST", f"{T}/plan", {})) == list(range(6))
    assert list_planned_numbers(await api("POST", f"{T}/plan", {"snapshot-id": 1, "use-snapshot-schema": True})) == [
        0,
        1,
    ]
    assert list_planned_numbers(await api("POST", f"{T}/plan", {"snapshot-id": 2})) == [0, 1, 2, 3]
    snapshot_range = {"start-snapshot-id": 1, "end-snapshot-id": 3}
    assert list_planned_numbers(await api("POST", f"{T}/plan", snapshot_range)) == [2, 3, 4, 5]
    assert list_planned_numbers(
        await api("POST", f"{T}/plan", {**snapshot_range, "filter": {"type": "gt", "term": "id", "value": 45}})
    ) == [4, 5]


async def test_invalid_plan_request_is_rejected_with_the_reason(api_with_files: Api) -> None:
    cases: list[tuple[Any, str]] = [
        ({"filter": {"type": "eq", "term": "no_such", "value": 5}}, "no_such"),
        ({"filter": {"type": "eq", "term": "id", "value": "five"}}, "five"),
        ({"filter": {"type": "resembles", "term": "id", "value": 5}}, "resembles"),
        ({"filter": None}, "filter"),
        ({"filter": 7}, "filter"),
        ({"snapshot-id": 77}, "77"),
        ({"snapshot-id": 1, "start-snapshot-id": 1, "end-snapshot-id": 1}, "snapshot-id"),
        ({"start-snapshot-id": 1}, "end-snapshot-id"),
        ({"start-snapshot-id": 5, "end-snapshot-id": 1}, "5"),
        ({"stats-fields": ["no_such"]}, "no_such"),
        ({"stats-fields": ["id"] * 10_001}, "the limit is 10,000"),
        ({"case-sensitive": "perhaps"}, "case-sensitive"),
        ({"snapshot-id": "1"}, "snapshot-id"),
    ]
    for body, reason in cases:
        answer = await api_with_files("POST", f"{T}/plan", body)
        assert answer.error[:2] == (400, "BadRequestException"), body
        assert reason in answer.error[2], body


async def test_error_types_of_missing_objects_are_known_to_clients(api_with_files: Api) -> None:
    for method, path, body in (
        ("POST", "plan", {}),
        ("GET", "plan/x", None),
        ("DELETE", "plan/x", None),
        ("POST", "tasks", {"plan-task": "x"}),
    ):
        answer = await api_with_files(method, f"/v1/namespaces/db/tables/none/{path}", body)
        assert answer.error[:2] == (404, "NoSuchTableException")
    for method in ("GET", "DELETE"):
        for plan_id in ("x", "a%20b", "AAAA", "%FF"):
            assert (await api_with_files(method, f"{T}/plan/{plan_id}")).error[:2] == (404, "NoSuchPlanIdException")
    for token in ("", "x", "AQ", "ä"):
        answer = await api_with_files("POST", f"{T}/tasks", {"plan-task": token})
        assert answer.error[:2] == (404, "NoSuchPlanTaskException")
    assert (await api_with_files("POST", f"{T}/tasks", {})).error[0] == 400


async def test_snapshot_that_is_its_own_ancestor_is_rejected_in_an_incremental_scan(api: Api) -> None:
    await api.create_table()
    await append_files(api, "t", build_ten_id_files(1), snapshot_id=1, parent=1)
    answer = await api("POST", f"{T}/plan", {"end-snapshot-id": 1})
    assert answer.error[:2] == (400, "BadRequestException")
    assert "ancestor" in answer.error[2]


async def test_statistics_are_returned_for_the_requested_fields(api_with_files: Api) -> None:
    body: dict[str, Any] = {"stats-fields": ["data"], "filter": EQ_5}
    (task,) = (await api_with_files("POST", f"{T}/plan", body)).json["file-scan-tasks"]
    assert task["data-file"]["lower-bounds"] == {"keys": [2], "values": ["61"]}
    assert task["data-file"]["upper-bounds"] == {"keys": [2], "values": ["7A"]}
    assert task["data-file"]["value-counts"] == {"keys": [2], "values": [100]}
    body = {"stats-fields": ["DATA"], "filter": EQ_5, "case-sensitive": False}
    (task,) = (await api_with_files("POST", f"{T}/plan", body)).json["file-scan-tasks"]
    assert task["data-file"]["value-counts"]["keys"] == [2]


async def test_statistics_of_a_new_column_can_be_requested_before_the_next_snapshot(api_with_files: Api) -> None:
    """The scan requests statistics of a column that is only in the current schema, and uses the snapshot's schema."""
    scan: dict[str, Any] = {"snapshot-id": 1, "use-snapshot-schema": True}
    assert len(list_planned_numbers(await api_with_files("POST", f"{T}/plan", scan))) == 30
    fields = [*SCHEMA["fields"], {"id": 3, "name": "extra", "required": False, "type": "string"}]
    change = {
        "requirements": [],
        "updates": [
            {"action": "add-schema", "schema": {**SCHEMA, "schema-id": 1, "fields": fields}},
            {"action": "set-current-schema", "schema-id": -1},
        ],
    }
    assert (await api_with_files("POST", T, change)).status == 200
    assert (
        len(list_planned_numbers(await api_with_files("POST", f"{T}/plan", {**scan, "stats-fields": ["extra"]}))) == 30
    )


async def test_swapped_column_names_prune_no_file_that_matches_under_either_meaning(api: Api) -> None:
    """Spark uses the current names together with the snapshot's schema. In time travel it uses the snapshot's names."""
    fields = [{"id": n, "name": name, "required": False, "type": "long"} for n, name in ((1, "id"), (2, "other"))]
    await api.create_table(schema={"type": "struct", "schema-id": 0, "fields": fields})
    await append_files(api, "t", build_ten_id_files(6), snapshot_id=1)
    scan = {"snapshot-id": 1, "use-snapshot-schema": True, "filter": EQ_5}
    assert list_planned_numbers(await api("POST", f"{T}/plan", scan)) == [0]
    for names in (("x", "other"), ("x", "id"), ("other", "id")):
        renamed_fields = [{**field, "name": name} for field, name in zip(fields, names, strict=True)]
        schema = {"type": "struct", "schema-id": 9, "fields": renamed_fields}
        updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
        assert (await api("POST", T, {"requirements": [], "updates": updates})).status == 200
        answer = await api("POST", f"{T}/plan", scan, headers={"X-Client-Version": "Apache Iceberg 1.12.0"})
        assert list_planned_numbers(answer) == ([*range(6)] if "id" in names else [0])
        assert answer.json["file-scan-tasks"][0]["residual-filter"] is True
    await append_files(api, "t", build_ten_id_files(2), snapshot_id=2)
    assert list_planned_numbers(await api("POST", f"{T}/plan", scan)) == [0], (
        "time travel uses only the names of the snapshot"
    )


NAME_REUSE_CASES: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    # (the case, the dropped column, the new column with its name, a filter that is valid for only one of the types)
    ("text", {"type": "long"}, {"type": "string"}, {"type": "eq", "term": "f", "value": "x"}),
    ("number", {"type": "string"}, {"type": "long"}, {"type": "lt", "term": "f", "value": 3}),
    ("prefix", {"type": "long"}, {"type": "string"}, {"type": "starts-with", "term": "f", "value": "x"}),
    ("nan", {"type": "long"}, {"type": "double"}, {"type": "is-nan", "term": "f"}),
    (
        "date",
        {"type": "boolean"},
        {"type": "date"},
        {"type": "in", "term": "f", "values": ["2026-01-01", "2026-01-02"]},
    ),
    (
        "bucket",
        {"type": "double"},
        {"type": "long"},
        {"type": "eq", "term": {"type": "transform", "transform": "bucket[4]", "term": "f"}, "value": 1},
    ),
    (
        "nested",
        {"type": "long"},
        {"type": {"type": "struct", "fields": [{"id": 9, "name": "g", "required": False, "type": "string"}]}},
        {"type": "eq", "term": "f.g", "value": "x"},
    ),
    (
        "or",
        {"type": "long"},
        {"type": "string"},
        {
            "type": "or",
            "left": {"type": "eq", "term": "f", "value": "x"},
            "right": {"type": "not", "child": {"type": "lt", "term": "f", "value": "a"}},
        },
    ),
    ("case", {"type": "long"}, {"type": "string", "name": "F"}, {"type": "eq", "term": "f", "value": "x"}),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("dropped_column", "new_column", "filter"),
    [case[1:] for case in NAME_REUSE_CASES],
    ids=[case[0] for case in NAME_REUSE_CASES],
)
async def test_name_reused_with_another_type_is_planned_under_either_schema(
    api: Api, dropped_column: dict[str, Any], new_column: dict[str, Any], filter: dict[str, Any]
) -> None:
    """A column is dropped, and a new column with another type takes its name `f`.

    Each filter is valid for only one of the two types, so the server must not prune files by it.
    """
    id_field = {"id": 1, "name": "id", "required": False, "type": "long"}
    dropped_field = {"id": 2, "name": "f", "required": False, **dropped_column}
    await api.create_table(schema={"type": "struct", "schema-id": 0, "fields": [id_field, dropped_field]})
    await append_files(api, "t", build_ten_id_files(4), snapshot_id=1)
    assert (await api("GET", T)).json["config"]["scan-planning-mode"] == "server"
    new_field = {"id": 3, "name": "f", "required": False, **new_column}
    updates = [
        {"action": "add-schema", "schema": {"type": "struct", "schema-id": 1, "fields": [id_field, new_field]}},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    assert (await api("POST", T, {"requirements": [], "updates": updates})).status == 200
    assert (await api("GET", T)).json["config"]["scan-planning-mode"] == "client"
    scan = {"snapshot-id": 1, "use-snapshot-schema": True, "case-sensitive": False}
    answer = await api("POST", f"{T}/plan", {**scan, "filter": filter})
    assert list_planned_numbers(answer) == [*range(4)]
    # File 2 has the ids from 20 to 29.
    both_conditions = {"type": "and", "left": {"type": "eq", "term": "id", "value": 25}, "right": filter}
    assert list_planned_numbers(await api("POST", f"{T}/plan", {**scan, "filter": both_conditions})) == [2], (
        "the condition on the other column still prunes"
    )
    residuals = [task["residual-filter"] for task in answer.json["file-scan-tasks"]]
    assert residuals == [filter if filter.get("term") == "f.g" else True] * 4, (
        "the residual may exclude no matching row"
    )
    await append_files(api, "t", build_ten_id_files(1), snapshot_id=2, parent=1)
    assert (await api("GET", T)).json["config"]["scan-planning-mode"] == "server"
    answer = await api("POST", f"{T}/plan", {**scan, "filter": filter})
    assert list_planned_numbers(answer) == [*range(4)], "a client with the older schema sends this filter"


async def test_filter_that_no_schema_can_bind_is_rejected(api: Api) -> None:
    await api.create_table()
    await append_files(api, "t", build_ten_id_files(2), snapshot_id=1)
    fields = [*SCHEMA["fields"], {"id": 3, "name": "extra", "required": False, "type": "string"}]
    updates = [
        {"action": "add-schema", "schema": {**SCHEMA, "schema-id": 1, "fields": fields}},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    assert (await api("POST", T, {"requirements": [], "updates": updates})).status == 200
    scan = {"snapshot-id": 1, "use-snapshot-schema": True, "filter": {"type": "eq", "term": "id", "value": "word"}}
    answer = await api("POST", f"{T}/plan", scan)
    assert answer.status == 400
    assert "id" in answer.json["error"]["message"]


async def test_partition_column_with_a_wider_type_is_accepted(api: Api) -> None:
    """The partition values are the same under both schemas."""
    fields = [{"id": 1, "name": "id", "required": False, "type": "int"}]
    spec = {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "id", "transform": "identity"}]}
    await api.create_table(schema={"type": "struct", "schema-id": 0, "fields": fields}, **{"partition-spec": spec})
    await append_files(api, "t", [], snapshot_id=1)
    schema = {"type": "struct", "schema-id": 1, "fields": [{**fields[0], "type": "long"}]}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
    assert (await api("POST", T, {"requirements": [], "updates": updates})).status == 200
    assert (await api("GET", T)).json["config"]["scan-planning-mode"] == "server"
    for value in (1, 1 << 40):
        filter = {"type": "eq", "term": "id", "value": value}
        answer = await api("POST", f"{T}/plan", {"snapshot-id": 1, "use-snapshot-schema": True, "filter": filter})
        assert list_paths(answer) == []


async def test_limit_is_met_by_the_first_files_whose_rows_surely_match(api_with_files: Api) -> None:
    """Each file has 100 rows. If the filter has a condition on rows, the planner cannot count any row as matching."""
    assert list_planned_numbers(await api_with_files("POST", f"{T}/plan", {"min-rows-requested": 100})) == [0]
    assert list_planned_numbers(await api_with_files("POST", f"{T}/plan", {"min-rows-requested": 101})) == [0, 1]
    assert len(list_planned_numbers(await api_with_files("POST", f"{T}/plan", {"min-rows-requested": 10**9}))) == 30
    assert len(list_planned_numbers(await api_with_files("POST", f"{T}/plan", {"min-rows-requested": 0}))) == 30
    filtered_body = {"filter": {"type": "gt", "term": "id", "value": 5}, "min-rows-requested": 1}
    assert len(list_planned_numbers(await api_with_files("POST", f"{T}/plan", filtered_body))) == 30


async def test_large_answer_is_compressed_for_clients_that_accept_it(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(500), snapshot_id=1)
        plain_plan = await api("POST", f"{T}/plan", {})
        assert "Content-Encoding" not in plain_plan.headers
        compressed_answer = await _post_raw(api, f"{T}/plan", {}, {"Accept-Encoding": "gzip"})
        assert compressed_answer.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(compressed_answer.raw) == plain_plan.raw
        assert len(compressed_answer.raw) < len(plain_plan.raw) / 5
        small_answer = await _post_raw(api, f"{T}/plan", {"filter": EQ_5}, {"Accept-Encoding": "gzip"})
        assert "Content-Encoding" not in small_answer.headers


async def _post_raw(api: Api, path: str, body: Any, headers: dict[str, str]) -> Response:
    """Send a POST request, and return the answer with its body as received, without decompression."""
    http = aiohttp.ClientSession(auto_decompress=False)
    async with http, http.post(api.server.url + path, json=body, headers=headers) as answer:
        return Response(answer.status, answer.headers, await answer.read())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_answer_too_large_to_collect_is_streamed_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coding: str
) -> None:
    monkeypatch.setattr(pieces, "STREAM_FROM_BYTES", 500)
    async with run_server(tmp_path, plan_inline_limit=100_000) as server:
        api = Api(server)
        await api.create_table()
        names = [random.Random(number).randbytes(100).hex() for number in range(3_000)]
        files = [build_data_file(f"file:///t/data/{name}", 0, 9) for name in names]
        await append_files(api, "t", files, snapshot_id=1, manifests=3)
        answer = await api("POST", f"{T}/plan", {}, headers={"Accept-Encoding": coding})
        assert answer.headers["Transfer-Encoding"] == "chunked"
        assert answer.headers["X-Request-Id"]
        assert list_paths(answer) == [file.path for file in files]


async def test_answer_that_fails_midway_is_not_mistaken_for_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "STREAM_FROM_BYTES", 500)
    write_tasks = ScanTaskWriter.write_tasks

    def write_three_tasks_and_fail(self: Any, rows: Any) -> Any:
        yield from list(write_tasks(self, rows))[:3]
        raise StorageError("the disk is gone")

    monkeypatch.setattr(ScanTaskWriter, "write_tasks", write_three_tasks_and_fail)
    async with run_server(tmp_path, plan_inline_limit=100_000) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(3_000), snapshot_id=1, manifests=3)
        with pytest.raises(aiohttp.ClientError):
            await api("POST", f"{T}/plan", {})
        assert (await api("GET", T)).status == 200


@pytest.mark.slow
async def test_filter_with_tens_of_thousands_of_values_is_bound_off_the_event_loop(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def record_bind_thread(metadata: TableMetadata, options: ScanOptions, filter: Expression) -> BoundScan:
        threads.append(threading.get_ident())
        return bind_for_java(metadata, options, filter)

    monkeypatch.setattr(request, "bind_for_java", record_bind_thread)
    long_filter = {"type": "in", "term": "id", "values": list(range(5, 90_000, 2))}
    answer = await api_with_files("POST", f"{T}/plan", {"filter": long_filter})
    assert answer.status == 200
    assert 0 in list_planned_numbers(answer)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.slow
async def test_answer_that_repeats_a_long_filter_is_encoded_in_another_thread(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyIceberg gets the whole filter as the residual of each file.

    The server encodes residuals twice: first to compute the page's length, and then for the files.
    """
    threads = []

    def record_encode_thread(expression: Expression) -> Any:
        threads.append(threading.get_ident())
        return encode_expression(expression)

    monkeypatch.setattr(answers, "encode_expression", record_encode_thread)
    long_filter = {"type": "in", "term": "id", "values": list(range(5, 90_000, 2))}
    headers = {**PYICEBERG, "X-Seamark-Residuals": "exact"}
    answer = await api_with_files("POST", f"{T}/plan", {"filter": long_filter}, headers=headers)
    assert answer.status == 200, answer.raw
    assert 0 in await read_all_pages(api_with_files, answer, headers=headers)
    assert threads
    assert threading.get_ident() not in threads


async def test_idempotency_key_is_accepted_and_a_repeat_gets_an_equal_answer_without_a_record(
    api_with_files: Api,
) -> None:
    """The server stores no answer for a key: planning changes nothing, and an answer may have megabytes."""
    key = create_key()
    first_answer, second_answer = [
        await api_with_files("POST", f"{T}/plan", {"filter": EQ_5}, key=key) for _ in range(2)
    ]
    assert (first_answer.status, first_answer.raw) == (second_answer.status, second_answer.raw)
    store, clock = api_with_files.server.components.store, api_with_files.server.components.clock
    assert await store.find_idempotency_record(key, clock.now_ms()) is None


async def test_plan_uses_the_newest_snapshot_of_any_committer(tmp_path: Path) -> None:
    """Two servers share a database, and one of them commits.

    After the commit, neither server uses its cached answer to an equal request.
    """
    async with run_server(tmp_path) as first_server, run_server(tmp_path) as second_server:
        first_api, second_api = Api(first_server), Api(second_server)
        await first_api.create_table()
        for count in range(1, 5):
            await append_files(first_api, "t", build_ten_id_files(count), snapshot_id=count)
            for api in (second_api, second_api, first_api):
                assert list_planned_numbers(await api("POST", f"{T}/plan", {})) == list(range(count))
        await first_api("DELETE", T)
        assert (await second_api("POST", f"{T}/plan", {})).error[:2] == (404, "NoSuchTableException")


async def test_cached_answer_is_refused_after_the_grant_was_revoked(tmp_path: Path) -> None:
    clock, grant = SystemClock(), Grant("rita", "admin")
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        secret = await create_token(store, clock, "rita", None, [grant])
    async with run_server(tmp_path, auth="token") as server:
        server.http.headers["Authorization"] = f"Bearer {secret}"
        api = Api(server)
        await api("POST", "/v1/namespaces", {"namespace": ["db"]})
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
        for _ in range(2):
            assert list_planned_numbers(await api("POST", f"{T}/plan", {})) == [0, 1, 2]
        await server.components.store.transact([RemoveGrant(grant=grant)])
        assert (await api("POST", f"{T}/plan", {})).error[:2] == (403, "ForbiddenException")
        del server.http.headers["Authorization"]
        assert (await api("POST", f"{T}/plan", {})).error[:2] == (401, "NotAuthorizedException")


@pytest.mark.slow
async def test_large_answer_is_written_in_pieces_with_its_length(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_plan = await api_with_files("POST", f"{T}/plan", {})
    compressed_answer = await api_with_files("POST", f"{T}/plan", {}, headers={"Accept-Encoding": "gzip"})
    monkeypatch.setattr(pieces, "BODY_BYTES_MAX", 100)  # The answer is longer, so the server writes it in pieces.
    uncached_request = {"case-sensitive": False}  # A request for which the server has no answer in memory yet
    answer_in_pieces = await api_with_files("POST", f"{T}/plan", uncached_request)
    assert answer_in_pieces.raw == whole_plan.raw
    assert answer_in_pieces.headers["Content-Length"] == str(len(whole_plan.raw))
    assert answer_in_pieces.headers["X-Request-Id"]
    assert (
        await api_with_files("POST", f"{T}/plan", uncached_request, headers={"Accept-Encoding": "gzip"})
    ).raw == compressed_answer.raw


async def test_body_that_arrives_after_the_headers_gets_the_same_answer(api_with_files: Api) -> None:
    body = json.dumps({"filter": EQ_5}).encode()
    head = f"POST {T}/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(api_with_files.server.url).port)
    for chunk in (head.encode(), body[:7], body[7:]):
        writer.write(chunk)
        await asyncio.sleep(0.02)
    answer = await reader.read()
    writer.close()
    assert answer.endswith((await api_with_files("POST", f"{T}/plan", {"filter": EQ_5})).raw)


PLANNING_MODE_CASES = [
    # (the setting, the table's format version, the table's property, the announced mode)
    ("auto", 1, None, "server"),
    ("auto", 2, None, "server"),
    ("auto", 3, None, "client"),
    ("server", 3, None, "server"),
    ("client", 2, None, "client"),
    ("client", 2, "server", "server"),
    ("auto", 2, "client", "client"),
    ("auto", 3, "server", "server"),
    ("server", 2, "nonsense", "server"),
]


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("setting", "version", "table_property", "announced_mode"), PLANNING_MODE_CASES)
async def test_clients_learn_for_each_table_who_plans(
    tmp_path: Path, setting: str, version: int, table_property: str | None, announced_mode: str
) -> None:
    async with run_server(tmp_path, scan_planning_mode=setting) as server:
        api = Api(server)
        properties = {"format-version": str(version)}
        if table_property is not None:
            properties["seamark.scan-planning-mode"] = table_property
        created_table = await api.create_table(properties=properties)
        assert created_table["config"]["scan-planning-mode"] == announced_mode
        assert (await api("GET", T)).json["config"]["scan-planning-mode"] == announced_mode


async def test_change_of_planning_mode_is_not_hidden_by_client_caches(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        await api.create_table()
        etag_before = (await api("GET", T)).headers["ETag"]
        assert (await api("GET", T, headers={"If-None-Match": etag_before})).status == 304
        await api("POST", T, build_property_commit(**{"seamark.scan-planning-mode": "client"}))
        answer = await api("GET", T, headers={"If-None-Match": etag_before})
        assert answer.json["config"]["scan-planning-mode"] == "client"
    async with run_server(tmp_path, scan_planning_mode="server") as server:
        assert (await Api(server)("GET", T, headers={"If-None-Match": answer.headers["ETag"]})).status == 200


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("setting", "is_announced"), [("auto", True), ("server", True), ("client", False)])
async def test_pyiceberg_learns_the_planning_mode_from_the_catalog_configuration(
    tmp_path: Path, setting: str, is_announced: bool
) -> None:
    async with run_server(tmp_path, scan_planning_mode=setting) as server:
        api = Api(server)
        config = (await api("GET", "/v1/config", headers=PYICEBERG)).json
        assert config["defaults"] == ({"scan-planning-mode": "server"} if is_announced else {})
        assert (await api("GET", "/v1/config")).json["defaults"] == {}


async def test_error_names_the_broken_manifest(api: Api) -> None:
    location = (await api.create_table())["metadata"]["location"]
    await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
    damaged_manifest = Path(location.removeprefix("file://")) / "metadata" / "1-0.avro"
    damaged_manifest.write_bytes(damaged_manifest.read_bytes()[:-40])
    answer = await api("POST", f"{T}/plan", {})
    assert answer.status == 500
    assert "1-0.avro" in answer.error[2]
