"""The policies of table services: properties of tables, and of namespaces for their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamark.connector.client.catalog import namespace_route
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path


def load_policy(client: SeamarkClient, table: Name) -> dict[str, Any]:
    """`runs`, and the `properties` in effect with where each is set, as docs/reference/openapi.json has it
    (loadTablePolicy). NotFound."""
    found: dict[str, Any] = client._json("GET", f"{table_path(table)}/policy", {})
    return found


def effective_properties(client: SeamarkClient, table: Name) -> dict[str, str]:
    """The policy's properties that the table or a namespace of it sets."""
    listed = load_policy(client, table)["properties"]
    return {entry["name"]: entry["value"] for entry in listed if entry["source"] in ("table", "namespace")}


def change_table_properties(
    client: SeamarkClient, table: Name, updates: Mapping[str, str], removals: Sequence[str]
) -> None:
    """By the standard's commit. NotFound, BadRequest, Conflict."""
    changes: list[dict[str, Any]] = []
    if updates:
        changes.append({"action": "set-properties", "updates": dict(updates)})
    if removals:
        changes.append({"action": "remove-properties", "removals": list(removals)})
    client._json("POST", client._standard_path(table), {}, {"requirements": [], "updates": changes})


def change_namespace_properties(
    client: SeamarkClient, namespace: Name, updates: Mapping[str, str], removals: Sequence[str]
) -> None:
    """By the standard's route. NotFound, BadRequest."""
    changes = {"updates": dict(updates), "removals": list(removals)}
    client._json("POST", f"{namespace_route(client, namespace)}/properties", {}, changes)
