"""Divides items, such as files, into groups with a limited size and number of items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import add, gt
from typing import TypeVar

T = TypeVar("T")


def divide(items: Iterable[T], weigh: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Divide successive items into groups.

    For each limit, the sum of the weights of a group's items is at most the limit. An item above a limit is its own
    group.
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
