"""Two columns that swap names while somebody writes by one of them: rows are those of one schema, never of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import BadRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read import scans as reading
from seamark.connector.read.scans import scan
from seamark.connector.write import row_locations as locating
from seamark.connector.write import upserts
from seamark.connector.write.appends import append, overwrite
from seamark.connector.write.upserts import delete, upsert
from tests.connector.write.test_upserts import MODES, create
from tests.connector.write.test_upserts_at_once import meanwhile


def fields(*names: str) -> list[dict[str, Any]]:
    return [{"id": n, "name": name, "required": False, "type": "long"} for n, name in enumerate(names, 1)]


def swap(client: IndexClient) -> None:
    schema = {"type": "struct", "schema-id": 1, "fields": fields("b", "a")}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
    body = json.dumps({"requirements": [], "updates": updates}).encode()
    client._request("POST", "/v1/namespaces/db/tables/t", {}, body)


def fill(client: IndexClient, *rows: tuple[int, int], properties: Mapping[str, str] | None = None) -> None:
    create(client, fields=fields("a", "b"), properties=properties)
    for a, b in rows:
        append(client, "db.t", pa.table({"a": [a], "b": [b]}))


def held(client: IndexClient) -> list[tuple[int, int]]:
    """Of each row the columns by their ids."""
    table = scan(client, "db.t").to_arrow()
    return sorted(zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True))


def swapped_before_plan(monkeypatch: pytest.MonkeyPatch, module: Any, client: IndexClient) -> None:
    real = module.plan

    def plan(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(module, "plan", real)
        swap(client)
        return real(*args, **named)

    monkeypatch.setattr(module, "plan", plan)


def test_an_overwrite_replaces_what_its_names_meant_when_it_began(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, (1, 2), (2, 1))
    meanwhile(monkeypatch, lambda: swap(client))
    overwrite(client, "db.t", pa.table({"a": [1], "b": [77]}), where="a = 1")
    assert held(client) == [(1, 77), (2, 1)]


@pytest.mark.parametrize("mode", MODES)
def test_an_upsert_that_a_swap_and_its_key_have_overtaken_is_done_anew(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, (5, 50))

    def other() -> None:
        swap(client)
        append(client, "db.t", pa.table({"b": [9], "a": [1]}))

    meanwhile(monkeypatch, other)
    assert upsert(client, "db.t", pa.table({"a": [1], "b": [7]}), keys=["a"], mode=mode).attempts == 2
    assert held(client) == [(5, 50), (7, 1)], "the key is the second column by now, and there is one row of it"


@pytest.mark.parametrize("mode", MODES)
def test_an_upsert_and_a_delete_find_the_rows_of_their_names_though_these_change_before_the_plan(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, (1, 50), (50, 1))
    swapped_before_plan(monkeypatch, locating, client)
    assert upsert(client, "db.t", pa.table({"a": [1], "b": [7]}), keys=["a"], mode=mode).updated == 1
    assert held(client) == [(1, 50), (7, 1)]
    client._request("DELETE", "/v1/namespaces/db/tables/t", {})
    fill(client, (1, 2), (2, 1))
    swapped_before_plan(monkeypatch, upserts, client)
    assert delete(client, "db.t", where="a = 1", mode=mode).deleted == 1
    assert held(client) == [(1, 2)]


@pytest.mark.parametrize("properties", [{}, {"seamark.index.a": "bitmap(a)", "seamark.index.b": "bitmap(b)"}])
def test_a_scan_is_by_the_names_of_the_schema_that_it_has_loaded(
    client: IndexClient, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, (1, 2), (2, 1), properties=properties)
    swapped_before_plan(monkeypatch, reading, client)
    assert scan(client, "db.t", where="a = 1").to_arrow().to_pylist() == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_nan_that_came_meanwhile_are_deleted_by_a_filter_in_json_too(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(client, fields=[{"id": 1, "name": "x", "required": False, "type": "double"}])
    append(client, "db.t", pa.table({"x": [1.0, 9.0]}))
    meanwhile(monkeypatch, lambda: append(client, "db.t", pa.table({"x": [float("nan")]})))
    delete(client, "db.t", where={"type": "gt", "term": "x", "value": 5.0}, mode=mode)
    assert scan(client, "db.t").to_arrow().to_pylist() == [{"x": 1.0}]


def test_a_schema_that_the_table_does_not_have_is_refused(client: IndexClient) -> None:
    fill(client, (1, 2))
    asked = json.dumps({"filter": {"type": "eq", "term": "a", "value": 1}, "seamark": {"schema-id": 7}}).encode()
    with pytest.raises(BadRequest, match=r"no schema 7|schema-id is 7"):
        client._request("POST", "/v1/namespaces/db/tables/t/plan", {}, asked)
    body = {"schema-id": 7, "replace": {"filter": {"type": "eq", "term": "a", "value": 1}}, "add": []}
    with pytest.raises(BadRequest, match=r"no schema 7|schema-id is 7"):
        client._request("POST", "/api/v1/tables/db/t/commit", {}, json.dumps(body).encode())
