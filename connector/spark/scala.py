"""Values of Scala over py4j."""

from __future__ import annotations

from typing import Any


def items(given: Any) -> list[Any]:
    """The items of a Scala Seq."""
    return [given.apply(at) for at in range(given.size())]


def strings(given: Any) -> list[str]:
    """The items of a Scala Seq as texts, in two calls to the JVM for any number of them."""
    count = given.size()
    found = str(given.mkString("\0")).split("\0") if count else []
    return found if len(found) == count else [str(one) for one in items(given)]  # a name can have a zero byte
