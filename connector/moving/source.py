"""The interface of catalogs from which tables and views are imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

Levels = tuple[str, ...]
"""The name of a namespace, table or view, as its levels."""


class CatalogRefusal(Exception):
    """Raised if a catalog refuses a request or returns an invalid answer. Other entries may still be readable."""


class EntryMissing(CatalogRefusal):
    """Raised if a catalog no longer has a table, view or namespace."""


class CatalogUnavailable(Exception):
    """Raised if a catalog or the storage does not answer, or no longer accepts the login. The import ends."""


class Source(Protocol):
    """A catalog from which an import reads. Several threads call the methods at the same time.

    Each method raises a CatalogRefusal or CatalogUnavailable.
    """

    def list_namespaces(self) -> Iterator[Levels]:
        """Yield all namespaces, parents first."""

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        """Return the properties of a namespace."""

    def list_tables(self, namespace: Levels) -> list[str]:
        """Return the names of the tables of a namespace."""

    def list_views(self, namespace: Levels) -> list[str]:
        """Return the names of the views of a namespace."""

    def find_table(self, namespace: Levels, name: str) -> str:
        """Return the location of the current metadata file of a table."""

    def find_view(self, namespace: Levels, name: str) -> str:
        """Return the location of the current metadata file of a view."""

    def close(self) -> None:
        """Close the connections."""
