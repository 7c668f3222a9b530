"""Shares fresh snapshots between the processes on the same storage.

A client may load a table from one process, and plan its fresh snapshot at another process. The manifest list of a
fresh snapshot has the id of the snapshot in its name, and a record of the snapshot in its header. So the other process
can find the snapshot by its id, without an additional file. The record is signed with a key that all replicas have.
Otherwise, a principal that can write to the table's folder could make the server read arbitrary files as a snapshot.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from seamark.formats.iceberg.manifests.avro import read_header
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import Corrupt, ObjectMissing, TooLarge
from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.streams.fresh_snapshots import make_fresh_location

_PURPOSE = "fresh-snapshots"
_MAC_BYTES = 32
_HEADER_KEY = "seamark.fresh-snapshot"
"""The key of the record in the header of a manifest list."""
_LIST_BYTES_MAX = 64 << 20
"""The maximum size of the manifest list of a fresh snapshot."""
_REMEMBERED_MAX = 1_000
"""The maximum number of records of other processes in memory."""


class _Record(msgspec.Struct, frozen=True):
    """The record of a fresh snapshot, by which other processes can use the snapshot.

    Attributes:
        until_ms: The time until which requests may name the snapshot.
        snapshot: The snapshot, which no metadata file contains.
    """

    snapshot: Snapshot
    until_ms: int


class SharedSnapshots:
    """Signs and finds the records of fresh snapshots. An instance belongs to one event loop."""

    def __init__(self, objects: ObjectStore, keyring: Keyring, clock: Clock) -> None:
        self._objects = objects
        self._keyring = keyring
        self._clock = clock
        self._records: OrderedDict[tuple[str, int], _Record] = OrderedDict()
        """The read records, the least recently used first."""

    def seal(self, uuid: str, snapshot: Snapshot, *, until_ms: int) -> Mapping[str, str]:
        """Return the signed record of a fresh snapshot as entries for the header of its manifest list.

        A fresh snapshot has rows of a stream that no commit has added to the table yet. Other processes accept it only
        with this signature, because clients may be able to write files to the folder of the manifest lists.

        Args:
            uuid: The UUID of the table.
            snapshot: The fresh snapshot.
            until_ms: The time until which requests may name the snapshot.
        """
        body = msgspec.json.encode(_Record(snapshot, until_ms))
        key_id, key = self._keyring.find_signing_key(_PURPOSE)
        return {_HEADER_KEY: to_base64url(key_id + _compute_mac(key, uuid, body) + body)}

    async def find(self, uuid: str, snapshot_id: int, folder: str) -> Snapshot | None:
        """Return the fresh snapshot with this id, or None if it is unknown or too old. Any process may have created it.

        Args:
            uuid: The UUID of the table.
            snapshot_id: The id.
            folder: The location of the folder for fresh files.

        Raises:
            RetryLater: The storage is unavailable.
        """
        record = self._records.get((uuid, snapshot_id))
        if record is None:
            try:
                data = await self._objects.read(make_fresh_location(folder, snapshot_id), limit_bytes=_LIST_BYTES_MAX)
            except (ObjectMissing, TooLarge):
                return None
            record = self._decode(data, uuid)
            if record is None or record.snapshot.snapshot_id != snapshot_id:
                return None
            self._records[uuid, snapshot_id] = record
            # The first record is the least recently used.
            while len(self._records) > _REMEMBERED_MAX:
                self._records.popitem(last=False)
        self._records.move_to_end((uuid, snapshot_id))
        return record.snapshot if self._clock.now_ms() <= record.until_ms else None

    def _decode(self, data: bytes, uuid: str) -> _Record | None:
        """Return the record in a manifest list, or None if it has no valid signature for this table.

        The value in the header consists of the id of the key, the signature and the record.
        """
        try:
            data = decode_base64url(read_header(data, "The manifest list").get(_HEADER_KEY, ""))
        except (Corrupt, ValueError):
            return None
        key = self._keyring.find_verification_key(_PURPOSE, data[:ID_BYTES])
        mac, body = data[ID_BYTES : ID_BYTES + _MAC_BYTES], data[ID_BYTES + _MAC_BYTES :]
        if key is None or not hmac.compare_digest(mac, _compute_mac(key, uuid, body)):
            return None
        record: _Record = convert_json(body, _Record)
        return record


def _compute_mac(key: bytes, uuid: str, body: bytes) -> bytes:
    return hmac.digest(key, uuid.encode() + b"\n" + body, hashlib.sha256)
