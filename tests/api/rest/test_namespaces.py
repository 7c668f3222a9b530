"""Tests of namespaces over HTTP, including errors in the format of the specification."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from seamark.formats.protocol.wire import LEVELS_MAX
from seamark.metaserver.api.http.errors import MESSAGE_CHARACTERS_MAX
from seamark.metaserver.catalog.namespaces import DEEP_CHARACTERS_MAX, PROPERTIES_CHARACTERS_MAX
from seamark.metaserver.catalog.policies import INHERITED_MAX
from tests.api.client import Api


async def test_namespace_is_created_with_its_properties_and_loaded(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces", {"namespace": ["shop"], "properties": {"owner": "ann"}})
    assert answer.status == 200
    assert answer.json["namespace"] == ["shop"]
    assert answer.json["properties"]["owner"] == "ann"
    assert (await api("GET", "/v1/namespaces/shop")).json == answer.json


async def test_namespace_always_has_a_location(api: Api) -> None:
    await api("POST", "/v1/namespaces", {"namespace": ["shop"]})
    location = (await api("GET", "/v1/namespaces/shop")).json["properties"]["location"]
    assert location == f"{api.server.components.settings.make_warehouse_uri()}/shop"


async def test_second_create_of_a_namespace_is_a_conflict(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces", {"namespace": ["db"]})
    assert answer.error[:2] == (409, "AlreadyExistsException")


async def test_nested_namespace_requires_its_parent(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces", {"namespace": ["no", "child"]})
    assert answer.error[:2] == (404, "NoSuchNamespaceException")


async def test_listing_has_only_direct_children(api: Api) -> None:
    for path in (["a"], ["a", "b"], ["a", "b", "c"], ["a", "d"]):
        assert (await api("POST", "/v1/namespaces", {"namespace": path})).status == 200
    assert (await api("GET", "/v1/namespaces")).json == {"namespaces": [["a"], ["db"]], "next-page-token": None}
    assert (await api("GET", "/v1/namespaces?parent=")).json["namespaces"] == [["a"], ["db"]]
    assert (await api("GET", "/v1/namespaces?parent=a")).json["namespaces"] == [["a", "b"], ["a", "d"]]
    assert (await api("GET", "/v1/namespaces?parent=a%1Fb")).json["namespaces"] == [["a", "b", "c"]]


async def test_listing_below_an_unknown_parent_is_not_found(api: Api) -> None:
    assert (await api("GET", "/v1/namespaces?parent=none")).error[:2] == (404, "NoSuchNamespaceException")


async def test_head_reports_whether_a_namespace_exists(api: Api) -> None:
    assert (await api("HEAD", "/v1/namespaces/db")).status == 204
    missing_answer = await api("HEAD", "/v1/namespaces/none")
    assert (missing_answer.status, missing_answer.raw) == (404, b"")


async def test_error_names_the_unknown_namespace(api: Api) -> None:
    answer = await api("GET", "/v1/namespaces/non-existing")
    assert answer.error == (404, "NoSuchNamespaceException", "Namespace does not exist: non-existing")


async def test_properties_are_set_and_removed_in_one_request(api: Api) -> None:
    await api("POST", "/v1/namespaces", {"namespace": ["p"], "properties": {"a": "1", "b": "2"}})
    body = {"removals": ["a", "zzz"], "updates": {"c": "3"}}
    answer = (await api("POST", "/v1/namespaces/p/properties", body)).json
    assert answer == {"updated": ["c"], "removed": ["a"], "missing": ["zzz"]}
    properties = (await api("GET", "/v1/namespaces/p")).json["properties"]
    assert {key: properties[key] for key in properties if key != "location"} == {"b": "2", "c": "3"}


async def test_property_both_set_and_removed_is_unprocessable_and_changes_nothing(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces/db/properties", {"removals": ["a", "b"], "updates": {"a": "1"}})
    assert answer.error[:2] == (422, "UnprocessableEntityException")
    assert "a" not in (await api("GET", "/v1/namespaces/db")).json["properties"]


async def test_properties_of_an_unknown_namespace_are_not_found(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces/none/properties", {"updates": {"a": "1"}})
    assert answer.error[:2] == (404, "NoSuchNamespaceException")


async def test_empty_namespace_can_be_dropped(api: Api) -> None:
    deleted_answer = await api("DELETE", "/v1/namespaces/db")
    assert (deleted_answer.status, deleted_answer.raw) == (204, b"")
    assert (await api("DELETE", "/v1/namespaces/db")).error[:2] == (404, "NoSuchNamespaceException")


async def test_namespace_with_a_table_cannot_be_dropped(api: Api) -> None:
    await api.create_table()
    assert (await api("DELETE", "/v1/namespaces/db")).error[:2] == (409, "NamespaceNotEmptyException")


async def test_removal_of_many_properties_takes_no_quadratic_time(api: Api) -> None:
    """The test's client waits for 30 s. A removal in quadratic time would block the event loop for minutes.

    The namespace has 60,000 properties, and the request also names 30,000 properties that it does not have.
    """
    addition = await api("POST", "/v1/namespaces/db/properties", {"updates": {f"k{n}": "" for n in range(60_000)}})
    assert addition.status == 200, addition.raw
    removals = [f"k{n}" for n in range(90_000)]
    removal = await api("POST", "/v1/namespaces/db/properties", {"removals": removals})
    assert (len(removal.json["removed"]), len(removal.json["missing"])) == (60_000, 30_000)


async def test_namespace_properties_are_limited_over_all_requests(api: Api) -> None:
    path, half_of_limit = "/v1/namespaces/db/properties", PROPERTIES_CHARACTERS_MAX // 2
    assert (await api("POST", path, {"updates": {"a": "x" * half_of_limit}})).status == 200
    refusal = await api("POST", path, {"updates": {"b": "x" * half_of_limit}})
    assert refusal.error[:2] == (413, "PayloadTooLargeException")
    assert (await api("POST", path, {"removals": ["a"], "updates": {"b": "x" * half_of_limit}})).status == 200


async def test_levels_of_a_namespace_are_limited(api: Api) -> None:
    deep_levels = ["a"] * LEVELS_MAX
    assert (await api("POST", "/v1/namespaces", {"namespace": deep_levels})).status == 404
    refusal = await api("POST", "/v1/namespaces", {"namespace": [*deep_levels, "a"]})
    assert refusal.error[:2] == (400, "BadRequestException")


async def test_namespaces_too_long_for_a_url_are_rejected(api: Api) -> None:
    long_names = ["é" * 255] * 3
    created_answers = [await api("POST", "/v1/namespaces", {"namespace": long_names[:count]}) for count in (1, 2, 3)]
    assert [answer.status for answer in created_answers] == [200, 200, 200]
    assert (await api("GET", "/v1/namespaces/" + quote("\x1f".join(long_names)))).status == 200
    refusal = await api("POST", "/v1/namespaces", {"namespace": ["é" * 255] * 4})
    assert refusal.error[:2] == (400, "BadRequestException")
    assert "in a URL" in refusal.error[2]


@pytest.mark.slow
async def test_properties_of_deep_namespaces_and_policies_of_all_namespaces_above_a_table_are_limited(api: Api) -> None:
    """Table services read the properties of all namespaces above a table."""
    deep_levels = ["a"] * 9
    for count in range(1, 10):
        assert (await api("POST", "/v1/namespaces", {"namespace": deep_levels[:count]})).status == 200
    long_body = {"updates": {"a": "x" * (DEEP_CHARACTERS_MAX + 1)}}
    paths = ["/v1/namespaces/" + "%1F".join(deep_levels[:count]) + "/properties" for count in (8, 9)]
    assert [(await api("POST", path, long_body)).status for path in paths] == [200, 413]
    policies = {f"seamark.compaction.x{number}": "1" for number in range(INHERITED_MAX)}
    assert (await api("POST", paths[0], {"updates": policies})).status == 200
    refusal = await api("POST", paths[0], {"updates": {"seamark.statistics.enabled": "true"}})
    assert refusal.error[:2] == (413, "PayloadTooLargeException")


async def test_error_does_not_quote_megabytes_of_the_request(api: Api) -> None:
    await api.create_table()
    long_text = "x" * 3_000_000
    for path, body in (
        ("/v1/namespaces/db/tables/t/plan", {"filter": {"type": "eq", "term": long_text, "value": 1}}),
        ("/api/v1/tables/db/t/explain", {"filter": {"type": "eq", "term": long_text, "value": 1}}),
        ("/v1/namespaces/db/properties", {"updates": {long_text[:400_000]: ""}, "removals": [long_text[:400_000]]}),
    ):
        status, _, message = (await api("POST", path, body)).error
        assert status < 500, path
        assert len(message) < MESSAGE_CHARACTERS_MAX + 100, path
