"""The entries of each holder of a cache, such as a tenant, in the order of their last use, and their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Holders(Generic[K]):
    """The keys of the entries of each holder, such as a tenant. A holder without entries uses no memory."""

    def __init__(self) -> None:
        self._keys: dict[str, OrderedDict[K, None]] = {}
        self._bytes: dict[str, int] = {}

    def add(self, holder: str, key: K, charged_bytes: int) -> None:
        self._keys.setdefault(holder, OrderedDict())[key] = None
        self._bytes[holder] = self._bytes.get(holder, 0) + charged_bytes

    def remove(self, holder: str, key: K, charged_bytes: int) -> None:
        keys = self._keys[holder]
        del keys[key]
        self._bytes[holder] -= charged_bytes
        if not keys:
            del self._keys[holder], self._bytes[holder]

    def use(self, holder: str, key: K) -> None:
        """Make a key the most recently used key of its holder."""
        self._keys[holder].move_to_end(key)

    def get_used_bytes(self, holder: str) -> int:
        return self._bytes.get(holder, 0)

    def iter_oldest(self, holder: str) -> Iterator[K]:
        """Return the keys of a holder, least recently used first."""
        return iter(self._keys.get(holder, ()))

    def check_invariants(self, bytes_by_entry: dict[tuple[str, K], int], limit_bytes: int) -> None:
        """Check that the entries are exactly those of `bytes_by_entry`, and that each holder is within the limit.

        Only tests call this.

        Raises:
            AssertionError: The entries differ, or a holder exceeds the limit.
        """
        assert {(holder, key) for holder, keys in self._keys.items() for key in keys} == set(bytes_by_entry)
        sums: dict[str, int] = {}
        for (holder, _), size in bytes_by_entry.items():
            sums[holder] = sums.get(holder, 0) + size
        assert self._bytes == sums
        assert all(size <= limit_bytes for size in sums.values())
