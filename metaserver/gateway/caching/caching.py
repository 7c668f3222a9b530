"""Answers reads of immutable objects from the cache, and passes all other requests on to the store.

A read is answered from the cache only if the object's name shows that it is written once (`written_once.py`), and
if the request has only a range and conditions. The store answers all other requests, such as listings, versions, and
reads with the client's own encryption keys. If the store refuses a read of the cache, it also answers the client's
request, so that the client receives the store's error. A write changes the version of each object that it may change,
before and after the write (`write_versions.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from email.utils import formatdate
from functools import lru_cache, partial
from typing import NamedTuple

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from seamark.cache.single_flight import SingleFlight
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.api.http.observability.metrics import GatewayCacheMetrics
from seamark.metaserver.gateway.backend import Backend, BrokenAnswer, PromptResponse, S3Call, S3Read, StartedAnswer
from seamark.metaserver.gateway.caching.blocks import Owner
from seamark.metaserver.gateway.caching.fetches import ChangedObject, RefusedRead, split_bucket_and_key
from seamark.metaserver.gateway.caching.reader import RangeReader, keep_part
from seamark.metaserver.gateway.caching.records import ObjectRecord, parse_record
from seamark.metaserver.gateway.caching.sending import AnswerBudget, SendBudget
from seamark.metaserver.gateway.caching.store import StoreAnswer
from seamark.metaserver.gateway.caching.tiers import CacheTiers
from seamark.metaserver.gateway.caching.written_once import find_written_once_kind
from seamark.metaserver.gateway.conditions import check_read, read_range
from seamark.metaserver.gateway.connection import SentAnswer
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.s3_scope import Address, parse_delete_body

_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")
_CONDITIONS = frozenset(("if-match", "if-none-match", "if-modified-since", "if-unmodified-since"))
_ALLOWED_AMZ = frozenset(
    (
        *("x-amz-date", "x-amz-content-sha256", "x-amz-checksum-mode", "x-amz-user-agent", "x-amz-te"),
        *("x-amz-api-version", "x-amz-request-payer"),
    )
)
_SEQUENCES_MAX = 4096
_STREAK_MAX = 6
"""The number of consecutive reads after which the parts that are read ahead stop growing."""
_log = structlog.get_logger("seamark.gateway")
_READ_AHEAD_MIN_BYTES = 1 << 20
_BYTES_PER_TURN = 4 << 20
"""The bytes of one answer that are sent before the event loop handles other requests, which takes about 1 ms."""

_LOOKUPS_MAX = 2
"""The maximum number of times that a read looks up the record of an object that changes meanwhile."""


class _ReadSequence(NamedTuple):
    """The last reads of an object, each of which continues the previous one.

    Attributes:
        end: The end of the last read.
        streak: The number of reads that have continued a previous read.
        ahead_until: The end of the part that was read ahead.
    """

    end: int
    streak: int
    ahead_until: int


_NO_READS = _ReadSequence(-1, 0, 0)


class CachingBackend:
    """A `Backend` with a cache in front of the store's `Backend`. An instance belongs to one event loop."""

    def __init__(self, backend: Backend, tiers: CacheTiers, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._tiers = tiers
        self._records = tiers.records
        self._fetches = tiers.fetches
        self._send_budget: SendBudget = tiers.sending
        self._reader = RangeReader(tiers.store, tiers.blocks, tiers.fetches)
        self._preloader = RangeReader(tiers.store, tiers.blocks, tiers.fetches)
        """A separate reader for preloads, so that `_reader` counts only the bytes of clients."""
        self._preloaded_files = 0
        self._opening: SingleFlight[str, ObjectRecord] = SingleFlight()
        self._sequences: OrderedDict[str, _ReadSequence] = OrderedDict()
        """The last reads, by location."""

    @property
    def served_bytes(self) -> Mapping[str, int]:
        """The number of sent bytes, by source: memory, disk, fetch, or direct."""
        return self._reader.served_bytes

    def report(self, metrics: GatewayCacheMetrics, warehouse: str) -> None:
        """Report the values of the cache of a warehouse. An empty text is the server's own warehouse."""
        blocks, fetches = self._tiers.blocks, self._fetches
        memory, disks = blocks.memory.read_stats(), blocks.collect_disk_stats()
        metrics.set_values(
            warehouse=warehouse,
            memory={
                "blocks": memory.used_bytes,
                "records": self._records.used_bytes,
                "fetches": fetches.used_bytes,
                "unsent": self._send_budget.taken_bytes,
            },
            disk={name: stats.used_bytes for name, stats in disks},
            served_bytes=self.served_bytes,
            events={
                "fetch": fetches.requests,
                "hedged_read": self._tiers.store.hedged,
                "memory_eviction": memory.evictions,
                "memory_rejection": blocks.memory.rejected,
                "disk_eviction": sum(stats.evictions for _, stats in disks),
                "disk_damage": sum(stats.damaged for _, stats in disks),
                "disk_error": sum(stats.errors for _, stats in disks),
                "disk_write_dropped": blocks.dropped,
                "preloaded_file": self._preloaded_files,
                "preloaded_byte": sum(self._preloader.served_bytes.values()),
            },
        )

    async def close(self) -> None:
        await self._tiers.close()
        await self._backend.close()

    async def answer(self, call: S3Call) -> web.StreamResponse:
        """Answer a request from the cache or the store.

        A write is noted before and after the store handles it, so that no older content stays in the cache.
        """
        if call.method in ("GET", "HEAD"):
            if _can_answer_from_cache(call):
                response = await self._read(call)
                if response is not None:
                    return response
            return await self._backend.answer(call)
        written_locations = _list_changed_locations(call)
        for location in written_locations:
            self._records.note_write(location)
        try:
            return await self._backend.answer(call)
        finally:
            for location in written_locations:
                self._records.note_write(location)

    def begin(self, s3_read: S3Read, transport: asyncio.Transport) -> StartedAnswer | None:
        """Send the part of the answer that is available without waiting for the store, the disk, or the client.

        Args:
            s3_read: The request.
            transport: The connection, which has no unsent bytes. It keeps bytes that the kernel does not accept.

        Returns:
            The started answer. None if nothing was sent, because there is no trusted record, the first block is not
            available, or the read has conditions.
        """
        if not _can_answer_from_cache(s3_read) or not _CONDITIONS.isdisjoint(s3_read.headers):
            return None
        location = _make_location(s3_read)
        record = self._records.get_trusted(location)
        if record is None:
            return None
        try:
            part = read_range(s3_read.headers.get("range"), record.size)
        except S3Error:
            return None
        start, length = part or (0, record.size)
        owner, end = _make_owner(s3_read), start + length
        budget = AnswerBudget(self._send_budget, owner.holder)
        sent_end = start if s3_read.method == "GET" else end
        pieces: list[memoryview] = []
        size_bytes = 0
        if sent_end < end:
            # The previous read has counted the first block of a read that continues it.
            is_continuation = self._continues_last_read(record, start)
            pieces, size_bytes = self._take_pieces(record, start, end, owner, budget, counted=not is_continuation)
            if not pieces:
                return None
            self._record_read(record, start, end, owner)
        head = _encode_head(record, part, s3_read.request_id, self._clock.now_ms())
        transport.writelines([head, *pieces])
        sent_end += sum(map(len, pieces))
        while sent_end < end and not transport.get_write_buffer_size() and sent_end - start < _BYTES_PER_TURN:
            pieces, size_bytes = self._take_pieces(record, sent_end, end, owner, budget)
            if not pieces:
                break
            transport.writelines(pieces)
            sent_end += sum(map(len, pieces))
        status = 206 if part else 200
        if transport.get_write_buffer_size():
            budget.set_charge(size_bytes)
        elif sent_end == end:
            return StartedAnswer(status, length, None)

        async def send_body(writer: AbstractStreamWriter) -> None:
            await self._send_blocks(record, sent_end, end, owner, transport, writer, budget)

        return StartedAnswer(status, length, send_body, partial(budget.set_charge, 0))

    def _take_pieces(
        self, record: ObjectRecord, start: int, end: int, owner: Owner, budget: AnswerBudget, *, counted: bool = True
    ) -> tuple[list[memoryview], int]:
        """Return the bytes from `start` that are available without waiting, and the memory that they occupy.

        If the first block is not available, there are no bytes. A piece is a view, which keeps its whole block in
        memory. If the budget offers less memory than a block, the pieces are copies of the needed bytes instead.
        """
        offer, block_bytes = budget.next_bytes, self._tiers.blocks.block_bytes
        pieces = self._reader.read_at_once(record, start, min(end, start + offer), owner, is_counted=counted)
        if offer < block_bytes:
            pieces = [keep_part(piece, 0, len(piece), 0)[0] for piece in pieces]
            return pieces, sum(map(len, pieces))
        return pieces, len(pieces) * block_bytes

    async def _send_blocks(
        self,
        record: ObjectRecord,
        start: int,
        end: int,
        owner: Owner,
        transport: asyncio.Transport,
        writer: AbstractStreamWriter,
        budget: AnswerBudget,
    ) -> None:
        """Send the rest of an answer: available blocks together, and then each block as it arrives.

        Bytes that the connection has not sent yet are charged to the budget of the answer.

        Raises:
            BrokenAnswer: The answer cannot be completed.
        """
        try:
            await writer.drain()
            budget.set_charge(0)
            while start < end and not transport.is_closing():
                pieces, size_bytes = self._take_pieces(record, start, end, owner, budget)
                if not pieces:
                    break
                transport.writelines(pieces)
                start += sum(map(len, pieces))
                # Drop the references, so that only the connection references the unsent bytes.
                del pieces
                if transport.get_write_buffer_size():
                    budget.set_charge(size_bytes)
                await writer.drain()
                budget.set_charge(0)
                # Yield to other tasks, because `drain` never yields if the client is fast.
                await asyncio.sleep(0)
            async with aclosing(self._reader.read(record, start, end, owner, budget, started=True)) as remaining_pieces:
                await _send_rest(writer, remaining_pieces)
        finally:
            budget.set_charge(0)

    @property
    def is_busy(self) -> bool:
        """Whether reads of clients use so much of the budget that preloads must wait."""
        return self._fetches.is_half_used

    async def preload(self, location: str, last_bytes: int | None, holder: str) -> int:
        """Read the object, or its last bytes, into the pinned part of the cache.

        Returns:
            The number of bytes. It is 0 if the object no longer exists or cannot be cached.

        Raises:
            RetryLater: The object cannot be read now.
        """
        owner, budget = Owner(holder, pinned=True), AnswerBudget(self._send_budget, holder)
        headers = {} if last_bytes is None else {"range": f"bytes=-{last_bytes}"}
        s3_read = S3Read("GET", Address(*split_bucket_and_key(location), {}), headers, "preload", holder, True)
        try:
            record = self._records.get_trusted(location) or await self._find(location, s3_read, owner)
            if record is None:
                return 0
            start = 0 if last_bytes is None else max(0, record.size - last_bytes)
            async with aclosing(self._preloader.read(record, start, record.size, owner, budget)) as pieces:
                async for _ in pieces:
                    pass
        except (RefusedRead, ChangedObject):
            return 0
        self._preloaded_files += 1
        return record.size - start

    async def _read(self, call: S3Call) -> web.StreamResponse | None:
        """Return the answer from the cache, or None if the store must answer.

        If the object in the store differs from its record, the record is read again, at most `_LOOKUPS_MAX` times.
        """
        location, owner = _make_location(call), _make_owner(call)
        for _ in range(_LOOKUPS_MAX):
            record = self._records.get_trusted(location)
            if record is None:
                try:
                    record = await self._find(location, call, owner)
                except (RefusedRead, ChangedObject):
                    return None
                if record is None:
                    return None
            try:
                return await self._answer_from(record, call, owner)
            except ChangedObject:
                self._records.forget(location)
            except RefusedRead:
                return None
        return None

    async def _find(self, location: str, call: S3Read, owner: Owner) -> ObjectRecord | None:
        """Return the object's record from the cache or from the store, or None if the store must answer.

        Raises:
            RefusedRead: The store refuses the read.
            RetryLater: The store cannot answer now.
        """
        is_conditional = call.method == "GET" and not _CONDITIONS.isdisjoint(call.headers)
        if is_conditional and await self._records.find(location, owner.holder) is None:
            # Without a record, let the store evaluate the conditions.
            return None
        for _ in range(_LOOKUPS_MAX):
            record = await self._opening.run(location, lambda: self._open(location, call, owner))
            # The task of an earlier read may have begun before a write that has ended since.
            if self._records.get_version(location) == record.version:
                return record
        return None

    async def _open(self, location: str, call: S3Read, owner: Owner) -> ObjectRecord:
        """Return the record of an object, which is read from the store unless a trusted record is cached.

        If the store does not answer, an untrusted cached record is also returned if its version has not changed.

        If possible, a GET also reads the first blocks that the client needs. Otherwise a HEAD reads only the record.

        Raises:
            RefusedRead: The store refuses the read.
            RetryLater: The store cannot answer now.
        """
        version, now_ms = self._records.get_version(location), self._clock.now_ms()
        cached_record = await self._records.find(location, owner.holder)
        if cached_record is not None and self._records.is_trusted(cached_record):
            return cached_record

        def make_record(answer: StoreAnswer) -> ObjectRecord | None:
            return parse_record(answer, location, version=version, now_ms=now_ms)

        record = None
        if cached_record is None and call.method == "GET":
            span, expected_bytes = self._choose_opening_span(call.headers.get("range"))
            record = await self._fetches.open(location, span, expected_bytes, make_record, owner)
        if record is None:
            try:
                async with self._tiers.store.request("HEAD", *split_bucket_and_key(location), {}) as answer:
                    record = make_record(answer) if answer.status == 200 else None
            except RetryLater:
                if cached_record is not None and cached_record.version == version:
                    return cached_record  # The store does not answer, but the object is immutable.
                raise
        if record is None:
            if cached_record is not None:
                self._records.forget(location)
            raise RefusedRead
        self._records.keep(record, owner.holder)
        self._tiers.write_record(record, owner)
        # A small object of a pinned table is read completely, so that later reads find all of it.
        if cached_record is None and owner.pinned and record.size <= self._tiers.whole_bytes:
            self._reader.read_ahead(record, 0, record.size, owner)
        return record

    def _choose_opening_span(self, range_header: str | None) -> tuple[str, int]:
        """Return the Range header for the first read of an object, and the maximum length of the range.

        The range consists of the whole blocks around the requested part, up to the limit of one request.
        """
        block_bytes, request_bytes = self._tiers.blocks.block_bytes, self._fetches.request_bytes
        match = _RANGE.fullmatch(range_header or "bytes=0-")
        assert match is not None, range_header  # `_can_answer_from_cache` has checked the header.
        if match[3]:
            # The client requests the last bytes of an object whose size is unknown. So the start of their first block
            # is also unknown. One more block certainly includes this start.
            length = min(int(match[3]) + block_bytes, request_bytes)
            return f"bytes=-{length}", length
        start = int(match[1]) // block_bytes * block_bytes
        end = start + request_bytes
        if match[2]:
            end = min(end, (int(match[2]) // block_bytes + 1) * block_bytes)
        end = max(end, start + block_bytes)
        return f"bytes={start}-{end - 1}", end - start

    async def _answer_from(self, record: ObjectRecord, call: S3Call, owner: Owner) -> web.StreamResponse:
        """Answer a read of an object with this record. Blocks that are not cached are read from the store."""
        if not _CONDITIONS.isdisjoint(call.headers):
            check_read(call.headers, record.etag, record.modified_s)
        part = read_range(call.headers.get("range"), record.size)
        start, length = part or (0, record.size)
        request = call.request
        if call.method == "HEAD":
            response = _make_response(record, part, call)
            await response.prepare(request)
            await response.write_eof()
            return response
        # The previous read has counted the first block of a read that continues it.
        is_continuation = self._continues_last_read(record, start)
        self._record_read(record, start, start + length, owner)
        budget = AnswerBudget(self._send_budget, owner.holder)
        pieces = self._reader.read(record, start, start + length, owner, budget, is_counted=not is_continuation)
        async with aclosing(pieces):
            # The first piece is read before the header is sent, so that an error can have its own status.
            first_piece = await anext(pieces, None)
            try:
                if request.keep_alive and request.version == HttpVersion11:
                    # For the usual kind of connection, write the header and the first bytes without a copy. Other
                    # kinds need headers of aiohttp.
                    head = _encode_head(record, part, call.request_id, self._clock.now_ms())
                    _send_first_bytes(request, [head] if first_piece is None else [head, first_piece])
                    del first_piece
                    await _send_rest(request.writer, pieces)
                    return SentAnswer(206 if part else 200, length)
                response = _make_response(record, part, call)
                await response.prepare(request)
                if first_piece is not None:
                    await response.write(first_piece)
                    del first_piece
                await _send_rest(request.writer, pieces)
            except BrokenAnswer:
                if request.transport is not None:
                    request.transport.abort()
                return SentAnswer(206 if part else 200, length)
        await response.write_eof()
        return response

    def _continues_last_read(self, record: ObjectRecord, start: int) -> bool:
        """Return whether a read starts in the middle of a block, where the previous read of the object ended."""
        previous_read = self._sequences.get(record.location)
        return previous_read is not None and start == previous_read.end and start % self._tiers.blocks.block_bytes != 0

    def _record_read(self, record: ObjectRecord, start: int, end: int, owner: Owner) -> None:
        """Record a read. If it continues the previous read, read ahead.

        Each part that is read ahead is twice as large as the previous part, up to `request_bytes`. The next part is
        read when half of the previous part was requested.
        """
        previous_end, streak, ahead_until = self._sequences.get(record.location, _NO_READS)
        streak = min(streak + 1, _STREAK_MAX) if start == previous_end else 0
        if streak:
            window_bytes = min(self._fetches.request_bytes, max(_READ_AHEAD_MIN_BYTES, end - start) << (streak - 1))
            if end + window_bytes // 2 > ahead_until:
                self._reader.read_ahead(record, max(end, ahead_until), min(record.size, end + window_bytes), owner)
                ahead_until = end + window_bytes
        self._sequences[record.location] = _ReadSequence(end, streak, ahead_until if streak else 0)
        self._sequences.move_to_end(record.location)
        while len(self._sequences) > _SEQUENCES_MAX:
            self._sequences.popitem(last=False)


def _make_response(record: ObjectRecord, part: tuple[int, int] | None, call: S3Call) -> web.StreamResponse:
    """Return an unprepared response of aiohttp for the part (start, length), or for the whole object."""
    start, length = part or (0, record.size)
    headers = {**record.headers, "Accept-Ranges": "bytes", "x-amz-request-id": call.request_id}
    response = PromptResponse(status=206 if part else 200, headers=headers)
    if part:
        response.headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{record.size}"
    response.content_length = length
    return response


def _send_first_bytes(request: web.BaseRequest, pieces: list[bytes | memoryview]) -> None:
    """Pass the header and the first bytes to the connection in one call, without copying them.

    aiohttp's writer would make a copy, and keep it until the client has received it.

    Raises:
        ConnectionResetError: The client has closed the connection.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("The client closed the connection")
    # Make aiohttp assume that it has sent bytes. After an error, it then closes the connection without an error
    # response.
    request.writer.output_size = 1
    transport.writelines(pieces)


async def _send_rest(writer: AbstractStreamWriter, pieces: AsyncGenerator[memoryview]) -> None:
    """Send the pieces after the first bytes, and return when the client has received all of them.

    Raises:
        BrokenAnswer: A piece cannot be read.
    """
    bytes_in_turn = 0
    try:
        # Wait for the client before reading the next piece into memory.
        await writer.drain()
        async for piece in pieces:
            bytes_in_turn += len(piece)
            await writer.write(piece)
            await writer.drain()  # `write` waits for the client only after 64 KiB.
            # Yield to other tasks, because `write` never yields if the client is fast.
            if bytes_in_turn >= _BYTES_PER_TURN:
                bytes_in_turn = 0
                await asyncio.sleep(0)
    except (ChangedObject, RefusedRead, RetryLater) as error:
        _log.warning("answer could not be completed", error=f"{type(error).__name__}: {error}")
        raise BrokenAnswer from error
    await writer.drain()


def _make_location(s3_read: S3Read) -> str:
    return f"s3://{s3_read.address.bucket}/{s3_read.address.key}"


def _make_owner(s3_read: S3Read) -> Owner:
    return Owner(s3_read.principal_name, s3_read.pinned or find_written_once_kind(s3_read.address.key) == "metadata")


def _encode_head(record: ObjectRecord, part: tuple[int, int] | None, request_id: str, now_ms: int) -> bytes:
    """Return the status line and the headers of an answer with the part (start, length), or with the whole object.

    Raises:
        ValueError: A value contains the end of a line.
    """
    start, length = part or (0, record.size)
    headers = {
        "content-type": "application/octet-stream",
        **record.headers,
        "accept-ranges": "bytes",
        "content-length": str(length),
        "date": _format_date(now_ms // 1000),
        "server": "seamark",
        "x-amz-request-id": request_id,
    }
    if part:
        headers["content-range"] = f"bytes {start}-{start + length - 1}/{record.size}"
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError(f"A header of {record.location} contains the end of a line")
    status = "206 Partial Content" if part else "200 OK"
    return f"HTTP/1.1 {status}\r\n{text}\r\n".encode("utf-8", "surrogateescape")


@lru_cache(1)
def _format_date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


def _can_answer_from_cache(call: S3Read) -> bool:
    """Return whether the cache can answer the read.

    It can if the object is of a kind that is written once, and the read has no parameters that only the store supports.
    """
    if find_written_once_kind(call.address.key) is None or not call.address.query.keys() <= {"x-id"}:
        return False
    headers = call.headers
    # Records have neither the answer to a HEAD of a range nor checksums, and `if-range` is not implemented.
    if "if-range" in headers or (call.method == "HEAD" and "range" in headers):
        return False
    if call.method == "HEAD" and "x-amz-checksum-mode" in headers:
        return False
    if any(name.startswith("x-amz-") and name not in _ALLOWED_AMZ for name in headers):
        return False
    range_header = headers.get("range")
    if range_header is None:
        return True
    match = _RANGE.fullmatch(range_header)
    if match is None or match[3] == "0":  # The store refuses a range of the last 0 bytes.
        return False
    return not match[2] or int(match[1]) <= int(match[2])  # The store ignores a range that ends before its start.


def _list_changed_locations(call: S3Call) -> list[str]:
    """Return the locations of the cached objects that a request may change.

    Only objects of kinds that are written once are cached, such as data files and metadata files.
    """
    bucket, key = call.address.bucket, call.address.key
    if "partNumber" in call.address.query or "uploads" in call.address.query:
        return []  # The parts of an upload change no object before the upload is completed.
    keys = [key]
    if not key:
        # A request without a key deletes the objects that its body lists.
        keys = []
        with contextlib.suppress(Exception):  # An invalid body was refused already, and changes nothing.
            keys = parse_delete_body((call.document or b"").decode())
    return [f"s3://{bucket}/{object_key}" for object_key in keys if find_written_once_kind(object_key) is not None]
