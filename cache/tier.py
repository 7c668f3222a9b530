"""The contract of a cache tier that keeps bytes. `tests/cache/contract.py` holds every tier to it.

The rules: a key is immutable, so a value once put under it never changes and nothing is ever invalidated; a tier may
forget anything at any time; and a tier that fails is a tier that misses. So no method raises because of a disk, a
network or a damaged entry: `get` answers None, `put` False, and the stats say how often and why last.

The tiers of `Stack` are asked in order of cost: memory, then disk. A peer tier (blocks of the worker that owns a key by
rendezvous hashing, over HTTP) comes between disk and fetch, behind this same contract; an objects gateway is not a
tier: it is what a `fetch` reads from, so that several servers share one read of the object storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Bytes | Sequence[Bytes]
"""One buffer, or several that are one after the other; C-contiguous, of any item size."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since this process opened the tier. `entries` and `used_bytes` are as of its last write.

    `refused`: values that could never fit. `damaged`: entries found broken, and removed; each is a miss too.
    `errors`: operations given up because the tier could not do its work; `last_error` says why, "" when there was none.
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
    """Methods block and may be called from any thread, several at a time."""

    def get(self, key: str) -> memoryview | None:
        """The payload: read-only, flat, of format "B". It stays valid while it or a view of it lives, come what may."""

    def is_mapped(self, payload: memoryview) -> bool:
        """Whether a payload that `get` gave is a mapped file: its pages are the kernel's, which takes them back when
        it needs them, and not this process' own."""

    def put(self, key: str, payload: Payload) -> bool:
        """Whether it is kept now. TypeError for a payload that is not made of contiguous buffers."""

    def discard(self, key: str) -> None:
        """Forgets the key; that it was not held is no error."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Frees what it holds; payloads handed out stay valid. Afterwards everything misses. Twice is once."""

    def check_invariants(self) -> None:
        """AssertionError when the account does not add up. For tests; call it while nothing else uses the tier."""


def parts_of(payload: Payload) -> list[memoryview]:
    """The buffers of a payload as flat views of bytes. TypeError for what is no contiguous buffer."""
    parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    return [memoryview(part).cast("B") for part in parts]
