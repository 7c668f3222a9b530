"""A random catalog whose names have odd characters, and its listing."""

from __future__ import annotations

import random
from typing import Any

from seamark.connector.client.catalog import (
    create_namespace,
    create_table,
    list_views,
    load_namespace_properties,
    load_view,
)
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import make_namespace_path
from tests.api.client import SCHEMA, VIEW_VERSION

_CHARACTERS = "aZ09_- .,:;%+&=?#@!'\"()[]{}|~^$*<>äß漢🙂\u202eé"
_COLUMNS = {"type": "struct", "fields": [{"id": 1, "name": "id", "type": "long", "required": False}]}


def fill_with_odd_names(client: IndexClient, seed: int, *, namespaces: int, entries: int) -> None:
    """Create random namespaces of up to three levels with properties, and tables and views in them.

    `namespaces` is the number of namespaces, and `entries` the number of tables and views.
    """
    rng = random.Random(seed)
    number = 0

    def draw_name() -> str:
        nonlocal number
        number += 1
        odd_text = "".join(rng.choice(_CHARACTERS) for _ in range(rng.randint(0, 8)))
        return f"{odd_text}x{number}" if rng.random() < 0.7 else f"x{number}"  # The number makes each name unique.

    paths: list[tuple[str, ...]] = []
    for _ in range(namespaces):
        parent = rng.choice([(), *[path for path in paths if len(path) < 3]])
        paths.append((*parent, draw_name()))
        create_namespace(client, paths[-1], {draw_name(): draw_name() for _ in range(rng.randint(0, 3))})
    for _ in range(entries):
        path, name = rng.choice(paths), draw_name()
        properties = {draw_name(): draw_name()}
        if rng.random() < 0.2:
            body = {"name": name, "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": properties}
            client._request_json("POST", f"/v1/namespaces/{make_namespace_path(path)}/views", body=body)
        else:
            create_table(client, (*path, name), _COLUMNS, properties=properties)


def list_catalog(client: IndexClient) -> dict[tuple[str, ...], Any]:
    """Return the properties of each namespace, and the metadata of each table and view.

    The location of a namespace is left out, because the default location depends on the warehouse.
    """
    listing: dict[tuple[str, ...], Any] = {}
    for namespace in client.namespaces():
        if namespace == ("db",):  # The test server creates this namespace.
            continue
        properties = load_namespace_properties(client, namespace)
        listing["namespace", *namespace] = {name: value for name, value in properties.items() if name != "location"}
        for table in client.tables(namespace):
            listing["table", *table] = bytes(client.load_table(table, history=True).metadata)
        for view in list_views(client, namespace):
            listing["view", *view] = load_view(client, view)
    return listing
