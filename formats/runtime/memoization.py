"""Decorators that cache the results of functions of short texts, and the values of properties.

`functools.lru_cache` counts entries, not bytes: if clients sent names of a megabyte, its keys would fill the memory of
the server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import Parameter, signature
from typing import Any, Generic, TypeVar

CHARACTERS_MAX = 300
"""The maximum number of characters of all texts of a call. The result of a longer call is not cached."""
_R = TypeVar("_R")


def memoize(entries: int) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Return a decorator that caches the results of the last `entries` calls.

    The arguments of the function must be texts, passed by position. A call with more than CHARACTERS_MAX characters is
    not cached, which bounds the memory of the cache.
    """

    def decorate(function: Callable[..., _R]) -> Callable[..., _R]:
        cached_function = lru_cache(entries)(function)

        # Use special functions for one and two texts. A plan makes about twenty of these calls, and adding up the
        # lengths of any number of texts would cost more than the lookup.
        def call_with_one(text: Any) -> _R:
            return cached_function(text) if len(text) <= CHARACTERS_MAX else function(text)

        def call_with_two(first: Any, second: Any) -> _R:
            return (
                cached_function(first, second)
                if len(first) + len(second) <= CHARACTERS_MAX
                else function(first, second)
            )

        def call_with_any(*texts: Any) -> _R:
            return cached_function(*texts) if sum(map(len, texts)) <= CHARACTERS_MAX else function(*texts)

        parameters = signature(function).parameters.values()
        has_no_defaults = all(parameter.default is Parameter.empty for parameter in parameters)
        calls_by_count: dict[int, Callable[..., _R]] = {1: call_with_one, 2: call_with_two}
        call = calls_by_count.get(len(parameters), call_with_any) if has_no_defaults else call_with_any
        return wraps(function)(call)

    return decorate


class computed_once(Generic[_R]):  # noqa: N801  a decorator
    """A property that is computed once, like `functools.cached_property`, but without a lock.

    In Python 3.11, `cached_property` takes a lock when it computes a value. Without the lock, two threads may both
    compute the value. Later reads find it in the `__dict__` of the object, and do not call this class.
    """

    def __init__(self, function: Callable[[Any], _R]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> _R:
        value: _R
        value = instance.__dict__[self._name] = self._function(instance)
        return value
