"""Finds the Iceberg tables of a Hive metastore, for an import.

The parameters of a table contain the location of its metadata file. PyIceberg has a client for the metastore's Thrift
interface. Hive 4 no longer has the calls that Hive 2.2 has, so both are used.

The metastore is not trusted: the time, the bytes and the values of an answer are limited while it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from hive_metastore.ThriftHiveMetastore import Client
from hive_metastore.ttypes import (
    ClientCapabilities,
    ClientCapability,
    GetTablesRequest,
    NoSuchObjectException,
    Table,
    UnknownDBException,
)
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.protocol.TProtocol import TProtocolException
from thrift.Thrift import TApplicationException, TException
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TTransportException

from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable, EntryMissing, FoundTables, Levels

_PORT = 9083
"""The default port of a metastore."""
_IDLE_MS = 60_000
"""The maximum time for which a call waits for the next bytes."""
_CALL_S = 300.0
"""The maximum time of one call."""
_CALL_BYTES_MAX = 128 << 20
_CALL_VALUES_MAX = 1_000_000
"""The maximum number of values in the lists, sets and maps of one answer."""
_TABLES_PER_CALL = 100
_CAPABILITIES = [ClientCapability.INSERT_ONLY_TABLES]
"""Without it, the metastore refuses a call that asks for several tables if one of them is an insert-only table."""
_TABLE, _VIEW = "ICEBERG", "ICEBERG-VIEW"
"""The values of the parameter `table_type`, for tables and for views."""
_INVALID_SIZES = (TTransportException.SIZE_LIMIT, TTransportException.NEGATIVE_SIZE)


class _AnswerInvalid(CatalogRefusal):
    """Raised if an answer cannot be decoded, or has more bytes or values than the limit."""


class HiveSource:
    """The source of an import from a Hive metastore. Kerberos is not supported.

    Args:
        uri: `thrift://HOST:PORT`.
        properties: `ugi` is the name of the user for whom the metastore checks rights. Without it, no name is sent.

    Raises:
        CatalogRefusal: The port is invalid.
    """

    def __init__(self, uri: str, properties: Mapping[str, str]) -> None:
        parts = urlsplit(uri)
        try:
            self._host, self._port = parts.hostname or "localhost", parts.port or _PORT
        except ValueError as error:
            raise CatalogRefusal(f"{uri} is not the address of a metastore: {error}") from None
        self._user = properties.get("ugi", "")
        self._views: dict[Levels, list[str]] = {}
        """The names of the views by namespace, which `list_tables` finds in the same answers."""

    def list_namespaces(self) -> Iterator[Levels]:
        with self._connect() as client:
            names: list[str] = client.get_all_databases()
        yield from ((name,) for name in sorted(set(names)))

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        with self._connect() as client:
            database = client.get_database(namespace[0])
        properties: dict[str, str] = dict(database.parameters or {})
        properties |= {"location": database.locationUri} if database.locationUri else {}
        properties |= {"comment": database.description} if database.description else {}
        return properties

    def list_tables(self, namespace: Levels) -> list[str]:
        tables, self._views[namespace] = self._list(namespace)
        return tables

    def list_views(self, namespace: Levels) -> list[str]:
        views = self._views.pop(namespace, None)
        return self._list(namespace)[1] if views is None else views

    def find_tables(self, namespace: Levels, names: Sequence[str]) -> FoundTables:
        return self._find(namespace, names, _TABLE)

    def find_view(self, namespace: Levels, name: str) -> str:
        location = self._find(namespace, [name], _VIEW)[name]
        if isinstance(location, CatalogRefusal):
            raise location
        return location

    def close(self) -> None:
        """Do nothing: each call has its own connection, because a connection serves one thread."""

    def _list(self, namespace: Levels) -> tuple[list[str], list[str]]:
        """Return the names of Iceberg tables and views. Tables of other formats are left out."""
        with self._connect() as client:
            names: list[str] = client.get_all_tables(namespace[0])
        names = sorted(set(names))
        kinds: dict[str, str] = {}
        for start in range(0, len(names), _TABLES_PER_CALL):
            tables = self._load_by_name(namespace, names[start : start + _TABLES_PER_CALL])
            # The kind of a table that cannot be read is unknown, so `find_tables` reports why it is not imported.
            kinds |= {
                name: _TABLE if isinstance(table, CatalogRefusal) else _read_kind(table)
                for name, table in tables.items()
            }
        return [name for name in kinds if kinds[name] == _TABLE], [name for name in kinds if kinds[name] == _VIEW]

    def _find(self, namespace: Levels, names: Sequence[str], kind: str) -> FoundTables:
        """Return the locations of the metadata files of tables or views."""
        tables = self._load_by_name(namespace, names)
        return {name: _read_location(tables.get(name), name, kind) for name in names}

    def _load_by_name(self, namespace: Levels, names: Sequence[str]) -> dict[str, Table | CatalogRefusal]:
        """Return the tables with these names, or the reason why a table cannot be read.

        Missing tables are left out, and so are tables with other names. If an answer is invalid, each half of the names
        is requested separately, until the invalid table is found.
        """
        try:
            with self._connect() as client:
                tables = _load_tables(client, namespace[0], list(names))
        except _AnswerInvalid as error:
            if len(names) == 1:
                return {names[0]: error}
            # Tables with thousands of columns need smaller answers, and one invalid table must not affect others.
            middle = len(names) // 2
            return self._load_by_name(namespace, names[:middle]) | self._load_by_name(namespace, names[middle:])
        by_name = {table.tableName: table for table in tables or ()}
        return {name: by_name[name] for name in names if name in by_name}

    @contextmanager
    def _connect(self) -> Iterator[Client]:
        """Open a connection, and convert the errors of calls to exceptions of imports.

        Raises:
            CatalogUnavailable: The metastore does not answer.
            EntryMissing: The database, the table or the view no longer exists.
            CatalogRefusal: The metastore refuses a call, or its answer is invalid or too large.
        """
        transport = TBufferedTransport(_LimitedSocket(self._host, self._port))
        try:
            transport.open()
            client = Client(_LimitedProtocol(transport))
            if self._user:
                client.set_ugi(self._user, [])
            yield client
        except (NoSuchObjectException, UnknownDBException) as error:
            raise EntryMissing(f"The metastore no longer has the entry: {error.message}") from None
        except (TTransportException, OSError) as error:
            if isinstance(error, TTransportException) and error.type in _INVALID_SIZES:
                raise _AnswerInvalid(f"The answer of the metastore is too large or invalid: {error}") from None
            raise CatalogUnavailable(f"The metastore {self._host}:{self._port} does not answer: {error}") from None
        except TProtocolException as error:
            raise _AnswerInvalid(f"The answer of the metastore is invalid: {error}") from None
        except TException as error:
            raise CatalogRefusal(f"The metastore refuses the call: {error}") from None
        # Thrift raises these for invalid UTF-8, unknown types, and values that are nested too deeply.
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _AnswerInvalid(f"The answer of the metastore is invalid: {error}") from None
        finally:
            transport.close()


class _LimitedSocket(TSocket):  # type: ignore[misc]
    """A connection that ends after a time or a number of bytes, even if the metastore continues to send."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.setTimeout(_IDLE_MS)
        self._deadline_s = time.monotonic() + _CALL_S
        self._remaining_bytes = _CALL_BYTES_MAX

    def read(self, sz: int) -> bytes:
        if time.monotonic() > self._deadline_s:
            raise TTransportException(TTransportException.TIMED_OUT, f"the answer takes more than {_CALL_S:.0f} s")
        data: bytes = super().read(sz)
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise TTransportException(TTransportException.SIZE_LIMIT, f"more than {_CALL_BYTES_MAX >> 20} MiB")
        return data


class _LimitedProtocol(TBinaryProtocol):  # type: ignore[misc]
    """A protocol that limits the number of values of an answer.

    A limit of the answer's bytes is not sufficient. An empty structure has only one byte in the answer, so an answer of
    few bytes could become many objects in memory.
    """

    def __init__(self, transport: TBufferedTransport) -> None:
        super().__init__(transport, string_length_limit=_CALL_BYTES_MAX)
        self._remaining_values = _CALL_VALUES_MAX

    def _check_container_length(self, length: int) -> None:
        super()._check_container_length(length)
        self._remaining_values -= length
        if self._remaining_values < 0:
            raise TTransportException(TTransportException.SIZE_LIMIT, f"more than {_CALL_VALUES_MAX:,} values")


def _load_tables(client: Client, database: str, names: list[str]) -> list[Table]:
    try:
        request = GetTablesRequest(database, names, ClientCapabilities(_CAPABILITIES))
        tables: list[Table] = client.get_table_objects_by_name_req(request).tables
    except TApplicationException as error:
        if error.type != TApplicationException.UNKNOWN_METHOD:
            raise
        tables = client.get_table_objects_by_name(database, names)
    return tables


def _read_location(table: Table | CatalogRefusal | None, name: str, kind: str) -> str | CatalogRefusal:
    if table is None:
        return EntryMissing(f"The metastore no longer has {name}")
    if isinstance(table, CatalogRefusal):
        return table
    location = (table.parameters or {}).get("metadata_location")
    if _read_kind(table) != kind or not location:
        return CatalogRefusal("The metastore does not state the location of a metadata file")
    return str(location)


def _read_kind(table: Table) -> str:
    return str((table.parameters or {}).get("table_type", "")).upper()
