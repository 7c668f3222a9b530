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
    """One value of each type. Threads that compute a value at the same time get the one that was stored first."""

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
        return sum(value.size_bytes for value in list(self._values.values()))


class BlockMemory:
    """The memory of a block with what is derived from it. It outlives the block, so that whoever has counted it can
    subtract the same."""

    __slots__ = ("on_growth", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.on_growth: Callable[[int], None] | None = None
        """Called with the bytes, from any thread."""

    def add(self, size_bytes: int) -> None:
        with _charging:
            self.size_bytes += size_bytes
        if self.on_growth is not None:
            self.on_growth(size_bytes)
