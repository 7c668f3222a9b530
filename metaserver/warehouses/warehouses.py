"""Creates, changes, drops and opens the further warehouses of a server.

A warehouse has its own database, home folder, signing keys and components, which no other warehouse uses. It
is opened by its first request, and closed when it is changed or dropped, or when the server stops. Each request reads
the record of its warehouse, so that every process of a fleet notices a change at its next request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    ConfigError,
    NoSuchWarehouse,
    RetryLater,
    SeamarkError,
)
from seamark.formats.storage.locations import Location, make_location_key, parse_location
from seamark.metaserver.access.principal import Role
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.runtime.home import prepare_home
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant, StoredWarehouse
from seamark.metaserver.store.open import SQLITE_SCHEME, open_store, parse_scheme, parse_sqlite_path
from seamark.metaserver.store.operations import (
    AssignCatalogToWarehouse,
    ChangeWarehouse,
    CloseCatalog,
    CreateWarehouse,
    RemoveWarehouse,
    SaveGrant,
)
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.warehouses.definitions import (
    CREDENTIALS,
    WAREHOUSE_SETTINGS,
    check_definition,
    check_services,
    check_settings,
    check_warehouse_name,
    choose_backend,
    is_warehouse_name,
    load_credentials,
    load_settings,
    make_settings,
    open_credentials,
    prepare_folder,
    reencrypt_credentials,
    seal_credentials,
)
from seamark.metaserver.warehouses.federation.mirror import remove_mirrors
from seamark.metaserver.warehouses.places import (
    check_location,
    check_no_overlap_with_server,
    check_no_overlap_with_warehouses,
    check_same_backend,
    find_place,
    is_place_unchanged,
)

if TYPE_CHECKING:
    from aiohttp import web

_OPEN_INTERVAL_S = 30.0
"""The interval in which all warehouses are opened for housekeeping, and dropped warehouses are closed."""
_NAMES_S = 1.0
"""The time for which the names of all warehouses are cached, so that not every unknown name costs a query."""
_FAILURE_S = 5.0
"""The time after a failure to open a warehouse before the next attempt."""
_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""The suffixes of the files of a SQLite database."""
_log = structlog.get_logger("seamark.warehouses")


@dataclass(frozen=True)
class ServedWarehouse:
    """The functions of an open warehouse that requests need.

    Attributes:
        answer: Answers a request.
        end_waits: Ends the long polls of the warehouse before it is closed.
        gateway: Answers S3 requests with keys of the warehouse. None if clients of the warehouse do not use the
            gateway. It is ended after the warehouse is closed, because the transfer of a large object takes long.
    """

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    end_waits: Callable[[], None]
    gateway: ClosableGateway | None = None


class ClosableGateway(Protocol):
    """The part of a warehouse's gateway that this module uses, so that the module need not import the gateway."""

    async def end(self) -> None:
        """Wait for running requests for a limited time, and close the connections to the store."""


Opener = Callable[["Warehouses", Settings, StoredWarehouse], AbstractAsyncContextManager[ServedWarehouse]]
"""A function that opens the components of a warehouse with the settings of the warehouse."""


@dataclass(eq=False)
class _OpenWarehouse:
    """A warehouse that is open or is being opened.

    The same task opens and closes the components, because a context manager must exit in the task that entered it.

    Attributes:
        stored: The record of the warehouse with which it is opened.
        opened: Has the functions of the warehouse when it is open, or the error of the opening.
        closing: An event that is set when the warehouse must be closed.
        unused: An event that is set when no request uses the warehouse.
        users: The number of requests that use the warehouse.
        task: The task that opens and closes the components.
    """

    stored: StoredWarehouse
    opened: asyncio.Future[ServedWarehouse]
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set when the components are closed. The gateway may still answer requests then."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    confirmed_s: float = -math.inf
    """The time at which the database of the server last had this version of the warehouse."""
    task: asyncio.Task[None] | None = None


class Warehouses:
    """The further warehouses of a server. `open_warehouses` creates an instance, which belongs to one event loop.

    Args:
        settings: The settings of the server.
        store: The pointer store of the server, which contains the records of the warehouses.
        clock: The clock.
        opener: Opens the components of a warehouse with its settings. It must call `check_database`.
    """

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock, opener: Opener) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._opener = opener
        self._open: dict[str, _OpenWarehouse] = {}
        self._leaving_warehouses: set[_OpenWarehouse] = set()
        """The warehouses that are being closed."""
        self._names: dict[str, str] = {}
        """The id of each warehouse, by its name."""
        self._names_valid_until_s = -math.inf
        self._names_lock = asyncio.Lock()
        self._failures: dict[str, tuple[int, float]] = {}
        """A tuple (version, time of the next attempt) for each warehouse that could not be opened, by its id."""

    @property
    def open_count(self) -> int:
        """The number of warehouses that are open in this process."""
        return len(self._open)

    @property
    def may_have_further_warehouses(self) -> bool:
        """Whether the server has warehouses in addition to its own, or admins can create them."""
        return bool(self._settings.warehouse_roots or self._names)

    # Records ---------------------------------------------------------------------------------------------------------

    async def list(self) -> list[StoredWarehouse]:
        return await self._store.list_warehouses()

    async def find(self, name: str) -> StoredWarehouse | None:
        """Read the further warehouse with this name from the database, and cache its id. None if there is none."""
        stored = await self._store.load_warehouse(name) if is_warehouse_name(name) else None
        if stored is not None:
            self._names[name] = stored.id
        return stored

    async def _may_exist(self, name: str) -> bool:
        """Return whether a warehouse with this name may exist."""
        if name in self._names:
            return True
        await self._refresh_names()
        return name in self._names

    async def _find_name(self, warehouse_id: str) -> str | None:
        """Return the name of the warehouse with this id, or None if no such warehouse is known."""
        warehouse = self._open.get(warehouse_id)
        if warehouse is not None:
            return warehouse.stored.name
        if warehouse_id not in self._names.values():
            await self._refresh_names()
        return next((name for name, known_id in self._names.items() if known_id == warehouse_id), None)

    async def _refresh_names(self) -> None:
        """Read the names of all warehouses, but at most once in `_NAMES_S`.

        A request can name a warehouse before its login is checked. So all requests for unknown names together cost one
        query in `_NAMES_S`. A warehouse that another process has created can be unknown for this time.
        """
        async with self._names_lock:
            if self._clock.monotonic() >= self._names_valid_until_s:
                await self.read_names()
                self._names_valid_until_s = self._clock.monotonic() + _NAMES_S

    async def read_names(self) -> None:
        """Read the names of all warehouses."""
        self._names = {stored.name: stored.id for stored in await self.list()}

    async def require(self, name: str) -> StoredWarehouse:
        """Return the further warehouse with this name.

        Raises:
            NoSuchWarehouse: The warehouse does not exist.
        """
        warehouse = await self.find(name)
        if warehouse is None:
            raise NoSuchWarehouse(f"Warehouse does not exist: {name[:80]}")
        return warehouse

    async def find_by_location(self, location: str) -> StoredWarehouse | None:
        """Return the further warehouse with this normalised location, or None if there is no such warehouse."""
        return next((warehouse for warehouse in await self.list() if warehouse.location == location), None)

    def make_client_settings(self, warehouse: StoredWarehouse) -> Settings:
        """Return the settings of a warehouse without its credentials, for answers to clients."""
        return make_settings(self._settings, warehouse, warehouse.settings, {})

    async def create(
        self,
        name: str,
        location: str,
        own_settings: Mapping[str, Any],
        credentials: Mapping[str, Any],
        principal_name: str,
    ) -> StoredWarehouse:
        """Create a warehouse, and make the principal an admin of it.

        Raises:
            AlreadyExists: A warehouse with this name exists.
            BadRequest: The definition is invalid, or the operator does not allow it.
        """
        check_warehouse_name(name, self._settings)
        own_settings = check_settings(own_settings, WAREHOUSE_SETTINGS, self._settings)
        credentials = check_settings(credentials, CREDENTIALS, self._settings)
        check_services(self._settings, own_settings)
        check_definition(self._settings, own_settings, credentials)
        backend = self._choose_backend(own_settings, credentials)
        parsed_location = check_location(location, self._settings, backend, self._list_server_roots())
        if await self._store.load_warehouse(name) is not None:
            raise AlreadyExists(f"Warehouse already exists: {name}")
        warehouse_id = self._clock.uuid4().hex
        warehouse = StoredWarehouse(
            name=name,
            id=warehouse_id,
            location=str(parsed_location),
            location_key=make_location_key(find_place(parsed_location, backend)),
            settings=own_settings,
            credentials=await seal_credentials(self._settings, self._clock, warehouse_id, credentials),
            created_ms=self._clock.now_ms(),
            principal_name=principal_name,
        )
        settings = make_settings(self._settings, warehouse, own_settings, credentials)
        # Check this before the folder is created. The transaction below checks it again.
        check_no_overlap_with_warehouses(parsed_location, self._settings, backend, await self.list())
        await asyncio.to_thread(prepare_folder, parsed_location, settings)
        await asyncio.to_thread(prepare_home, settings)
        try:
            # Create the database before the record. So if a warehouse with a record has no database, it was lost.
            async with open_store(settings.make_database_url(), clock=self._clock, pool_max=1) as store:
                grant = Grant(principal_name, Role.ADMIN.value)
                await store.transact([AssignCatalogToWarehouse(warehouse_id), SaveGrant(grant)])
            await self._store.transact([CreateWarehouse(warehouse, self._settings.warehouses_limit)])
        except (AlreadyExists, BadRequest, ConfigError):
            _remove_database_and_home(settings)  # No record names this database.
            raise
        async with self._names_lock:  # The cached names may have been read before the warehouse was created.
            self._names[name] = warehouse.id
        return warehouse

    async def change(
        self, name: str, own_settings: Mapping[str, Any], credentials: Mapping[str, Any] | None
    ) -> StoredWarehouse:
        """Replace the own settings of a warehouse, and its credentials unless `credentials` is None.

        Raises:
            NoSuchWarehouse: The warehouse does not exist.
            BadRequest: The definition is invalid, the operator does not allow it, the warehouse would be at another
                place, or the stored login would be sent to another catalog.
            CommitConflict: Another request changed the warehouse.
        """
        warehouse = await self.require(name)
        own_settings = check_settings(own_settings, WAREHOUSE_SETTINGS, self._settings)
        check_same_backend(warehouse, own_settings)
        if credentials is None:
            credentials = await load_credentials(self._settings, self._clock, warehouse)
            _check_same_catalog(warehouse, own_settings, credentials)
        else:
            credentials = check_settings(credentials, CREDENTIALS, self._settings)
        check_services(self._settings, own_settings)
        check_definition(self._settings, own_settings, credentials)
        if bool(own_settings.get("federation_uri")) != bool(warehouse.settings.get("federation_uri")):
            raise BadRequest(
                f"The warehouse {name} cannot begin or cease to show another catalog, because its names come from "
                "there; create another warehouse"
            )
        await self._check_place(warehouse, own_settings, credentials)
        changed_warehouse = msgspec.structs.replace(
            warehouse,
            settings=own_settings,
            credentials=await seal_credentials(self._settings, self._clock, warehouse.id, credentials),
            version=warehouse.version + 1,
        )
        await self._store.transact([ChangeWarehouse(changed_warehouse, expected_version=warehouse.version)])
        self._retire(warehouse.id)
        return changed_warehouse

    def _choose_backend(self, own_settings: Mapping[str, Any], credentials: Mapping[str, Any]) -> str:
        has_s3_keys = bool(credentials.get("s3_secret_access_key"))
        return choose_backend(self._settings, own_settings, has_s3_keys=has_s3_keys)

    async def _check_place(
        self, warehouse: StoredWarehouse, own_settings: Mapping[str, Any], credentials: Mapping[str, Any]
    ) -> None:
        """Check that a change does not move a warehouse. It may move back to the place for which it was created.

        Args:
            warehouse: The warehouse before the change.
            own_settings: The new settings.
            credentials: The new credentials.

        Raises:
            BadRequest: The change moves the warehouse, or the operator does not allow the place, or another warehouse
                is there.
        """
        former_backend = None
        with suppress(ConfigError):  # The key of the former credentials is lost.
            former_credentials = await open_credentials(self._settings, self._clock, warehouse)
            former_backend = self._choose_backend(warehouse.settings, former_credentials)
        backend = self._choose_backend(own_settings, credentials)
        if is_place_unchanged(warehouse, former_backend, backend):
            return
        location = check_location(warehouse.location, self._settings, backend, self._list_server_roots())
        other_warehouses = [other for other in await self.list() if other.id != warehouse.id]
        check_no_overlap_with_warehouses(location, self._settings, backend, other_warehouses)

    async def drop(self, name: str) -> None:
        """Drop an empty warehouse without deleting its database, which has the audit log and the timeline.

        The names in a federated warehouse belong to another catalog, so they are removed and do not count.

        Raises:
            NoSuchWarehouse: The warehouse does not exist.
            NamespaceNotEmpty: The warehouse has namespaces, or dropped entries that still have their locations.
        """
        warehouse = await self.require(name)
        settings = make_settings(self._settings, warehouse, {}, {})
        async with open_store(settings.make_database_url(), clock=self._clock, pool_max=1) as store:
            await check_database(store, warehouse)
            if warehouse.settings.get("federation_uri"):
                await remove_mirrors(store)
            await store.transact([CloseCatalog()])
        await self._store.transact([RemoveWarehouse(warehouse.id)])
        self._retire(warehouse.id)

    def _list_server_roots(self) -> tuple[Location, ...]:
        return Warehouse(self._settings.make_warehouse_uri(), self._settings.allowed_locations).roots

    # Open warehouses -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ServedWarehouse | None]:
        """Open a warehouse, and do not close it while the context is active.

        The value is None if the warehouse does not exist.

        Raises:
            RetryLater: The database of the server does not answer, or the warehouse cannot be opened.
        """
        warehouse = await self._get_or_open(name)
        if warehouse is None:
            yield None
            return
        warehouse.users += 1
        try:
            yield await asyncio.shield(warehouse.opened)
        finally:
            warehouse.users -= 1
            if not warehouse.users:
                warehouse.unused.set()

    def find_confirmed(self, warehouse_id: str) -> ServedWarehouse | None:
        """Return an open warehouse whose record was seen in the database in the last `rights_recheck_s`, or None."""
        warehouse = self._open.get(warehouse_id)
        if warehouse is None or not warehouse.opened.done() or warehouse.opened.exception() is not None:
            return None
        is_confirmed = self._clock.monotonic() < warehouse.confirmed_s + self._settings.rights_recheck_s
        return warehouse.opened.result() if is_confirmed else None

    async def find_by_id(self, warehouse_id: str) -> ServedWarehouse | None:
        """Return the warehouse with this id, and open it if necessary. Return None if it does not exist.

        The warehouse may be closed while it is used, so this method is only for its gateway.

        Raises:
            RetryLater: The database of the server does not answer, or the warehouse cannot be opened.
        """
        confirmed = self.find_confirmed(warehouse_id)
        if confirmed is not None:
            return confirmed
        name = await self._find_name(warehouse_id)
        warehouse = None if name is None else await self._get_or_open(name)
        if warehouse is None or warehouse.stored.id != warehouse_id:
            return None
        return await asyncio.shield(warehouse.opened)

    async def _get_or_open(self, name: str) -> _OpenWarehouse | None:
        """Return the warehouse with this name. If it is not open, a task begins to open it.

        An open warehouse is returned even if the database of the server does not answer.

        Returns:
            None if the warehouse does not exist.

        Raises:
            RetryLater: The database of the server does not answer, or the warehouse could not be opened shortly before.
        """
        try:
            stored_warehouse = await self.find(name) if await self._may_exist(name) else None
        except RetryLater:
            # The databases of the warehouses are in the same place. So let an open warehouse answer as far as it can.
            warehouse = next((warehouse for warehouse in self._open.values() if warehouse.stored.name == name), None)
            if warehouse is None:
                raise
            return warehouse
        if stored_warehouse is None:
            return None
        warehouse = self._open.get(stored_warehouse.id)
        if warehouse is not None and warehouse.stored.version != stored_warehouse.version:
            self._retire(stored_warehouse.id)
            warehouse = None
        if warehouse is None:
            # After a failure, do not open the same version again before `retry_s`, because each attempt takes long.
            version, retry_s = self._failures.get(stored_warehouse.id, (0, 0.0))
            if version == stored_warehouse.version and self._clock.monotonic() < retry_s:
                raise _make_opening_error(stored_warehouse)
            warehouse = _OpenWarehouse(stored_warehouse, asyncio.get_running_loop().create_future())
            self._open[stored_warehouse.id] = warehouse
            predecessors = [
                leaving.closed for leaving in self._leaving_warehouses if leaving.stored.id == stored_warehouse.id
            ]
            warehouse.task = asyncio.create_task(
                self._run(warehouse, predecessors), name=f"warehouse {stored_warehouse.name}"
            )
        warehouse.confirmed_s = self._clock.monotonic()
        return warehouse

    def _retire(self, warehouse_id: str) -> None:
        """Close a warehouse after its running requests have ended. The next request opens it again."""
        warehouse = self._open.pop(warehouse_id, None)
        if warehouse is not None:
            self._leaving_warehouses.add(warehouse)
            warehouse.closing.set()

    async def _run(self, warehouse: _OpenWarehouse, predecessors: Sequence[asyncio.Event]) -> None:
        """Open the components of a warehouse, and close them when the warehouse is retired.

        Args:
            warehouse: The instance of the warehouse that this task opens.
            predecessors: The events of its earlier instances, which must be closed first. They are closed when their
                requests have ended, but at most after `drain_timeout_s`. Until then, an earlier instance has locked
                the log of rows, and the new instance could not serve fresh rows.
        """
        stored_warehouse = warehouse.stored
        try:
            for closed in predecessors:
                await closed.wait()
            settings = await load_settings(self._settings, self._clock, stored_warehouse)
            location = parse_location(stored_warehouse.location)
            roots = self._list_server_roots()
            await asyncio.to_thread(check_no_overlap_with_server, location, self._settings, settings.s3_backend, roots)
            async with self._opener(self, settings, stored_warehouse) as served_warehouse:
                warehouse.opened.set_result(served_warehouse)
                await warehouse.closing.wait()
                served_warehouse.end_waits()
                # Wait until no request uses the warehouse. After `drain_timeout_s`, close it anyway.
                while warehouse.users:
                    warehouse.unused.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(warehouse.unused.wait(), self._settings.drain_timeout_s)
                        continue
                    break
        except Exception as error:  # noqa: BLE001  a failure must not stop other warehouses
            if not isinstance(error, SeamarkError):
                _log.error("a warehouse failed unexpectedly", warehouse=stored_warehouse.name, exc_info=error)
            else:
                _log.error("a warehouse cannot be opened", warehouse=stored_warehouse.name, error=error.message)
            if not warehouse.opened.done():
                self._failures[stored_warehouse.id] = (stored_warehouse.version, self._clock.monotonic() + _FAILURE_S)
                warehouse.opened.set_exception(_make_opening_error(stored_warehouse))
                warehouse.opened.exception()  # The request that opened the warehouse may have ended.
        finally:
            warehouse.closed.set()
            if self._open.get(stored_warehouse.id) is warehouse:
                del self._open[stored_warehouse.id]
            if warehouse.opened.done() and warehouse.opened.exception() is None:
                gateway = warehouse.opened.result().gateway
                if gateway is not None:
                    self._leaving_warehouses.add(warehouse)
                    await gateway.end()
            self._leaving_warehouses.discard(warehouse)

    async def run(self) -> None:
        """Open all warehouses for their housekeeping, and close dropped warehouses, until the task is cancelled."""
        while True:
            await self.synchronize_with_database()
            await asyncio.sleep(_OPEN_INTERVAL_S)

    async def synchronize_with_database(self) -> None:
        """Open all warehouses in the database, and close those that are no longer in it.

        The credentials of a warehouse are encrypted again if the operator has replaced the encryption key.
        """
        warehouses_by_id = {warehouse.id: warehouse for warehouse in await self.list()}
        for warehouse_id in list(self._open):
            if warehouse_id not in warehouses_by_id:
                self._retire(warehouse_id)
        self._failures = {
            warehouse_id: failure
            for warehouse_id, failure in self._failures.items()
            if warehouse_id in warehouses_by_id
        }
        for warehouse in warehouses_by_id.values():
            await self._reencrypt_credentials(warehouse)
            with suppress(RetryLater):  # The log has the reason.
                async with self.use(warehouse.name):
                    pass

    async def _reencrypt_credentials(self, warehouse: StoredWarehouse) -> None:
        """Encrypt the credentials of a warehouse again if the operator has replaced the encryption key."""
        # Ignore these errors. Another request may have changed the warehouse, and a missing key was logged before.
        with suppress(CommitConflict, ConfigError):
            ciphertext = await reencrypt_credentials(self._settings, self._clock, warehouse)
            if ciphertext is not None:
                # Do not change the version. A new version would close and open the warehouse in all processes.
                renewed_warehouse = msgspec.structs.replace(warehouse, credentials=ciphertext)
                await self._store.transact([ChangeWarehouse(renewed_warehouse, expected_version=warehouse.version)])

    def end_waits(self) -> None:
        """End the long polls of all open warehouses."""
        for warehouse in self._open.values():
            if warehouse.opened.done() and warehouse.opened.exception() is None:
                warehouse.opened.result().end_waits()

    async def close(self) -> None:
        """Close all warehouses after their running requests have ended."""
        for warehouse_id in list(self._open):
            self._retire(warehouse_id)
        tasks = [warehouse.task for warehouse in self._leaving_warehouses if warehouse.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_same_catalog(
    warehouse: StoredWarehouse, own_settings: Mapping[str, Any], credentials: Mapping[str, Any]
) -> None:
    """Check that a change does not send the stored login to a different catalog.

    Args:
        warehouse: The warehouse before its change.
        own_settings: The new settings.
        credentials: The stored credentials, which the change does not replace.

    Raises:
        BadRequest: The warehouse has a login, and the change names another catalog.
    """
    former_uri = str(warehouse.settings.get("federation_uri", "")).rstrip("/")
    uri = str(own_settings.get("federation_uri", "")).rstrip("/")
    if uri != former_uri and any(name.startswith("federation_") for name in credentials):
        raise BadRequest(
            f"The stored login of the warehouse {warehouse.name} is for the catalog {former_uri!r}; send the "
            "credentials of the new catalog in the same request"
        )


def _make_opening_error(warehouse: StoredWarehouse) -> RetryLater:
    return RetryLater(f"The warehouse {warehouse.name} cannot be opened; the server's log has the reason")


async def check_database(store: PointerStore, warehouse: StoredWarehouse) -> None:
    """Check that a database belongs to the warehouse.

    Raises:
        ConfigError: The database belongs to another warehouse. Or it is empty, because the warehouse's database is
            lost.
    """
    if await store.load_catalog_id() != warehouse.id:
        raise ConfigError(
            f"The database of the warehouse {warehouse.name} is missing; restore its backup, or create the warehouse "
            "again at another location"
        )


async def check_server_database(store: PointerStore) -> None:
    """Check that a server does not use the database of a further warehouse as its own.

    Raises:
        ConfigError: The database belongs to a further warehouse.
    """
    warehouse_id = await store.load_catalog_id()
    if warehouse_id:
        raise ConfigError(
            f"The setting database names the database of the further warehouse with the id {warehouse_id}; name the "
            "database of the server"
        )


async def check_prefix(settings: Settings, store: PointerStore) -> None:
    """Check that the prefix of the server is not the name of a further warehouse.

    Raises:
        ConfigError: The prefix is such a name, so requests for this warehouse would reach the server's own warehouse.
    """
    if settings.prefix and await store.load_warehouse(settings.prefix) is not None:
        raise ConfigError(f"The setting prefix is {settings.prefix!r}, the name of a further warehouse; choose another")


def _remove_database_and_home(settings: Settings) -> None:
    """Remove the SQLite database and the empty home folder of a warehouse whose creation has failed.

    A schema in PostgreSQL is not removed.
    """
    if parse_scheme(settings.make_database_url()) == SQLITE_SCHEME:
        file = parse_sqlite_path(settings.make_database_url())
        for suffix in _SQLITE_SUFFIXES:
            Path(f"{file}{suffix}").unlink(missing_ok=True)
    with suppress(OSError):
        settings.home.rmdir()


async def find_warehouse_settings(settings: Settings, clock: Clock, name: str) -> Settings:
    """Return the settings of a further warehouse, for a command that opens the warehouse's database.

    Args:
        settings: The settings of the server.
        clock: The clock.
        name: The name of the warehouse.

    Raises:
        NoSuchWarehouse: The warehouse does not exist.
        ConfigError: The credentials of the warehouse cannot be decrypted, or its settings are no longer allowed.
    """
    async with open_store(settings.make_database_url(), clock=clock, pool_max=1) as store:
        warehouse = await store.load_warehouse(name)
    if warehouse is None:
        raise NoSuchWarehouse(f"Warehouse does not exist: {name[:80]}")
    return await load_settings(settings, clock, warehouse)


@asynccontextmanager
async def open_warehouses(
    settings: Settings, store: PointerStore, clock: Clock, opener: Opener
) -> AsyncIterator[Warehouses]:
    """Yield the further warehouses of a server. When the context ends, close the open warehouses."""
    warehouses = Warehouses(settings, store, clock, opener)
    await warehouses.read_names()
    try:
        yield warehouses
    finally:
        await warehouses.close()
