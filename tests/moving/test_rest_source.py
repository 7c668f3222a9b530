"""Tests of the source that reads names from a REST catalog over HTTP for an import."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import pytest

from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable, EntryMissing
from tests.moving.http_catalog import serve_catalog

TABLE = {"metadata-location": "s3://lake/t/v1.metadata.json", "metadata": {"format-version": 99}}


def test_requests_are_signed_for_glue() -> None:
    properties = {
        "rest.sigv4-enabled": "true",
        "rest.signing-name": "glue",
        "rest.signing-region": "eu-central-1",
        "client.access-key-id": "key",
        "client.secret-access-key": "secret",
    }
    with serve_catalog(lambda path, headers: (200, TABLE)) as catalog:
        with closing(RestSource({"uri": catalog.url, **properties}, 2)) as source:
            # The import does not parse the metadata, which may have a later format version.
            assert source.find_table(("shop",), "orders") == "s3://lake/t/v1.metadata.json"
        assert all(
            headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=key/")
            and "/eu-central-1/glue/aws4_request" in headers["Authorization"]
            for headers in catalog.received_headers
        )


def test_error_of_a_namespace_ends_the_listing() -> None:
    """If the source left out the namespace, the import would look complete."""

    def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        if "parent=" in path:
            return 400, {"error": {"message": "no nested namespaces", "type": "BadRequestException", "code": 400}}
        return 200, {"namespaces": [["shop"]]}

    with serve_catalog(respond) as catalog:
        with (
            closing(RestSource({"uri": catalog.url}, 2)) as source,
            pytest.raises(CatalogRefusal, match="answers 400: no nested namespaces"),
        ):
            list(source.list_namespaces())
        with closing(RestSource({"uri": catalog.url}, 2, is_flat=True)) as source:
            assert list(source.list_namespaces()) == [("shop",)]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, {}, EntryMissing),
        (403, {"error": {"message": "no"}}, CatalogRefusal),
        (401, {}, CatalogUnavailable),
        (200, {}, CatalogRefusal),
        (200, {"metadata-location": 5}, CatalogRefusal),
    ],
)
def test_answers_without_a_metadata_file_are_errors(status: int, body: Any, error: type[Exception]) -> None:
    with (
        serve_catalog(lambda path, headers: (status, body)) as catalog,
        closing(RestSource({"uri": catalog.url}, 2)) as source,
        pytest.raises(error),
    ):
        source.find_table(("shop",), "orders")


def test_nested_namespaces_of_a_catalog_that_ignores_the_parent_are_listed_once() -> None:
    with (
        serve_catalog(lambda path, headers: (200, {"namespaces": [["a"], ["b"], ["a"]]})) as catalog,
        closing(RestSource({"uri": catalog.url}, 2)) as source,
    ):
        assert list(source.list_namespaces()) == [("a",), ("b",)]


def test_listing_without_an_end_is_refused() -> None:
    def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        page = {"next-page-token": "1" if "pageToken=2" in path else "2"}
        if "/tables" in path or "/views" in path:
            return 200, {"identifiers": [{"namespace": ["a"], "name": "t"}], **page}
        return 200, {"namespaces": [["a"]], **page}

    def respond_with_deeper_level(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        parent = parse_qs(path.partition("?")[2]).get("parent", [""])[0]
        return 200, {"namespaces": [[*filter(None, parent.split("\x1f")), "a"]]}

    with serve_catalog(respond) as catalog, closing(RestSource({"uri": catalog.url}, 2)) as source:
        for listing in (source.list_namespaces, partial(source.list_tables, ("a",))):
            with pytest.raises(CatalogRefusal, match="the listing would not end"):
                list(listing())
    with (
        serve_catalog(respond_with_deeper_level) as catalog,
        closing(RestSource({"uri": catalog.url}, 2)) as source,
        pytest.raises(CatalogRefusal, match="more than 32 levels"),
    ):
        list(source.list_namespaces())


def test_tables_are_listed_to_the_last_page_although_the_login_expires() -> None:
    answers = [(401, {}), (200, {"identifiers": [{"namespace": ["a"], "name": "t"}], "next-page-token": "2"})]
    answers.append((200, {"identifiers": [{"namespace": ["a"], "name": "u"}], "next-page-token": ""}))
    with (
        serve_catalog(lambda path, headers: answers.pop(0)) as catalog,
        closing(RestSource({"uri": catalog.url}, 2)) as source,
    ):
        assert source.list_tables(("a",)) == ["t", "u"]
    with (
        serve_catalog(lambda path, headers: (404, {})) as catalog,
        closing(RestSource({"uri": catalog.url}, 2)) as source,
        pytest.raises(EntryMissing),
    ):
        source.list_tables(("a",))
