"""The storage for files of the server's machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError, StorageError
from seamark.formats.storage.locations import Location
from seamark.formats.storage.storages import LOCAL, STORAGES
from seamark.metaserver.objects.local import LocalObjects, check_writable
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.storage import ServerStorage
from seamark.metaserver.runtime.home import is_in_home
from seamark.metaserver.settings.settings import Settings

LOCAL_THREADS = 8
"""The maximum number of files that are read or written concurrently.

So several syncs run at the same time, but the threads do not compete for one disk.
"""


class LocalStorage(ServerStorage):
    """The storage for local files.

    Engines open the files themselves, so they must run on the server's machine or share its disks.
    """

    rules = STORAGES[LOCAL]

    @asynccontextmanager
    async def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
        paths = [root.file_path for root in roots]
        objects = LocalObjects(
            paths,
            clock,
            threads=LOCAL_THREADS,
            timeout_s=settings.storage_timeout_s,
            umasks=_choose_umasks(paths, settings),
        )
        try:
            yield objects
        finally:
            await objects.close()

    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        return "Let the account of the server write this folder, or set --warehouse to another folder"

    def prepare_root(self, root: Location, settings: Settings) -> None:
        """Create the folder of the warehouse if it is missing, and check that files can be created in it."""
        try:
            check_writable(root.file_path, _choose_umasks([root.file_path], settings).get(root.file_path))
        except StorageError as error:
            raise ConfigError(f"{error.message}; choose another warehouse with --warehouse") from None


def _choose_umasks(paths: Iterable[str], settings: Settings) -> dict[str, int]:
    """Return the umasks of roots outside the home folder. Files inside the home folder are private."""
    if not settings.warehouse_umask:
        return {}
    umask = int(settings.warehouse_umask, 8)
    return {path: umask for path in paths if not is_in_home(settings, path)}
