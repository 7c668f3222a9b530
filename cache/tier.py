"""The contract of a cache tier for bytes. `tests/cache/contract.py` checks all tiers.

The rules: a key is immutable, which means that its value never changes, so that nothing has to be invalidated. A tier
can remove anything at any time. A tier that fails counts as a miss. No method raises an error because of a disk, a
network or a damaged entry: `get` returns None, `put` returns False, and the stats contain the number of errors and the
last reason.

`Stack` queries the tiers in order of cost: memory, then disk. A peer tier (blocks of the worker that owns a key by
rendezvous hashing, over HTTP) would be between disk and fetch, with this contract. The objects gateway's cache has its
own order of tiers (`metaserver/gateway/caching/`), because it answers parts of blocks while they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from seamark.cache.region import Region

Bytes: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Bytes | Sequence[Bytes]
"""One buffer, or several buffers that are concatenated. They are C-contiguous and can have any item size."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since this process opened the tier.

    `entries` and `used_bytes` are the values after the last write of this process.

    Attributes:
        refused: The number of values that can never fit.
        damaged: The number of damaged entries, which are removed. These entries also count as misses.
        errors: The number of failed operations.
        last_error: The reason of the last failure, or an empty text.
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
    """A cache tier. Its methods block, and several threads can call them concurrently."""

    def get(self, key: str) -> memoryview | None:
        """Return the payload as a read-only, flat view of format "B", or None if the tier does not have the key.

        The payload stays valid while the view, or a view of it, exists.
        """

    def may_have(self, key: str) -> bool:
        """Return False if `get` would certainly return None.

        The check is cheap and does not count as a use. True does not prove that there is a value.
        """

    def is_mapped(self, payload: memoryview) -> bool:
        """Return whether a payload from `get` is a mapped file.

        The pages of a mapped file belong to the kernel's page cache, and do not count as memory of this process.
        """

    def put(self, key: str, payload: Payload) -> bool:
        """Store a value, and return whether it is stored now.

        Raises:
            TypeError: The payload contains an object that is not a contiguous buffer.
        """

    def map_over(self, key: str, region: Region) -> bool:
        """Replace the memory of `region` by the mapped file of a stored value.

        Args:
            key: The key of the value.
            region: Private memory that has the same bytes as the stored value.

        Returns:
            Whether the memory is now the mapped file.
        """

    def discard(self, key: str) -> None:
        """Remove the key, if the tier has it."""

    def read_stats(self) -> TierStats: ...

    def close(self) -> None:
        """Release the resources. Payloads that were returned stay valid.

        Afterwards, every get is a miss. The method can be called several times.
        """

    def check_invariants(self) -> None:
        """Check that the counts match. Only tests call this, while nothing else uses the tier.

        Raises:
            AssertionError: The counts do not match.
        """


def split_payload(payload: Payload) -> list[memoryview]:
    """Return the buffers of a payload as flat views of bytes.

    Raises:
        TypeError: The payload contains an object that is not a contiguous buffer.
    """
    parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    return [memoryview(part).cast("B") for part in parts]
