"""The memory of decoded values, for caches whose entries CPython allocates object by object.

`measure_object_bytes` adds up the sizes of an object and of all objects that it references. `sys.getsizeof` returns the
size that the allocator provided. An object that occurs several times counts once. Of a long sequence, only a sample is
measured, because a manifest list can have 100,000 entries of the same shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

_SAMPLED_ITEMS = 8
_SHARED = (type, Enum, FunctionType, MethodType, ModuleType)
"""The types of objects that other code keeps in memory anyway."""
_SMALL_INTS = range(-5, 257)
"""The integers for which CPython has a single object each."""
_FLAT = frozenset((str, bytes, int, float, bytearray))


def measure_object_bytes(value: object) -> int:
    """Return the memory of a value and of all objects that it references.

    If the elements of long sequences have similar sizes, the error is a few percent.
    """
    return _measure_value(value, set())


def _measure_value(value: Any, counted_ids: set[int]) -> int:
    """Return the memory of a value and of all objects that it references, except objects in `counted_ids`.

    Objects that exist once in each process, such as None and small integers, have the size 0. A view of an array counts
    the whole memory of its owner, because the view keeps it alive.
    """
    kind, identity = type(value), id(value)
    if value is None or kind is bool or identity in counted_ids or (kind is int and value in _SMALL_INTS):
        return 0
    counted_ids.add(identity)
    if kind in _FLAT:
        return sys.getsizeof(value)
    if isinstance(value, _SHARED):
        return 0
    size = sys.getsizeof(value)
    if isinstance(value, np.ndarray | memoryview):
        return size + _measure_owner(value.obj if isinstance(value, memoryview) else value.base, counted_ids)
    for name in _list_attributes(kind):  # type: ignore[arg-type]  # mypy: a class is not Hashable
        size += _measure_value(getattr(value, name, None), counted_ids)
    if isinstance(value, Mapping):
        return size + _estimate_size_of_many(
            list(value.items()),
            lambda pair: _measure_value(pair[0], counted_ids) + _measure_value(pair[1], counted_ids),
        )
    if isinstance(value, Sequence):
        return size + _estimate_size_of_many(value, lambda part: _measure_value(part, counted_ids))
    if isinstance(value, AbstractSet):
        return size + _estimate_size_of_many(list(value), lambda part: _measure_value(part, counted_ids))
    return size


def _measure_owner(owner: Any, counted_ids: set[int]) -> int:
    """Return the size of the whole object to which a view refers.

    The owner is another view, an object, or memory of the kernel or of a library.
    """
    if owner is None or isinstance(owner, np.ndarray | memoryview | bytes | bytearray):
        return _measure_value(owner, counted_ids)
    if id(owner) in counted_ids:
        return 0
    counted_ids.add(id(owner))
    return memoryview(owner).nbytes


@lru_cache(maxsize=1024)  # The cache has one entry for each class.
def _list_attributes(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes of a struct, or of a class with slots or a dict."""
    fields = getattr(kind, "__struct_fields__", None)
    if fields is not None:
        return tuple(fields)
    slots = [name for base in kind.__mro__ for name in _list_slots(base)]
    return (*slots, "__dict__") if hasattr(kind, "__dict__") and kind.__dictoffset__ else tuple(slots)


def _list_slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _estimate_size_of_many(values: Sequence[Any], estimate_size: Callable[[Any], int]) -> int:
    if len(values) <= 2 * _SAMPLED_ITEMS:
        return sum(map(estimate_size, values))
    # The size of the first element includes the objects that all elements share.
    first_bytes, step = estimate_size(values[0]), len(values) / _SAMPLED_ITEMS
    sampled_bytes = sum(estimate_size(values[int(number * step)]) for number in range(1, _SAMPLED_ITEMS))
    return first_bytes + sampled_bytes * (len(values) - 1) // (_SAMPLED_ITEMS - 1)
