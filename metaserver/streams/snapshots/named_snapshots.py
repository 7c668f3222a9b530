"""Stores fresh snapshots, and finds them by their id, even if another process has created them.

A client loads a table once, and then names the snapshot in all its requests, so that all scans of a statement read the
same rows. Requests can name a fresh snapshot for some minutes after the server last returned it as the current
snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from seamark.cache.single_flight import SingleFlight
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.store.model import Entry
from seamark.metaserver.streams.fresh_snapshots import drop_replaced_vectors, may_be_fresh, run_encoding
from seamark.metaserver.streams.snapshots.shared_snapshots import SharedSnapshots
from seamark.metaserver.streams.stream_table import FreshRows, StreamTable

_NAMED_S_MAX = 600.0
"""The maximum time for which requests may name a fresh snapshot after the server last returned it as current."""
_SNAPSHOTS_MAX = 20_000
"""The maximum number of snapshots of all tables. If there are more, requests can no longer name the oldest."""


class _NamedSnapshot:
    """A fresh snapshot, with rows that no commit has added yet. Requests may name it by its id.

    Attributes:
        key: The table, the metadata file and the fresh files from which the snapshot was created. The same values give
            the same snapshot.
        made_s: The time at which it was created.
        used_s: The time at which the server last returned it as the current snapshot.
    """

    __slots__ = ("key", "made_s", "snapshot", "used_s")

    def __init__(self, key: tuple[object, ...], snapshot: Snapshot, now_s: float) -> None:
        self.key = key
        self.snapshot = snapshot
        self.made_s = self.used_s = now_s


class NamedSnapshots:
    """The fresh snapshots of all tables. An instance belongs to one event loop.

    Attributes:
        reuse_s: The time for which requests may name a fresh snapshot after the server last returned it as current. The
            server also returns it again as current for at most this time after its creation.
        lifetime_s: The time after its creation for which requests to any process may name a fresh snapshot.
    """

    def __init__(
        self, objects: ObjectStore, manifests: Manifests, shared: SharedSnapshots, clock: Clock, *, retention_s: float
    ) -> None:
        """Create an empty collection.

        Args:
            objects: The storage.
            manifests: Reads the manifest lists of tables.
            shared: Shares the snapshots with other processes.
            clock: The clock.
            retention_s: The time for which files are kept after the last plan that may contain them. A request can name
                a snapshot by its id only for this time, because the files of the snapshot are deleted then.
        """
        self._objects = objects
        self._manifests = manifests
        self._shared_snapshots = shared
        self._clock = clock
        self.reuse_s = min(_NAMED_S_MAX, retention_s)
        # A snapshot is returned for `reuse_s` after its creation, and may be named for `reuse_s` after that.
        self.lifetime_s = 2 * self.reuse_s
        self._newest: dict[str, _NamedSnapshot] = {}
        """The newest snapshot of each table, by the UUID of the table."""
        self._by_id: dict[tuple[str, int], _NamedSnapshot] = {}
        """All snapshots, by the UUID of the table and the id of the snapshot, the oldest first."""
        self._encoding: SingleFlight[tuple[object, ...], Snapshot] = SingleFlight()

    async def find(self, uuid: str, snapshot_id: int, folder: str) -> Snapshot | None:
        """Return the fresh snapshot of a table with an id, or None if it is unknown, or too old for requests.

        A fresh snapshot has rows of a stream that no commit has added to the table yet. Requests may name its id for
        `reuse_s` after the server has last returned it.

        Args:
            uuid: The UUID of the table.
            snapshot_id: The id of the snapshot, which another process may have created.
            folder: The location of the folder for fresh files.

        Raises:
            RetryLater: The storage is unavailable.
        """
        named_snapshot = self._by_id.get((uuid, snapshot_id))
        if named_snapshot is not None:
            return named_snapshot.snapshot if self._clock.monotonic() - named_snapshot.used_s <= self.reuse_s else None
        if not may_be_fresh(snapshot_id):
            return None
        return await self._shared_snapshots.find(uuid, snapshot_id, folder)

    async def make(
        self, table: StreamTable, entry: Entry, metadata: TableMetadata, fresh_rows: FreshRows, folder: str
    ) -> Snapshot:
        """Return a fresh snapshot: a snapshot with rows of a stream that no commit has added to the table yet.

        Its manifests are stored. If nothing has changed, it is the newest existing snapshot, unless that was created
        more than `reuse_s` ago. Its files are kept for a limited time after its creation.

        Args:
            table: The open table, which later deletes the manifests, when no query can need them.
            entry: The catalog entry of the table.
            metadata: The metadata to which the entry points.
            fresh_rows: The parts with the fresh files.
            folder: The location of the folder for the manifests.
        """
        ranges = tuple((part.shard, part.start, part.end, part.key) for part in fresh_rows.parts)
        locations = tuple(file.location for part in fresh_rows.parts for file in part.files)
        key = (entry.uuid, entry.metadata_location, ranges, locations)
        now_s, newest = self._clock.monotonic(), self._newest.get(entry.uuid)
        if newest is not None and newest.key == key and now_s - newest.made_s < self.reuse_s:
            newest.used_s = now_s
            return newest.snapshot
        return await self._encoding.run(
            key, lambda: self._store_snapshot(table, entry, metadata, fresh_rows, folder, key)
        )

    async def _store_snapshot(
        self,
        table: StreamTable,
        entry: Entry,
        metadata: TableMetadata,
        fresh_rows: FreshRows,
        folder: str,
        key: tuple[object, ...],
    ) -> Snapshot:
        """Create a snapshot with rows that no commit has added to the table yet, and store its manifests.

        If rows with a key replace rows in the table's files, delete files are stored, too. `key` identifies the rows
        and files of the snapshot. `make` describes the other arguments.
        """
        manifest_files: Sequence[ManifestFile] = await self._manifests.read_list(metadata.current_snapshot)
        files = [file for part in fresh_rows.parts for file in part.files]
        keyed_rows = [part.keyed for part in fresh_rows.parts if part.keyed is not None]
        locations: list[str] = []
        deletes: list[bytes] = []
        try:
            if keyed_rows:
                stored_deletes = await table.store_deletes(keyed_rows, entry, metadata, fresh=True)
                locations += [location for location, _ in stored_deletes.files]
                deletes = stored_deletes.content_files
                # The id of the fresh snapshot is drawn later, so the rewritten manifests get the snapshot id 0.
                writer = SnapshotWriter(self._objects, self._clock, self._manifests, folder, 0)
                try:
                    manifest_files = await drop_replaced_vectors(
                        stored_deletes.removed, manifest_files, metadata, writer, self._manifests
                    )
                finally:
                    locations += writer.written
            # `make` returns the snapshot for `reuse_s`, and requests may name it for another `reuse_s` after that.
            # Other processes accept the snapshot for this lifetime, by its signed record (`seal`).
            until_ms = self._clock.now_ms() + int(1000 * self.lifetime_s)
            seal = partial(self._shared_snapshots.seal, table.uuid, until_ms=until_ms)
            encoded_snapshot = await run_encoding(metadata, manifest_files, files, folder, self._clock, seal, deletes)
            locations += [location for location, _ in encoded_snapshot.files]
            await asyncio.gather(
                *(self._objects.create(location, data, durable=False) for location, data in encoded_snapshot.files)
            )
        finally:
            # The files are always deleted later: after their retention, when no plan needs them. After an error, no
            # plan refers to them at all.
            table.delete_files_later(locations)
        self._add(table.uuid, _NamedSnapshot(key, encoded_snapshot.snapshot, self._clock.monotonic()))
        return encoded_snapshot.snapshot

    def _add(self, uuid: str, named_snapshot: _NamedSnapshot) -> None:
        self._newest[uuid] = named_snapshot
        self._by_id[uuid, named_snapshot.snapshot.snapshot_id] = named_snapshot
        while True:
            oldest_id, oldest = next(iter(self._by_id.items()))
            if len(self._by_id) <= _SNAPSHOTS_MAX and named_snapshot.made_s - oldest.used_s <= self.reuse_s:
                return
            del self._by_id[oldest_id]

    def forget(self, uuid: str) -> None:
        """Forget which snapshot of a closed table is the newest. Requests may still name this snapshot by its id."""
        self._newest.pop(uuid, None)
