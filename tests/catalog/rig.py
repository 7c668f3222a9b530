"""A catalog over SQLite and local files, and wrappers of both that fail on demand, with a seed."""

from __future__ import annotations

import json
import random
import sqlite3
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamark.formats.iceberg.views.view import decode_view
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import CommitUnknown, RetryLater, StorageError
from seamark.metaserver.catalog.catalog import Catalog, open_catalog
from seamark.metaserver.catalog.ownership.owners import compute_view_fingerprint
from seamark.metaserver.catalog.values import Caller, CreateTable
from seamark.metaserver.commit.engine_commits.engine_commits import EngineCommits
from seamark.metaserver.commit.publication import Publisher, open_publisher
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import Operation, SwapPointer
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import open_timeline
from tests.access.keyrings import make_fixed_keyring
from tests.support.wrapper_capture import WrapperCapture


def use_metadata_file_without_digest(location: str) -> Path:
    """Copy the current metadata file of a table or view to a name without a digest, and return the path of the copy.

    The copy becomes the current file in the database. Another catalog may have written such a file.
    """
    old_path = Path(location.removeprefix("file://"))
    # The first five characters are the version number.
    path = old_path.with_name(f"{old_path.name[:5]}-{uuid.uuid4()}.metadata.json")
    path.write_bytes(old_path.read_bytes())
    home = next(parent for parent in path.parents if (parent / "seamark.db").exists())
    new_location = f"file://{path}"
    with sqlite3.connect(home / "seamark.db") as database:
        database.execute(
            "UPDATE entries SET metadata_location = ? WHERE metadata_location = ?", (new_location, location)
        )
        if "view-uuid" in json.loads(path.read_bytes()):
            metadata = decode_view(path.read_bytes(), new_location)
            fingerprints = (
                compute_view_fingerprint(metadata, new_location),
                compute_view_fingerprint(metadata, location),
            )
            database.execute("UPDATE instants SET fingerprint = ? WHERE fingerprint = ?", fingerprints)
    database.close()
    return path


CALLER = Caller(principal_name="tester", request_id="test")
SCHEMA: dict[str, Any] = {
    "type": "struct",
    "fields": [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "data", "required": False, "type": "string"},
    ],
}


class RandomFaults:
    """Random faults from a seed. With `rate` 0 nothing fails."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random = random.Random(seed)
        self.rate = rate

    def is_due(self) -> bool:
        return self.random.random() < self.rate


class FailingStore:
    """A pointer store whose transactions may fail before their execution, or lose their reply afterwards."""

    def __init__(self, store: PointerStore, faults: RandomFaults) -> None:
        self._store = store
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        if self._faults.is_due():
            raise RetryLater("injected: the queue is full")
        if self._faults.is_due():
            raise CommitUnknown("injected: the connection broke before the commit arrived")
        results = await self._store.transact(operations)
        if self._faults.is_due():
            raise CommitUnknown("injected: the reply was lost")
        return results


class FailingObjects:
    """Storage whose writes may fail before or after their execution, and whose deletions may fail before it."""

    def __init__(self, objects: ObjectStore, faults: RandomFaults) -> None:
        self._objects = objects
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        if self._faults.is_due():
            raise StorageError("injected: the disk is full")
        await self._objects.create(location, data, durable=durable)
        if self._faults.is_due():
            raise RetryLater("injected: slow down, after the write")

    async def delete(self, location: str) -> None:
        if self._faults.is_due():
            raise StorageError("injected: cannot delete")
        await self._objects.delete(location)


class BusyObjects:
    """Storage that refuses reads of manifests and manifest lists while `is_busy` is true."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.is_busy = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        if self.is_busy and location.endswith(".avro"):
            raise RetryLater("injected: slow down")
        return await self._objects.read(location, limit_bytes=limit_bytes)


class RacingStore:
    """A store that calls `run_before_swap` once, just before the first pointer swap, like a faster server."""

    def __init__(self, store: PointerStore) -> None:
        self._store = store
        self.run_before_swap: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        if self.run_before_swap is not None and any(isinstance(operation, SwapPointer) for operation in operations):
            run_before_swap, self.run_before_swap = self.run_before_swap, None
            await run_before_swap()
        return await self._store.transact(operations)


@asynccontextmanager
async def open_racing_rigs(home: Path) -> AsyncIterator[tuple[CatalogRig, CatalogRig, RacingStore]]:
    """Yield two catalogs over the same database, and the store of the first one.

    The store can run a function just before a swap of a pointer, for example a commit by the second catalog.
    """
    capture = WrapperCapture(RacingStore)
    async with open_rig(home, wrap_store=capture) as rig, open_rig(home) as other_rig:
        yield rig, other_rig, capture.wrapper


@dataclass(frozen=True)
class CatalogRig:
    """A catalog with its database and objects, without an HTTP server."""

    catalog: Catalog
    commits: EngineCommits
    publisher: Publisher
    store: PointerStore
    objects: ObjectStore
    settings: Settings

    async def create_table(self, name: str = "t", **options: Any) -> None:
        if not await self.catalog.namespaces.exists(("db",)):
            await self.catalog.namespaces.create(CALLER, ("db",), {})
        await self.catalog.tables.create(CALLER, ("db",), CreateTable(name=name, schema=SCHEMA, **options))

    async def list_files(self) -> set[str]:
        return {info.location async for info in self.objects.list(self.settings.make_warehouse_uri())}


@asynccontextmanager
async def open_rig(
    home: Path,
    *,
    clock: Clock | None = None,
    wrap_store: Any = None,
    wrap_objects: Any = None,
    **settings: Any,
) -> AsyncIterator[CatalogRig]:
    """Open a catalog over a database and a warehouse in `home`. `wrap_store` and `wrap_objects` can inject faults."""
    clock = clock or SystemClock()
    chosen_settings = Settings(home=home, **settings)
    home.mkdir(exist_ok=True, parents=True)
    (home / "warehouse").mkdir(exist_ok=True)
    async with (
        open_store(chosen_settings.make_database_url(), clock=clock) as store,
        open_objects(chosen_settings, clock) as objects,
    ):
        used_store = wrap_store(store) if wrap_store else store
        used_objects = wrap_objects(objects) if wrap_objects else objects
        async with (
            open_timeline(chosen_settings, used_store, clock) as timeline,
            open_catalog(
                chosen_settings, used_store, used_objects, clock, timeline, make_fixed_keyring(clock=clock)
            ) as catalog,
            open_publisher(catalog.context) as publisher,
        ):
            yield CatalogRig(
                catalog=catalog,
                commits=EngineCommits(catalog, publisher),
                publisher=publisher,
                store=store,
                objects=objects,
                settings=chosen_settings,
            )


def build_append(
    snapshot_id: int, parent: int | None, sequence: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return requirements and updates of an append, as Java sends them."""
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": 1_700_000_000_000 + sequence,
        "manifest-list": f"file:///nowhere/snap-{snapshot_id}.avro",
        "summary": {"operation": "append", "added-records": "1"},
        "schema-id": 0,
    }
    if parent is not None:
        snapshot["parent-snapshot-id"] = parent
    requirements = [{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": parent}]
    updates = [
        {"action": "add-snapshot", "snapshot": snapshot},
        {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id},
    ]
    return requirements, updates


def build_creation_updates(uuid: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the updates that create an unpartitioned, unsorted table of version 2, without its location."""
    return [
        {"action": "assign-uuid", "uuid": uuid},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": schema},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    ]
