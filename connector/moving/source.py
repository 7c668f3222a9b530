"""The interface of catalogs from which tables and views are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

Levels = tuple[str, ...]
"""The name of a namespace, table or view, as its levels."""


class CatalogRefusal(Exception):
    """Raised if a catalog refuses a request or returns an invalid answer. Other entries may still be readable."""


class EntryMissing(CatalogRefusal):
    """Raised if a catalog no longer has a table, view or namespace."""


class CatalogUnavailable(Exception):
    """Raised if a catalog or the storage does not answer, or no longer accepts the login. The import ends."""


FoundTables = dict[str, str | CatalogRefusal]
"""The locations of metadata files, or the reasons why tables cannot be imported, by the names of the tables."""


class Source(Protocol):
    """A catalog from which an import reads. Several threads call the methods at the same time.

    Each method may raise a CatalogRefusal or CatalogUnavailable.
    """

    def list_namespaces(self) -> Iterator[Levels]:
        """Yield all namespaces, parents first."""

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        """Return the properties of a namespace."""

    def list_tables(self, namespace: Levels) -> list[str]:
        """Return the names of the tables of a namespace."""

    def list_views(self, namespace: Levels) -> list[str]:
        """Return the names of the views of a namespace."""

    def find_tables(self, namespace: Levels, names: Sequence[str]) -> FoundTables:
        """Return the locations of the current metadata files of tables, for each of the names."""

    def find_view(self, namespace: Levels, name: str) -> str:
        """Return the location of the current metadata file of a view."""

    def close(self) -> None:
        """Close the connections."""


def find_each(find: Callable[[Levels, str], str], namespace: Levels, names: Sequence[str]) -> FoundTables:
    """Find tables one after another.

    Args:
        find: Returns the location of the metadata file of one table, or raises a CatalogRefusal.
    """
    found_tables: FoundTables = {}
    for name in names:
        try:
            found_tables[name] = find(namespace, name)
        except CatalogRefusal as error:
            found_tables[name] = error
    return found_tables
