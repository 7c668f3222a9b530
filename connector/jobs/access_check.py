"""Checks that this process can reach the server and the storage, which every job of the table services needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import urllib3

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import describe_cause
from seamark.connector.client.storage import Storage
from seamark.formats.runtime.tls import find_or_create_authorities_file

_CONTENT = b"Written by Seamark to check the keys of table services. It can be deleted."
_TIMEOUT_S = 10.0
_NO_PROPERTIES: Mapping[str, str] = {}


def check_access(
    client: SeamarkClient,
    table: tuple[str, ...],
    *,
    location: str = "",
    storage: Mapping[str, str] = _NO_PROPERTIES,
    endpoint: str = "",
    reaches_server: bool = True,
) -> dict[str, Any]:
    """Send a request to the server, and write, read and delete an object in the storage.

    Args:
        client: A client with the token of the job.
        table: An unused parameter, which every job has.
        location: The folder in which the object is written. If it is empty, no object is written.
        storage: The address of the storage, as properties of a FileIO.
        endpoint: The address of the objects gateway. Any response of the gateway is sufficient. If it is empty, no
            request is sent to the gateway.
        reaches_server: Whether to send a request to the server.

    Returns:
        An empty dict, which is the result of a job without work.

    Raises:
        RuntimeError: The storage cannot be used. The message has the reason.
        ClientError: The server cannot be reached, or refuses the token.
    """
    if reaches_server:
        client.ping()
    if location:
        _check_object(Storage(storage), location)
    if endpoint:
        _check_gateway(endpoint)
    return {}


def _check_object(storage: Storage, location: str) -> None:
    """Write, read and delete an object.

    Raises:
        RuntimeError: The object cannot be written or read, or other bytes were read.
    """
    folder = location.rpartition("/")[0]
    try:
        storage.write(location, [_CONTENT])
        content = bytes(storage.read(location))
    except OSError as error:
        raise RuntimeError(f"a worker process cannot write and read an object in {folder}: {error}") from None
    finally:
        with suppress(OSError):  # Most jobs do not need the right to delete, so the deletion may fail.
            storage.delete(location)
    if content != _CONTENT:
        raise RuntimeError(f"a worker process has read bytes from an object in {folder} that it has not written")


def _check_gateway(endpoint: str) -> None:
    with urllib3.PoolManager(retries=False, timeout=_TIMEOUT_S, ca_certs=find_or_create_authorities_file()) as pool:
        try:
            pool.request("GET", endpoint)
        except urllib3.exceptions.HTTPError as error:
            raise RuntimeError(
                f"a worker process cannot reach the objects gateway at {endpoint}: {describe_cause(error, endpoint)}"
            ) from None
