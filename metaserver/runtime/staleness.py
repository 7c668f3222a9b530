"""The staleness that a request allows: answers from earlier reads while the database or the storage does not answer.

A client sends `Cache-Control: stale-if-error=<seconds>` (RFC 5861, 4; `max-stale` of RFC 9111, 5.2.1.2 is also
accepted). The middleware puts a `Staleness` into the context of a request that reads. Before code answers from an
earlier read, it checks this object, and records the age there. The age becomes the answer's header `Age` (RFC 9111,
5.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DIRECTIVE = re.compile(r"(?:^|[,\s])(?:stale-if-error|max-stale)\s*=\s*\"?([0-9]{1,9})\"?(?=$|[,\s])", re.IGNORECASE)
_HEADER_CHARS_MAX = 1000
"""The maximum number of characters of the header that are searched."""


class Staleness:
    """The staleness that a request allows.

    Args:
        limit_s: The maximum age of an earlier value in seconds.
        wait_s: The time in seconds to wait for a current value before an earlier value is used.
    """

    __slots__ = ("age_s", "limit_s", "wait_s")

    def __init__(self, limit_s: float, wait_s: float) -> None:
        self.limit_s = limit_s
        self.wait_s = wait_s
        self.age_s = 0.0
        """The age of the oldest value that was used instead of a current value."""

    def allows(self, age_s: float) -> bool:
        return age_s <= self.limit_s

    def record_age(self, age_s: float) -> None:
        self.age_s = max(self.age_s, age_s)


_CURRENT: ContextVar[Staleness | None] = ContextVar("staleness", default=None)


def get_current_staleness() -> Staleness | None:
    """Return the staleness that the current request allows, or None if the request needs current values."""
    return _CURRENT.get()


@contextmanager
def allow_staleness(staleness: Staleness | None) -> Iterator[None]:
    """Set the current staleness while the context is active, in this task and the tasks that it starts."""
    token = _CURRENT.set(staleness)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def parse_staleness_s(cache_control: str) -> int | None:
    """Return the maximum age in seconds that a Cache-Control header allows for answers from earlier reads.

    The directives are `stale-if-error` and `max-stale`. If there are several, the result is the smallest number. If
    there is none, the result is None.
    """
    directives = _DIRECTIVE.findall(cache_control[:_HEADER_CHARS_MAX])
    return min(map(int, directives)) if directives else None
