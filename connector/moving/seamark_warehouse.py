"""Registers the tables of an import in a warehouse of a Seamark server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamark.connector.client.catalog import (
    TableImport,
    create_namespace,
    drop_namespace,
    import_tables,
    import_view,
    load_namespace_properties,
)
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, LoginRequired, NoSuchResource, Refused
from seamark.connector.moving.moves import MoveOutcome
from seamark.connector.moving.source import Levels

_CONFLICT_STATUS = 409


@dataclass(frozen=True)
class SeamarkDestination:
    """The destination of an import into a warehouse of a Seamark server.

    Each method raises a ClientError if the server does not answer or refuses the login.

    Attributes:
        client: A client of the warehouse.
        keep_owners: Whether to import views that run with the rights of a user.
        dry_run: Whether to only report what would be moved.
    """

    client: SeamarkClient
    keep_owners: bool = False
    dry_run: bool = False

    def create_namespace(self, namespace: Levels, properties: dict[str, str]) -> MoveOutcome:
        try:
            if self.dry_run:
                return self._check_namespace(namespace)
            create_namespace(self.client, namespace, properties)
        except LoginRequired:
            raise
        except InvalidRequest as error:
            if "location" not in properties:
                return MoveOutcome("refused", error.message)
            other_properties = {name: value for name, value in properties.items() if name != "location"}
            answer = self.create_namespace(namespace, other_properties)
            return answer._replace(reason=answer.reason or f"Its location is not imported: {error.message}")
        except Refused as error:
            return (
                MoveOutcome("unchanged") if error.status == _CONFLICT_STATUS else MoveOutcome("refused", error.message)
            )
        return MoveOutcome("moved")

    def _check_namespace(self, namespace: Levels) -> MoveOutcome:
        """Return the outcome that `create_namespace` would have, without creating the namespace."""
        try:
            load_namespace_properties(self.client, namespace)
        except NoSuchResource:
            return MoveOutcome("moved")
        return MoveOutcome("unchanged")

    def drop_namespace(self, namespace: Levels) -> bool:
        if self.dry_run:
            return True
        try:
            drop_namespace(self.client, namespace)
        except LoginRequired:
            raise
        except Refused:  # Another client has created something in it, or the caller may not drop it.
            return False
        return True

    def register_tables(self, namespace: Levels, locations: Mapping[str, str]) -> list[MoveOutcome]:
        try:
            results = import_tables(self.client, namespace, locations, dry_run=self.dry_run)
        except LoginRequired:
            raise
        except Refused as error:
            return [MoveOutcome("refused", error.message)] * len(locations)
        return [_to_outcome(result) for result in results]

    def register_view(self, name: Levels, metadata_location: str) -> MoveOutcome:
        try:
            is_new = import_view(
                self.client, name, metadata_location, keep_owner=self.keep_owners, dry_run=self.dry_run
            )
        except LoginRequired:
            raise
        except Refused as error:
            return MoveOutcome("refused", error.message)
        return MoveOutcome("moved" if is_new else "unchanged")


def _to_outcome(result: TableImport) -> MoveOutcome:
    if result.error:
        return MoveOutcome("refused", result.error)
    return MoveOutcome("moved" if result.is_new else "unchanged")
