"""Results of pure functions of short texts.

`functools.lru_cache` counts entries, not bytes: clients that send names of a megabyte would fill the memory of the
server with its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

CHARACTERS_MAX = 300
"""Of all texts of a call together. Longer calls are computed each time."""
_R = TypeVar("_R")


def memoized(entries: int) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Keeps the results of the last `entries` calls. The arguments are texts, given by position."""

    def decorate(function: Callable[..., _R]) -> Callable[..., _R]:
        kept = lru_cache(entries)(function)

        @wraps(function)
        def call(*texts: Any) -> _R:
            return kept(*texts) if sum(map(len, texts)) <= CHARACTERS_MAX else function(*texts)

        return call

    return decorate
