"""Creates, changes and drops namespaces, tables and views of a catalog.

The requests use the routes of Iceberg's REST specification, and Seamark's own routes for dropped entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import (
    Name,
    make_namespace_path,
    make_standard_path,
    make_table_path,
    split_name,
    split_table,
)
from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR

_ENTRIES_PER_PAGE = 1000


def load_namespace_properties(client: SeamarkClient, namespace: Name) -> dict[str, str]:
    """Return the properties of a namespace.

    Raises:
        NoSuchResource: The namespace does not exist.
    """
    properties: dict[str, str] = client._request_json("GET", make_namespace_route(client, namespace))["properties"]
    return properties


def create_namespace(client: SeamarkClient, namespace: Name, properties: Mapping[str, str]) -> None:
    """Create a namespace.

    Raises:
        Refused: The namespace exists already. The status is 409.
        NoSuchResource: The parent namespace does not exist.
    """
    body = {"namespace": list(_split_levels(namespace)), "properties": dict(properties)}
    _send(client, "POST", f"{client._get_catalog()}/namespaces", body)


def drop_namespace(client: SeamarkClient, namespace: Name) -> None:
    """Drop an empty namespace.

    Raises:
        NoSuchResource: The namespace does not exist.
        Refused: The namespace is not empty. The status is 409.
    """
    _send(client, "DELETE", make_namespace_route(client, namespace))


def create_table(
    client: SeamarkClient,
    table: Name,
    schema: Mapping[str, Any],
    *,
    partition_spec: Mapping[str, Any] | None = None,
    location: str | None = None,
    properties: Mapping[str, str],
) -> None:
    """Create a table.

    Args:
        schema: The schema in Iceberg's JSON form.
        partition_spec: The partition spec in Iceberg's JSON form. None means an unpartitioned table.
        location: The folder of the table. None means that the server chooses it.
        properties: The properties of the table.

    Raises:
        InvalidRequest: An argument is invalid.
        NoSuchResource: The namespace does not exist.
        Refused: The table exists already. The status is 409.
    """
    levels = split_table(table)
    body: dict[str, Any] = {"name": levels[-1], "schema": dict(schema), "properties": dict(properties)}
    body |= {} if partition_spec is None else {"partition-spec": dict(partition_spec)}
    body |= {} if location is None else {"location": location}
    _send(client, "POST", f"{make_namespace_route(client, levels[:-1])}/tables", body)


def drop_table(client: SeamarkClient, table: Name, *, purge: bool = False) -> None:
    """Drop a table.

    Args:
        purge: Whether the server deletes the table's files after the retention time.

    Raises:
        NoSuchResource: The table does not exist.
    """
    _send(client, "DELETE", client._make_standard_path(table), query={"purgeRequested": "true" if purge else "false"})


def rename_table(client: SeamarkClient, table: Name, new_name: Name) -> None:
    """Rename a table.

    Raises:
        NoSuchResource: The table does not exist.
        Refused: The new name is taken. The status is 409.
    """
    body = {"source": _make_identifier(table), "destination": _make_identifier(new_name)}
    _send(client, "POST", f"{client._get_catalog()}/tables/rename", body)


def list_views(client: SeamarkClient, namespace: Name) -> Iterator[tuple[str, ...]]:
    """Yield the names of the views of one namespace. Each name has all levels.

    Raises:
        NoSuchResource: The namespace does not exist.
    """
    for identifier in client._list_names(
        f"namespaces/{make_namespace_path(_split_levels(namespace))}/views", "identifiers"
    ):
        yield (*identifier["namespace"], identifier["name"])


def load_view(client: SeamarkClient, view: Name) -> dict[str, Any]:
    """Return the metadata of a view, in the form of Iceberg's view specification.

    Raises:
        NoSuchResource: The view does not exist.
    """
    metadata: dict[str, Any] = client._request_json("GET", _make_view_route(client, view))["metadata"]
    return metadata


class TableImport(NamedTuple):
    """The result of the import of a table.

    Attributes:
        is_new: Whether the table was not registered before.
        error: The reason why the table is not imported, or empty.
    """

    is_new: bool
    error: str


def import_table(client: SeamarkClient, table: Name, metadata_location: str, *, dry_run: bool = False) -> bool:
    """Register a table of a different catalog under a name, unless the name already refers to this metadata file.

    Args:
        metadata_location: The location of the metadata file, which is not copied.
        dry_run: Whether to check the import without registering the table.

    Returns:
        Whether the name is new.

    Raises:
        InvalidRequest: The metadata file contains a location that the server does not allow.
        NoSuchResource: The metadata file or the namespace does not exist.
        Refused: The name refers to a different metadata file. The status is 409.
    """
    body = {"metadata-location": metadata_location, "dry-run": dry_run}
    return bool(client._request_json("PUT", f"{make_table_path(table)}/import", body=body)["is-new"])


def import_tables(
    client: SeamarkClient, namespace: Name, metadata_locations: Mapping[str, str], *, dry_run: bool = False
) -> list[TableImport]:
    """Register tables of a different catalog in a namespace, as `import_table` does.

    A table that the server refuses does not affect the others.

    Args:
        metadata_locations: The locations of the metadata files by the names of the tables.

    Returns:
        The results, in the order of the locations.

    Raises:
        NoSuchResource: The namespace does not exist.
    """
    path = f"/api/v1/namespaces/{make_namespace_path(_split_levels(namespace))}/import"
    body = {"metadata-locations": dict(metadata_locations), "dry-run": dry_run}
    results = client._request_json("PUT", path, body=body)["results"]
    return [TableImport(result.get("is-new", False), result.get("error", "")) for result in results]


def import_view(
    client: SeamarkClient, view: Name, metadata_location: str, *, keep_owner: bool = False, dry_run: bool = False
) -> bool:
    """Register a view of a different catalog, as `import_table` registers a table.

    Args:
        keep_owner: Whether the view keeps its owner, with whose rights engines may run it.
    """
    body = {"metadata-location": metadata_location, "keep-owner": keep_owner, "dry-run": dry_run}
    path = make_table_path(view).replace("/api/v1/tables/", "/api/v1/views/", 1)
    return bool(client._request_json("PUT", f"{path}/import", body=body)["is-new"])


def rename_view(client: SeamarkClient, view: Name, new_name: Name) -> None:
    """Rename a view.

    Raises:
        NoSuchResource: The view does not exist.
        Refused: The new name is taken. The status is 409.
    """
    body = {"source": _make_identifier(view), "destination": _make_identifier(new_name)}
    _send(client, "POST", f"{client._get_catalog()}/views/rename", body)


def drop_view(client: SeamarkClient, view: Name) -> None:
    """Drop a view.

    Raises:
        NoSuchResource: The view does not exist.
    """
    _send(client, "DELETE", _make_view_route(client, view))


def _make_view_route(client: SeamarkClient, view: Name) -> str:
    return make_standard_path(client._get_catalog(), "views", split_table(view))


def list_dropped_entries(client: SeamarkClient, namespace: Name | None = None) -> Iterator[dict[str, Any]]:
    """Yield the dropped tables and views that can be restored.

    docs/reference/openapi.json defines the form of an entry (listDropped).
    """
    query: dict[str, Any] = {"pageSize": _ENTRIES_PER_PAGE}
    query |= {} if namespace is None else {"namespace": NAMESPACE_SEPARATOR.join(_split_levels(namespace))}
    for page in client._list_pages("/api/v1/dropped", query, "pageToken"):
        yield from page["dropped"]


def list_retained_entries(client: SeamarkClient, namespace: Name | None = None) -> Iterator[dict[str, Any]]:
    """Yield the dropped tables and views that cannot be restored, but still reserve their locations.

    Their files still exist, so a new table must not use the locations.
    """
    query: dict[str, Any] = {"pageSize": _ENTRIES_PER_PAGE, "retained": "true"}
    query |= {} if namespace is None else {"namespace": NAMESPACE_SEPARATOR.join(_split_levels(namespace))}
    for page in client._list_pages("/api/v1/dropped", query, "pageToken"):
        yield from page["dropped"]


def release_dropped_location(client: SeamarkClient, entry_id: str) -> None:
    """Release the location of a dropped entry, so that other tables or views can use it. The files stay.

    Raises:
        NoSuchResource: There is no dropped entry with this id.
        InvalidRequest: The entry can be restored.
    """
    _send(client, "DELETE", f"/api/v1/dropped/{quote(entry_id, safe='')}?release=true")


def purge_dropped(client: SeamarkClient, entry_id: str) -> None:
    """Delete the files to which the metadata of a dropped table refers.

    Raises:
        NoSuchResource: There is no dropped entry with this id.
        InvalidRequest: The properties of the table forbid the deletion.
    """
    _send(client, "DELETE", f"/api/v1/dropped/{quote(entry_id, safe='')}")


def restore_dropped(client: SeamarkClient, entry_id: str, new_name: Name | None = None) -> dict[str, Any]:
    """Restore a dropped table or view, and return the restored entry.

    Raises:
        NoSuchResource: There is no dropped entry with this id.
        Refused: The name is taken. The status is 409.
    """
    body = {} if new_name is None else _make_identifier(new_name)
    answer = _send(client, "POST", f"/api/v1/dropped/{quote(entry_id, safe='')}/undrop", body)
    entry: dict[str, Any] = json.loads(answer)
    return entry


def list_replicas(client: SeamarkClient) -> list[dict[str, Any]]:
    """Return the replicas of the server that have a lease.

    docs/reference/openapi.json defines the form of the result (listReplicas).
    """
    replicas: list[dict[str, Any]] = client._request_json("GET", "/api/v1/replicas")["replicas"]
    return replicas


def _send(
    client: SeamarkClient,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    query: Mapping[str, str] | None = None,
) -> bytes:
    """Send a request only once, because the server would refuse a retry of a request that has succeeded."""
    payload = None if body is None else json.dumps(body).encode()
    return client._request(method, path, query or {}, payload, repeatable=False)


def make_namespace_route(client: SeamarkClient, namespace: Name) -> str:
    return f"{client._get_catalog()}/namespaces/{make_namespace_path(_split_levels(namespace))}"


def _split_levels(namespace: Name) -> Sequence[str]:
    return split_name(namespace) if isinstance(namespace, str) else tuple(namespace)


def _make_identifier(table: Name) -> dict[str, Any]:
    levels = split_table(table)
    return {"namespace": list(levels[:-1]), "name": levels[-1]}
