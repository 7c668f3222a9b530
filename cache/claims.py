"""Claims, which ensure that only one process of this machine fetches a key at a time.

The other processes wait until the key is in the disk cache. Without claims, each of N workers that access a new table
would fetch and decode all of it.

The rule: a claim is advisory. A claim ends when its process ends, even after a crash. A process that has waited too
long fetches without a claim. If locks do not work, every claim is granted. In the worst case, data are fetched twice.

A claim is a lock on one byte of one file. The offset of the byte is derived from the key, so that there is no file per
key and nothing has to be cleaned up. In the rare case that two keys have the same byte, they only wait for each other.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from seamark.cache.envelope import compute_key_digest


class Claims:
    """The claims of a process, used by one event loop or thread.

    Create one instance per file and process, because POSIX releases a process's locks on a file when the process closes
    any descriptor of it.
    """

    def __init__(self, path: Path) -> None:
        """Open the lock file `path`, in which each claim is a lock on one byte. Create the file if it is missing.

        If the file cannot be opened, other processes do not see these claims, so data may be fetched twice.
        """
        self._held_offsets: set[int] = set()
        """The bytes of the lock file whose claims this instance has."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1  # There is no file descriptor, so claims are granted without a lock.

    def take(self, key: str) -> bool:
        """Try to take the claim for a key, and return whether it was granted.

        The method never waits. The claim is refused while another task or process has it.
        """
        offset = _hash_to_offset(key)
        if offset in self._held_offsets:
            return False
        if self._file >= 0:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            except (BlockingIOError, PermissionError):
                return False
            except OSError:
                return True  # Without file locks, each process fetches the value itself.
        self._held_offsets.add(offset)
        return True

    def release(self, key: str) -> None:
        """Release the claim for a key, if this instance has it."""
        offset = _hash_to_offset(key)
        if offset in self._held_offsets:
            self._held_offsets.discard(offset)
            if self._file >= 0:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)

    def close(self) -> None:
        """Release all claims. Later claims are granted without a lock.

        The method can be called several times.
        """
        self._held_offsets.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _hash_to_offset(key: str) -> int:
    # Seven bytes fit into the offset of a file, which is a signed 64-bit integer.
    return int.from_bytes(compute_key_digest(key)[:7])
