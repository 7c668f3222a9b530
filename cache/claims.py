"""Claims: one process of this machine at a time fetches a key, while the others wait for what it puts on the disk.

N workers that all meet a new table would otherwise each fetch and decode all of it. The rule: a claim is advice. It
ends with its process, however that ends; who waits too long goes ahead without; and where locks do not work, every
claim is granted. At worst something is fetched twice.

A claim is a lock on one byte of one file, at an offset drawn from the key: no file per key, nothing to clean up. Two
keys share a byte about never, and then they only wait for each other.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cache.envelope import key_digest


class Claims:
    """Belongs to one event loop or thread. One per file and process: POSIX drops a process's locks on a file when it
    closes any descriptor of it."""

    def __init__(self, path: Path) -> None:
        self._held: set[int] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1

    def take(self, key: str) -> bool:
        """Whether it is ours now; False when somebody holds it, this process included. Never waits."""
        offset = _offset(key)
        if offset in self._held:
            return False
        if self._file >= 0:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            except (BlockingIOError, PermissionError):
                return False
            except OSError:
                return True
        self._held.add(offset)
        return True

    def release(self, key: str) -> None:
        """That it was not held is no error."""
        offset = _offset(key)
        if offset in self._held:
            self._held.discard(offset)
            if self._file >= 0:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)

    def close(self) -> None:
        """Releases every claim; later ones are granted unheard. Twice is once."""
        self._held.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _offset(key: str) -> int:
    return int.from_bytes(key_digest(key)[:7])
