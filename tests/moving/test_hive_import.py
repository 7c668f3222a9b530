"""Tests of `seamark import` from a Hive metastore.

The tests serve it with the generated code of its Thrift interface.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hive_metastore import ThriftHiveMetastore
from hive_metastore.ttypes import Database, NoSuchObjectException, Table
from thrift.protocol.TBinaryProtocol import TBinaryProtocolFactory
from thrift.server.TServer import TThreadedServer
from thrift.transport.TSocket import TServerSocket
from thrift.transport.TTransport import TBufferedTransportFactory

from seamark.connector.client.catalog import create_namespace, create_table, load_namespace_properties
from seamark.connector.client.indexes import IndexClient
from tests.moving.test_import import COLUMNS, append_ids, import_all, run_import


class Metastore:
    """A metastore with the database `shop`. It implements only the calls of an import."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, str]] = {}

    def get_all_databases(self) -> list[str]:
        return ["shop"]

    def get_database(self, name: str) -> Database:
        return Database(name=name, description="Orders", parameters={"owner": "ann"})

    def get_all_tables(self, db_name: str) -> list[str]:
        return list(self.tables)

    def get_table_objects_by_name(self, dbname: str, tbl_names: list[str]) -> list[Table]:
        return [self.get_table(dbname, name) for name in tbl_names]

    def get_table(self, dbname: str, tbl_name: str) -> Table:
        if tbl_name not in self.tables:
            raise NoSuchObjectException(f"{dbname}.{tbl_name}")
        return Table(tableName=tbl_name, dbName=dbname, parameters=self.tables[tbl_name])


@pytest.fixture
def metastore() -> Iterator[tuple[Metastore, str]]:
    """Serve a metastore, and yield it with its address."""
    metastore, socket = Metastore(), TServerSocket("127.0.0.1", 0)
    socket.listen()
    port = socket.handle.getsockname()[1]
    socket.listen = lambda: None
    server = TThreadedServer(
        ThriftHiveMetastore.Processor(metastore),
        socket,
        TBufferedTransportFactory(),
        TBinaryProtocolFactory(),
        daemon=True,
    )
    threading.Thread(target=server.serve, daemon=True).start()
    yield metastore, f"thrift://127.0.0.1:{port}"
    socket.close()


def find_metadata_location(client: IndexClient, table: str) -> Any:
    return client._request_json("GET", client._make_standard_path(table))["metadata-location"]


def test_import_takes_the_iceberg_tables_of_a_metastore(
    origin: IndexClient, target: IndexClient, metastore: tuple[Metastore, str]
) -> None:
    service, address = metastore
    create_namespace(origin, "shop", {})
    create_table(origin, "shop.orders", COLUMNS, properties={})
    append_ids(origin, "shop.orders", 1)
    location = find_metadata_location(origin, "shop.orders")
    service.tables["orders"] = {"table_type": "iceberg", "metadata_location": location}
    service.tables["plain"] = {"table_type": "EXTERNAL"}
    service.tables["broken"] = {"table_type": "ICEBERG"}
    outcomes = import_all(target, address)
    assert outcomes == {"shop": "imported", "shop.orders": "imported", "shop.broken": "refused"}
    assert {"owner": "ann", "comment": "Orders"}.items() <= load_namespace_properties(target, "shop").items()
    assert json.loads(target.load_table("shop.orders").metadata)["location"] in location


def test_import_error_names_a_metastore_that_does_not_answer(target: IndexClient) -> None:
    assert "127.0.0.1:1 does not answer" in run_import(target, "thrift://127.0.0.1:1").output
