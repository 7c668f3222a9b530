"""Tests that any possible name works in paths, listings and pages, in both encodings that clients use."""

from __future__ import annotations

from urllib.parse import quote, quote_plus

import pytest

from seamark.metaserver.catalog.values import Caller
from tests.api.client import SCHEMA, VIEW_VERSION, Api, build_function_document

CALLER = Caller(principal_name="tester", request_id="test")

NAMES = (
    "plain",
    "with.dot",
    "with/slash",
    "with\\backslash",
    "per%cent",
    "%2F",
    "%25",
    "a+b",
    "a b",
    " lead and trail ",
    "...",
    ".hidden",
    "question?mark",
    "hash#tag",
    "semi;colon=x&y",
    "{braces}",
    "quo\"te's",
    "naïve",
    "雪",
    "👩‍🚀",
    "e\u0301",
    "<tag>|^`",
    "x" * 255,
    "雪" * 255,
    "@ref~1:*",
    "NULL",
)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("encode", [lambda name: quote(name, safe=""), quote_plus], ids=["PyIceberg", "Java"])
async def test_name_is_the_same_in_body_path_and_listing(api: Api, encode: object) -> None:
    assert callable(encode)
    for name in NAMES:
        encoded_namespace = f"{encode(name)}%1F{encode(name)}"
        assert (await api("POST", "/v1/namespaces", {"namespace": [name]})).status == 200, name
        assert (await api("POST", "/v1/namespaces", {"namespace": [name, name]})).status == 200, name
        assert (await api("GET", f"/v1/namespaces/{encoded_namespace}")).json["namespace"] == [name, name], name
        assert (await api("GET", f"/v1/namespaces?parent={encode(name)}")).json["namespaces"] == [[name, name]], name
        answer = await api("POST", f"/v1/namespaces/{encoded_namespace}/tables", {"name": name, "schema": SCHEMA})
        assert answer.status == 200, (name, answer.raw)
        table = f"/v1/namespaces/{encoded_namespace}/tables/{encode(name)}"
        assert (await api("GET", table)).json == answer.json, name
        assert answer.json["metadata"]["location"].startswith(
            api.server.components.settings.make_warehouse_uri() + "/"
        ), name
        assert ".." not in answer.json["metadata"]["location"], name
        identifiers = (await api("GET", f"/v1/namespaces/{encoded_namespace}/tables")).json["identifiers"]
        assert identifiers == [{"namespace": [name, name], "name": name}], name
        assert (await api("DELETE", table)).status == 204, name
        body = {"name": name, "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
        assert (await api("POST", f"/v1/namespaces/{encoded_namespace}/views", body)).status == 200, name
        assert (await api("HEAD", f"/v1/namespaces/{encoded_namespace}/views/{encode(name)}")).status == 204, name


async def test_pages_have_every_name_once_and_in_order(api: Api) -> None:
    for name in NAMES:
        await api("POST", "/v1/namespaces", {"namespace": ["db", name]})
        assert (await api("POST", "/v1/namespaces/db/tables", {"name": name, "schema": SCHEMA})).status == 200
        body = {"name": name + "v" if len(name) < 255 else "v" + name[1:], "schema": SCHEMA}
        assert (await api("POST", "/v1/namespaces/db/views", {**body, "view-version": VIEW_VERSION})).status == 200
    for path, list_name in (
        ("/v1/namespaces?parent=db&", "namespaces"),
        ("/v1/namespaces/db/tables?", "identifiers"),
        ("/v1/namespaces/db/views?", "identifiers"),
    ):
        answer = (await api("GET", path)).json
        assert answer["next-page-token"] is None
        assert len(answer[list_name]) == len(NAMES)
        for size in (1, 7, len(NAMES), 1000):
            listed_items: list[object] = []
            token: str | None = ""
            page_count = 0
            while token is not None:
                page = (await api("GET", f"{path}pageToken={token}&pageSize={size}")).json
                assert len(page[list_name]) <= size
                listed_items += page[list_name]
                token = page["next-page-token"]
                page_count += 1
            assert listed_items == answer[list_name]
            assert page_count == -(-len(NAMES) // size)


async def test_client_without_paging_gets_all_names_beyond_the_page_limit(api: Api) -> None:
    for number in range(30):
        await api("POST", "/v1/namespaces", {"namespace": [f"n{number:02}"]})
    limit = api.server.components.settings.page_limit
    assert limit >= 30
    assert len((await api("GET", "/v1/namespaces")).json["namespaces"]) == 31


async def test_page_size_without_a_page_token_does_not_shorten_a_listing(api: Api) -> None:
    """The specification requires all results in one answer if the request has no `pageToken`."""
    for name in ("a", "b", "c"):
        await api("POST", "/v1/namespaces", {"namespace": ["db", name]})
        await api.create_table(name)
        body = {"name": f"v{name}", "schema": SCHEMA, "view-version": VIEW_VERSION}
        assert (await api("POST", "/v1/namespaces/db/views", body)).status == 200
        await api.server.components.catalog.functions.put(CALLER, ("db",), f"f{name}", build_function_document())
    for path, list_name in (
        ("/v1/namespaces?parent=db&pageSize=2", "namespaces"),
        ("/v1/namespaces/db/tables?pageSize=2", "identifiers"),
        ("/v1/namespaces/db/views?pageSize=2", "identifiers"),
        ("/v1/namespaces/db/functions?pageSize=2", "identifiers"),
    ):
        answer = (await api("GET", path)).json
        assert (len(answer[list_name]), answer["next-page-token"]) == (3, None), path
        page = (await api("GET", f"{path}&pageToken=")).json
        assert len(page[list_name]) == 2, path
        assert page["next-page-token"] is not None, path


@pytest.mark.slow
async def test_drop_at_the_end_of_a_page_loses_no_names(api: Api) -> None:
    for name in ("a", "b", "c", "d"):
        await api.create_table(name)
    first_page = (await api("GET", "/v1/namespaces/db/tables?pageSize=2&pageToken=")).json
    await api("DELETE", "/v1/namespaces/db/tables/b")
    next_page = (await api("GET", f"/v1/namespaces/db/tables?pageToken={first_page['next-page-token']}")).json
    assert [identifier["name"] for identifier in next_page["identifiers"]] == ["c", "d"]
