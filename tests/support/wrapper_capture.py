"""Wrap an object that the code under test opens, and keep the wrapper for the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WrapperCapture(Generic[T]):
    """A function that wraps objects, and keeps the last wrapper as `wrapper`."""

    wrapper: T

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __call__(self, inner: Any) -> T:
        self.wrapper = self._make(inner)
        return self.wrapper
