"""Registers the tables of an export in an Iceberg REST catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests
from pyiceberg.catalog.rest import Capability, Endpoints, IdentifierKind

from seamark.connector.moving.moves import MoveOutcome
from seamark.connector.moving.rest_catalog import RestConnection, read_message, translate_errors
from seamark.connector.moving.source import CatalogRefusal, Levels

_CONFLICT_STATUS = 409


class RestDestination:
    """The destination of an export to an Iceberg REST catalog.

    Args:
        properties: The properties of PyIceberg's REST catalog, such as `uri`, `warehouse` and `token`.
        connections: The maximum number of requests at the same time.
        dry_run: Whether to only report what would be moved.

    Raises:
        CatalogRefusal: A property is invalid.
        CatalogUnavailable: The catalog does not answer, or refuses the login.
    """

    def __init__(self, properties: Mapping[str, str], connections: int, *, dry_run: bool = False) -> None:
        self._dry_run = dry_run
        with translate_errors():
            self._connection = RestConnection(connections, properties)

    def create_namespace(self, namespace: Levels, properties: dict[str, str]) -> MoveOutcome:
        with translate_errors():
            if self._connection.namespace_exists(namespace):
                return MoveOutcome("unchanged")
            if self._dry_run:
                return MoveOutcome("moved")
            body = {"namespace": list(namespace), "properties": properties}
            response = self._connection.post(Endpoints.create_namespace, body)
        if response.status_code == 400 and "location" in properties:
            other_properties = {name: value for name, value in properties.items() if name != "location"}
            answer = self.create_namespace(namespace, other_properties)
            return answer._replace(reason=answer.reason or f"Its location is not exported: {read_message(response)}")
        return _to_outcome(response)

    def drop_namespace(self, namespace: Levels) -> bool:
        # Another catalog may drop the tables of a namespace with it, and a client may have created one meanwhile.
        return False

    def register_tables(self, namespace: Levels, locations: Mapping[str, str]) -> list[MoveOutcome]:
        return [
            self._register(Endpoints.register_table, IdentifierKind.TABLE, (*namespace, name), location)
            for name, location in locations.items()
        ]

    def register_view(self, name: Levels, metadata_location: str) -> MoveOutcome:
        if not self._connection.supports(Capability.V1_REGISTER_VIEW):
            return MoveOutcome("refused", "The other catalog cannot register views; create the view there")
        return self._register(Endpoints.register_view, IdentifierKind.VIEW, name, metadata_location)

    def _register(self, endpoint: str, kind: IdentifierKind, name: Levels, metadata_location: str) -> MoveOutcome:
        """Register a table or view in the other catalog with its metadata file, and return the outcome.

        A dry run changes nothing. It returns the outcome that the registration would have, such as `moved`.
        """
        load_endpoint = Endpoints.load_table if kind is IdentifierKind.TABLE else Endpoints.load_view
        try:
            with translate_errors():
                existing_location = self._connection.find_location(load_endpoint, kind, name)
                if existing_location is None and not self._dry_run:
                    body: dict[str, Any] = {"name": name[-1], "metadata-location": metadata_location}
                    response = self._connection.post(endpoint, body, name[:-1])
                    if response.status_code != _CONFLICT_STATUS:
                        return _to_outcome(response)
                    # Another export, or an earlier attempt of this request, may have registered the name.
                    existing_location = self._connection.find_location(load_endpoint, kind, name)
        except CatalogRefusal as error:
            return MoveOutcome("refused", str(error))
        if existing_location == metadata_location:
            return MoveOutcome("unchanged")
        if existing_location is None:
            return (
                MoveOutcome("moved")
                if self._dry_run
                else MoveOutcome("refused", "The name is taken in the other catalog")
            )
        return MoveOutcome("refused", f"It exists in the other catalog with the metadata file {existing_location}")

    def close(self) -> None:
        self._connection.close()


def _to_outcome(response: requests.Response) -> MoveOutcome:
    if response.ok:
        return MoveOutcome("moved")
    if response.status_code == _CONFLICT_STATUS:
        return MoveOutcome("unchanged")
    return MoveOutcome("refused", f"The other catalog answers {response.status_code}: {read_message(response)}")
