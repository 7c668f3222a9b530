"""Divides items, such as files, into groups within limits of size and number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import add, gt
from typing import TypeVar

T = TypeVar("T")


def divide(items: Iterable[T], weigh: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Divide successive items into groups.

    For each limit, the weights of the items of a group add up to at most the limit. An item above a limit is a
    separate group.
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
