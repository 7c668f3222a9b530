"""Tests of the plan requests that Iceberg's Java library sends, and of the answer to each client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.index.files import DataFile as ListedFile
from seamark.connector.index.files import encode_index_file
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds import bitmap
from tests.api.client import SCHEMA, Api, build_property_commit
from tests.api.indexes.indexed import begin_build, define_index, register_files, write_index_file
from tests.api.plans.planned import (
    JAVA_HEADERS,
    PYICEBERG,
    T,
    append_files,
    build_data_file,
    build_ten_id_files,
    list_planned_numbers,
    read_all_pages,
)
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.metrics import ColumnMetrics
from tests.server.rig import run_server

FILE_COUNT = 12
TABLES = "/v1/namespaces/db/tables"
SHORT_RESIDUALS = {**JAVA_HEADERS, "X-Seamark-Residuals": "short"}
ALL_COLUMNS = {"select": ["id", "data"]}
ONE_COLUMN = {"select": ["id"]}
COLUMNS_OF_COPY_ON_WRITE = {"select": ["id", "data", "_file", "_pos"]}
COLUMNS_OF_MERGE = {"select": ["id", "_file", "_pos", "_spec_id", "_partition"]}
ODD_ID_FILTER: dict[str, Any] = {"type": "eq", "term": "id", "value": 15}


@pytest.fixture
async def indexed_api(tmp_path: Path) -> AsyncIterator[Api]:
    """Yield the API with `db.t`, whose index proves that no row has an odd id.

    The server splits answers of more than two files into pages of four.
    """
    async with run_server(tmp_path, plan_inline_limit=2, plan_page_size=4, index_wait_s=20.0) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(FILE_COUNT), snapshot_id=1)
        await define_index(api, kind="bitmap", columns=["id"])
        build = await begin_build(api)
        term = Term(1, "id", "identity", "long", "long")
        listed_files = [ListedFile(file.path, file.size, file.record_count) for file in build_ten_id_files(FILE_COUNT)]
        bitmaps = [
            bitmap.build_bitmap(convert_to_keys(pa.array(range(10 * n, 10 * n + 10, 2)), "long"))
            for n in range(FILE_COUNT)
        ]
        data = b"".join(
            encode_index_file(build["table-uuid"], IndexDefinition("i", "bitmap", (term,)), listed_files, bitmaps)
        )
        assert (await register_files(api, build, write_index_file(build, "i.puffin", data))).status == 200
        yield api


async def plan_numbers(api: Api, filter: Any, headers: dict[str, str], **fields: Any) -> list[int]:
    answer = await api("POST", f"{T}/plan", {"filter": filter, **fields}, headers=headers)
    return await read_all_pages(api, answer, headers=headers)


async def test_spark_gets_a_partly_matching_file_so_that_it_cannot_delete_by_metadata(indexed_api: Api) -> None:
    """Spark plans with all columns to decide whether it may delete by metadata.

    An empty plan would permit the delete.
    """
    for filter in (ODD_ID_FILTER, {"type": "in", "term": "id", "values": [15, 37]}):
        assert len(await plan_numbers(indexed_api, filter, JAVA_HEADERS, **ALL_COLUMNS)) == 1
        # The answer is empty if another client requests the same columns, or if Java requests other columns.
        for headers, parameters in (
            (PYICEBERG, ALL_COLUMNS),
            ({}, ALL_COLUMNS),
            (JAVA_HEADERS, ONE_COLUMN),
            (JAVA_HEADERS, COLUMNS_OF_COPY_ON_WRITE),
            (JAVA_HEADERS, COLUMNS_OF_MERGE),
            (JAVA_HEADERS, {}),
        ):
            assert await plan_numbers(indexed_api, filter, headers, **parameters) == []
    # An answer in pages also has a file: the index prunes all files, and the server adds one that partly matches.
    filter_of_odd_ids = {"type": "in", "term": "id", "values": list(range(15, 120, 20))}
    assert await plan_numbers(indexed_api, filter_of_odd_ids, JAVA_HEADERS, **ALL_COLUMNS) == [1]


async def test_no_file_is_added_when_statistics_keep_none_or_a_file_remains(indexed_api: Api) -> None:
    for filter, file_numbers in (
        ({"type": "eq", "term": "id", "value": 5000}, []),
        ({"type": "eq", "term": "id", "value": 14}, [1]),
        ({"type": "in", "term": "id", "values": [14, 15, 37, 38, 51, 52, 53, 55, 70]}, [1, 3, 5, 7]),
        ({"type": "and", "left": ODD_ID_FILTER, "right": {"type": "eq", "term": "data", "value": "zz"}}, []),
    ):
        assert await plan_numbers(indexed_api, filter, JAVA_HEADERS, **ALL_COLUMNS) == file_numbers


async def test_lists_that_iceberg_does_not_compare_with_bounds_count_as_not_pruned(indexed_api: Api) -> None:
    """A request for all columns may be Spark's check whether it can delete whole files.

    Iceberg's library then compares the filter with the statistics of all files, but not a list of more than 200 values,
    and fails because it keeps every file. So the server adds a file that prevents this kind of delete.
    """
    filter_of_201_values = {"type": "in", "term": "id", "values": list(range(5000, 5201))}
    assert await plan_numbers(indexed_api, filter_of_201_values, JAVA_HEADERS, **ALL_COLUMNS) == [0]
    assert await plan_numbers(indexed_api, filter_of_201_values, JAVA_HEADERS, **ONE_COLUMN) == []
    filter_of_200_values = {"type": "in", "term": "id", "values": list(range(5000, 5200))}
    assert await plan_numbers(indexed_api, filter_of_200_values, JAVA_HEADERS, **ALL_COLUMNS) == []


async def test_residual_skips_no_row_group_if_the_client_may_rewrite_the_file(indexed_api: Api) -> None:
    """A client that rewrites a file must read all of its rows, also those that do not match the filter.

    The selected columns show that a client may rewrite files, because Iceberg's Java library does not send its option
    `ignoreResiduals`. Its reader skips row groups in which no row satisfies the residual, so rows would be lost. It
    cannot skip row groups by a condition on the transform `identity`.
    """
    plain_filter = {"type": "eq", "term": "id", "value": 14}
    identity_filter = {**plain_filter, "term": {"type": "transform", "transform": "identity", "term": "id"}}

    async def read_residual(headers: dict[str, str], **options: Any) -> Any:
        answer = await indexed_api("POST", f"{T}/plan", {"filter": plain_filter, **options}, headers=headers)
        (task,) = answer.json["file-scan-tasks"]
        return task["residual-filter"]

    for headers, parameters, residual in (
        (JAVA_HEADERS, ALL_COLUMNS, identity_filter),
        (JAVA_HEADERS, COLUMNS_OF_COPY_ON_WRITE, identity_filter),
        (JAVA_HEADERS, {"select": ["_file"]}, identity_filter),
        (JAVA_HEADERS, COLUMNS_OF_MERGE, identity_filter),
        (JAVA_HEADERS, ONE_COLUMN, plain_filter),
        (JAVA_HEADERS, {}, plain_filter),
        (SHORT_RESIDUALS, ALL_COLUMNS, True),
        (SHORT_RESIDUALS, COLUMNS_OF_COPY_ON_WRITE, True),
        (SHORT_RESIDUALS, ONE_COLUMN, plain_filter),
        (PYICEBERG, ALL_COLUMNS, plain_filter),
        ({}, COLUMNS_OF_COPY_ON_WRITE, plain_filter),
    ):
        assert await read_residual(headers, **parameters) == residual, (headers, parameters)
    modes = {f"write.{statement}.mode": "merge-on-read" for statement in ("delete", "update", "merge")}
    assert (await indexed_api("POST", T, build_property_commit(**modes))).status == 200
    assert await read_residual(JAVA_HEADERS, **COLUMNS_OF_MERGE) == plain_filter, (
        "merge-on-read does not rewrite the remaining rows of a file"
    )
    assert await read_residual(JAVA_HEADERS, **COLUMNS_OF_COPY_ON_WRITE) == identity_filter


async def test_orc_files_that_may_be_rewritten_have_no_residual(api_with_files: Api) -> None:
    """Iceberg's ORC reader skips rows by predicates on transforms too, so the residual of an ORC file is true.

    A scan of all columns may be the start of a rewrite, which must read all rows of its files.
    """
    await api_with_files.create_table("mixed")
    files = [
        build_data_file("file:///t/data/0.parquet", low=0, high=9),
        replace(build_data_file("file:///t/data/1.orc", low=0, high=9), format="ORC"),
    ]
    await append_files(api_with_files, "mixed", files, snapshot_id=7)
    answer = await api_with_files(
        "POST", f"{TABLES}/mixed/plan", {"filter": {**ODD_ID_FILTER, "value": 4}, **ALL_COLUMNS}, headers=JAVA_HEADERS
    )
    residuals_by_format = {
        task["data-file"]["file-format"]: task["residual-filter"] for task in answer.json["file-scan-tasks"]
    }
    assert residuals_by_format["orc"] is True
    assert residuals_by_format["parquet"]["term"]["transform"] == "identity"


async def test_nested_columns_and_columns_of_another_schema_count_as_all_columns(api_with_files: Api) -> None:
    """A request for all columns may come from a client that rewrites files and must read all of their rows.

    Its residual has the term `identity(id)` in place of `id`, because Java's reader skips no row group by such a term.
    """
    struct = {"type": "struct", "fields": [{"id": 4, "name": "a", "required": False, "type": "int"}]}
    fields = [*SCHEMA["fields"], {"id": 3, "name": "st", "required": False, "type": struct}]
    await api_with_files.create_table("deep", schema={**SCHEMA, "fields": fields})
    await append_files(api_with_files, "deep", build_ten_id_files(1), snapshot_id=7)
    residual_terms = []
    for select in (["id", "data", "st", "st.a"], ["id", "data", "st"], ["id", "data"]):
        body = {
            "filter": {**ODD_ID_FILTER, "value": 4},
            "select": select,
            "snapshot-id": 7,
            "use-snapshot-schema": True,
        }
        answer = await api_with_files("POST", f"{TABLES}/deep/plan", body, headers=JAVA_HEADERS)
        residual_terms.append(answer.json["file-scan-tasks"][0]["residual-filter"]["term"])
    assert residual_terms[1:] == ["id", "id"]
    assert residual_terms[0]["transform"] == "identity"
    schema_update = {
        "requirements": [],
        "updates": [
            {"action": "add-schema", "schema": {**SCHEMA, "schema-id": 1, "fields": fields[:2]}},
            {"action": "set-current-schema", "schema-id": -1},
        ],
    }
    assert (await api_with_files("POST", f"{TABLES}/deep", schema_update)).status == 200
    body = {"filter": {**ODD_ID_FILTER, "value": 4}, "select": ["id", "data"]}
    for parameters in ({}, {"snapshot-id": 7, "use-snapshot-schema": True}):
        answer = await api_with_files("POST", f"{TABLES}/deep/plan", {**body, **parameters}, headers=JAVA_HEADERS)
        assert answer.json["file-scan-tasks"][0]["residual-filter"]["term"] != "id", parameters


NAN_COUNTS = (0, 1, 10, None)
"""The number of NaN in each file of `db.doubles`, which has ten rows. None is an unknown number."""


@pytest.fixture
async def doubles_api(api_with_files: Api) -> Api:
    """Return the API with `db.doubles`. All numbers in its files that are not NaN are between 0 and 1."""
    double_field = {"id": 1, "name": "x", "required": False, "type": "double"}
    await api_with_files.create_table("doubles", schema={**SCHEMA, "fields": [double_field, SCHEMA["fields"][1]]})
    files = []
    for number, nan_count in enumerate(NAN_COUNTS):
        # A file whose 10 rows are all NaN has no bounds.
        bounds = (None, None) if nan_count == 10 else (to_bytes("double", 0.0), to_bytes("double", 1.0))
        metrics = {1: ColumnMetrics(10, 0, nan_count, *bounds)}
        files.append(
            replace(build_data_file(f"file:///t/data/{number}.parquet", low=0, high=9, rows=10), metrics=metrics)
        )
    await append_files(api_with_files, "doubles", files, snapshot_id=7, kinds={1: "double", 2: "string"})
    return api_with_files


async def test_files_with_nan_are_kept_for_clients_where_nan_is_the_greatest_value(doubles_api: Api) -> None:
    def build_comparison(op: str, value: float) -> dict[str, Any]:
        return {"type": op, "term": "x", "value": value}

    path = f"{TABLES}/doubles/plan"
    range_filter = {"type": "and", "left": build_comparison("gt", 3.0), "right": build_comparison("lt", 9.0)}
    for filter, kept_files in (
        (build_comparison("gt", 3.0), [1, 2, 3]),
        (build_comparison("gt-eq", 3.0), [1, 2, 3]),
        ({"type": "not", "child": build_comparison("lt", 3.0)}, [1, 2, 3]),
        ({"type": "not", "child": build_comparison("lt-eq", 3.0)}, [1, 2, 3]),
        (build_comparison("gt", 0.5), [0, 1, 2, 3]),
        (build_comparison("lt", -3.0), []),
        ({"type": "not", "child": build_comparison("gt", -3.0)}, []),
        (build_comparison("eq", 3.0), []),
        ({"type": "is-nan", "term": "x"}, [1, 2, 3]),
        (range_filter, []),
    ):
        for headers in (JAVA_HEADERS, SHORT_RESIDUALS, {}, {"User-Agent": "DuckDB/1.5"}):
            assert (
                list_planned_numbers(await doubles_api("POST", path, {"filter": filter}, headers=headers)) == kept_files
            ), filter
    assert (
        list_planned_numbers(
            await doubles_api("POST", path, {"filter": build_comparison("gt", 3.0)}, headers=PYICEBERG)
        )
        == []
    )
    assert list_planned_numbers(
        await doubles_api("POST", path, {"filter": build_comparison("gt", 0.5)}, headers=PYICEBERG)
    ) == [0, 1, 3]


async def test_residual_tests_for_nan_only_in_files_that_may_have_it(doubles_api: Api) -> None:
    """The bounds of row groups do not include NaN.

    If the residual tests for NaN, Iceberg's reader does not skip row groups that may have NaN.
    """
    plain_filter = {"type": "gt", "term": "x", "value": 0.5}
    filter_with_nan_test = {"type": "or", "left": plain_filter, "right": {"type": "is-nan", "term": "x"}}
    answer = await doubles_api("POST", f"{TABLES}/doubles/plan", {"filter": plain_filter}, headers=JAVA_HEADERS)
    assert [task["residual-filter"] for task in answer.json["file-scan-tasks"]] == [
        plain_filter,
        filter_with_nan_test,
        filter_with_nan_test,
        filter_with_nan_test,
    ]
    both_conditions = {"type": "or", "left": plain_filter, "right": {"type": "eq", "term": "data", "value": "b"}}
    answer = await doubles_api(
        "POST", f"{TABLES}/doubles/plan", {"filter": both_conditions, **ONE_COLUMN}, headers=JAVA_HEADERS
    )
    nan_counts = [str(task["residual-filter"]).count("is-nan") for task in answer.json["file-scan-tasks"]]
    assert nan_counts == [0, 1, 1, 1]


async def test_server_plans_a_plan_table_whose_filter_nan_may_match(doubles_api: Api) -> None:
    """Iceberg's library, which `seamark.spark.sql` uses, prunes files and row groups that have only NaN.

    Spark's `x > 3` matches NaN, so the library must not prune such a table: the server plans it.
    """

    async def request_planning_mode(predicate: str) -> str:
        route = "/api/v1/tables/db/doubles/plan-tables"
        plan = await doubles_api("POST", route, {"predicate": predicate, "kept-max": 1.0})
        assert plan.status == 200, plan.raw
        mode = (await doubles_api("GET", f"{TABLES}/{plan.json['name']}")).json["config"]["scan-planning-mode"]
        assert isinstance(mode, str)
        return mode

    modes = [
        await request_planning_mode(predicate)
        for predicate in ("x > 3", "NOT (x < 3)", "x > 3 AND x < 9", "data = 'b'")
    ]
    assert modes == ["server", "server", "client", "client"]
    change = build_property_commit(**{"seamark.scan-planning-mode": "client"})
    assert (await doubles_api("POST", f"{TABLES}/doubles", change)).status == 200
    assert await request_planning_mode("x > 4") == "client"


async def test_only_seamarks_clients_get_functions_of_columns_as_terms(api: Api) -> None:
    await api.create_table()
    await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
    term = {"type": "transform", "transform": "lower", "term": "data"}
    body = {"filter": {"type": "eq", "term": term, "value": "a"}}
    own_options = {"residuals": False, "functions": True}
    refusal = await api("POST", f"{T}/plan", body)
    assert (refusal.status, refusal.json["error"]["message"]) == (400, "Cannot bind data: unknown transform lower")
    refusal = await api("POST", f"{T}/plan", {**body, "seamark": {**own_options, "residuals": True}})
    assert (refusal.status, "residuals: false" in refusal.json["error"]["message"]) == (400, True)
    assert len((await api("POST", f"{T}/plan", {**body, "seamark": own_options})).json["file-scan-tasks"]) == 3
    answer = await api("POST", "/api/v1/tables/db/t/plan-tables", body)
    assert (answer.status, answer.json["files"]) == (200, 3)
    filter_of_long_column = {"type": "eq", "term": {**term, "term": "id"}, "value": "a"}
    refusal = await api("POST", f"{T}/plan", {"filter": filter_of_long_column, "seamark": own_options})
    assert (refusal.status, "lower cannot transform the long values" in refusal.json["error"]["message"]) == (400, True)
    assert (await api("POST", "/api/v1/tables/db/t/plan-tables", {"predicate": "upper(data) = 'A'"})).json["files"] == 3
