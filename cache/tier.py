"""The contract of a cache tier for bytes. `tests/cache/contract.py` checks every tier.

The rules: a key is immutable, so that its value never changes and nothing is invalidated; a tier may remove anything at
any time; a tier that fails counts as a miss. No method raises because of a disk, a network or a damaged entry: `get`
returns None, `put` False, and the stats contain the number and the last reason.

`Stack` queries the tiers in order of cost: memory, then disk. A peer tier (blocks of the worker that owns a key by
rendezvous hashing, over HTTP) would be between disk and fetch, with this contract. The objects gateway's cache has its
own order of tiers (`metaserver/gateway/caching/`): it answers parts of blocks while they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from seamark.cache.region import Region

Bytes: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Bytes | Sequence[Bytes]
"""One buffer, or several that are concatenated; C-contiguous, of any item size."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since this process opened the tier.

    `entries` and `used_bytes` are those after its last write.

    Attributes:
        refused: Values that can never fit.
        damaged: Broken entries, which are removed and count as misses, too.
        errors: Failed operations; `last_error` is the reason of the last, "" without any.
    """

    hits: int
    misses: int
    puts: int
    refused: int
    evictions: int
    damaged: int
    errors: int
    last_error: str
    entries: int
    used_bytes: int
    budget_bytes: int


class Tier(Protocol):
    """Methods block and may be called from any thread, also concurrently."""

    def get(self, key: str) -> memoryview | None:
        """Return the payload: read-only, flat, of format "B".

        It stays valid while it or a view of it exists.
        """

    def may_have(self, key: str) -> bool:
        """False if `get` would find nothing: cheap, not counted as a use, and True is no proof of a value."""

    def is_mapped(self, payload: memoryview) -> bool:
        """Return whether a payload from `get` is a mapped file: its pages belong to the kernel's page cache and do
        not count as memory of this process.
        """

    def put(self, key: str, payload: Payload) -> bool:
        """Return whether the value is stored now.

        Raises:
            TypeError: For a payload without contiguous buffers.
        """

    def map_over(self, key: str, region: Region) -> bool:
        """Return whether the memory of `region`, which has the payload of `key`, is now the stored value's mapped
        file.
        """

    def discard(self, key: str) -> None:
        """Remove the key; no error when it is absent."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Release resources; returned payloads stay valid.

        Afterwards every get is a miss. Idempotent.
        """

    def check_invariants(self) -> None:
        """AssertionError when the counts do not add up.

        For tests; call it while nothing else uses the tier.
        """


def parts_of(payload: Payload) -> list[memoryview]:
    """Return the buffers of a payload as flat views of bytes.

    Raises:
        TypeError: For an object without a contiguous buffer.
    """
    parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    return [memoryview(part).cast("B") for part in parts]
