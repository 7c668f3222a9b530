"""Decides which refused requests are recorded individually, and counts the other refused requests.

Unauthenticated clients can send refused requests at no cost, so recording refusals must be cheap. For each
address, the first few refusals per minute are written, and further refusals are only counted. The same applies to
the refused requests of a principal, with a higher limit. The number of addresses and principals is limited; beyond the
limit, further addresses and principals share an entry. The caller passes the time, and the module does no I/O.
"""

from __future__ import annotations

import msgspec

WINDOW_MS = 60_000
_OTHERS = "others"


class UnrecordedRefusals(msgspec.Struct, frozen=True):
    """The number of a client's refused requests in one minute that were counted, but not recorded individually."""

    principal_name: str
    remote: str
    count: int


class Refusals:
    """Counts the refused requests of each client in a window of time, and decides which of them are written.

    Only the first refusals of a client are written, so that a client cannot fill the audit log. If there are more than
    `keys_max` clients, the further clients are counted together.
    """

    def __init__(self, *, each_address: int, each_principal: int, keys_max: int) -> None:
        self._limits = {True: each_address, False: each_principal}
        """The number of refusals that are written, by whether the client is unauthenticated."""
        self._keys_max = keys_max
        self._since_ms = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._unauthenticated_keys: set[tuple[str, str]] = set()

    def count_and_check_limit(self, principal: str, remote: str, *, unauthenticated: bool) -> bool:
        """Count one refusal, and return whether the limit allows to record it individually.

        If `keys_max` clients are counted already, the further authenticated clients share one count, and the further
        unauthenticated clients share one count for each principal name.

        The caller must call `end_window_if_due` first, so that the count is that of the current window.
        """
        key = (principal, remote)
        if key not in self._counts and len(self._counts) >= self._keys_max:
            key = (principal if unauthenticated else _OTHERS, _OTHERS)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if unauthenticated:
            self._unauthenticated_keys.add(key)
        return count <= self._limits[unauthenticated]

    def end_window_if_due(self, now_ms: int, *, closing: bool = False) -> list[UnrecordedRefusals]:
        """Begin a new window if the current window has ended, and return the refusals that were only counted.

        Args:
            now_ms: The current time.
            closing: Whether the server stops. The window then ends early, so that its counts are not lost.
        """
        if now_ms - self._since_ms < WINDOW_MS and not closing:
            return []
        refusals = []
        for key, count in self._counts.items():
            is_unauthenticated = key in self._unauthenticated_keys
            unrecorded_count = count - self._limits[is_unauthenticated]
            if unrecorded_count > 0:
                principal, remote = key
                refusals.append(UnrecordedRefusals(principal, remote, unrecorded_count))
        self._since_ms = now_ms
        self._counts.clear()
        self._unauthenticated_keys.clear()
        return refusals

    def check_invariants(self) -> None:
        # Further unauthenticated clients share one entry, and further principals share another.
        assert len(self._counts) <= self._keys_max + 2
        assert self._unauthenticated_keys <= self._counts.keys()
