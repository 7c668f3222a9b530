"""Finds the Iceberg tables of AWS Glue through its own interface, for an import.

Glue also has an Iceberg REST interface (`rest_catalog`), but it needs other permissions of AWS, and compatible services
do not have it. PyIceberg reads the properties and makes the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError
from pyiceberg.catalog.glue import GLUE_ID, GLUE_REGION, GlueCatalog

from seamark.connector.moving.source import (
    CatalogRefusal,
    CatalogUnavailable,
    EntryMissing,
    FoundTables,
    Levels,
    find_each,
)

_PAGES_MAX = 100_000
"""The maximum number of pages of one listing."""
_ICEBERG_TABLE_TYPE = "ICEBERG"
_MISSING_CODE = "EntityNotFoundException"
_UNAVAILABLE_CODES = frozenset(
    (
        "ExpiredTokenException",
        "IncompleteSignatureException",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "ThrottlingException",
        "UnrecognizedClientException",
    )
)
_SERVER_ERROR_STATUS = 500


class GlueSource:
    """The source of an import from AWS Glue. Glue has no Iceberg views.

    Args:
        uri: `glue://REGION`, or `glue://` for the region of the environment.
        properties: PyIceberg's properties of a Glue catalog, such as `glue.endpoint`. `warehouse` is the id of the
            AWS account, if it is not the account of the login.

    Raises:
        CatalogRefusal: A property is invalid.
    """

    def __init__(self, uri: str, properties: Mapping[str, str]) -> None:
        own_properties = dict(properties)
        if region := urlsplit(uri).netloc:
            own_properties[GLUE_REGION] = region
        if account := own_properties.pop("warehouse", ""):
            own_properties.setdefault(GLUE_ID, account)
        try:
            self._client: Any = GlueCatalog("other", **own_properties).glue
        except (BotoCoreError, ValueError) as error:
            raise CatalogRefusal(f"The properties of Glue are invalid: {error}") from None

    def list_namespaces(self) -> Iterator[Levels]:
        names = {str(database["Name"]) for database in self._read_pages("get_databases", "DatabaseList")}
        yield from ((name,) for name in sorted(names))

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        with _translate_errors():
            database = self._client.get_database(Name=namespace[0])["Database"]
        properties: dict[str, str] = dict(database.get("Parameters") or {})
        properties |= {"location": database["LocationUri"]} if database.get("LocationUri") else {}
        properties |= {"comment": database["Description"]} if database.get("Description") else {}
        return properties

    def list_tables(self, namespace: Levels) -> list[str]:
        tables = self._read_pages("get_tables", "TableList", DatabaseName=namespace[0])
        return sorted({str(table["Name"]) for table in tables if _is_iceberg(table)})

    def list_views(self, namespace: Levels) -> list[str]:
        return []

    def find_tables(self, namespace: Levels, names: Sequence[str]) -> FoundTables:
        return find_each(self._find_table, namespace, names)

    def find_view(self, namespace: Levels, name: str) -> str:
        raise EntryMissing("Glue has no Iceberg views")

    def close(self) -> None:
        self._client.close()

    def _find_table(self, namespace: Levels, name: str) -> str:
        with _translate_errors():
            table = self._client.get_table(DatabaseName=namespace[0], Name=name)["Table"]
        location = (table.get("Parameters") or {}).get("metadata_location")
        if not _is_iceberg(table) or not location:
            raise CatalogRefusal("Glue does not state the location of a metadata file")
        return str(location)

    def _read_pages(self, operation: str, list_name: str, **arguments: str) -> Iterator[dict[str, Any]]:
        """Yield the items of a listing.

        Raises:
            CatalogRefusal: The listing has too many pages, or Glue refuses a call.
            CatalogUnavailable: Glue does not answer, refuses the login, or repeats a page.
        """
        with _translate_errors():
            pages = iter(self._client.get_paginator(operation).paginate(**arguments))
            for page in islice(pages, _PAGES_MAX):
                yield from page.get(list_name) or ()
            if next(pages, None) is not None:
                raise CatalogRefusal(f"Glue lists more than {_PAGES_MAX:,} pages")


def _is_iceberg(table: Mapping[str, Any]) -> bool:
    return str((table.get("Parameters") or {}).get("table_type", "")).upper() == _ICEBERG_TABLE_TYPE


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert the errors of calls in a block to exceptions of imports.

    Errors that may be temporary, and errors of the login, become CatalogUnavailable, which ends the import. A missing
    entry becomes EntryMissing, and any other refusal becomes CatalogRefusal.
    """
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == _MISSING_CODE:
            raise EntryMissing(f"Glue no longer has the entry: {error}") from None
        if code in _UNAVAILABLE_CODES or status >= _SERVER_ERROR_STATUS:
            raise CatalogUnavailable(f"Glue does not answer, or refuses the login: {error}") from None
        raise CatalogRefusal(f"Glue refuses the call: {error}") from None
    except BotoCoreError as error:
        raise CatalogUnavailable(f"Glue does not answer: {error}") from None
