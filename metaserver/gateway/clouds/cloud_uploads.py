"""Multipart uploads on a cloud whose own uploads differ from those of S3. Each part is an object until the end.

The parts of an upload are in a folder at the root of the bucket, outside of all tables. All servers share them, so a
server that stops loses no part. The name of the folder contains a hash of the object's key, so an upload id cannot be
used for a different key. The name of a part contains its ETag, which is random.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
import obstore
from obstore import exceptions
from obstore.store import ObjectStore as RemoteStore

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.gateway.clouds.object_stream import put_stream, read_stream
from seamark.metaserver.gateway.folder_uploads import Part, choose_parts
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.clouds.backed import UPLOADS

_UPLOAD_ID = re.compile("[0-9a-f]{32}")
_PART_NAME = re.compile("([0-9]{5})-([0-9a-f]{32})")
_HEADERS_NAME = "headers"
"""The name of the object that contains the headers of an upload, and marks its existence."""
_DIGEST_CHARACTERS = 32


class CloudUploads:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def create(self, store: RemoteStore, key: str, headers: Mapping[str, str]) -> str:
        """Create an upload, and return its id. `headers` are the headers that reads of the object return."""
        upload_id = self._clock.draw_bytes(16).hex()
        document = msgspec.json.encode(dict(headers))
        await obstore.put_async(
            store, f"{_get_upload_folder(key, upload_id)}/{_HEADERS_NAME}", document, use_multipart=False
        )
        return upload_id

    async def check(self, store: RemoteStore, key: str, upload_id: str) -> None:
        """Check that the upload exists.

        Raises:
            S3Error: NoSuchUpload if it does not exist.
        """
        try:
            await obstore.head_async(store, f"{_get_upload_folder(key, upload_id)}/{_HEADERS_NAME}")
        except (FileNotFoundError, exceptions.NotFoundError):
            raise _make_missing_error() from None

    async def add_part(
        self, store: RemoteStore, key: str, upload_id: str, number: int, pieces: AsyncIterator[bytes], length: int
    ) -> str:
        """Store a part of `length` bytes, and return its ETag."""
        etag = self._clock.draw_bytes(16).hex()
        await put_stream(store, f"{_get_upload_folder(key, upload_id)}/{number:05d}-{etag}", pieces, length, {})
        return f'"{etag}"'

    async def list_parts(self, store: RemoteStore, key: str, upload_id: str) -> list[Part]:
        """Return the newest part with each part number, in the order of the numbers.

        Raises:
            S3Error: NoSuchUpload if the upload does not exist.
        """
        newest: dict[int, Part] = {}
        for part in await self._list_parts(store, key, upload_id):
            earlier_part = newest.get(part.number)
            if earlier_part is None or earlier_part.modified_ns <= part.modified_ns:
                newest[part.number] = part
        return sorted(newest.values(), key=lambda part: part.number)

    async def read_headers_and_choose_parts(
        self, store: RemoteStore, key: str, upload_id: str, part_etags: Sequence[tuple[int, str]]
    ) -> tuple[dict[str, str], list[Part]]:
        """Return the headers of the object, and the parts that the client has listed.

        Raises:
            S3Error: The upload or one of its parts does not exist, or the order of the parts is wrong.
        """
        stored_parts = {
            (part.number, part.etag.strip('"')): part for part in await self._list_parts(store, key, upload_id)
        }
        listed_parts = {
            number: stored_parts[number, etag] for number, etag in part_etags if (number, etag) in stored_parts
        }
        parts = choose_parts(list(part_etags), listed_parts)
        headers = await obstore.get_async(store, f"{_get_upload_folder(key, upload_id)}/{_HEADERS_NAME}")
        return convert_json(bytes(await headers.bytes_async()), dict[str, str]), parts

    async def read(self, store: RemoteStore, parts: Sequence[Part]) -> AsyncIterator[bytes]:
        """Yield the bytes of the parts, one part after the other."""
        for part in parts:
            async for piece in read_stream(store, part.name, 0, part.size, None):
                yield piece

    async def remove(self, store: RemoteStore, key: str, upload_id: str) -> None:
        """Delete the parts of an upload, and finally the object that marks its existence."""
        folder = _get_upload_folder(key, upload_id)
        names = [meta["path"] async for page in obstore.list(store, f"{folder}/") for meta in page]
        for name in sorted(names, key=lambda name: name.endswith(f"/{_HEADERS_NAME}")):
            await _delete_if_stored(store, name)

    async def delete_abandoned(self, store: RemoteStore, before_ms: int) -> None:
        """Delete the uploads to which nothing was written since `before_ms`."""
        newest_ms_by_folder: dict[str, int] = {}
        names_by_folder: dict[str, list[str]] = {}
        async for page in obstore.list(store, f"{UPLOADS}/", chunk_size=1000):
            for meta in page:
                folder = meta["path"].rpartition("/")[0]
                modified_ms = int(meta["last_modified"].timestamp() * 1000)
                newest_ms_by_folder[folder] = max(modified_ms, newest_ms_by_folder.get(folder, 0))
                names_by_folder.setdefault(folder, []).append(meta["path"])
        for folder, modified_ms in newest_ms_by_folder.items():
            if modified_ms < before_ms:
                for name in names_by_folder[folder]:
                    await _delete_if_stored(store, name)

    async def _list_parts(self, store: RemoteStore, key: str, upload_id: str) -> list[Part]:
        await self.check(store, key, upload_id)
        parts = []
        async for page in obstore.list(store, f"{_get_upload_folder(key, upload_id)}/", chunk_size=1000):
            for meta in page:
                match = _PART_NAME.fullmatch(meta["path"].rpartition("/")[2])
                if match is not None:
                    modified_ns = int(meta["last_modified"].timestamp() * 1e9)
                    parts.append(Part(int(match[1]), meta["path"], meta["size"], modified_ns, f'"{match[2]}"'))
        return parts


def _get_upload_folder(key: str, upload_id: str) -> str:
    """Return the folder of the parts of an upload.

    Raises:
        S3Error: NoSuchUpload if the id is malformed.
    """
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise _make_missing_error()
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{UPLOADS}/{digest}-{upload_id}"


async def _delete_if_stored(store: RemoteStore, name: str) -> None:
    try:
        await obstore.delete_async(store, name)
    except (FileNotFoundError, exceptions.NotFoundError):
        return


def _make_missing_error() -> S3Error:
    return S3Error("NoSuchUpload", "The specified multipart upload does not exist")
