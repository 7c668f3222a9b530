"""A file system in memory for temporary folders, so that no test waits for a disk.

Stores, catalogs and writers sync their files. A test of them waits ten times as long for a disk as it computes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SHARED = Path("/dev/shm")
FREE_MIN_BYTES = 8 << 30
"""The least free space. A whole run needs 1 to 3 GiB at a time."""


def find_folder_in_memory() -> Path | None:
    """Return a file system in memory, or None if the machine has no large one."""
    is_large = os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free >= FREE_MIN_BYTES
    return SHARED if is_large else None
