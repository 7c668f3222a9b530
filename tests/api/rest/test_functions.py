"""Tests of functions over HTTP: the standard lists and loads them."""

from __future__ import annotations

from seamark.metaserver.catalog.values import Caller
from tests.api.client import Api, build_function_document

FUNCTIONS = "/v1/namespaces/db/functions"
CALLER = Caller(principal_name="tester", request_id="test")


async def test_functions_are_listed_by_their_full_name(api: Api) -> None:
    for name in ("f", "g"):
        await api.server.components.catalog.functions.put(CALLER, ("db",), name, build_function_document())
    assert (await api("GET", FUNCTIONS)).json == {"identifiers": [["db", "f"], ["db", "g"]], "next-page-token": None}
    assert (await api("GET", "/v1/namespaces/none/functions")).error[:2] == (404, "NoSuchNamespaceException")


async def test_function_is_created_replaced_and_dropped_through_seamarks_api(api: Api) -> None:
    function_url, document = "/api/v1/functions/db/f", build_function_document()
    put_answer = await api("PUT", function_url, document)
    assert (put_answer.status, put_answer.json["metadata"]) == (200, document)
    replacement = {**document, "doc": "adds one"}
    assert (await api("PUT", function_url, replacement)).status == 200
    assert (await api("GET", f"{FUNCTIONS}/f")).json["metadata"] == replacement
    other_answer = await api("PUT", function_url, build_function_document())
    assert other_answer.error[:2] == (400, "BadRequestException")
    assert "function-uuid" in other_answer.error[2]
    assert (await api("PUT", function_url, {**document, "format-version": 2})).error[0] == 400
    assert (await api("PUT", "/api/v1/functions/none/f", document)).error[:2] == (404, "NoSuchNamespaceException")
    answer = await api("PUT", "/api/v1/functions/db/g", document)
    assert answer.error[0] == 400
    assert document["function-uuid"] in answer.error[2]
    assert (await api("DELETE", function_url)).status == 204
    assert (await api("DELETE", function_url)).error[:2] == (404, "NoSuchFunctionException")
    assert (await api("GET", FUNCTIONS)).json["identifiers"] == []


async def test_function_is_loaded_with_all_its_definitions(api: Api) -> None:
    document = build_function_document()
    await api.server.components.catalog.functions.put(CALLER, ("db",), "f", document)
    loaded_function = (await api("GET", f"{FUNCTIONS}/f")).json
    assert loaded_function["metadata"] == document
    assert loaded_function["metadata-location"].startswith(api.server.components.settings.make_warehouse_uri())
    assert (await api("GET", f"{FUNCTIONS}/none")).error[:2] == (404, "NoSuchFunctionException")
