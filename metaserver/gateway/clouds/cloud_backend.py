"""Answers S3 requests from Azure or Google Cloud Storage, through obstore.

It supports each operation of the S3 API that Iceberg's clients use.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import format_datetime
from urllib.parse import unquote

import obstore
from aiohttp import web
from obstore import exceptions
from obstore.store import ObjectStore as RemoteStore

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ObjectMissing, RetryLater, SeamarkError
from seamark.formats.storage.locations import Location
from seamark.metaserver.api.http.slots import HolderLimit
from seamark.metaserver.gateway.answers import (
    answer_copy,
    build_xml_element,
    make_document,
    make_xml_response,
    name_object,
)
from seamark.metaserver.gateway.backend import PromptResponse, S3Call
from seamark.metaserver.gateway.clouds.cloud_uploads import CloudUploads
from seamark.metaserver.gateway.clouds.object_stream import put_stream, read_first, read_stream
from seamark.metaserver.gateway.conditions import check_read, read_range
from seamark.metaserver.gateway.folder_files import Checksums, select_kept_headers
from seamark.metaserver.gateway.folder_uploads import (
    answer_part_list,
    parse_complete_multipart_upload,
    read_part_number,
)
from seamark.metaserver.gateway.listing import Listed, ListingRequest, encode_key
from seamark.metaserver.gateway.s3_errors import S3Error, convert_error, escape_xml
from seamark.metaserver.objects.clouds.backed import Backing
from seamark.metaserver.objects.clouds.cloud_objects import FAILED
from seamark.metaserver.objects.s3_scope import parse_delete_body
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.passed_time import PassedTime

CONDITIONAL_BYTES_MAX = 16 << 20
"""The maximum size of an object that is written only if it does not exist. The whole object is in memory."""
_FOLDER_LISTINGS_MAX = 2
"""The maximum number of folders that are listed concurrently, because all entries of a folder are in memory."""
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_READ_CONDITIONS = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range")
_METADATA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AZURE = "abfss"
_MARKER_ETAG = '"0-0-0"'
"""The ETag in the answer to a write of a folder marker, which is not stored."""


class CloudBackend:
    """A `Backend` for the cloud that the setting `s3_backend` names. An instance belongs to one event loop."""

    def __init__(self, settings: Settings, clock: Clock, bodies: HolderLimit) -> None:
        """Create a backend.

        Args:
            settings: The settings of the warehouse.
            clock: The clock.
            bodies: The limit for the memory of conditional writes, which all backends of the server share.
        """
        self._backing = Backing(settings.s3_backend)
        self._objects = self._backing.open([], settings, clock)
        self._uploads = CloudUploads(clock)
        self._abandoned_s = settings.gateway_uploads_s
        self._stores: dict[str, RemoteStore] = {}
        self._listing_threads = ThreadPoolExecutor(_FOLDER_LISTINGS_MAX, "gateway-listings")
        self._bodies = bodies
        roots = Warehouse(settings.make_warehouse_uri(), settings.allowed_locations).roots
        self._buckets = sorted({root.bucket for root in roots if root.scheme == "s3"})

    async def close(self) -> None:
        self._listing_threads.shutdown(wait=False, cancel_futures=True)
        self._stores.clear()

    async def answer(self, call: S3Call) -> web.StreamResponse:
        # SDKs add the parameter x-id with the name of the operation. It changes nothing.
        handler = self._find_handler(call, set(call.address.query) - {"x-id"})
        try:
            return await handler(call)
        except ConnectionError:
            raise  # The client has closed the connection: obstore never raises this error.
        except exceptions.AlreadyExistsError:
            raise S3Error("PreconditionFailed", "An object with this key exists already") from None
        except FAILED as error:
            raise self._explain(error, call) from error

    def _explain(self, error: Exception, call: S3Call) -> S3Error:
        failure = self._objects.explain(error, f"s3://{call.address.bucket}/{call.address.key}")
        if isinstance(failure, ObjectMissing):
            return _make_no_key_error()
        return convert_error(failure)

    def _find_handler(self, call: S3Call, query: set[str]) -> Callable[[S3Call], Awaitable[web.StreamResponse]]:
        is_copy = "x-amz-copy-source" in call.headers
        match call.method:
            case "GET" if not call.address.key:
                return self._list
            case "GET" if "uploadId" in query:
                return self._list_parts
            case "GET" | "HEAD" if not query:
                return self._read
            case "PUT" if query == {"partNumber", "uploadId"} and not is_copy:
                return self._put_part
            case "PUT" if not query:
                return self._copy if is_copy else self._put
            case "POST" if not call.address.key:
                return self._delete_many
            case "POST" if query == {"uploads"}:
                return self._create_upload
            case "POST" if query == {"uploadId"}:
                return self._complete_upload
            case "DELETE" if query == {"uploadId"}:
                return self._abort_upload
            case "DELETE" if not query:
                return self._delete
        request_text = f"{call.method} with the query {sorted(query)}{' and a copy source' if is_copy else ''}"
        raise S3Error("NotImplemented", f"{request_text} is not supported by this store")

    async def _read(self, call: S3Call) -> web.StreamResponse:
        store, key = self._find_object(call)
        if key.endswith("/"):
            raise _make_no_key_error()
        header = call.headers.get("range")
        match = _RANGE.fullmatch(header) if header else None
        has_conditions = any(name in call.headers for name in _READ_CONDITIONS)
        first_bytes = b""
        if call.method == "HEAD" or has_conditions or (header and (match is None or int(match[1]) > int(match[2]))):
            # Read the size and the ETag of the object first, because the range and the conditions need them.
            result = await obstore.get_async(store, key, options={"head": True})
            etag, modified_time = _quote_etag(result.meta["e_tag"]), result.meta["last_modified"]
            check_read(call.headers, etag, int(modified_time.timestamp()))
            is_range_applicable = call.headers.get("if-range") in (None, etag)
            part = read_range(header, result.meta["size"]) if is_range_applicable else None
            start, length = part or (0, result.meta["size"])
            is_part = part is not None
        else:
            is_part = match is not None
            start = int(match[1]) if match else 0
            limit = int(match[2]) + 1 if match else None
            result, first_bytes = await read_first(store, key, start, limit)
            size = result.meta["size"]
            length = (size if limit is None else min(limit, size)) - start
        response = self._start_answer(result, start, length, call, is_part=is_part)
        await response.prepare(call.request)
        if call.method != "HEAD":
            await response.write(first_bytes)
            try:
                remaining_pieces = read_stream(
                    store, key, start + len(first_bytes), start + length, result.meta["e_tag"]
                )
                async for piece in remaining_pieces:
                    await response.write(piece)
            except (*FAILED, EOFError):
                # The answer has started, so only an aborted connection shows the client that bytes are missing.
                if call.request.transport is not None:
                    call.request.transport.abort()
                raise ConnectionError("The store did not send the rest of the object") from None
        await response.write_eof()
        return response

    def _start_answer(
        self, result: obstore.GetResult, start: int, length: int, call: S3Call, *, is_part: bool
    ) -> PromptResponse:
        meta = result.meta
        headers = {
            "Content-Type": "binary/octet-stream",
            "ETag": _quote_etag(meta["e_tag"]),
            "Last-Modified": format_datetime(meta["last_modified"], usegmt=True),
            "Accept-Ranges": "bytes",
            "x-amz-request-id": call.request_id,
        }
        for name, value in result.attributes.items():
            is_standard = name.title() in ("Content-Type", "Content-Encoding", "Content-Language", "Cache-Control")
            headers[name.title() if is_standard else f"x-amz-meta-{name}"] = value
        response = PromptResponse(status=206 if is_part else 200, headers=headers)
        if is_part:
            response.headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{meta['size']}"
        response.content_length = length
        return response

    async def _list(self, call: S3Call) -> web.StreamResponse:
        listing = ListingRequest.parse(call.address.bucket, call.address.query)
        store = self._open_bucket(call.address.bucket)
        if not listing.limit:
            entries: list[Listed] = []
        elif listing.delimiter:
            loop = asyncio.get_running_loop()
            entries = await loop.run_in_executor(self._listing_threads, _list_folder, store, listing)
        else:
            entries = await _list_keys(store, listing)
        return make_xml_response(listing.write(entries), call)

    async def _put(self, call: S3Call) -> web.StreamResponse:
        assert call.body is not None
        store, key = self._find_object(call)
        if key.endswith("/"):
            return await self._put_marker(call)
        attributes = self._make_attributes(select_kept_headers(call.headers))
        if "if-match" in call.headers:
            raise S3Error("NotImplemented", "This store does not support If-Match for writes")
        condition = call.headers.get("if-none-match")
        if condition is not None and condition.strip() != "*":
            raise S3Error("NotImplemented", "A write supports only * in If-None-Match")
        if condition:
            limit = min(CONDITIONAL_BYTES_MAX, self._bodies.share)
            if call.body.length > limit:
                raise S3Error("NotImplemented", f"If-None-Match needs an object of at most {limit} bytes")
            with self._reserve_memory(call, call.body.length):
                data = b"".join([piece async for piece in _read_body(call)])
                put_result = await obstore.put_async(
                    store, key, data, attributes=attributes, mode="create", use_multipart=False
                )
        else:
            put_result = await put_stream(store, key, _read_body(call), call.body.length, attributes)
        return web.Response(headers={"ETag": _quote_etag(put_result["e_tag"]), "x-amz-request-id": call.request_id})

    @contextmanager
    def _reserve_memory(self, call: S3Call, size: int) -> Iterator[None]:
        """Reserve memory for a body of `size` bytes while the context is active.

        Raises:
            S3Error: SlowDown if other bodies use the memory.
        """
        try:
            self._bodies.take(call.principal_name, size)
        except RetryLater as error:
            raise S3Error("SlowDown", error.message, {"Retry-After": "1"}) from None
        try:
            yield
        finally:
            self._bodies.release(call.principal_name, size)

    async def _put_marker(self, call: S3Call) -> web.StreamResponse:
        """Accept a key that ends with a slash, without storing an object.

        Some clients create such empty objects as folders, which clouds do not need.

        Raises:
            S3Error: NotImplemented if the request has content.
        """
        assert call.body is not None
        if call.body.length:
            raise S3Error("NotImplemented", "A key that ends with a slash cannot have content on this store")
        async for _ in call.body.iter_pieces():
            pass
        return web.Response(headers={"ETag": _MARKER_ETAG, "x-amz-request-id": call.request_id})

    async def _copy(self, call: S3Call) -> web.StreamResponse:
        if any(name.startswith("x-amz-copy-source-") for name in call.headers):
            raise S3Error("NotImplemented", "This store does not support conditions of copies")
        if call.headers.get("x-amz-metadata-directive", "COPY").upper() != "COPY":
            raise S3Error("NotImplemented", "A copy on this store keeps the metadata of its source")
        if "if-match" in call.headers or "if-none-match" in call.headers:
            raise S3Error("NotImplemented", "This store does not support conditions of copies")
        store, key = self._find_object(call)
        bucket, _, source_key = unquote(call.headers["x-amz-copy-source"]).removeprefix("/").partition("/")
        source = self._check_place(bucket, source_key)
        await obstore.copy_async(store, source.path, key, overwrite=True)
        meta = await obstore.head_async(store, key)
        modified_ns = int(meta["last_modified"].timestamp() * 1e9)
        return answer_copy("CopyObjectResult", _quote_etag(meta["e_tag"]), modified_ns, call)

    async def _delete(self, call: S3Call) -> web.StreamResponse:
        store, key = self._find_object(call)
        await _delete_object(store, key)
        return web.Response(status=204, headers={"x-amz-request-id": call.request_id})

    async def _delete_many(self, call: S3Call) -> web.StreamResponse:
        assert call.document is not None
        text = call.document.decode()
        is_quiet = "<Quiet>true</Quiet>" in text
        store = self._open_bucket(call.address.bucket)
        outcomes = []
        for key in parse_delete_body(text):
            try:
                await _delete_object(store, self._check_place(call.address.bucket, key).path)
            except (*FAILED, SeamarkError) as error:
                failure = error if isinstance(error, SeamarkError) else self._objects.explain(error, key)
                code = convert_error(failure).code
                parts = (("Key", key), ("Code", code), ("Message", failure.message))
                texts = "".join(build_xml_element(name, value) for name, value in parts)
                outcomes.append(f"<Error>{texts}</Error>")
            else:
                if not is_quiet:
                    outcomes.append(f"<Deleted><Key>{escape_xml(key)}</Key></Deleted>")
        return make_xml_response(make_document("DeleteResult", "".join(outcomes)), call)

    async def _create_upload(self, call: S3Call) -> web.StreamResponse:
        store, key = self._find_object(call)
        headers = select_kept_headers(call.headers)
        self._make_attributes(headers)
        upload_id = await self._uploads.create(store, key, headers)
        text = name_object(call) + build_xml_element("UploadId", upload_id)
        return make_xml_response(make_document("InitiateMultipartUploadResult", text), call)

    async def _put_part(self, call: S3Call) -> web.StreamResponse:
        number = read_part_number(call.address.query.get("partNumber"))
        store, key = self._find_object(call)
        upload_id = call.address.query["uploadId"]
        await self._uploads.check(store, key, upload_id)
        assert call.body is not None
        etag = await self._uploads.add_part(store, key, upload_id, number, _read_body(call), call.body.length)
        return web.Response(headers={"ETag": etag, "x-amz-request-id": call.request_id})

    async def _list_parts(self, call: S3Call) -> web.StreamResponse:
        store, key = self._find_object(call)
        parts = await self._uploads.list_parts(store, key, call.address.query["uploadId"])
        return answer_part_list(parts, call)

    async def _complete_upload(self, call: S3Call) -> web.StreamResponse:
        assert call.document is not None
        if "if-match" in call.headers or "if-none-match" in call.headers:
            raise S3Error("NotImplemented", "This store does not support conditions of multipart uploads")
        store, key = self._find_object(call)
        upload_id, parts = call.address.query["uploadId"], parse_complete_multipart_upload(call.document)
        headers, chosen_parts = await self._uploads.read_headers_and_choose_parts(store, key, upload_id, parts)
        pieces = self._uploads.read(store, chosen_parts)
        size = sum(part.size for part in chosen_parts)
        put_result = await put_stream(store, key, pieces, size, self._make_attributes(headers))
        await self._uploads.remove(store, key, upload_id)
        text = name_object(call) + build_xml_element("ETag", _quote_etag(put_result["e_tag"]))
        return make_xml_response(make_document("CompleteMultipartUploadResult", text), call)

    async def _abort_upload(self, call: S3Call) -> web.StreamResponse:
        store, key = self._find_object(call)
        upload_id = call.address.query["uploadId"]
        await self._uploads.check(store, key, upload_id)
        await self._uploads.remove(store, key, upload_id)
        return web.Response(status=204, headers={"x-amz-request-id": call.request_id})

    async def delete_abandoned(self, passed_time: PassedTime) -> None:
        """Delete the parts of uploads that have not changed for `gateway_uploads_s` of passed time.

        Raises:
            SeamarkError: The cloud does not answer, or refuses a request.
        """
        before_ms = passed_time.find_time_ago(int(self._abandoned_s * 1000))
        for bucket in self._buckets:
            try:
                await self._uploads.delete_abandoned(self._open_bucket(bucket), before_ms)
            except FAILED as error:
                raise self._objects.explain(error, f"s3://{bucket}") from error

    def _find_object(self, call: S3Call) -> tuple[RemoteStore, str]:
        """Return the store and the key of the object of a call.

        Raises:
            BadRequest: The name of the bucket or the key is invalid on the cloud.
        """
        key = call.address.key
        place = self._check_place(call.address.bucket, key)
        return self._open_bucket(call.address.bucket), place.path + ("/" if key.endswith("/") else "")

    def _check_place(self, bucket: str, key: str) -> Location:
        return self._backing.map_to_cloud(Location("s3", bucket, key))

    def _open_bucket(self, bucket: str) -> RemoteStore:
        store = self._stores.get(bucket)
        if store is None:
            self._check_place(bucket, "x")  # Any key: only the name of the bucket is checked.
            store = self._stores[bucket] = self._objects.open_bucket(self._backing.map_bucket(bucket))
        return store

    def _make_attributes(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the attributes with which the cloud stores an object, from the headers that a later read must return.

        Raises:
            S3Error: NotImplemented if a name of user metadata is invalid on Azure.
        """
        attributes = {}
        for name, value in headers.items():
            if not name.startswith("x-amz-meta-"):
                if name != "expires":  # The library obstore has no attribute for this header.
                    attributes[name.title()] = value
                continue
            key = name.removeprefix("x-amz-meta-")
            if self._objects.scheme == _AZURE and not _METADATA_NAME.fullmatch(key):
                raise S3Error("NotImplemented", f"Azure has no metadata with the name {key[:100]!r}: use letters and _")
            attributes[key] = value
        return attributes


async def _read_body(call: S3Call) -> AsyncIterator[bytes]:
    """Yield the verified data of a body. The last piece is yielded after all checksums are verified.

    Raises:
        S3Error: The body does not match a checksum or length in the headers.
    """
    body = call.body
    assert body is not None
    names = {name for name in call.headers if name.startswith("x-amz-checksum-")}
    names -= {"x-amz-checksum-algorithm", "x-amz-checksum-type"}
    trailer = call.headers.get("x-amz-trailer", "").lower()
    checksums = Checksums(names | ({trailer} if trailer else set()), md5="content-md5" in call.headers)
    withheld = b""
    async for piece in body.iter_pieces():
        checksums.update(piece)
        if withheld:
            yield withheld
        withheld = piece
    checksums.check(call.headers | body.trailers)
    if withheld:
        yield withheld


async def _list_keys(store: RemoteStore, listing: ListingRequest) -> list[Listed]:
    """Return the keys of a page of a listing. If there are more keys, return one more than the limit."""
    folder = listing.prefix.rpartition("/")[0]
    entries: list[Listed] = []
    async for page in obstore.list(store, f"{folder}/", offset=listing.start_after or None, chunk_size=1000):
        for meta in page:
            if meta["path"].startswith(listing.prefix) and encode_key(meta["path"]) > encode_key(listing.start_after):
                entries.append(_describe_object(meta))
                if len(entries) > listing.limit:
                    return entries
    return entries


def _list_folder(store: RemoteStore, listing: ListingRequest) -> list[Listed]:
    """Return the keys and common prefixes of a page of one folder. If there are more, return one more than the limit.

    A folder may have a million objects, so call this function in a thread. It reads the whole folder, because a flat
    listing from `listing.start_after` would also read the subfolders, and some accounts of Azure do not list keys in
    the order of their bytes.
    """
    folder = listing.prefix.rpartition("/")[0]
    result = obstore.list_with_delimiter(store, f"{folder}/")
    encoded_start = encode_key(listing.start_after)

    def find_entries() -> Iterator[tuple[bytes, Listed | obstore.ObjectMeta]]:
        for prefix in result["common_prefixes"]:
            key = f"{prefix.rstrip('/')}/"
            if (
                key.startswith(listing.prefix)
                and not listing.start_after.startswith(key)
                and encode_key(key) > encoded_start
            ):
                yield encode_key(key), Listed(key)
        for meta in result["objects"]:
            if meta["path"].startswith(listing.prefix) and encode_key(meta["path"]) > encoded_start:
                yield encode_key(meta["path"]), meta

    next_entries = heapq.nsmallest(listing.limit + 1, find_entries(), key=lambda entry: entry[0])
    return [entry if isinstance(entry, Listed) else _describe_object(entry) for _, entry in next_entries]


def _describe_object(meta: obstore.ObjectMeta) -> Listed:
    modified_ns = int(meta["last_modified"].timestamp() * 1e9)
    return Listed(meta["path"], meta["size"], modified_ns, _quote_etag(meta["e_tag"]))


async def _delete_object(store: RemoteStore, key: str) -> None:
    """Delete an object. If the object is missing, do nothing."""
    if key.endswith("/"):
        return  # The backend stores no object with such a key. The store would remove the slash, and delete another.
    try:
        await obstore.delete_async(store, key)
    except (FileNotFoundError, exceptions.NotFoundError):
        return


def _quote_etag(etag: str | None) -> str:
    text = (etag or "none").strip('"')
    return f'"{text}"'


def _make_no_key_error() -> S3Error:
    return S3Error("NoSuchKey", "The specified key does not exist")
