"""Remembers for some seconds that Trino has checked a sender's rights on the tables and columns of a cube.

Before a statement with groups is sent, Trino checks the rights by a query without rows, because users can read the text
of their statements in Trino. The check takes as long as a short query. Statements of a dashboard read the same columns,
so a check that succeeded is not repeated for some seconds. During this time, only the groups in the text of a statement
are visible after a right has been revoked: the statement itself names the tables and columns, so Trino refuses it, and
the proxy reads the access rules of each statement.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from multidict import CIMultiDict

from seamark.connector.trino.protocol.coordinators import Coordinator

CHECKS_MAX = 10_000
"""The maximum number of checks in memory."""
_IGNORED_HEADERS = frozenset(
    ("accept", "accept-encoding", "connection", "content-length", "content-type", "traceparent", "tracestate")
)
"""The headers that do not affect rights."""


class CheckedRights:
    """Remembers the checks of rights that have succeeded. An instance belongs to one event loop.

    Only keyed hashes of the headers and texts of the checks are stored, so that the memory contains no passwords.

    Args:
        remembered_s: The time in seconds for which a check is not repeated. 0 means that each statement is checked.
    """

    def __init__(self, remembered_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._remembered_s = remembered_s
        self._now_s = clock
        self._key = secrets.token_bytes(32)
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        """The times, on the clock, until which checks are not repeated, by the hash of the check."""

    def has(self, coordinator: Coordinator, headers: CIMultiDict[str], check: str) -> bool:
        """Return whether a check has succeeded a short time ago.

        Args:
            coordinator: The coordinator that checks.
            headers: The headers that the coordinator receives, with the sender, its roles and the session.
            check: The text of the query that checks the rights.
        """
        return self._until_s.get(self._hash(coordinator, headers, check), 0.0) > self._now_s()

    def remember(self, coordinator: Coordinator, headers: CIMultiDict[str], check: str) -> None:
        """Record that a check has succeeded, unless the settings disable this.

        Args:
            coordinator: The coordinator that has checked the rights.
            headers: The headers that the coordinator received, with the sender, its roles and the session.
            check: The text of the query that checked the rights.
        """
        if self._remembered_s <= 0:
            return
        key = self._hash(coordinator, headers, check)
        self._until_s[key] = self._now_s() + self._remembered_s
        self._until_s.move_to_end(key)
        while len(self._until_s) > CHECKS_MAX:
            self._until_s.popitem(last=False)

    def _hash(self, coordinator: Coordinator, headers: CIMultiDict[str], check: str) -> bytes:
        relevant_headers = sorted(
            (name.lower(), value) for name, value in headers.items() if name.lower() not in _IGNORED_HEADERS
        )
        text = repr((coordinator.url, relevant_headers, check)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()
