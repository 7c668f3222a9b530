"""The interface of the storages of a server.

A storage opens an object store, gives access to clients and jobs, and explains failures. Each storage is a subclass of
`ServerStorage` and is registered in `metaserver/objects/storages.py`. Its schemes and the form of its locations are in
`formats/storage/storages.py`. Clients open its objects with `connector/client/file_systems.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.locations import Location
from seamark.formats.storage.rules import StorageRules
from seamark.metaserver.objects.credentials import VendedKeys
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.settings.settings import Settings

ClientAccess = tuple[dict[str, str], list[dict[str, object]]]
"""The `config` and the `storage-credentials` of a LoadTableResult."""


class ServerStorage(ABC):
    """A storage of the server.

    The methods of this class are for a storage that clients use without keys or addresses from the server.
    """

    rules: StorageRules
    variable_prefixes: tuple[str, ...] = ()
    """The prefixes of the environment variables that worker processes need to reach the storage."""
    public_variables: tuple[str, ...] = ()
    """The prefixes of environment variables that worker processes need, but that contain no login to a cloud."""

    @abstractmethod
    def open(
        self, roots: Sequence[Location], settings: Settings, clock: Clock
    ) -> AbstractAsyncContextManager[ObjectStore]:
        """Open the object store of the locations below `roots`, and close it when the context ends.

        The store checks the form of the locations that it receives. The caller checks that they are below a root.
        """

    @abstractmethod
    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        """Return advice for an operator after the access to the warehouse failed with this error."""

    def get_endpoint(self, settings: Settings) -> str:
        """Return the configured URL of the store, or an empty text if none is configured."""
        return ""

    def prepare_root(self, root: Location, settings: Settings) -> None:  # noqa: B027  most storages check nothing
        """Check the location of the warehouse before the server starts, and create a local folder if it is missing.

        The method sends no request over the network.

        Raises:
            ConfigError: No objects can be created in the warehouse.
        """

    async def grant_client_access(
        self,
        settings: Settings,
        table: Location,
        *,
        delegation: str | None,
        sign_path: str,
        refresh_path: str = "",
        vend: Callable[[], VendedKeys] | None = None,
        may_write: Callable[[], bool] | None = None,
    ) -> ClientAccess:
        """Return the configuration with which clients read and write the objects of a table.

        Args:
            settings: The settings of the warehouse.
            table: The location of the table.
            delegation: The header `X-Iceberg-Access-Delegation`, or None.
            sign_path: The path for signing requests of this table, relative to the catalog's URI and
                percent-encoded: `v1/…/tables/t/sign`.
            refresh_path: The path for new keys, or an empty text.
            vend: Issues keys of the objects gateway for the table.
            may_write: Returns whether the client may change the table. Without it, the client may only read.

        Raises:
            StorageError: The service of the storage refuses keys for the table.
            RetryLater: The service does not answer.
        """
        return {}, []

    def compute_access_stamp(self, settings: Settings, delegation: str | None) -> tuple[str | bool, ...]:
        """Return the values that determine the result of `grant_client_access`, besides the table.

        When they change, clients must not reuse an answer.
        """
        return ()

    def compute_keys_stamp(self, settings: Settings, now_ms: int) -> int | None:
        """Return a number that changes when clients must load a table again to get new keys.

        Returns:
            The number, or None if the keys in an answer depend neither on the caller nor on the time.
        """
        return None

    async def sign(
        self, request: dict[str, Any], table: Location, settings: Settings, *, writable: bool, now_ms: int
    ) -> tuple[dict[str, Any], str]:
        """Sign a request of a client to the store.

        Args:
            request: A decoded RemoteSignRequest.
            table: The location of the table.
            settings: The settings of the warehouse.
            writable: Whether the client may change the table.
            now_ms: The time of the server.

        Returns:
            A tuple of the RemoteSignResult and its `Cache-Control` header.

        Raises:
            BadRequest: The request is malformed, or the storage does not use signatures.
            Forbidden: The request reaches outside the table, or signing is disabled.
        """
        raise BadRequest(f"The table is at {str(table)!r}, not on S3, so its requests need no signature")

    def make_job_keys(self, settings: Settings) -> Callable[[], dict[str, str]] | None:
        """Return a function that returns the keys of jobs, as properties of a FileIO.

        The function may wait for another service, so call it in a thread. It raises StorageError if the server has no
        keys.

        Returns:
            The function, or None if jobs get no keys.
        """
        return None

    def has_own_job_keys(self, settings: Settings) -> bool:
        """Return whether jobs can read and write the storage without a login to a cloud in their environment.

        That is the case if the settings have the keys of the storage, or if jobs get keys for one table.
        """
        return False

    def make_access_check_arguments(self, root: Location, settings: Settings, name: str) -> dict[str, Any]:
        """Return the arguments of the job that checks access to the warehouse (`connector/jobs/access_check.py`).

        The result is empty if jobs cannot check the access to this storage.

        Args:
            root: The location of the warehouse.
            settings: The settings of the server.
            name: The name of the object that the job may write.
        """
        return {}
