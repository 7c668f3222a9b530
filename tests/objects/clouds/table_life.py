"""A check of the life of a table on a storage, from creation to purge. The tests of each cloud run it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

import seamark
from seamark.connector.client.catalog import drop_table
from seamark.connector.client.indexes import IndexClient
from seamark.metaserver.objects.port import ObjectStore
from tests.connector.server_thread import ServerThread
from tests.waits import block_until

ROWS = 1000


def run_table_life(server: ServerThread, warehouse: str, client_properties: dict[str, Any]) -> None:
    """Check that PyIceberg and Seamark's client write and read a table, and that a purge deletes its objects.

    Args:
        server: A server that does not retain dropped tables.
        warehouse: The location of its warehouse.
        client_properties: The properties of PyIceberg's catalog.
    """
    catalog = RestCatalog("cloud", uri=server.url, **client_properties)
    catalog.create_namespace_if_not_exists("db")
    data = pa.table({"id": range(ROWS), "part": [f"p {number % 3}/ü" for number in range(ROWS)]})
    table = catalog.create_table("db.t", schema=data.schema)
    assert table.location().startswith(f"{warehouse}/db/t")
    table.append(data)
    table.append(data.slice(0, 10))  # These ids are then in the table twice.
    assert sorted(table.scan(row_filter="id < 5").to_arrow()["id"].to_pylist()) == sorted([0, 1, 2, 3, 4] * 2)

    with closing(IndexClient(server.url)) as client:
        seamark.append(client, "db.t", pa.table({"id": [ROWS + 7], "part": ["seamark"]}))
        planned_scan = seamark.scan(client, "db.t", where=f"id > {ROWS}")
        assert planned_scan.to_arrow()["part"].to_pylist() == ["seamark"]
        assert client.explain("db.t", f"id > {ROWS}").files == 1, "only the file of Seamark's append matches"
        row_count = ROWS + 10 + 1  # The rows of the three appends.
        assert catalog.load_table("db.t").scan().to_arrow().num_rows == row_count
        assert server.run(_list_objects(server.components.objects, warehouse))
        drop_table(client, "db.t", purge=True)
    block_until(lambda: not server.run(_list_objects(server.components.objects, warehouse)))


async def _list_objects(objects: ObjectStore, folder: str) -> list[str]:
    return [info.location async for info in objects.list(folder)]
