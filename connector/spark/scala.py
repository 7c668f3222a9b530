"""Values of Scala over py4j."""

from __future__ import annotations

from typing import Any


def items(given: Any) -> list[Any]:
    """The items of a Scala Seq."""
    return [given.apply(at) for at in range(given.size())]
