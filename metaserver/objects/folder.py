"""Stores the objects of `s3://` locations in a local folder: each bucket is a folder in it, and a key is a path.

So one machine can be a small object store. Engines read and write `s3://` tables through the objects gateway
(`metaserver/gateway/`), and the server uses the files directly. Unlike S3, a folder cannot contain both
the key `a` and the key `a/b`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.locations import Location, parse_location
from seamark.metaserver.objects.forwarding import ForwardingObjects
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore, Upload, yield_no_uploads

UPLOADS = ".seamark-uploads"
"""The folder of incomplete objects, beside the folders of the buckets. A bucket cannot have this name."""


def map_to_file_location(location: str, folder: str, parse: Callable[[str], Location] = parse_location) -> str:
    """Return the `file://` location of the object or bucket at an `s3://` location.

    Raises:
        BadRequest: The location has another scheme.
    """
    parsed_location = parse(location)
    if parsed_location.scheme != "s3":
        raise BadRequest(f"{location!r} is not on S3")
    return f"file://{folder}/{parsed_location.bucket}/{parsed_location.path}".rstrip("/")


class FolderObjects(ForwardingObjects):
    """An ObjectStore for `s3://` locations.

    The objects are files of the store `local`, below the absolute path `folder`.
    """

    def __init__(self, local: ObjectStore, folder: str) -> None:
        super().__init__(local)
        self._folder = folder.rstrip("/")

    def _map_location(self, location: str) -> str:
        return map_to_file_location(location, self._folder)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        folder_prefix = f"file://{self._folder}/"
        async for info in self._stored_objects.list(self._map_location(prefix)):
            yield ObjectInfo(f"s3://{info.location.removeprefix(folder_prefix)}", info.size_bytes, info.modified_ms)

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        # The objects gateway deletes unfinished uploads.
        return yield_no_uploads()

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return 0
