"""Divides items, such as files, into groups within limits of size and number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import add, gt
from typing import TypeVar

T = TypeVar("T")


def divide(items: Iterable[T], weigh: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Groups of successive items.

    The weights of a group add up to at most each of the limits; an item above a limit has its own group.
    """
    group: list[T] = []
    total = (0,) * len(limits)
    for item in items:
        weights = weigh(item)
        grown = tuple(map(add, total, weights))
        if group and any(map(gt, grown, limits)):
            yield group
            group, grown = [], weights
        group.append(item)
        total = grown
    if group:
        yield group
