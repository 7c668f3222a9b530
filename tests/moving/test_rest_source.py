"""The names that an import reads from a REST catalog, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest

from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable, EntryMissing
from tests.moving.http_catalog import serving_catalog

TABLE = {"metadata-location": "s3://lake/t/v1.metadata.json", "metadata": {"format-version": 99}}


def test_requests_are_signed_for_glue() -> None:
    properties = {
        "rest.sigv4-enabled": "true",
        "rest.signing-name": "glue",
        "rest.signing-region": "eu-central-1",
        "client.access-key-id": "key",
        "client.secret-access-key": "secret",
    }
    with serving_catalog(lambda path, headers: (200, TABLE)) as catalog:
        with closing(RestSource({"uri": catalog.url, **properties}, 2)) as source:
            # The import does not parse the metadata, which may have a later format version.
            assert source.find_table(("shop",), "orders") == "s3://lake/t/v1.metadata.json"
        assert all(
            headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=key/")
            and "/eu-central-1/glue/aws4_request" in headers["Authorization"]
            for headers in catalog.received
        )


def test_namespaces_that_cannot_be_listed_end_the_listing() -> None:
    """A missing namespace would look like a complete import."""

    def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        if "parent=" in path:
            return 400, {"error": {"message": "no nested namespaces", "type": "BadRequestException", "code": 400}}
        return 200, {"namespaces": [["shop"]]}

    with serving_catalog(respond) as catalog:
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
        serving_catalog(lambda path, headers: (status, body)) as catalog,
        closing(RestSource({"uri": catalog.url}, 2)) as source,
        pytest.raises(error),
    ):
        source.find_table(("shop",), "orders")
