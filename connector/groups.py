"""Divides items, such as files, into groups with a limited size and number of items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import add, gt
from typing import TypeVar

T = TypeVar("T")


def divide(items: Iterable[T], weigh: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Divide consecutive items into groups whose total weights do not exceed the limits.

    A single item that exceeds a limit is a separate group.

    Args:
        items: The items.
        weigh: A function that returns the weights of an item, one for each limit.
        limits: The maximum total weights of a group.
    """
    group: list[T] = []
    total = (0,) * len(limits)
    for item in items:
        weights = weigh(item)
        new_total = tuple(map(add, total, weights))
        if group and any(map(gt, new_total, limits)):
            yield group
            group, new_total = [], weights
        group.append(item)
        total = new_total
    if group:
        yield group
