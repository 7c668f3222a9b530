"""A trial storage, `toy://bucket/path`: a folder that only its classes use, opened with a key.

It is the example for a new storage. It has all that a storage needs, and nothing else of the product refers to it:

- `Toy`, the rules of its locations, which the settings and both sides use. A storage of the product is in
  `formats/storage/storages.py`.
- `ToyStorage`, the part of the server. It opens the `ObjectStore`, gives clients access, and explains failures to
  operators. A storage of the product is a module in `metaserver/objects/`, registered in
  `metaserver/objects/storages.py`.
- `ToyClient`, the part of readers, writers and jobs. A storage of the product is in
  `connector/client/file_systems.py`.

`register_example_storage` shows the three registries. The tests of a storage inherit `tests/objects/contract.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

from seamark.connector.client.file_systems import CLIENT_STORAGES, ClientStorage
from seamark.formats.runtime.clock import Clock
from seamark.formats.storage.locations import Location, parse_location
from seamark.formats.storage.rules import StorageRules
from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.objects.credentials import VendedKeys
from seamark.metaserver.objects.forwarding import ForwardingObjects
from seamark.metaserver.objects.local import LocalObjects
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore
from seamark.metaserver.objects.storage import ClientAccess, ServerStorage
from seamark.metaserver.objects.storages import SERVER_STORAGES
from seamark.metaserver.settings.settings import Settings

KEY, FOLDER = "toy.key", "toy.folder"
SECRET = "a key of the toy"


class Toy(StorageRules):
    scheme = "toy"
    aliases = ("toys",)
    property_families = ("toy",)


class ToyObjects(ForwardingObjects):
    """An ObjectStore over `toy://`, in files below `folder`."""

    def __init__(self, files: ObjectStore, folder: Path) -> None:
        super().__init__(files)
        self._folder = f"file://{folder}"

    def _map_location(self, location: str) -> str:
        address = parse_location(location)
        return f"{self._folder}/{address.bucket}/{address.path}".rstrip("/")

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in self._stored_objects.list(self._map_location(prefix)):
            location = f"toy://{info.location.removeprefix(self._folder + '/')}"
            yield ObjectInfo(location, info.size_bytes, info.modified_ms)


class ToyStorage(ServerStorage):
    """A storage of scheme `toy` in a local folder, as a plugin would add it."""

    rules = Toy()

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
        files = LocalObjects([str(self._folder)], clock, threads=2, timeout_s=settings.storage_timeout_s)
        try:
            yield ToyObjects(files, self._folder)
        finally:
            await files.close()

    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        return "Find the toy"

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
        keys = {KEY: SECRET, FOLDER: str(self._folder)}
        return keys, [{"prefix": f"{table}/", "config": dict(keys)}]

    def compute_access_stamp(self, settings: Settings, delegation: str | None) -> tuple[str | bool, ...]:
        return (SECRET,)

    def make_access_check_arguments(self, root: Location, settings: Settings, name: str) -> dict[str, Any]:
        return {"location": f"{root}/{name}", "storage": {KEY: SECRET, FOLDER: str(self._folder)}}


class ToyClient(ClientStorage):
    def create_file_system(self, properties: Mapping[str, str], fallback_keys: Mapping[str, str]) -> fs.FileSystem:
        if properties.get(KEY) != SECRET:
            raise PermissionError("the toy needs a key")
        folder = DirFileSystem(properties[FOLDER], LocalFileSystem(auto_mkdir=True))
        return fs.PyFileSystem(fs.FSSpecHandler(folder))

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return KEY in properties


@contextmanager
def register_example_storage(folder: Path) -> Iterator[None]:
    """Register the example storage while the context is active. Its objects are in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STORAGES, Toy.scheme, ToyStorage.rules)
        patch.setitem(SERVER_STORAGES, Toy.scheme, ToyStorage(folder))
        patch.setitem(CLIENT_STORAGES, Toy.scheme, ToyClient())
        yield
