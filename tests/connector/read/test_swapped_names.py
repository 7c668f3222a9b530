"""Two columns swap their names during a write; the rows always belong to one schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read import scans as reading
from seamark.connector.read.scans import scan
from seamark.connector.write import row_locations as locating
from seamark.connector.write import upserts
from seamark.connector.write.appends import append, overwrite
from seamark.connector.write.upserts import delete, upsert
from tests.connector.write.test_upserts import MODES, create_upsert_table
from tests.connector.write.test_upserts_at_once import run_before_commits


def build_fields(*names: str) -> list[dict[str, Any]]:
    return [{"id": n, "name": name, "required": False, "type": "long"} for n, name in enumerate(names, 1)]


def swap_names(client: IndexClient) -> None:
    schema = {"type": "struct", "schema-id": 1, "fields": build_fields("b", "a")}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
    body = json.dumps({"requirements": [], "updates": updates}).encode()
    client._request("POST", "/v1/namespaces/db/tables/t", {}, body)


def create_and_fill_table(
    client: IndexClient, *rows: tuple[int, int], properties: Mapping[str, str] | None = None
) -> None:
    create_upsert_table(client, fields=build_fields("a", "b"), properties=properties)
    for a, b in rows:
        append(client, "db.t", pa.table({"a": [a], "b": [b]}))


def read_rows(client: IndexClient) -> list[tuple[int, int]]:
    """Return (first column, second column) of each row in the order of the rows' values."""
    table = scan(client, "db.t").to_arrow()
    return sorted(zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True))


def swap_before_plan(monkeypatch: pytest.MonkeyPatch, module: Any, client: IndexClient) -> None:
    plan_scan = module.plan

    def swap_and_plan(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "plan", plan_scan)
        swap_names(client)
        return plan_scan(*args, **options)

    monkeypatch.setattr(module, "plan", swap_and_plan)


def test_overwrite_uses_the_column_names_from_its_start(client: IndexClient, monkeypatch: pytest.MonkeyPatch) -> None:
    create_and_fill_table(client, (1, 2), (2, 1))
    run_before_commits(monkeypatch, lambda: swap_names(client))
    overwrite(client, "db.t", pa.table({"a": [1], "b": [77]}), where="a = 1")
    assert read_rows(client) == [(1, 77), (2, 1)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_upsert_is_repeated_after_a_concurrent_swap_and_append(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_and_fill_table(client, (5, 50))

    def swap_and_commit() -> None:
        swap_names(client)
        append(client, "db.t", pa.table({"b": [9], "a": [1]}))

    run_before_commits(monkeypatch, swap_and_commit)
    assert upsert(client, "db.t", pa.table({"a": [1], "b": [7]}), keys=["a"], mode=mode).attempts == 2
    assert read_rows(client) == [(5, 50), (7, 1)], "the key is now the second column, and one row has the key 7"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_upsert_and_delete_use_the_names_from_before_a_swap_of_columns(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_and_fill_table(client, (1, 50), (50, 1))
    swap_before_plan(monkeypatch, locating, client)
    assert upsert(client, "db.t", pa.table({"a": [1], "b": [7]}), keys=["a"], mode=mode).updated == 1
    assert read_rows(client) == [(1, 50), (7, 1)]
    client._request("DELETE", "/v1/namespaces/db/tables/t", {})
    create_and_fill_table(client, (1, 2), (2, 1))
    swap_before_plan(monkeypatch, upserts, client)
    assert delete(client, "db.t", where="a = 1", mode=mode).deleted == 1
    assert read_rows(client) == [(1, 2)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("properties", [{}, {"seamark.index.a": "bitmap(a)", "seamark.index.b": "bitmap(b)"}])
def test_scan_uses_the_names_of_the_schema_that_it_loaded(
    client: IndexClient, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create_and_fill_table(client, (1, 2), (2, 1), properties=properties)
    swap_before_plan(monkeypatch, reading, client)
    assert scan(client, "db.t", where="a = 1").to_arrow().to_pylist() == [{"a": 1, "b": 2}]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_delete_by_a_json_filter_includes_nan_rows_of_a_concurrent_append(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, fields=[{"id": 1, "name": "x", "required": False, "type": "double"}])
    append(client, "db.t", pa.table({"x": [1.0, 9.0]}))
    run_before_commits(monkeypatch, lambda: append(client, "db.t", pa.table({"x": [float("nan")]})))
    delete(client, "db.t", where={"type": "gt", "term": "x", "value": 5.0}, mode=mode)
    assert scan(client, "db.t").to_arrow().to_pylist() == [{"x": 1.0}]


def test_request_with_an_unknown_schema_id_is_refused(client: IndexClient) -> None:
    create_and_fill_table(client, (1, 2))
    request = json.dumps({"filter": {"type": "eq", "term": "a", "value": 1}, "seamark": {"schema-id": 7}}).encode()
    with pytest.raises(InvalidRequest, match=r"no schema 7|schema-id is 7"):
        client._request("POST", "/v1/namespaces/db/tables/t/plan", {}, request)
    body = {"schema-id": 7, "replace": {"filter": {"type": "eq", "term": "a", "value": 1}}, "add": []}
    with pytest.raises(InvalidRequest, match=r"no schema 7|schema-id is 7"):
        client._request("POST", "/api/v1/tables/db/t/commit", {}, json.dumps(body).encode())
