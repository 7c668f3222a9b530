"""A random catalog over HTTP, and an independent listing of it.

Clients send the actions: namespaces, tables with commits, branches and properties, views, functions, renames, drops and
undrops. The listing reads everything through the API. It shares no code with backups and rebuilds.
"""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import quote

from tests.api.client import SCHEMA, VIEW_VERSION, build_function_document
from tests.catalog.rig import build_append
from tests.faults.rigs.http import HttpClient

SEPARATOR = "\x1f"
LEVELS_MAX = 3
"""The maximum number of levels of a namespace."""
Path = tuple[str, ...]
Listing = dict[str, dict[str, Any]]


class RandomCatalog:
    """Sends random changes. It remembers the name with which each table, view and function was created."""

    def __init__(self, base_url: str, seed: int) -> None:
        self.client = HttpClient(base_url)
        self._rng = random.Random(seed)
        self._number = 0
        self.namespaces: list[Path] = []
        self.tables: dict[str, tuple[Path, str]] = {}
        self.views: dict[str, tuple[Path, str]] = {}
        self.dropped_objects: dict[str, str] = {}
        self.created_objects: dict[str, tuple[str, str]] = {}
        """(kind, name at the creation) of each object, by UUID."""

    def run(self, actions: int) -> None:
        self.create_namespace()
        for _ in range(actions):
            self._rng.choice(
                (
                    *(self.create_table,) * 5,
                    *(self.commit,) * 8,
                    *(self.create_view, self.replace_view, self.put_function),
                    *(self.create_namespace, self.rename, self.rename, self.drop, self.drop, self.undrop_table),
                )
            )()

    def _call_and_check(self, method: str, path: str, body: Any = None) -> Any:
        status, answer = self.client.call(method, path, body)
        assert status in (200, 204), (method, path, status, answer)
        return answer

    def _draw_name(self) -> str:
        self._number += 1
        return f"n{self._number}"

    def create_namespace(self) -> None:
        parent = self._rng.choice([(), *self.namespaces]) if self.namespaces else ()
        path = (*parent, self._draw_name()) if len(parent) < LEVELS_MAX else (self._draw_name(),)
        self._call_and_check("POST", "/v1/namespaces", {"namespace": list(path), "properties": {"owner": path[-1]}})
        self.namespaces.append(path)

    def create_table(self) -> None:
        path, name = self._rng.choice(self.namespaces), self._draw_name()
        body = {"name": name, "schema": SCHEMA, "properties": {"seamark.services.compact": "off"}}
        answer = self._call_and_check("POST", f"{build_namespace_route(path)}/tables", body)
        self._remember(self.tables, "table", answer["metadata"]["table-uuid"], path, name)

    def create_view(self) -> None:
        path, name = self._rng.choice(self.namespaces), self._draw_name()
        body = {"name": name, "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
        answer = self._call_and_check("POST", f"{build_namespace_route(path)}/views", body)
        self._remember(self.views, "view", answer["metadata"]["view-uuid"], path, name)

    def put_function(self) -> None:
        path, name, document = self._rng.choice(self.namespaces), self._draw_name(), build_function_document()
        for version in range(self._rng.randint(1, 3)):
            document["properties"] = {"version": str(version)}
            self._call_and_check("PUT", f"/api/v1/functions/{encode(path)}/{name}", document)
        self.created_objects[document["function-uuid"]] = ("function", ".".join((*path, name)))

    def _remember(self, live_objects: dict[str, tuple[Path, str]], kind: str, uuid: str, path: Path, name: str) -> None:
        live_objects[uuid] = (path, name)
        self.created_objects[uuid] = (kind, ".".join((*path, name)))

    def commit(self) -> None:
        """Commit a change of properties, an append or a new branch to a random table."""
        if not self.tables:
            return
        path, name = self._rng.choice(list(self.tables.values()))
        route = f"{build_namespace_route(path)}/tables/{name}"
        metadata = self._call_and_check("GET", f"{route}?snapshots=all")["metadata"]
        change_kind = self._rng.choice(("properties", "append", "append", "branch"))
        requirements: list[Any] = []
        updates: list[Any] = [{"action": "set-properties", "updates": {"p": str(self._rng.random())}}]
        parent_id = metadata.get("current-snapshot-id")
        parent_id = None if parent_id in (None, -1) else parent_id
        if change_kind == "append":
            snapshot_id = self._rng.randrange(1, 1 << 60)
            requirements, updates = build_append(snapshot_id, parent_id, metadata["last-sequence-number"] + 1)
        elif change_kind == "branch" and parent_id is not None:
            branch = {
                "action": "set-snapshot-ref",
                "ref-name": self._draw_name(),
                "type": "branch",
                "snapshot-id": parent_id,
            }
            updates = [branch]
        self._call_and_check("POST", route, {"requirements": requirements, "updates": updates})

    def replace_view(self) -> None:
        if self.views:
            path, name = self._rng.choice(list(self.views.values()))
            updates = [{"action": "set-properties", "updates": {"p": str(self._rng.random())}}]
            self._call_and_check(
                "POST", f"{build_namespace_route(path)}/views/{name}", {"requirements": [], "updates": updates}
            )

    def rename(self) -> None:
        kind, live_objects = self._rng.choice((("tables", self.tables), ("views", self.views)))
        if live_objects:
            uuid = self._rng.choice(list(live_objects))
            path, name = live_objects[uuid]
            new_path, new_name = self._rng.choice(self.namespaces), self._draw_name()
            body = {
                "source": {"namespace": list(path), "name": name},
                "destination": {"namespace": list(new_path), "name": new_name},
            }
            self._call_and_check("POST", f"/v1/{kind}/rename", body)
            live_objects[uuid] = (new_path, new_name)

    def drop(self) -> None:
        if self.tables:
            uuid = self._rng.choice(list(self.tables))
            path, name = self.tables.pop(uuid)
            self._call_and_check("DELETE", f"{build_namespace_route(path)}/tables/{name}")
            rows = self._call_and_check("GET", "/api/v1/dropped")["dropped"]
            self.dropped_objects[uuid] = next(row["id"] for row in rows if row["uuid"] == uuid)

    def undrop_table(self) -> None:
        if self.dropped_objects:
            uuid = self._rng.choice(list(self.dropped_objects))
            path, name = self._rng.choice(self.namespaces), self._draw_name()
            body = {"namespace": list(path), "name": name}
            self._call_and_check("POST", f"/api/v1/dropped/{self.dropped_objects.pop(uuid)}/undrop", body)
            self.tables[uuid] = (path, name)


def encode(path: Path) -> str:
    return quote(SEPARATOR.join(path), safe="")


def build_namespace_route(path: Path) -> str:
    return f"/v1/namespaces/{encode(path)}"


def list_catalog(base_url: str) -> Listing:
    """Return all namespaces, tables, views, functions and dropped tables of a server, by kind and name.

    The content of a table or a view is (metadata file, metadata).
    """
    client = HttpClient(base_url)

    def get(path: str) -> Any:
        status, body = client.call("GET", path)
        assert status == 200, (path, body)
        return body

    listing: Listing = {"namespace": {}, "table": {}, "view": {}, "function": {}, "dropped": {}}
    pending_paths: list[Path] = [()]
    while pending_paths:
        path = pending_paths.pop()
        children = get(f"/v1/namespaces?parent={encode(path)}" if path else "/v1/namespaces")["namespaces"]
        pending_paths += map(tuple, children)
        if not path:
            continue
        route = build_namespace_route(path)
        listing["namespace"][".".join(path)] = get(route)["properties"]
        for kind in ("table", "view"):
            for identifier in get(f"{route}/{kind}s")["identifiers"]:
                name = identifier["name"]
                document = get(f"{route}/{kind}s/{quote(name, safe='')}")
                listing[kind][".".join((*path, name))] = (document["metadata-location"], document["metadata"])
        for identifier in get(f"{route}/functions")["identifiers"]:
            document = get(f"{route}/functions/{quote(identifier[-1], safe='')}")
            listing["function"][".".join(identifier)] = document["metadata"]
    for row in get("/api/v1/dropped")["dropped"]:
        listing["dropped"][row["id"]] = row
    return listing


def get_uuid(kind: str, content: Any) -> str:
    """Return the UUID of a table, view or function in a listing."""
    if kind == "function":
        uuid: str = content["function-uuid"]
    else:
        _, metadata = content
        uuid = metadata[f"{kind}-uuid"]
    return uuid


def get_location(kind: str, content: Any) -> str:
    """Return the metadata file of a table or view in a listing."""
    assert kind != "function"
    location: str
    location, _ = content
    return location


def list_pointers(base_url: str) -> dict[str, str]:
    """Return the metadata file of each table in the namespaces of the first level, by name."""
    client, pointers = HttpClient(base_url), {}
    for (namespace,) in client.call("GET", "/v1/namespaces")[1]["namespaces"]:
        for identifier in client.call("GET", f"/v1/namespaces/{namespace}/tables")[1]["identifiers"]:
            _, document = client.call("GET", f"/v1/namespaces/{namespace}/tables/{identifier['name']}?snapshots=refs")
            pointers[f"{namespace}.{identifier['name']}"] = document["metadata-location"]
    return pointers
