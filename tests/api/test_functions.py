"""Functions over HTTP: the standard lists and loads them."""

from __future__ import annotations

from metaserver.catalog.values import Caller
from tests.api.client import Api, function_document

FUNCTIONS = "/v1/namespaces/db/functions"
CALLER = Caller(who="tester", request_id="test")


async def test_functions_are_listed_by_their_whole_name(api: Api) -> None:
    for name in ("f", "g"):
        await api.server.parts.catalog.functions.put(CALLER, ("db",), name, function_document())
    assert (await api("GET", FUNCTIONS)).json == {"identifiers": [["db", "f"], ["db", "g"]], "next-page-token": None}
    assert (await api("GET", "/v1/namespaces/none/functions")).error[:2] == (404, "NoSuchNamespaceException")


async def test_a_function_is_loaded_with_all_its_definitions(api: Api) -> None:
    document = function_document()
    await api.server.parts.catalog.functions.put(CALLER, ("db",), "f", document)
    loaded = (await api("GET", f"{FUNCTIONS}/f")).json
    assert loaded["metadata"] == document
    assert loaded["metadata-location"].startswith(api.server.parts.settings.warehouse_uri())
    assert (await api("GET", f"{FUNCTIONS}/none")).error[:2] == (404, "NoSuchFunctionException")
