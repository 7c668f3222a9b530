"""Answers S3 requests from a local folder. It supports each operation of the S3 API that Iceberg's clients use.

All files are accessed in threads, and through a `RootFolder`, so that no symbolic link can lead outside the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from itertools import islice
from typing import TypeVar
from urllib.parse import unquote

from aiohttp import web

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ObjectMissing, SeamarkError
from seamark.formats.runtime.root_folder import RootFolder
from seamark.formats.storage.locations import parse_object
from seamark.metaserver.api.http.slots import HolderLimit
from seamark.metaserver.gateway.answers import (
    answer_copy,
    build_xml_element,
    make_document,
    make_xml_response,
    name_object,
)
from seamark.metaserver.gateway.backend import PromptResponse, S3Call
from seamark.metaserver.gateway.conditions import check_read, read_range
from seamark.metaserver.gateway.folder_files import (
    Checksums,
    FileInfo,
    Staging,
    copy_bytes,
    read_file_info,
    select_kept_headers,
)
from seamark.metaserver.gateway.folder_listing import list_keys
from seamark.metaserver.gateway.folder_uploads import (
    Uploads,
    answer_part_list,
    parse_complete_multipart_upload,
    read_part_number,
)
from seamark.metaserver.gateway.listing import ListingRequest
from seamark.metaserver.gateway.s3_errors import S3Error, convert_error, escape_xml
from seamark.metaserver.objects.folder import map_to_file_location
from seamark.metaserver.objects.local import TEMPORARY_PREFIX, LocalObjects, LocalPlace
from seamark.metaserver.objects.s3_scope import parse_delete_body
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.passed_time import PassedTime

T = TypeVar("T")

FILE_THREADS = 16
COPY_THREADS = 4
"""The number of threads that copy whole objects, for example to complete an upload.

These threads are separate, so that other requests do not wait for copies, which take long.
"""
COPIES_MAX = 16
"""The maximum number of copies that run or wait. A principal may use half of them."""
TIMEOUT_S = 3600.0
"""The timeout of one operation on files. The longest operation completes a large multipart upload by copying its
parts."""
PIECE_BYTES = 1 << 20
_MARKER_ETAG = '"0-0-0"'
"""The ETag in the answer to a write of a folder marker, which is not stored."""
KEY_BYTES_MAX = 1024
"""The maximum length of a key, as in S3. It also limits the depth of the recursion in listings."""


class FolderBackend:
    """A `Backend` for a local folder. An instance belongs to one event loop."""

    def __init__(self, settings: Settings, clock: Clock, warehouse_name: str = "") -> None:
        self._folder = settings.s3_folder.rstrip("/")
        self._clock = clock
        roots = [self._folder]
        self._files = LocalObjects(roots, clock, threads=FILE_THREADS, timeout_s=TIMEOUT_S, parse=parse_object)
        self._copiers = LocalObjects(roots, clock, threads=COPY_THREADS, timeout_s=TIMEOUT_S, parse=parse_object)
        self._root = RootFolder(self._folder)
        self._staging = Staging(self._root, self._files.folders)
        self._abandoned_s = settings.gateway_uploads_s
        self._uploads = Uploads(
            self._staging,
            limit=settings.gateway_uploads_limit,
            abandoned_s=settings.gateway_uploads_s,
            warehouse_name=warehouse_name,
        )
        # Without logins, there is one principal, which may use everything. Otherwise a principal may use half.
        self._share_divisor = 1 if settings.auth == "none" else 2
        self._copies = HolderLimit("copies of objects at once", COPIES_MAX, COPIES_MAX // self._share_divisor)

    async def close(self) -> None:
        await self._files.close()
        await self._copiers.close()

    async def answer(self, call: S3Call) -> web.StreamResponse:
        handler = self._find_handler(call.method, call.address.key, set(call.address.query) - {"x-id"}, call)
        if len(call.address.key.encode()) > KEY_BYTES_MAX:
            raise S3Error("KeyTooLongError", f"A key has at most {KEY_BYTES_MAX} bytes")
        if call.method in ("PUT", "POST") and f"/{TEMPORARY_PREFIX}" in f"/{call.address.key}":
            # Refuse such names: listings omit them, so no client could find and delete the object.
            raise S3Error("InvalidArgument", f"No part of a key may start with {TEMPORARY_PREFIX!r} on this store")
        try:
            return await handler(call)
        except SeamarkError as error:
            s3_error = convert_error(error)
            raise S3Error(s3_error.code, self._hide_folder(s3_error.message), s3_error.headers) from error

    def _find_handler(
        self, method: str, key: str, query: set[str], call: S3Call
    ) -> Callable[[S3Call], Awaitable[web.StreamResponse]]:
        match method:
            case "GET" if not key:
                return self._list
            case "GET" if "uploadId" in query:
                return self._list_parts
            case "GET" | "HEAD" if not query:
                return self._read
            case "PUT" if query == {"partNumber", "uploadId"}:
                return self._copy_part if "x-amz-copy-source" in call.headers else self._put_part
            case "PUT" if not query:
                return self._copy if "x-amz-copy-source" in call.headers else self._put
            case "POST" if not key:
                return self._delete_many
            case "POST" if query == {"uploads"}:
                return self._create_upload
            case "POST" if query == {"uploadId"}:
                return self._complete_upload
            case "DELETE" if query == {"uploadId"}:
                return self._abort_upload
            case "DELETE" if not query:
                return self._delete
        raise S3Error("NotImplemented", f"{method} with the query {sorted(query)} is not supported by this store")

    async def _read(self, call: S3Call) -> web.StreamResponse:
        descriptor, stored_file = await self._open(_make_location(call))
        try:
            check_read(call.headers, stored_file.etag, stored_file.modified_s)
            range_header = call.headers.get("range")
            if_range = call.headers.get("if-range")
            part = None if if_range not in (None, stored_file.etag) else read_range(range_header, stored_file.size)
            start, length = part or (0, stored_file.size)
            response = PromptResponse(status=206 if part else 200, headers=_build_headers(stored_file, call.request_id))
            if part:
                response.headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{stored_file.size}"
            response.content_length = length
            await response.prepare(call.request)
            if call.method != "HEAD":
                await self._send(response, descriptor, start, length, call)
            await response.write_eof()
            return response
        finally:
            os.close(descriptor)

    async def _send(self, response: web.StreamResponse, descriptor: int, start: int, length: int, call: S3Call) -> None:
        """Send `length` bytes of a file from the offset `start`, in pieces.

        Raises:
            ConnectionError: The file became shorter. The connection was aborted.
        """
        while length:
            data = await self._run(os.pread, descriptor, min(length, PIECE_BYTES), start)
            if not data:
                if call.request.transport is not None:  # Another program truncated the file.
                    call.request.transport.abort()
                raise ConnectionError("The file became shorter while it was sent")
            await response.write(data)
            start, length = start + len(data), length - len(data)

    async def _open(self, location: str) -> tuple[int, FileInfo]:
        """Return an open descriptor of an object, and its description. The caller closes the descriptor.

        Raises:
            S3Error: NoSuchKey if the object does not exist.
        """

        def work(place: LocalPlace) -> tuple[int, FileInfo]:
            descriptor = place.root.open_file(place.path_below_root)
            return descriptor, read_file_info(descriptor)

        if location.endswith("/"):
            raise _make_no_key_error()
        try:
            return await self._files.run(self._map_to_file_location(location), work)
        except ObjectMissing:
            raise _make_no_key_error() from None

    async def _list(self, call: S3Call) -> web.StreamResponse:
        """Answer with a page of the objects whose keys begin with a prefix."""
        query, bucket = dict(call.address.query), call.address.bucket
        # The location determines the root folder in which the thread lists. It need not exist.
        folder_location = self._map_to_file_location(f"s3://{bucket}/{query['prefix'].rpartition('/')[0]}")
        listing = ListingRequest.parse(bucket, query)

        def write_page(_: LocalPlace) -> bytes:
            keys = list_keys(self._root, bucket, listing.prefix, listing.delimiter, listing.start_after)
            # One more key than the limit shows that there is a further page.
            return listing.write(list(islice(keys, listing.limit + 1)) if listing.limit else [])

        return make_xml_response(await self._files.run(folder_location, write_page), call)

    async def _put(self, call: S3Call) -> web.StreamResponse:
        headers, location = select_kept_headers(call.headers), _make_location(call)
        if location.endswith("/"):
            return await self._put_marker(call)
        staged_name = await self._receive(call, headers)
        try:
            conditions = call.headers
            published_file = await self._files.run(
                self._map_to_file_location(location),
                lambda place: self._staging.publish(staged_name, place, conditions),
            )
        finally:
            await self._discard(staged_name)
        return web.Response(headers={"ETag": published_file.etag, "x-amz-request-id": call.request_id})

    async def _put_marker(self, call: S3Call) -> web.StreamResponse:
        """Accept a key that ends with a slash, without storing an object.

        Some clients create such empty objects as folders, which this store does not need.

        Raises:
            S3Error: NotImplemented if the object is not empty.
        """
        assert call.body is not None
        if call.body.length:
            raise S3Error("NotImplemented", "A key that ends with a slash cannot have content on this store")
        async for _ in call.body.iter_pieces():
            pass
        return web.Response(headers={"ETag": _MARKER_ETAG, "x-amz-request-id": call.request_id})

    async def _receive(self, call: S3Call, headers: dict[str, str]) -> str:
        """Write the body's data and `headers` to a staged file, sync it, and return its name.

        Raises:
            S3Error: The body is invalid, or does not have the checksum that the request states.
        """
        body = call.body
        assert body is not None
        checksum_headers = {name for name in call.headers if name.startswith("x-amz-checksum-")} - {
            "x-amz-checksum-algorithm",
            "x-amz-checksum-type",
        }
        trailer = call.headers.get("x-amz-trailer", "").lower()
        checksums = Checksums(checksum_headers | ({trailer} if trailer else set()), md5="content-md5" in call.headers)
        staged_name = self._clock.draw_bytes(16).hex()
        descriptor = await self._run(self._staging.open_new, staged_name)
        try:
            pending = bytearray()

            def write(data: bytes) -> None:
                checksums.update(data)
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]

            # Collect small pieces, because each write switches to a thread.
            async for piece in body.iter_pieces():
                pending += piece
                if len(pending) >= PIECE_BYTES:
                    await self._run(write, bytes(pending))
                    pending.clear()
            await self._run(write, bytes(pending))
            checksums.check(call.headers | body.trailers)
            await self._run(self._staging.store_headers_and_sync, descriptor, headers)
        except BaseException:
            self._staging.discard(staged_name)
            raise
        finally:
            os.close(descriptor)
        return staged_name

    async def _copy(self, call: S3Call) -> web.StreamResponse:
        staged_name = await self._stage_copy(call)
        try:
            published_file = await self._files.run(
                self._map_to_file_location(_make_location(call)),
                lambda place: self._staging.publish(staged_name, place, call.headers),
            )
        finally:
            await self._discard(staged_name)
        return answer_copy("CopyObjectResult", published_file.etag, published_file.modified_ns, call)

    async def _stage_copy(self, call: S3Call, *, is_part: bool = False) -> str:
        bucket, _, key = unquote(call.headers["x-amz-copy-source"]).removeprefix("/").partition("/")
        source, source_file = await self._open(f"s3://{bucket}/{key}")
        try:
            check_read(call.headers, source_file.etag, source_file.modified_s, "x-amz-copy-source-")
            part = read_range(call.headers.get("x-amz-copy-source-range") if is_part else None, source_file.size)
            start, length = part or (0, source_file.size)
            replaces_metadata = call.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
            headers = {} if is_part else select_kept_headers(call.headers) if replaces_metadata else source_file.headers
            staged_name = self._clock.draw_bytes(16).hex()

            def work() -> None:
                descriptor = self._staging.open_new(staged_name)
                try:
                    copy_bytes(source, descriptor, start, length)
                    self._staging.store_headers_and_sync(descriptor, headers)
                except BaseException:
                    self._staging.discard(staged_name)
                    raise
                finally:
                    os.close(descriptor)

            with self._copies.reserve(call.principal_name):
                await self._copiers.run(f"file://{self._folder}", lambda _: work())
        finally:
            os.close(source)
        return staged_name

    async def _delete(self, call: S3Call) -> web.StreamResponse:
        await self._delete_object(_make_location(call))
        return web.Response(status=204, headers={"x-amz-request-id": call.request_id})

    async def _delete_object(self, location: str) -> None:
        """Delete the object at the location, if it exists. A folder is not an object, and is not deleted."""
        if not location.endswith("/"):
            with contextlib.suppress(ObjectMissing):
                await self._files.delete(self._map_to_file_location(location))

    async def _delete_many(self, call: S3Call) -> web.StreamResponse:
        assert call.document is not None
        text = call.document.decode()
        is_quiet = "<Quiet>true</Quiet>" in text
        result_elements = []
        for key in parse_delete_body(text):
            try:
                await self._delete_object(f"s3://{call.address.bucket}/{key}")
                if not is_quiet:
                    result_elements.append(f"<Deleted><Key>{escape_xml(key)}</Key></Deleted>")
            except Exception as error:  # noqa: BLE001  each key has its own outcome
                message = self._hide_folder(getattr(error, "message", "The object was not deleted"))
                result_elements.append(
                    f"<Error><Key>{escape_xml(key)}</Key><Code>InternalError</Code>"
                    f"<Message>{escape_xml(message)}</Message></Error>"
                )
        return make_xml_response(make_document("DeleteResult", "".join(result_elements)), call)

    async def _create_upload(self, call: S3Call) -> web.StreamResponse:
        location, headers = _make_location(call), select_kept_headers(call.headers)
        secret = self._clock.draw_bytes(16)
        upload_id = await self._run(
            self._uploads.create, location, secret, call.principal_name, self._share_divisor, headers
        )
        return make_xml_response(
            make_document(
                "InitiateMultipartUploadResult", name_object(call) + build_xml_element("UploadId", upload_id)
            ),
            call,
        )

    async def _put_part(self, call: S3Call) -> web.StreamResponse:
        number = read_part_number(call.address.query.get("partNumber"))
        # Check the upload before receiving the body.
        await self._check_upload(call)
        return await self._add_part(call, number, await self._receive(call, {}))

    async def _copy_part(self, call: S3Call) -> web.StreamResponse:
        number = read_part_number(call.address.query.get("partNumber"))
        await self._check_upload(call)
        return await self._add_part(call, number, await self._stage_copy(call, is_part=True))

    async def _check_upload(self, call: S3Call) -> None:
        await self._run(self._uploads.check, _make_location(call), call.address.query["uploadId"])

    async def _add_part(self, call: S3Call, number: int, staged_name: str) -> web.StreamResponse:
        location, upload_id = _make_location(call), call.address.query["uploadId"]
        try:
            etag = await self._run(self._uploads.add_part, location, upload_id, number, staged_name)
        finally:
            await self._discard(staged_name)
        if "x-amz-copy-source" in call.headers:
            return answer_copy("CopyPartResult", etag, self._clock.now_ms() * 1_000_000, call)
        return web.Response(headers={"ETag": etag, "x-amz-request-id": call.request_id})

    async def _list_parts(self, call: S3Call) -> web.StreamResponse:
        upload_id = call.address.query["uploadId"]
        parts = await self._run(self._uploads.list_parts, _make_location(call), upload_id)
        return answer_part_list(parts, call)

    async def _complete_upload(self, call: S3Call) -> web.StreamResponse:
        assert call.document is not None
        location, upload_id = _make_location(call), call.address.query["uploadId"]
        part_etags, conditions = parse_complete_multipart_upload(call.document), call.headers
        with self._copies.reserve(call.principal_name):
            published_file = await self._copiers.run(
                self._map_to_file_location(location),
                lambda place: self._uploads.complete(location, upload_id, part_etags, place, conditions),
            )
        return make_xml_response(
            make_document(
                "CompleteMultipartUploadResult", name_object(call) + build_xml_element("ETag", published_file.etag)
            ),
            call,
        )

    async def _abort_upload(self, call: S3Call) -> web.StreamResponse:
        await self._run(self._uploads.abort, _make_location(call), call.address.query["uploadId"])
        return web.Response(status=204, headers={"x-amz-request-id": call.request_id})

    async def delete_abandoned(self, passed_time: PassedTime) -> None:
        """Delete uploads and staged files that have not changed for `gateway_uploads_s` of passed time."""
        age_ms = int(self._abandoned_s * 1000)
        # Passed time does not include jumps of the system clock, which would make files look older than they are.
        # `find_time_ago` returns the time before which a file is old enough. The callee subtracts the age itself, so
        # the age is added here.
        await self._run(self._uploads.delete_abandoned, (passed_time.find_time_ago(age_ms) + age_ms) / 1000)

    async def _discard(self, staged_name: str) -> None:
        """Delete a staged file, unless it was published: a published file is no longer in the staging folder."""
        await self._run(self._staging.discard, staged_name)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in one of the threads for files, and translate its errors."""
        return await self._files.run(f"file://{self._folder}", lambda _: work(*args))

    def _hide_folder(self, message: str) -> str:
        """Remove the path of the folder from a message, because clients identify objects by their keys."""
        return message.replace(f"file://{self._folder}/", "s3://").replace(self._folder, "the folder")

    def _map_to_file_location(self, location: str) -> str:
        return map_to_file_location(location, self._folder, parse_object)


def _make_location(call: S3Call) -> str:
    return f"s3://{call.address.bucket}/{call.address.key}"


def _build_headers(file: FileInfo, request_id: str) -> dict[str, str]:
    """Return the headers of an answer with the content of a stored file."""
    headers = {name.title() if not name.startswith("x-amz-") else name: value for name, value in file.headers.items()}
    return {
        "Content-Type": "binary/octet-stream",
        **headers,
        "ETag": file.etag,
        "Last-Modified": formatdate(file.modified_s, usegmt=True),
        "Accept-Ranges": "bytes",
        "x-amz-request-id": request_id,
    }


def _make_no_key_error() -> S3Error:
    return S3Error("NoSuchKey", "The specified key does not exist")
