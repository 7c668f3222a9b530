"""What is computed from a block or from a view and kept with it, so that it is counted, and freed, with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_charging = threading.Lock()


class Kept(Protocol):
    @property
    def size_bytes(self) -> int: ...


K = TypeVar("K", bound=Kept)


class Derived:
    """One value of each type. Threads that compute a value at the same time get the value that was stored first."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[type[Any], Any] = {}

    def get(self, kind: type[K]) -> K | None:
        found: K | None = self._values.get(kind)
        return found

    def keep(self, value: K) -> K:
        """The stored value, which may be another thread's."""
        kept: K = self._values.setdefault(type(value), value)
        return kept

    @property
    def size_bytes(self) -> int:
        """Now: values may grow."""
        return sum([value.size_bytes for value in list(self._values.values())])


class BlockMemory:
    """The memory of a block with what is derived from it. It outlives the block, so that the caller that has counted it
    can subtract the same."""

    __slots__ = ("_head_bytes", "_is_mapped", "_used_bytes", "on_growth", "size_bytes", "verified")

    def __init__(self, size_bytes: int, head_bytes: int) -> None:
        """`size_bytes`: of all of it. `head_bytes`: of its first part, which is always used."""
        self.size_bytes = size_bytes
        self._head_bytes = head_bytes
        self._used_bytes = 0
        self._is_mapped = False
        self.on_growth: Callable[[int], None] | None = None
        """Called with the bytes, which may be negative, from any thread."""
        self.verified: set[int] = set()
        """Offsets of the columns whose checksums were compared."""

    def add(self, size_bytes: int) -> None:
        with _charging:
            self.size_bytes += size_bytes
        if self.on_growth is not None:
            self.on_growth(size_bytes)

    def use(self, start: int, size_bytes: int) -> None:
        """Records that the column at offset `start` is verified and used. Only then a mapped file takes its memory."""
        with _charging:
            if start in self.verified:
                return
            self.verified.add(start)
            self._used_bytes += size_bytes
            is_mapped = self._is_mapped
        if is_mapped:
            self.add(size_bytes)

    def count_mapped(self, whole_bytes: int) -> None:
        """From now on the memory, of `whole_bytes`, is a mapped file: only what is used counts."""
        with _charging:
            if self._is_mapped:
                return
            self._is_mapped = True
            unused_bytes = whole_bytes - self._head_bytes - self._used_bytes
        self.add(-unused_bytes)
