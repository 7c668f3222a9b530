"""Table services: their policies, which are properties of tables and of namespaces, and their jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamark.connector.client.catalog import namespace_route
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path
from seamark.connector.client.updates import update_table


def load_policy(client: SeamarkClient, table: Name) -> dict[str, Any]:
    """`runs`, and the `properties` in effect with where each is set, as docs/reference/openapi.json has it
    (loadTablePolicy).

    Raises:
        NotFound: If it does not exist.
    """
    return client._json("GET", f"{table_path(table)}/policy")


def advise_ttl(client: SeamarkClient, table: Name, unread_days: int | None = None) -> dict[str, Any]:
    """Return columns that no query reads in old partitions, as docs/reference/openapi.json has it (adviseTtl).

    Raises:
        NotFound: If it does not exist.
        BadRequest: If the request is invalid.
    """
    query = {} if unread_days is None else {"unread-days": str(unread_days)}
    return client._json("GET", f"{table_path(table)}/ttl-advice", query)


def effective_properties(client: SeamarkClient, table: Name) -> dict[str, str]:
    """Return the policy's properties that the table or a namespace of it sets."""
    listed = load_policy(client, table)["properties"]
    return {entry["name"]: entry["value"] for entry in listed if entry["source"] in ("table", "namespace")}


def service_jobs(client: SeamarkClient, table: Name | None = None) -> dict[str, Any]:
    """Return the running `jobs` of table services on the table, or on all tables, and those that are `waiting`, as
    docs/reference/openapi.json has them (listRunningJobs).

    Raises:
        NotFound: If it does not exist.
    """
    path = "/api/v1/jobs" if table is None else f"{table_path(table)}/jobs"
    return client._json("GET", path)


def change_table_properties(
    client: SeamarkClient, table: Name, updates: Mapping[str, str], removals: Sequence[str]
) -> None:
    """By the standard's commit. NotFound, BadRequest, Conflict."""
    changes: list[dict[str, Any]] = []
    if updates:
        changes.append({"action": "set-properties", "updates": dict(updates)})
    if removals:
        changes.append({"action": "remove-properties", "removals": list(removals)})
    update_table(client, table, (), changes)


def change_namespace_properties(
    client: SeamarkClient, namespace: Name, updates: Mapping[str, str], removals: Sequence[str]
) -> None:
    """By the standard's route.

    Raises:
        NotFound: If it does not exist.
        BadRequest: If the request is invalid.
    """
    changes = {"updates": dict(updates), "removals": list(removals)}
    client._json("POST", f"{namespace_route(client, namespace)}/properties", {}, changes)
