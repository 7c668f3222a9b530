"""Claims: one process of this machine fetches a key at a time; the others wait until it is in the disk cache.

Otherwise each of N workers that access a new table would fetch and decode all of it. The rule: a claim is advisory. It
ends with its process, however that ends; a process that has waited too long continues without; and where locks do not
work, every claim is granted. In the worst case data are fetched twice.

A claim is a lock on one byte of one file, at an offset derived from the key: there is no file per key and nothing to
clean up. Two keys with the same byte are very rare, and then only wait for each other.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from seamark.cache.envelope import key_digest


class Claims:
    """Belongs to one event loop or thread.

    One instance per file and process: POSIX releases a process's locks on a file when it closes any descriptor of it.
    """

    def __init__(self, path: Path) -> None:
        self._held: set[int] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1

    def take(self, key: str) -> bool:
        """Return whether the claim was granted; False while another task or process has it.

        Never waits.
        """
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
        """Release the claim; no error without one."""
        offset = _offset(key)
        if offset in self._held:
            self._held.discard(offset)
            if self._file >= 0:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)

    def close(self) -> None:
        """Release every claim; later claims are granted without a lock.

        Idempotent.
        """
        self._held.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _offset(key: str) -> int:
    return int.from_bytes(key_digest(key)[:7])
