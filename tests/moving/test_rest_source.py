"""Tests of the source that reads names from a REST catalog over HTTP for an import."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import requests

from seamark.connector.moving import http_session
from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable, EntryMissing
from tests.moving.http_catalog import serve_catalog

TABLE = {"metadata-location": "s3://lake/t/v1.metadata.json", "metadata": {"format-version": 99}}

SIGNED = {
    "rest.sigv4-enabled": "true",
    "rest.signing-name": "glue",
    "rest.signing-region": "eu-central-1",
    "client.access-key-id": "key",
    "client.secret-access-key": "secret",
}
"""The properties of a catalog that requires signed requests."""


def test_requests_are_signed_for_glue() -> None:
    with serve_catalog(lambda path, headers: (200, TABLE)) as catalog:
        with closing(RestSource({"uri": catalog.url, **SIGNED}, connections=2)) as source:
            # The import does not parse the metadata, which may have a later format version.
            assert source.find_tables(("shop",), ["orders"])["orders"] == "s3://lake/t/v1.metadata.json"
        assert all(
            headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=key/")
            and "/eu-central-1/glue/aws4_request" in headers["Authorization"]
            for headers in catalog.received_headers
        )


def test_configuration_of_another_catalog_runs_no_code_and_gets_no_login(tmp_path: Path) -> None:
    hostile_file = tmp_path / "hostile"
    hostile_file.write_text("x")
    copy = {"src": str(hostile_file), "dst": str(tmp_path / "copied")}
    with serve_catalog(lambda path, headers: (200, {"access_token": "t", "token_type": "bearer"})) as other:
        settings = {
            "uri": other.url,
            "oauth2-server-uri": f"{other.url}/login",
            "auth": {"type": "custom", "impl": "shutil.copyfile", "custom": copy},
            "ssl": {"cabundle": "/nothing"},
            "header.X-Sent-By": "the other catalog",
            "rest.sigv4-enabled": "true",
            "prefix": "lake",
        }

        def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
            if path == "/login":
                return 200, {"access_token": "t", "token_type": "bearer"}
            assert path.startswith("/v1/lake/")
            assert "X-Sent-By" not in headers
            return 200, TABLE

        for config in ({"defaults": settings, "overrides": {}}, {"defaults": {}, "overrides": settings}):
            with serve_catalog(respond, config) as catalog:
                login = {"credential": "id:secret", "oauth2-server-uri": f"{catalog.url}/login"}
                with closing(RestSource({"uri": catalog.url, **login}, 2)) as source:
                    found_tables = source.find_tables(("shop",), ["orders"])
                assert found_tables["orders"] == TABLE["metadata-location"]
        assert other.received_headers == []
    assert list(tmp_path.iterdir()) == [hostile_file]


def test_address_of_the_configuration_is_used_only_if_the_address_of_the_user_is_below_it() -> None:
    """Nessie's configuration for `/iceberg/BRANCH` has the address `/iceberg/` and the branch as the prefix."""
    paths: list[str] = []

    def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        paths.append(path.partition("?")[0])
        if path.endswith("/config"):
            return 200, {"defaults": {"prefix": "my dev"}, "overrides": {"uri": address}}
        return 200, TABLE

    with serve_catalog(respond) as catalog:
        for address, expected in (
            (f"{catalog.url}/iceberg/", "/iceberg"),
            (catalog.url, ""),
            (f"{catalog.url}/ice", "/iceberg/dev"),
            (f"{catalog.url}/iceberg/dev/more", "/iceberg/dev"),
            ("http:", "/iceberg/dev"),
            (5, "/iceberg/dev"),
        ):
            with closing(RestSource({"uri": f"{catalog.url}/iceberg/dev"}, 2)) as source:
                assert source.find_tables(("shop",), ["orders"])["orders"] == TABLE["metadata-location"]
            assert paths[-1] == f"{expected}/v1/my%20dev/namespaces/shop/tables/orders", address


@pytest.mark.parametrize(
    "config",
    [
        {"defaults": {"prefix": {"a": 1}}, "overrides": {}},
        {"defaults": {}, "overrides": {"prefix": "lake/%2e%2e/../admin"}},
        {"defaults": {}, "overrides": {"prefix": "lake?x="}},
        {"defaults": {}, "overrides": {"namespace-separator": 5}},
        {"defaults": {}, "overrides": {"namespace-separator": "%2F..%2F..%2F"}},
        {"defaults": None, "overrides": None},
        {"overrides": {"view-endpoints-supported": ["x"]}},
        ["x"],
    ],
)
def test_invalid_configuration_of_another_catalog_is_an_error(config: Any) -> None:
    with serve_catalog(lambda path, headers: (200, TABLE), config) as catalog, pytest.raises(CatalogRefusal):
        RestSource({"uri": catalog.url}, 2)


def test_redirects_are_not_followed() -> None:
    with serve_catalog(lambda path, headers: (200, TABLE)) as other:
        with (
            serve_catalog(lambda path, headers: (307, {"location": other.url + path})) as catalog,
            closing(RestSource({"uri": catalog.url}, 2)) as source,
            pytest.raises(CatalogUnavailable, match=f"redirects to {other.url}"),
        ):
            source.list_tables(("shop",))
        with serve_catalog(lambda path, headers: (307, {"location": other.url + path})) as catalog:
            login = {"credential": "id:secret", "oauth2-server-uri": f"{catalog.url}/login"}
            with pytest.raises(CatalogUnavailable, match=f"redirects to {other.url}"):
                RestSource({"uri": catalog.url, **login}, 2)
        assert other.received_headers == []


def test_error_of_a_namespace_ends_the_listing() -> None:
    """If the source left out the namespace, the import would look complete."""

    def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        if "parent=" in path:
            return 400, {"error": {"message": "no nested namespaces", "type": "BadRequestException", "code": 400}}
        return 200, {"namespaces": [["shop"]]}

    with serve_catalog(respond) as catalog:
        with (
            closing(RestSource({"uri": catalog.url}, connections=2)) as source,
            pytest.raises(CatalogRefusal, match="answers 400: no nested namespaces"),
        ):
            list(source.list_namespaces())
        # A flat source lists only the top-level namespaces, so it does not send the failing request.
        with closing(RestSource({"uri": catalog.url}, connections=2, is_flat=True)) as source:
            assert list(source.list_namespaces()) == [("shop",)]


def raise_refusal(location: str | CatalogRefusal) -> None:
    """Raise the refusal if the source returned one instead of the location of a table."""
    if isinstance(location, CatalogRefusal):
        raise location


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
        raise_refusal(source.find_tables(("shop",), ["orders"])["orders"])


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
        for list_names in (source.list_namespaces, partial(source.list_tables, ("a",))):
            with pytest.raises(CatalogRefusal, match="the listing would not end"):
                list(list_names())
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


@pytest.mark.parametrize("properties", [{}, SIGNED])
def test_long_answers_are_given_up_while_they_are_read(
    properties: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"identifiers": [{"namespace": ["a"], "name": "x" * 1000}] * 200}
    with (
        serve_catalog(lambda path, headers: (200, answer)) as catalog,
        closing(RestSource({"uri": catalog.url, **properties}, 2)) as source,
    ):
        assert len(source.list_tables(("a",))) == 200
        monkeypatch.setattr(http_session, "_BODY_BYTES_MAX", 1 << 17)
        with pytest.raises(CatalogUnavailable, match="has more than 0 MiB"):
            source.list_tables(("a",))
        monkeypatch.setattr(http_session, "_BODY_BYTES_MAX", 1 << 20)
        monkeypatch.setattr(http_session, "_BODY_S", 0.0)
        with pytest.raises(CatalogUnavailable, match="takes more than 0 s"):
            source.list_tables(("a",))


def test_busy_catalog_delays_the_next_try_by_a_minute_at_most() -> None:
    retries = http_session.BoundedAdapter(2).max_retries.new()
    assert [retries.parse_retry_after(header) for header in ("5", "86400", "Fri, 31 Dec 2100 23:59:59 GMT")] == [
        5,
        60,
        60,
    ]


def test_session_reads_the_same_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "inner.example")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/authorities.pem")
    plain_session, session = requests.Session(), requests.Session()
    http_session.read_environment_once(session)
    # The arguments of each call are the URL, the proxies, `stream`, `verify` and `cert`.
    calls = [
        (url, proxies, None, verify, None)
        for url in ("http://outer.example/v1/a", "http://outer.example/v1/b", "http://inner.example/", "https://x/")
        for proxies in ((), (("http", "http://own.example"),))
        for verify in (None, True, False)
    ]
    for _ in range(2):
        for url, proxies, stream, verify, cert in calls:
            expected = plain_session.merge_environment_settings(url, dict(proxies), stream, verify, cert)
            assert session.merge_environment_settings(url, dict(proxies), stream, verify, cert) == expected
    # Requests may change the proxies that they receive.
    session.merge_environment_settings("http://outer.example/", {}, None, None, None)["proxies"].clear()
    monkeypatch.delenv("HTTP_PROXY")
    settings = session.merge_environment_settings("http://outer.example/", {}, None, None, None)
    assert settings["proxies"]["http"] == "http://proxy.example:3128"
