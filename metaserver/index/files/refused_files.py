"""Remembers data files of which an index cannot have an entry, so that builds do not read them again.

A data file never changes, so a cube that it does not shrink, for example, is refused by each build. The memory is
advisory: it is bounded, belongs to one process, and ends after a day. A forgotten file is read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

FILES_MAX = 20_000
"""The maximum number of remembered files. Each takes about 400 bytes."""
REMEMBERED_S = 86_400.0
"""The time for which a refused file is remembered."""
_REASON_CHARACTERS_MAX = 300

IndexKey = tuple[str, str]
"""The UUID of the table, and the id of the index definition."""


class RefusedFiles:
    """The refused data files of each index, with the reasons.

    Args:
        monotonic: Returns a monotonic time in seconds.
    """

    def __init__(self, monotonic: Callable[[], float], *, files_max: int = FILES_MAX) -> None:
        self._monotonic = monotonic
        self._files_max = files_max
        self._reasons: dict[bytes, dict[bytes, tuple[float, str]]] = {}
        """The time until which a reason is remembered, and the reason.

        The keys are digests of the index and of the path, in the order of their use.
        """
        self._count = 0

    def add(self, index: IndexKey, reasons: Iterable[tuple[str, str]]) -> None:
        """Remember files of an index by their paths, with the reasons.

        If there are too many files, the indexes to which files were added the longest time ago are forgotten. If this
        index alone has too many, its further files are not remembered.
        """
        # Removing the index and adding it again makes it the last index in the order.
        key = _digest("\n".join(index))
        now_s, remembered_files = self._monotonic(), self._reasons.pop(key, {})
        self._count -= len(remembered_files)
        files = {digest: (until_s, reason) for digest, (until_s, reason) in remembered_files.items() if until_s > now_s}
        remembered_until_s = now_s + REMEMBERED_S
        for path, reason in reasons:
            if len(files) < self._files_max:
                files[_digest(path)] = (remembered_until_s, reason[:_REASON_CHARACTERS_MAX])
        if files:  # An index without files does not count toward the limit, so nothing would remove it.
            self._reasons[key] = files
        self._count += len(files)
        while self._count > self._files_max:
            least_recent_key = next(iter(self._reasons))
            self._count -= len(self._reasons.pop(least_recent_key))

    def find_reasons(self, index: IndexKey, paths: Iterable[str]) -> Mapping[str, str]:
        """Return the reasons of the remembered files among `paths`, by path."""
        files = self._reasons.get(_digest("\n".join(index)))
        if not files:
            return {}
        now_s = self._monotonic()
        reasons: dict[str, str] = {}
        for path in paths:
            until_s, reason = files.get(_digest(path), (0.0, ""))
            if until_s > now_s:
                reasons[path] = reason
        return reasons


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
