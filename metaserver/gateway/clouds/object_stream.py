"""Sends an object to a cloud in chunks, so that only a few of them are in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import obstore
from obstore.store import ObjectStore as RemoteStore

PUT_BYTES_MAX = 8 << 20
"""The size up to which an object is sent with one request. A larger object is sent in chunks of this size."""
_CONCURRENT_CHUNKS = 2


async def put_stream(
    store: RemoteStore, key: str, pieces: AsyncIterator[bytes], length: int, attributes: dict[str, str]
) -> obstore.PutResult:
    """Store an object of `length` bytes, and replace an earlier object.

    If `pieces` raises an error, no object is stored, and the error is raised.
    """
    if length <= PUT_BYTES_MAX:
        data = b"".join([piece async for piece in pieces])
        return await obstore.put_async(store, key, data, attributes=attributes, use_multipart=False)
    # obstore wraps errors of its input, so the original error is kept here.
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
            max_concurrency=_CONCURRENT_CHUNKS,
        )
    except Exception:
        if failure:
            raise failure[0] from None
        raise
