"""Search for repeated values in lists that a client sends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def find_repeated(values: Iterable[T]) -> T | None:
    """Return the first value that occurs again, or None if the values are distinct.

    The time is proportional to the number of values. A call of `count` for each value takes minutes for long lists.
    """
    seen_values: set[T] = set()
    for value in values:
        if value in seen_values:
            return value
        seen_values.add(value)
    return None
