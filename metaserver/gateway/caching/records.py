"""Records of objects: the ETag, the size and the headers of an object, and the time of their last check.

A record is trusted for `recheck_s`, unless a worker of this machine writes the object (`write_versions.py`).
Afterwards, the record is read from the store again. So if another program replaces an object, which should never happen
to cached objects, the gateway notices it within this time.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import Executor
from email.utils import parsedate_to_datetime

import msgspec

from seamark.cache.disk import DiskTier
from seamark.cache.memory import SharedCache
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.metaserver.gateway.caching.store import StoreAnswer
from seamark.metaserver.gateway.caching.write_versions import WriteVersions

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_NOT_KEPT = frozenset(
    (
        *("content-length", "content-range", "connection", "transfer-encoding", "accept-ranges", "date", "server"),
        *("x-amz-request-id", "x-amz-id-2", "x-amz-missing-meta", "age", "via", "keep-alive"),
    )
)
_UNCACHED = ("x-amz-server-side-encryption-customer-algorithm", "x-amz-object-lock-mode")


class ObjectRecord(msgspec.Struct, frozen=True):
    """The record of an object.

    Attributes:
        modified: The value of the header Last-Modified.
        headers: The headers of an answer to a read, without length, range and checksum.
        version: A random number that changes when a worker of this machine writes the object (`write_versions.py`).
            It was read before the request for the record. If it has changed since, the record may be wrong.
        checked_ms: The time at which the record was read from the store.
        name: The name of the content, which is part of the names of its blocks.
    """

    location: str
    etag: str
    size: int
    modified: str
    headers: dict[str, str]
    version: int
    checked_ms: int
    name: str

    @property
    def modified_s(self) -> int:
        try:
            return int(parsedate_to_datetime(self.modified).timestamp())
        except (TypeError, ValueError, OverflowError):
            return 0


def parse_record(answer: StoreAnswer, location: str, *, version: int, now_ms: int) -> ObjectRecord | None:
    """Return the record in an answer to HEAD or GET, or None if the object cannot be cached.

    For example, an object cannot be cached if the answer has no strong ETag.

    Args:
        answer: The answer of the store.
        location: The location of the object.
        version: The version of the object, which was read before the request.
        now_ms: The time of the request.
    """
    headers = answer.headers
    etag, modified_text = headers.get("etag", ""), headers.get("last-modified", "")
    if answer.status == 206:
        _, _, size = parse_content_range(answer) or (0, 0, -1)
    else:
        size = int(headers.get("content-length", "-1"))
    is_strong_etag = etag.startswith('"') and len(etag) > len('""')
    if size < 0 or not is_strong_etag or any(name in headers for name in _UNCACHED):
        return None
    kept_headers = {
        name: value
        for name, value in headers.items()
        if name not in _NOT_KEPT and not name.startswith("x-amz-checksum-")
    }
    identity = f"{location}\n{etag}\n{modified_text}\n{size}".encode("utf-8", "surrogatepass")
    name = hashlib.blake2b(identity, digest_size=16).hexdigest()
    return ObjectRecord(location, etag, size, modified_text, kept_headers, version, now_ms, name)


def parse_content_range(answer: StoreAnswer) -> tuple[int, int, int] | None:
    """Return the start, the end and the size of the object from an answer with status 206, or None.

    The end is the offset after the last byte.
    """
    return read_content_range(answer.headers.get("content-range", ""))


def read_content_range(text: str) -> tuple[int, int, int] | None:
    """Parse a Content-Range header. Return the start, the end (exclusive) and the size of the object, or None."""
    match = _CONTENT_RANGE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]) + 1, int(match[3]))


def has_same_content(record: ObjectRecord, headers: Mapping[str, str]) -> bool:
    """Return whether an answer with these headers has the same content as the record."""
    return headers.get("etag") == record.etag and headers.get("last-modified", record.modified) == record.modified


class Records:
    """The records in memory, and on disk, where they survive a restart. An instance belongs to one event loop.

    Each principal may use at most `holder_bytes` of memory. Otherwise, a principal that reads many objects would evict
    the records of other principals, and each evicted record would cost a request to the store.
    """

    def __init__(
        self,
        memory_bytes: int,
        holder_bytes: int,
        disk: DiskTier | None,
        versions: WriteVersions,
        clock: Clock,
        executor: Executor,
        *,
        recheck_s: float,
    ) -> None:
        self._memory: SharedCache[str, ObjectRecord] = SharedCache(memory_bytes, holder_bytes, name="gateway-records")
        self._disk = disk
        self._versions = versions
        self._clock = clock
        self._executor = executor
        self._recheck_ms = int(recheck_s * 1000)

    def get_version(self, location: str) -> int:
        return self._versions.get_version(location)

    def get_trusted(self, location: str) -> ObjectRecord | None:
        """Return the record if it is in memory and can be used without a request to the store, otherwise None.

        That is the case for `recheck_s` after the last check, if no worker of this machine has written the object.
        """
        record = self._memory.get(location)
        return record if record is not None and self.is_trusted(record) else None

    def is_trusted(self, record: ObjectRecord) -> bool:
        """Return whether the record was checked within `recheck_s`, and no worker has written the object since."""
        age_ms = self._clock.now_ms() - record.checked_ms
        return 0 <= age_ms < self._recheck_ms and record.version == self._versions.get_version(record.location)

    async def find(self, location: str, holder: str) -> ObjectRecord | None:
        """Return the record from memory or disk, or None. The caller must verify the record by `is_trusted`.

        A record from the disk is added to memory, and counts towards the memory of the principal `holder`.
        """
        record = self._memory.get(location)
        if record is not None or self._disk is None:
            return record
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._executor, self._disk.get, _make_key(location))
        if data is None:
            return None
        try:
            record = convert_msgpack(data, ObjectRecord)
        except msgspec.MsgspecError:
            return None
        if record.location != location:
            return None  # The key on the disk is a digest, which two locations could share.
        self.keep(record, holder)
        return record

    def keep(self, record: ObjectRecord, holder: str) -> None:
        self._memory.put(record.location, record, measure_object_bytes(record), holder)

    async def store(self, record: ObjectRecord, holder: str, executor: Executor) -> None:
        """Write the record to the disk.

        Args:
            holder: The name of the holder (`Owner.tag`).
        """
        if self._disk is not None:
            data, key = msgspec.msgpack.encode(record), _make_key(record.location)
            await asyncio.get_running_loop().run_in_executor(executor, self._disk.put, key, data, holder)

    def note_write(self, location: str) -> None:
        """Record that a write of the object begins or ends in this worker."""
        self._versions.change(location)
        self._memory.discard(location)

    def forget(self, location: str) -> None:
        """Remove the cached record of an object, because it differs from the object in the store.

        The write version of the object also changes, so other workers no longer use their copies of the record, and
        no worker uses the copy on the disk.
        """
        self._memory.discard(location)
        self._versions.change(location)

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes


def _make_key(location: str) -> str:
    return f"record:{location}"
