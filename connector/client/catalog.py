"""Creates, changes and drops what the catalog holds: namespaces, tables and views.

The routes are those of Iceberg's REST specification, and our own for dropped entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, namespace_path, split_name, split_table, standard_path
from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR

_PAGE = 1000


def namespace_properties(client: SeamarkClient, namespace: Name) -> dict[str, str]:
    """NotFound."""
    properties: dict[str, str] = client._json("GET", namespace_route(client, namespace))["properties"]
    return properties


def create_namespace(client: SeamarkClient, namespace: Name, properties: Mapping[str, str]) -> None:
    """Refused, a 409, if it exists; NotFound if its parent does not."""
    body = {"namespace": list(_levels(namespace)), "properties": dict(properties)}
    _send(client, "POST", f"{client._catalog()}/namespaces", body)


def drop_namespace(client: SeamarkClient, namespace: Name) -> None:
    """NotFound; Refused, a 409, if it is not empty."""
    _send(client, "DELETE", namespace_route(client, namespace))


def create_table(
    client: SeamarkClient,
    table: Name,
    schema: Mapping[str, Any],
    *,
    partition_spec: Mapping[str, Any] | None = None,
    location: str | None = None,
    properties: Mapping[str, str],
) -> None:
    """`schema`, `partition_spec`: in Iceberg's JSON form.

    BadRequest; NotFound for the namespace; Refused, a 409, if the table exists.
    """
    levels = split_table(table)
    body: dict[str, Any] = {"name": levels[-1], "schema": dict(schema), "properties": dict(properties)}
    body |= {} if partition_spec is None else {"partition-spec": dict(partition_spec)}
    body |= {} if location is None else {"location": location}
    _send(client, "POST", f"{namespace_route(client, levels[:-1])}/tables", body)


def drop_table(client: SeamarkClient, table: Name, *, purge: bool = False) -> None:
    """`purge`: its files are deleted after the retention.

    Raises:
        NotFound: If it does not exist.
    """
    _send(client, "DELETE", client._standard_path(table), query={"purgeRequested": "true" if purge else "false"})


def rename_table(client: SeamarkClient, table: Name, to: Name) -> None:
    """NotFound; Refused, a 409, if the new name is taken."""
    body = {"source": _identifier(table), "destination": _identifier(to)}
    _send(client, "POST", f"{client._catalog()}/tables/rename", body)


def list_views(client: SeamarkClient, namespace: Name) -> Iterator[tuple[str, ...]]:
    """Yield names of the views of one namespace, each with all its levels.

    Raises:
        NotFound: If it does not exist.
    """
    for identifier in client._list_names(f"namespaces/{namespace_path(_levels(namespace))}/views", "identifiers"):
        yield (*identifier["namespace"], identifier["name"])


def load_view(client: SeamarkClient, view: Name) -> dict[str, Any]:
    """Return the metadata, as Iceberg's view specification has it.

    Raises:
        NotFound: If it does not exist.
    """
    metadata: dict[str, Any] = client._json("GET", _view_route(client, view))["metadata"]
    return metadata


def rename_view(client: SeamarkClient, view: Name, to: Name) -> None:
    """NotFound; Refused, a 409, if the new name is taken."""
    body = {"source": _identifier(view), "destination": _identifier(to)}
    _send(client, "POST", f"{client._catalog()}/views/rename", body)


def drop_view(client: SeamarkClient, view: Name) -> None:
    """NotFound."""
    _send(client, "DELETE", _view_route(client, view))


def _view_route(client: SeamarkClient, view: Name) -> str:
    return standard_path(client._catalog(), "views", split_table(view))


def list_dropped_entries(client: SeamarkClient, namespace: Name | None = None) -> Iterator[dict[str, Any]]:
    """Dropped tables and views that can be restored, as docs/reference/openapi.json has them (listDropped)."""
    query: dict[str, Any] = {"pageSize": _PAGE}
    query |= {} if namespace is None else {"namespace": NAMESPACE_SEPARATOR.join(_levels(namespace))}
    for page in client._list_pages("/api/v1/dropped", query, "pageToken"):
        yield from page["dropped"]


def list_retained_entries(client: SeamarkClient, namespace: Name | None = None) -> Iterator[dict[str, Any]]:
    """Yield the dropped tables and views that cannot be restored and keep their locations."""
    query: dict[str, Any] = {"pageSize": _PAGE, "retained": "true"}
    query |= {} if namespace is None else {"namespace": NAMESPACE_SEPARATOR.join(_levels(namespace))}
    for page in client._list_pages("/api/v1/dropped", query, "pageToken"):
        yield from page["dropped"]


def release_retained(client: SeamarkClient, entry_id: str) -> None:
    """Let others use the location of an entry. Its files stay.

    Raises:
        NotFound: There is no such entry.
        BadRequest: The entry can be restored.
    """
    _send(client, "DELETE", f"/api/v1/dropped/{quote(entry_id, safe='')}?release=true")


def purge_dropped(client: SeamarkClient, entry_id: str) -> None:
    """Delete the files that the metadata of a dropped table names.

    Raises:
        NotFound: There is no such entry.
        BadRequest: The properties of the table forbid it.
    """
    _send(client, "DELETE", f"/api/v1/dropped/{quote(entry_id, safe='')}")


def restore_dropped(client: SeamarkClient, entry_id: str, to: Name | None = None) -> dict[str, Any]:
    """Return the restored entry.

    NotFound; Refused, a 409, if the name is taken.
    """
    body = {} if to is None else _identifier(to)
    answer = _send(client, "POST", f"/api/v1/dropped/{quote(entry_id, safe='')}/undrop", body)
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def list_replicas(client: SeamarkClient) -> list[dict[str, Any]]:
    """Return the replicas with live leases, as docs/reference/openapi.json has them (listReplicas)."""
    replicas: list[dict[str, Any]] = client._json("GET", "/api/v1/replicas")["replicas"]
    return replicas


def _send(
    client: SeamarkClient,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    query: Mapping[str, str] | None = None,
) -> bytes:
    """Once: sent twice, the second request would be refused for what the first has done."""
    sent = None if body is None else json.dumps(body).encode()
    return client._request(method, path, query or {}, sent, repeatable=False)


def namespace_route(client: SeamarkClient, namespace: Name) -> str:
    return f"{client._catalog()}/namespaces/{namespace_path(_levels(namespace))}"


def _levels(namespace: Name) -> Sequence[str]:
    return split_name(namespace) if isinstance(namespace, str) else tuple(namespace)


def _identifier(table: Name) -> dict[str, Any]:
    levels = split_table(table)
    return {"namespace": list(levels[:-1]), "name": levels[-1]}
