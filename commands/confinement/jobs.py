"""Restrict the process of a job to the files and hosts that the job needs.

The process can use the folders of the job's table, a temporary folder, and the job's hosts. The data files that a job
decodes come from writers, and the process has the rights of the server's account and the keys of encrypted files.
`confine` refuses other files in Seamark's code. Landlock refuses them in the kernel, even if a library has a fault.
"""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from seamark.commands.confinement import landlock
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import LoginRequired, Refused
from seamark.connector.client.file_systems import find_client_storage
from seamark.connector.client.names import Name
from seamark.connector.client.policies import read_effective_properties
from seamark.connector.client.storage import Storage, confine, open_confined_folders
from seamark.connector.client.values import EngineTable
from seamark.connector.parquet.encryption.keys import KMS_CLASS
from seamark.formats.iceberg.metadata.clustering import parse_joins
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.protocol.wire import ACCESS_CHECK
from seamark.formats.services.services import INDEXING, SERVICES
from seamark.metaserver.services.launching.launchers import JobRequest

PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")
"""The table properties that name folders of the table in addition to its location."""
_ALLOWED = "seamark.allowed-locations"
"""The table property that lists folders with files that the table can name although they do not belong to it.

Only an admin of the catalog can set it.
"""
_SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 4, 38
"""Options of the system call prctl."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_PORTS = {"http": 80, "https": 443}
_DNS_PORT = 53


def protect_memory_and_rights() -> None:
    """Hide the memory of this process, and forbid it to gain rights.

    The memory can contain keys, so it is hidden from core dumps and from other processes of its account. With
    `_SET_NO_NEW_PRIVILEGES`, programs that the process starts get no more rights than it has, which Landlock requires.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = ctypes.CDLL(None)
    for option, value in ((_SET_DUMPABLE, 0), (_SET_NO_NEW_PRIVILEGES, 1)):
        library.prctl(option, value, 0, 0, 0)


def confine_job(client: SeamarkClient, request: JobRequest, scratch: str) -> None:
    """Restrict this process to the files and hosts of a job.

    Below the folders of the warehouse, the folders of the table are opened without symbolic links, because a
    writer could replace them by links to folders of other tables. The kernel's rules (Landlock) are made for the opened
    folders: those of the table can be written, and those of other tables that the job needs can only be read.

    Args:
        client: A client of the server.
        request: The job.
        scratch: The folder of the job's temporary files.

    Raises:
        NoSuchResource: The table does not exist.
        PermissionError: A folder of the table is outside the warehouse, or a symbolic link leads to it.
    """
    tempfile.tempdir = scratch
    if request.service == ACCESS_CHECK:  # The access check has no table.
        loaded_table, own_folders, other_folders = _load_checked_storage(request.arguments), list[str](), list[str]()
    else:
        loaded_table = client.load_table((*request.namespace, request.table))
        own_folders, other_folders = _find_folders(client, request, loaded_table)
    for folder in own_folders:
        path_in_folder = Storage().find_local_path(f"{folder}/x")
        if path_in_folder is not None:
            path_in_folder.make_folder()  # Landlock's rule needs an existing folder. The file is not created.
    protect_memory_and_rights()
    # First only the folders of the table, to open those that can be written, and then also the folders to read.
    confine(own_folders, request.folders)
    with open_confined_folders() as writable:
        confine([*own_folders, *other_folders], request.folders)
        with open_confined_folders() as readable:
            # The ports of a key service (KMS) are not known here, so with a class for it, all ports are allowed.
            landlock.confine_files(
                readable=[*readable, *_list_named_files(loaded_table)],
                writable=[*writable, scratch],
                connectable=None if os.environ.get(KMS_CLASS) else set(_list_ports(request.url, loaded_table)),
            )


def _load_checked_storage(arguments: Mapping[str, Any]) -> EngineTable:
    """Return the storage that an access check uses, in the form of a table's storage."""
    endpoint = arguments.get("endpoint", "")
    location = arguments.get("location", "") or ("s3://" if endpoint else "")
    return EngineTable(b"", location, arguments.get("storage") or {"s3.endpoint": endpoint})


def _find_folders(client: SeamarkClient, request: JobRequest, loaded_table: EngineTable) -> tuple[list[str], list[str]]:
    """Return the local folders of the table, and the local folders that its jobs only read."""
    metadata = decode_table(loaded_table.metadata, loaded_table.location)
    own_folders = list(list_local_folders([metadata.location, *(metadata.properties.get(name, "") for name in PATHS)]))
    other_folders = list(list_local_folders(metadata.properties.get(_ALLOWED, "").split(",")))
    for joined_table in _load_read_tables(client, request, metadata):
        properties = decode_table(joined_table.metadata, joined_table.location).properties
        other_folders += list_local_folders([joined_table.location, *(properties.get(name, "") for name in PATHS)])
        other_folders += list_local_folders(properties.get(_ALLOWED, "").split(","))
    return own_folders, other_folders


def _load_read_tables(client: SeamarkClient, request: JobRequest, metadata: TableMetadata) -> Iterator[EngineTable]:
    """Yield the other tables that a job reads: the joined tables of a clustering, and the dimension tables of cubes.

    A dimension table that the job has no right to read is omitted; the builds of its cubes then fail.

    Raises:
        ClientError: A joined table cannot be loaded, or a dimension table temporarily cannot be loaded. The scheduler
            repeats the job.
    """
    if request.service in SERVICES and SERVICES[request.service].reads_joined_tables:
        policy = read_effective_properties(client, (*request.namespace, request.table))
        for join in parse_joins({**policy, **metadata.properties}).values():
            yield client.load_table(join.table)
    if request.service == INDEXING.name:
        for name in _find_dimension_tables(metadata):
            try:
                yield client.load_table(name)
            except Refused as error:
                if isinstance(error, LoginRequired) or error.status == HTTPStatus.TOO_MANY_REQUESTS:
                    raise


def _find_dimension_tables(metadata: TableMetadata) -> set[Name]:
    """Return the dimension tables whose attributes are in cubes of the table."""
    terms = (term for definition in read_definitions(metadata).enabled for term in definition.terms)
    return {lookup.source.table for term in terms if (lookup := parse_lookup(term.transform)) is not None}


def list_local_folders(locations: Iterable[str]) -> Iterator[str]:
    """Yield the paths of the locations that are local."""
    for location in locations:
        path = location.strip().removeprefix("file://").removeprefix("file:")
        if path.startswith("/"):
            yield path.rstrip("/") or "/"


def _list_named_files(loaded_table: EngineTable) -> Iterator[str]:
    """Yield the files that environment variables name: keys of encrypted files, and files of the storage library."""
    for name, value in os.environ.items():
        if name.startswith("SEAMARK_PARQUET_") and os.path.exists(value):
            yield os.path.abspath(value)
    storage = find_client_storage(loaded_table.location)
    if storage is not None:
        yield from storage.list_configuration_files()


def _list_ports(url: str, loaded_table: EngineTable) -> Iterator[int]:
    """Yield the ports of this server, of the storage, of proxies, and of name resolution."""
    yield _DNS_PORT
    urls = [url, *(os.environ.get(name, "") for name in _PROXIES)]
    storage = find_client_storage(loaded_table.location)
    if storage is not None:
        urls += storage.list_urls(loaded_table.storage)
    for address in filter(None, urls):
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = parts.port or _PORTS.get(parts.scheme)
        if port:
            yield port
