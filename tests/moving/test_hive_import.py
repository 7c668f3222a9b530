"""Tests of `seamark import` from a Hive metastore.

The tests serve it with the generated code of its Thrift interface.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from hive_metastore import ThriftHiveMetastore
from hive_metastore.ttypes import Database, GetTablesRequest, GetTablesResult, Table
from thrift.protocol.TBinaryProtocol import TBinaryProtocolFactory
from thrift.server.TServer import TThreadedServer
from thrift.transport.TSocket import TServerSocket
from thrift.transport.TTransport import TBufferedTransportFactory

from seamark.connector.client.catalog import create_namespace, create_table, load_namespace_properties, load_view
from seamark.connector.client.indexes import IndexClient
from seamark.connector.moving import hive_metastore as hive_source
from seamark.connector.moving import opening
from seamark.connector.moving.opening import open_source
from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable, EntryMissing
from seamark.formats.runtime.lazy_module import LazyModule
from tests.api.client import SCHEMA, VIEW_VERSION
from tests.moving.test_import import COLUMNS, append_ids, import_all, run_import

ODD_NAMES = ("a/b", "../x", "a\0b", "'; DROP TABLE t --", '"', "%2e%2e%2f", "x" * 5000, " ", "漢\u202e\x1b[31m")


class Metastore:
    """A metastore with the database `shop`. It implements only the calls of an import."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, str]] = {}
        self.extra_tables: list[Table] = []
        """Tables that each answer contains in addition to the requested tables."""

    def get_all_databases(self) -> list[str]:
        return ["shop"]

    def get_database(self, name: str) -> Database:
        return Database(name=name, description="Orders", parameters={"owner": "ann"})

    def get_all_tables(self, db_name: str) -> list[str]:
        return list(self.tables)

    def get_table_objects_by_name_req(self, req: GetTablesRequest) -> GetTablesResult:
        tables = self.tables
        requested_tables = [
            Table(tableName=name, dbName=req.dbName, parameters=tables[name]) for name in req.tblNames if name in tables
        ]
        return GetTablesResult([*requested_tables, *self.extra_tables])


@pytest.fixture
def metastore() -> Iterator[tuple[Metastore, str]]:
    """Serve a metastore, and yield it with its address."""
    metastore, socket = Metastore(), TServerSocket("127.0.0.1", 0)
    socket.listen()
    port = socket.handle.getsockname()[1]
    socket.listen = lambda: None  # The server would listen again, and change the port.
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
    view = {"name": "recent", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    created = origin._request_json("POST", "/v1/namespaces/shop/views", body=view)
    service.tables["recent"] = {"table_type": "ICEBERG-VIEW", "metadata_location": created["metadata-location"]}
    service.tables["plain"] = {"table_type": "EXTERNAL"}
    service.tables["broken"] = {"table_type": "ICEBERG"}
    for name in ODD_NAMES:
        service.tables[name] = {"table_type": "ICEBERG", "metadata_location": "file:///etc/passwd"}
    outcomes = import_all(target, address)
    refused = dict.fromkeys([f"shop.{name}" for name in ("broken", *ODD_NAMES)], "refused")
    assert outcomes == {"shop": "imported", "shop.orders": "imported", "shop.recent": "imported", **refused}
    assert load_view(target, "shop.recent") == load_view(origin, "shop.recent")
    assert {"owner": "ann", "comment": "Orders"}.items() <= load_namespace_properties(target, "shop").items()
    assert json.loads(target.load_table("shop.orders").metadata)["location"] in location


def test_import_error_names_a_metastore_that_does_not_answer(target: IndexClient) -> None:
    assert "127.0.0.1:1 does not answer" in run_import(target, "thrift://127.0.0.1:1").output


@contextmanager
def serve_bytes(chunks: Callable[[], Iterable[bytes]]) -> Iterator[str]:
    """Yield the address of a server that answers the first call of each connection with the bytes of `chunks`."""

    class Handler(BaseRequestHandler):
        """A handler that reads one call, and sends bytes until the client has closed the connection."""

        def handle(self) -> None:
            self.request.recv(1 << 16)
            with suppress(OSError):
                for chunk in chunks():
                    self.request.sendall(chunk)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"thrift://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def make_answer(method: str, result: bytes) -> bytes:
    """Return the start of an answer of Thrift's binary protocol: a header, and the first bytes of the result.

    The first word of the header contains the version of the protocol (0x8001) and the type of a reply (2). The last
    word is the number of the call, which is 0.
    """
    return struct.pack("!II", 0x80010002, len(method)) + method.encode() + struct.pack("!I", 0) + result


LIST_START = struct.pack("!bhb", 15, 0, 11)
"""The start of a result that is a list of strings, without the length of the list."""
HOSTILE_ANSWERS: dict[str, tuple[Callable[[], Iterable[bytes]], type[Exception]]] = {
    "the connection is closed": (lambda: [], CatalogUnavailable),
    "a list of two billion names": (
        lambda: [make_answer("get_all_databases", LIST_START + struct.pack("!i", 2**31 - 1))],
        CatalogRefusal,
    ),
    "a negative length": (
        lambda: [make_answer("get_all_databases", LIST_START + struct.pack("!ii", 1, -5))],
        CatalogRefusal,
    ),
    "invalid UTF-8": (
        lambda: [make_answer("get_all_databases", LIST_START + struct.pack("!ii", 1, 2) + b"\xff\xfe")],
        CatalogRefusal,
    ),
    "structures in structures": (
        lambda: [make_answer("get_all_databases", struct.pack("!bh", 12, 9) * 100_000)],
        CatalogRefusal,
    ),
    "a name that does not end": (
        lambda: chain(
            [make_answer("get_all_databases", LIST_START + struct.pack("!ii", 1, 1 << 26))], repeat(b"x" * (1 << 16))
        ),
        CatalogRefusal,
    ),
    "names that do not end": (
        lambda: chain(
            [make_answer("get_all_databases", LIST_START + struct.pack("!i", 1 << 20))],
            repeat((struct.pack("!i", 1) + b"x") * (1 << 12)),
        ),
        CatalogRefusal,
    ),
    "an answer of another protocol": (lambda: [b"HTTP/1.1 400 Bad Request\r\n\r\n"], CatalogRefusal),
}


def test_answers_of_a_hostile_metastore_are_limited_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hive_source, "_CALL_BYTES_MAX", 1 << 20)
    for description, (chunks, error) in HOSTILE_ANSWERS.items():
        with serve_bytes(chunks) as address, pytest.raises(error):
            pytest.fail(f"{description}: {list(hive_source.HiveSource(address, {}).list_namespaces())!r:.100}")


def test_metastore_that_sends_one_byte_at_a_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hive_source, "_CALL_S", 0.2)

    def send_slowly() -> Iterator[bytes]:
        yield make_answer("get_all_databases", LIST_START + struct.pack("!ii", 1, 1 << 20))
        while True:
            time.sleep(0.01)
            yield b"x"

    # The message rounds the limit of 0.2 s to whole seconds.
    with serve_bytes(send_slowly) as address, pytest.raises(CatalogUnavailable, match=r"more than 0 s"):
        list(hive_source.HiveSource(address, {}).list_namespaces())


def test_tables_that_were_not_requested_are_ignored(metastore: tuple[Metastore, str]) -> None:
    service, address = metastore
    service.tables["orders"] = {"table_type": "ICEBERG", "metadata_location": "s3://lake/orders"}
    service.extra_tables = [Table(tableName=name, parameters=service.tables["orders"]) for name in ("other", None)]
    source = hive_source.HiveSource(address, {})
    assert source.list_tables(("shop",)) == ["orders"]
    found_tables = source.find_tables(("shop",), ["orders", "gone"])
    assert found_tables["orders"] == "s3://lake/orders"
    assert isinstance(found_tables["gone"], EntryMissing)


def test_wide_tables_are_read_in_smaller_answers(
    metastore: tuple[Metastore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, address = metastore
    wide_parameters = {"table_type": "ICEBERG", "metadata_location": "s3://lake/t"} | {f"p{n}": "v" for n in range(98)}
    service.tables |= {f"t{number}": wide_parameters for number in range(9)}
    # Each table has about 100 values, so an answer holds three tables.
    monkeypatch.setattr(hive_source, "_CALL_VALUES_MAX", 310)
    assert len(hive_source.HiveSource(address, {}).list_tables(("shop",))) == 9
    service.tables["plain"] = {"table_type": "EXTERNAL"}
    service.tables["narrow"] = {"table_type": "ICEBERG", "metadata_location": "s3://lake/narrow"}
    monkeypatch.setattr(hive_source, "_CALL_VALUES_MAX", 50)  # An answer cannot hold one of the wide tables.
    source = hive_source.HiveSource(address, {})
    names = source.list_tables(("shop",))
    assert set(names) == service.tables.keys() - {"plain"}
    found_tables = source.find_tables(("shop",), names)
    assert found_tables.pop("narrow") == "s3://lake/narrow"
    assert all(isinstance(found_table, CatalogRefusal) for found_table in found_tables.values())
    assert "more than 50 values" in str(found_tables["t0"])
    invalid_answer = make_answer("get_table_objects_by_name_req", LIST_START + struct.pack("!i", -1))
    with serve_bytes(lambda: [invalid_answer]) as hostile_address:
        found_tables = hive_source.HiveSource(hostile_address, {}).find_tables(("shop",), ["a", "b"])
    assert {type(found_table) for found_table in found_tables.values()} == {hive_source._AnswerInvalid}


@pytest.mark.parametrize(
    ("address", "library"),
    [("thrift://host", "hive_metastore.ThriftHiveMetastore"), ("glue://", "pyiceberg.catalog.glue")],
)
def test_error_names_the_extra_that_installs_a_missing_library(
    address: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hive_metastore", "glue"):
        monkeypatch.delitem(sys.modules, f"seamark.connector.moving.{name}", raising=False)
        monkeypatch.setattr(opening, name, LazyModule(f"seamark.connector.moving.{name}"))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(CatalogRefusal, match=r"needs the library .*: pip install 'seamark\[moving\]'"):
        open_source(address, {}, 1)
