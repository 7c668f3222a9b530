"""Tests of the query history over HTTP: it records plans, plan tables and scan reports, without literals."""

from __future__ import annotations

import inspect
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import StorageError
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.api.plans import statement_reads
from seamark.metaserver.history import history as query_history
from seamark.metaserver.history.history import StatementTime
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import AddQueryRecords
from tests.api.client import Api
from tests.api.plans.planned import EQ_5, PYICEBERG, T, append_files, build_ten_id_files
from tests.server.rig import RunningServer, run_server

HISTORY = "/api/v1/tables/db/t/history"
SECRET = 741_852_963


def build_comparison(op: str, value: Any, column: str = "id") -> dict[str, Any]:
    return {"type": op, "term": column, "value": value}


def make_conjunction(*parts: dict[str, Any]) -> dict[str, Any]:
    left, right = parts
    return {"type": "and", "left": left, "right": right}


async def load_shapes(api: Api, path: str = HISTORY) -> list[dict[str, Any]]:
    answer = await api("GET", path)
    assert answer.status == 200, answer.raw
    return answer.json["shapes"]


async def test_statements_that_differ_in_literals_share_a_shape(api_with_files: Api) -> None:
    for value in (5, 15, 25):
        body = {
            "filter": make_conjunction(
                build_comparison("eq", value), build_comparison("starts-with", f"x{value}", "data")
            ),
            "select": ["data"],
        }
        assert (await api_with_files("POST", f"{T}/plan", body, headers=PYICEBERG)).status == 200
    await api_with_files("POST", f"{T}/plan", {"filter": EQ_5}, headers=PYICEBERG)
    most_frequent, second_shape = await load_shapes(api_with_files)
    assert most_frequent["conditions"] == ["id = ?", "data starts with ?"]
    assert (most_frequent["engine"], most_frequent["columns"]) == ("pyiceberg", ["data"])
    assert most_frequent["sums"]["statements"] == 3
    assert (most_frequent["sums"]["files-before"], second_shape["sums"]["files-before"]) == (90, 30)
    assert second_shape["sums"]["files-after"] == 1


async def test_order_of_conditions_and_negations_do_not_change_the_shape(api_with_files: Api) -> None:
    small_filter, large_filter = build_comparison("lt", 50), build_comparison("gt-eq", 10)
    negated_filter = {"type": "not", "child": build_comparison("gt-eq", 50)}
    for filter in (
        make_conjunction(small_filter, large_filter),
        make_conjunction(large_filter, small_filter),
        make_conjunction(negated_filter, large_filter),
    ):
        assert (await api_with_files("POST", f"{T}/plan", {"filter": filter})).status == 200
    (shape,) = await load_shapes(api_with_files)
    assert shape["sums"]["statements"] == 3


async def test_answers_from_the_cache_count_as_statements(api_with_files: Api) -> None:
    for _ in range(4):
        await api_with_files("POST", f"{T}/plan", {"filter": EQ_5})
    (shape,) = await load_shapes(api_with_files)
    sums = shape["sums"]
    assert (sums["statements"], sums["files-before"], sums["files-after"]) == (4, 120, 4)


async def test_each_request_for_a_shared_plan_table_counts_as_a_statement(api_with_files: Api) -> None:
    for _ in range(3):
        answer = await api_with_files("POST", "/api/v1/tables/db/t/plan-tables", {"predicate": "id = 5"})
        assert answer.status == 200, answer.raw
    (shape,) = await load_shapes(api_with_files)
    assert (shape["conditions"], shape["sums"]["statements"]) == (["id = ?"], 3)
    assert (shape["sums"]["bytes-before"], shape["sums"]["bytes-after"]) == (900_000, 30_000)


async def test_scan_report_is_recorded_as_a_query_shape_without_literals(api_with_files: Api) -> None:
    report = {
        "report-type": "scan-report",
        "table-name": "db.t",
        "snapshot-id": 1,
        "filter": {"type": "eq", "term": "ID", "value": "(1-digit-int)"},
        "schema-id": 0,
        "projected-field-ids": [1],
        "projected-field-names": ["id"],
        "metrics": {
            "result-data-files": {"unit": "count", "value": 4},
            "total-file-size-in-bytes": {"unit": "bytes", "value": 4000},
        },
        "metadata": {"engine-name": "spark"},
    }
    assert (await api_with_files("POST", f"{T}/metrics", report)).status == 204
    hostile_report = report | {
        "metadata": {"engine-name": f"x{SECRET}"},
        "filter": {"type": "eq", "term": f"c{SECRET}", "value": 1},
    }
    assert (await api_with_files("POST", f"{T}/metrics", hostile_report)).status == 204
    unknown_report = report | {"snapshot-id": 99}
    assert (await api_with_files("POST", f"{T}/metrics", unknown_report)).status == 204
    first_shape, second_shape = sorted(await load_shapes(api_with_files), key=lambda shape: shape["engine"] == "other")
    assert (first_shape["engine"], first_shape["conditions"], first_shape["columns"]) == ("spark", ["id = ?"], ["id"])
    assert first_shape["sums"]["files-after"] == 4
    assert (second_shape["engine"], second_shape["conditions"]) == ("other", [])


async def test_no_literal_reaches_the_database_unless_a_setting_keeps_it(tmp_path: Path) -> None:
    for literals, is_stored in (("dropped", False), ("hashed", False), ("kept", True)):
        home = tmp_path / literals
        home.mkdir()
        async with run_server(home, query_history_literals=literals) as server:
            api = Api(server)
            await api.create_table()
            await append_files(api, "t", build_ten_id_files(30), snapshot_id=1)
            hostile_term = {"type": "transform", "transform": f"truncate[{SECRET}]", "term": "data"}
            for filter in (
                build_comparison("eq", SECRET),
                make_conjunction(build_comparison("gt", SECRET), build_comparison("lt", SECRET + 1)),
                {"type": "in", "term": "data", "values": [str(SECRET), f"a{SECRET}"]},
                {"type": "eq", "term": hostile_term, "value": str(SECRET)},
                build_comparison("eq", 1, f"c{SECRET}"),
            ):
                await api("POST", f"{T}/plan", {"filter": filter})
                await api("POST", "/api/v1/tables/db/t/plan-tables", {"filter": filter})
            assert str(SECRET) not in str(await load_shapes(api))
        with sqlite3.connect(home / "seamark.db") as database:
            rows = database.execute("SELECT shape, samples FROM query_shapes").fetchall()
        assert len(rows) >= 4
        assert (str(SECRET) in str(rows)) is is_stored, (literals, rows)


async def test_history_survives_a_restart(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
        await api("POST", f"{T}/plan", {"filter": EQ_5})
    async with run_server(tmp_path) as server:
        (shape,) = await load_shapes(Api(server))
        assert shape["sums"]["statements"] == 1


async def create_logins(home: Path, *grants: Grant) -> list[dict[str, str]]:
    """Create a token for each grant, and return the headers with which the principals log in."""
    clock = SystemClock()
    async with open_store(f"sqlite:///{home}/seamark.db", clock=clock, queue_limit=10) as store:
        tokens = [await create_token(store, clock, grant.principal, ttl_s=None, grants=[grant]) for grant in grants]
    return [{"Authorization": f"Bearer {token}"} for token in tokens]


async def create_table_as(login: dict[str, str], server: RunningServer) -> Api:
    """Create `db.t` with three files, and return a client that sends the headers `login`."""
    server.http.headers.update(login)
    api = Api(server)
    await api("POST", "/v1/namespaces", {"namespace": ["db"]})
    await api.create_table()
    await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
    return api


async def test_one_principal_cannot_use_the_whole_limit_of_shapes(tmp_path: Path) -> None:
    """The history stores statements by shape: the statement without its literals. The number of shapes is limited."""
    names = {"root": "admin", "mallory": "reader", "rita": "reader"}
    root, mallory, rita = await create_logins(tmp_path, *(Grant(name, role) for name, role in names.items()))
    async with run_server(tmp_path, auth="token", query_history_shapes=8) as server:
        api = await create_table_as(root, server)
        filters = [build_comparison(op, 5) for op in ("lt", "lt-eq", "gt", "gt-eq", "eq", "not-eq")]
        for filter in filters:
            for select in ([], ["id"], ["data"], ["id", "data"]):
                await api("POST", f"{T}/plan", {"filter": filter, "select": select}, headers=mallory)
        await server.components.history.flush()
        await api("POST", f"{T}/plan", {"filter": build_comparison("starts-with", "a", "data")}, headers=rita)
        shapes = await load_shapes(api)
        assert sum(shape["sums"]["statements"] for shape in shapes) == 25  # 24 of Mallory and one of Rita
        # One principal may use a quarter of the 8 shapes, so 2 of Mallory's 24 statements are stored with their shapes.
        # The other 22 are counted together, in an entry without a fingerprint.
        assert [shape["sums"]["statements"] for shape in shapes if not shape["fingerprint"]] == [22]
        assert any(shape["conditions"] == ["data starts with ?"] for shape in shapes)
        assert "mallory" not in str(shapes)


async def test_reader_sees_only_the_history_of_tables_that_he_may_read(tmp_path: Path) -> None:
    grants = Grant("root", "admin"), Grant("rita", "reader", ("db",)), Grant("bob", "reader", ("other",))
    root, rita, bob = await create_logins(tmp_path, *grants)
    async with run_server(tmp_path, auth="token") as server:
        api = await create_table_as(root, server)
        await api("POST", f"{T}/plan", {"filter": EQ_5})
        assert (await api("GET", HISTORY, headers=rita)).status == 200
        assert [table["table"] for table in (await api("GET", "/api/v1/history", headers=rita)).json["tables"]] == ["t"]
        assert (await api("GET", HISTORY, headers=bob)).status == 403
        assert (await api("GET", "/api/v1/history", headers=bob)).json["tables"] == []


async def test_failure_of_one_table_does_not_lose_statements_of_other_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        for name in ("a", "b"):
            await api.create_table(name)
            await append_files(api, name, build_ten_id_files(3), snapshot_id=1)
            assert (await api("POST", f"/v1/namespaces/db/tables/{name}/plan", {"filter": EQ_5})).status == 200
        transact, refused_operations = type(server.components.store).transact, []

        async def refuse_first(store: Any, operations: Any, *args: Any, **options: Any) -> Any:
            if isinstance(operations[0], AddQueryRecords) and not refused_operations:
                refused_operations.append(operations)
                raise StorageError("integer overflow")
            return await transact(store, operations, *args, **options)

        monkeypatch.setattr(type(server.components.store), "transact", refuse_first)
        await server.components.history.flush()
        assert len(refused_operations) == 1
        (table,) = (await api("GET", "/api/v1/history")).json["tables"]
        assert (table["table"], table["sums"]["statements"]) == ("b", 1)


async def test_failing_sampler_loses_only_its_sample(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
        await api("POST", f"{T}/plan", {"filter": EQ_5})
        (counts,) = server.components.history._counts.values()

        def fail() -> None:
            raise ValueError("a bound has another type")

        counts.samplers.append(fail)
        (shape,) = await load_shapes(api)
        assert (shape["sums"]["statements"], shape["sums"]["sized-statements"]) == (1, 1)


async def test_long_filters_and_many_files_are_not_kept_for_samples(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = api_with_files.server.components.history
    long_filter = {"filter": {"type": "in", "term": "id", "values": list(range(300))}}
    cases = ((long_filter, 20_000, "bound"), ({}, 5, "entry_ids"))
    for sampler_count, (body, files_max, missing_name) in enumerate(cases, 1):
        monkeypatch.setattr(statement_reads, "_SAMPLED_FILES_MAX", files_max)
        await api_with_files("POST", f"{T}/plan", body)
        samplers = [sampler for counts in history._counts.values() for sampler in counts.samplers]
        assert len(samplers) == sampler_count
        nonlocals = inspect.getclosurevars(samplers[-1]).nonlocals
        assert [name for name in ("bound", "entry_ids") if nonlocals[name] is None] == [missing_name]
    assert sum(shape["sums"]["sized-statements"] for shape in await load_shapes(api_with_files)) == 1


async def test_samplers_share_a_limited_memory(api_with_files: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_history, "_SAMPLERS_BYTES_MAX", 0)
    await api_with_files("POST", f"{T}/plan", {"filter": EQ_5})
    (shape,) = await load_shapes(api_with_files)
    assert (shape["sums"]["statements"], shape["sums"]["sized-statements"]) == (1, 0)


async def test_old_rows_are_removed_although_the_merge_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path) as server:
        pruned_hour_limits = []

        async def fail_merge(store: Any, hour_limit: int, limit: int, period_hours: int) -> int:
            raise StorageError("integer overflow")

        async def prune(store: Any, hour_limit: int, limit: int) -> int:
            pruned_hour_limits.append(hour_limit)
            return 0

        monkeypatch.setattr(type(server.components.store), "merge_query_hours", fail_merge)
        monkeypatch.setattr(type(server.components.store), "prune_queries", prune)
        with pytest.raises(StorageError, match="integer overflow"):
            await server.components.history.prune()
        assert len(pruned_hour_limits) == 1


async def test_setting_disables_the_query_history(tmp_path: Path) -> None:
    async with run_server(tmp_path, query_history_days=0) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
        await api("POST", f"{T}/plan", {"filter": EQ_5})
        answer = (await api("GET", HISTORY)).json
        assert (answer["shapes"], "query_history_days" in answer["reason"]) == ([], True)
        assert (await api("GET", "/api/v1/history")).json["tables"] == []


@pytest.mark.parametrize("query", ["days=0", "days=x", "limit=9999999"])
async def test_wrong_number_is_refused(api_with_files: Api, query: str) -> None:
    assert (await api_with_files("GET", f"{HISTORY}?{query}")).error[0] == 400


async def test_reported_groupings_and_aggregates_are_recorded_without_the_texts_of_the_client(
    api_with_files: Api,
) -> None:
    body = {
        **{"predicate": "id > 3", "kept-max": 0, "grouping": ["data", "secret of mallory"]},
        "aggregates": [
            *({"function": "sum", "column": "id"}, {"function": "count"}),
            *({"function": "my secret", "column": "id"}, {"function": "sum", "column": "no such column"}),
        ],
    }
    path = "/api/v1/tables/db/t/plan-tables"
    assert (await api_with_files("POST", path, body)).status == 200
    (shape,) = await load_shapes(api_with_files)
    assert (shape["grouping"], shape["aggregates"]) == (["data"], ["count(*)", "other(id)", "sum(id)"])
    assert "secret" not in str(shape)
    for field, entry in (("grouping", "id"), ("aggregates", {"function": "sum", "column": "id"})):
        refusal = await api_with_files("POST", path, {field: [entry] * 33})
        assert (refusal.status, refusal.error[0]) == (400, 400)


async def test_reported_columns_joins_and_engine_are_recorded_in_any_case_of_letters(api_with_files: Api) -> None:
    reported_use = {"engine": "seamark", "join-columns": ["DATA"], "aggregates": [{"function": "max", "column": "Id"}]}
    body = {"filter": EQ_5, "select": ["ID"], "seamark": {"use": reported_use}}
    plan_table = {"predicate": "id = 5", "columns": ["ID"], **reported_use, "engine": "a text of mallory"}
    assert (await api_with_files("POST", f"{T}/plan", body)).status == 200
    assert (await api_with_files("POST", "/api/v1/tables/db/t/plan-tables", plan_table)).status == 200
    request_body = {"filter": EQ_5, "select": ["ID"], "seamark": {"use": {"counts": False}}}
    assert (await api_with_files("POST", f"{T}/plan", request_body)).status == 200
    shapes = await load_shapes(api_with_files)
    assert sorted(shape["engine"] for shape in shapes) == ["other", "seamark"]
    for shape in shapes:
        assert (shape["columns"], shape["joins"], shape["aggregates"]) == (["id"], ["data"], ["max(id)"])
        assert shape["sums"]["statements"] == 1


async def test_times_of_engines_add_up_for_statements_that_the_history_has(api_with_files: Api) -> None:
    """An engine reports how long a statement ran, by its shape: the fingerprint of the statement without literals."""
    times_path = f"{HISTORY}/times"
    body = {"filter": EQ_5, "seamark": {"use": {"engine": "seamark"}}}
    statement = (await api_with_files("POST", f"{T}/plan", body)).json["seamark-statement"]
    report = {"statement": statement, "seconds": 1.5, "files": 2, "bytes": 1000}
    for changes in ({}, {"seconds": 0.5}, {"statement": "0" * 16}):
        assert (await api_with_files("POST", times_path, report | changes)).status == 204
    # The first times are reported before the shape is loaded for the first time, and the last two afterwards. The
    # second round loads the sums with three of the four times of the statement.
    for _ in range(2):
        (shape,) = await load_shapes(api_with_files)
        assert (await api_with_files("POST", times_path, report)).status == 204
    sums = shape["sums"]
    assert (shape["fingerprint"], sums["statements"], sums["timed-statements"]) == (statement, 1, 3)
    assert (sums["run-us"], sums["timed-files"], sums["timed-bytes"]) == (3_500_000, 6, 3000)
    for bad_times in ({"seconds": 0}, {"seconds": 1e300}, {"statement": "x"}, {"files": -1}, {"bytes": 1 << 60}):
        assert (await api_with_files("POST", times_path, report | bad_times)).status == 400


async def test_one_principal_cannot_use_the_whole_limit_of_times(tmp_path: Path) -> None:
    async with run_server(tmp_path, query_history_waiting=4) as server:
        history, time = server.components.history, StatementTime(1.0, 1, 1)
        for number in range(9):
            history.add_time("uuid", f"{number:016}", "mallory", time)
        history.add_time("uuid", "f" * 16, "rita", time)
        assert list(history._times) == [("uuid", f"{0:016}"), ("uuid", f"{1:016}"), ("uuid", "f" * 16)]
