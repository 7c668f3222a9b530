"""Finds the Iceberg tables of a Hive metastore, for an import.

The parameters of a table contain the location of its metadata file. PyIceberg has a client for the metastore's Thrift
interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from hive_metastore.ThriftHiveMetastore import Client
from hive_metastore.ttypes import NoSuchObjectException, Table
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TException
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TTransportException

from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable, EntryMissing, Levels

_PORT = 9083
_TIMEOUT_MS = 60_000
_TABLES_PER_CALL = 500
_TABLE, _VIEW = "ICEBERG", "ICEBERG-VIEW"
"""The values of the parameter `table_type`, for tables and for views."""


class HiveSource:
    """The source of an import from a Hive metastore. Kerberos is not supported.

    Args:
        uri: `thrift://HOST:PORT`.
        user: The name of the user for whom the metastore checks rights. If it is empty, no name is sent.
    """

    def __init__(self, uri: str, user: str = "") -> None:
        parts = urlsplit(uri)
        self._host, self._port = parts.hostname or "localhost", parts.port or _PORT
        self._user = user

    def list_namespaces(self) -> Iterator[Levels]:
        with self._connect() as client:
            names: list[str] = client.get_all_databases()
        yield from ((name,) for name in sorted(names))

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        with self._connect() as client:
            database = client.get_database(namespace[0])
        properties: dict[str, str] = dict(database.parameters or {})
        properties |= {"location": database.locationUri} if database.locationUri else {}
        properties |= {"comment": database.description} if database.description else {}
        return properties

    def list_tables(self, namespace: Levels) -> list[str]:
        return self._list(namespace, _TABLE)

    def list_views(self, namespace: Levels) -> list[str]:
        return self._list(namespace, _VIEW)

    def find_table(self, namespace: Levels, name: str) -> str:
        return self._find(namespace, name, _TABLE)

    def find_view(self, namespace: Levels, name: str) -> str:
        return self._find(namespace, name, _VIEW)

    def close(self) -> None:
        """Do nothing: each call has its own connection, because a connection serves one thread."""

    def _list(self, namespace: Levels, kind: str) -> list[str]:
        """Return the names of Iceberg tables or views. Tables of other formats are left out."""
        with self._connect() as client:
            names: list[str] = client.get_all_tables(namespace[0])
            tables: list[Table] = []
            for start in range(0, len(names), _TABLES_PER_CALL):
                tables += client.get_table_objects_by_name(namespace[0], names[start : start + _TABLES_PER_CALL])
        return sorted(table.tableName for table in tables if _read_kind(table) == kind)

    def _find(self, namespace: Levels, name: str, kind: str) -> str:
        with self._connect() as client:
            table = client.get_table(namespace[0], name)
        location = (table.parameters or {}).get("metadata_location")
        if _read_kind(table) != kind or not location:
            raise CatalogRefusal("The metastore does not state the location of the metadata file")
        return str(location)

    @contextmanager
    def _connect(self) -> Iterator[Client]:
        """Open a connection, and convert the errors of calls to exceptions of imports.

        Raises:
            CatalogUnavailable: The metastore does not answer.
            EntryMissing: The table, view or database no longer exists.
            CatalogRefusal: The metastore refuses a call.
        """
        socket = TSocket(self._host, self._port)
        socket.setTimeout(_TIMEOUT_MS)
        transport = TBufferedTransport(socket)
        try:
            transport.open()
            client = Client(TBinaryProtocol(transport))
            if self._user:
                client.set_ugi(self._user, [])
            yield client
        except NoSuchObjectException as error:
            raise EntryMissing(f"The metastore no longer has the entry: {error.message}") from None
        except (TTransportException, OSError) as error:
            raise CatalogUnavailable(f"The metastore {self._host}:{self._port} does not answer: {error}") from None
        except TException as error:
            raise CatalogRefusal(f"The metastore refuses the call: {error}") from None
        finally:
            transport.close()


def _read_kind(table: Table) -> str:
    return str((table.parameters or {}).get("table_type", "")).upper()
