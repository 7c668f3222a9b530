"""Writes and reads objects of a cloud in chunks.

Only a few chunks are in memory, and each request ends within its timeout, even if the client is slow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import obstore
from obstore.store import ObjectStore as RemoteStore

from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.clouds.cloud_objects import FAILED, is_range_behind_end

if TYPE_CHECKING:
    from obstore import GetOptions

PUT_BYTES_MAX = 8 << 20
"""The maximum size of an object that is written with one request. Larger objects are written in chunks of this size."""
READ_BYTES = 4 << 20
"""The maximum number of bytes that one request reads."""
_CONCURRENT_CHUNKS_MAX = 2


async def put_stream(
    store: RemoteStore, key: str, pieces: AsyncIterator[bytes], length: int, attributes: dict[str, str]
) -> obstore.PutResult:
    """Store an object of `length` bytes. It replaces an existing object.

    If `pieces` raises an error, the function stores no object, and raises the error.
    """
    if length <= PUT_BYTES_MAX:
        data = b"".join([piece async for piece in pieces])
        return await obstore.put_async(store, key, data, attributes=attributes, use_multipart=False)
    # Keep the original error of `pieces`, because obstore wraps it.
    failure: list[Exception] = []

    async def keep_failure() -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        except Exception as error:
            failure.append(error)
            raise

    try:
        return await obstore.put_async(
            store,
            key,
            keep_failure(),
            attributes=attributes,
            chunk_size=PUT_BYTES_MAX,
            max_concurrency=_CONCURRENT_CHUNKS_MAX,
        )
    except Exception:
        if failure:
            raise failure[0] from None
        raise


async def read_first(store: RemoteStore, key: str, start: int, end: int | None) -> tuple[obstore.GetResult, bytes]:
    """Return the description of an object, and at most `READ_BYTES` from `start`.

    Args:
        end: The end of the bytes that the client needs, or None for the end of the object.

    Raises:
        S3Error: InvalidRange if `end` is not None, and the object ends before `start`.
    """
    try:
        stop = start + READ_BYTES if end is None else min(end, start + READ_BYTES)
        result = await obstore.get_async(store, key, options={"range": (start, stop)})
    except FAILED as error:
        if not is_range_behind_end(error):
            raise
        if end is not None:
            raise S3Error("InvalidRange", "The requested range is not satisfiable") from None
        result = await obstore.get_async(store, key)  # The object is empty.
    return result, bytes(await result.bytes_async())


async def read_stream(store: RemoteStore, key: str, start: int, end: int, etag: str | None) -> AsyncIterator[bytes]:
    """Yield the bytes of an object from `start` to `end`.

    Args:
        etag: The ETag that the object must have, or None for any ETag.

    Raises:
        EOFError: The object has fewer bytes.
    """
    while start < end:
        stop = min(end, start + READ_BYTES)
        options: GetOptions = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = etag
        result = await obstore.get_async(store, key, options=options)
        data = bytes(await result.bytes_async())
        if len(data) != stop - start:
            raise EOFError(f"The object has no bytes {start + len(data)} to {stop}")
        yield data
        start = stop
