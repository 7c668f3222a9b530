"""Sends requests about the further warehouses of a server: those in addition to the server's own warehouse.

docs/reference/openapi.json defines the form of the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from seamark.connector.client.client import SeamarkClient

_PATH = "/api/v1/warehouses"


def make_warehouse_url(url: str, warehouse: str | None) -> str:
    """Return the URL of a further warehouse of a server. A client uses it as the URL of its server.

    Args:
        url: The URL of the server.
        warehouse: The name of the warehouse. If it is None or empty, the result is `url`, the server's own warehouse.
    """
    return f"{url.rstrip('/')}/warehouses/{quote(warehouse, safe='')}" if warehouse else url


def list_warehouses(client: SeamarkClient) -> list[dict[str, Any]]:
    """Return the further warehouses of the server, by name."""
    warehouses: list[dict[str, Any]] = client._request_json("GET", _PATH)["warehouses"]
    return warehouses


def load_warehouse(client: SeamarkClient, name: str) -> dict[str, Any]:
    """Return a further warehouse.

    Raises:
        NoSuchResource: The warehouse does not exist.
    """
    warehouse: dict[str, Any] = client._request_json("GET", _make_path(name))
    return warehouse


def create_warehouse(
    client: SeamarkClient, name: str, location: str, settings: Mapping[str, Any], credentials: Mapping[str, str]
) -> dict[str, Any]:
    """Create a further warehouse. The caller becomes an admin of the warehouse.

    Raises:
        InvalidRequest: The definition is invalid, or the operator does not allow it.
        Refused: A warehouse with this name already exists. The status is 409.
    """
    body = {"name": name, "location": location, "settings": dict(settings), "credentials": dict(credentials)}
    answer = client._request("POST", _PATH, {}, json.dumps(body).encode(), repeatable=False)
    warehouse: dict[str, Any] = json.loads(answer)
    return warehouse


def change_warehouse(
    client: SeamarkClient, name: str, settings: Mapping[str, Any], credentials: Mapping[str, str] | None
) -> dict[str, Any]:
    """Replace the settings of a further warehouse, and its credentials unless `credentials` is None.

    Raises:
        NoSuchResource: The warehouse does not exist.
        InvalidRequest: The definition is invalid, or the operator does not allow it.
    """
    body = {"settings": dict(settings), "credentials": None if credentials is None else dict(credentials)}
    warehouse: dict[str, Any] = client._request_json("PUT", _make_path(name), body=body)
    return warehouse


def drop_warehouse(client: SeamarkClient, name: str) -> None:
    """Drop an empty warehouse.

    Raises:
        NoSuchResource: The warehouse does not exist.
        Refused: The warehouse is not empty. The status is 409.
    """
    client._request("DELETE", _make_path(name), {}, repeatable=False)


def _make_path(name: str) -> str:
    return f"{_PATH}/{quote(name, safe='')}"
