"""A file system in memory for temporary folders, so that no test waits for a disk.

Stores, catalogs and writers sync their files. On a disk, their tests wait ten times as long for syncs as they compute.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
FREE_MIN_BYTES = 8 << 30
"""The minimum free space in bytes. A complete run needs 1 to 3 GiB at a time."""


def find_folder_in_memory() -> Path | None:
    """Return the folder in memory, or None if it is not writable or has less than `FREE_MIN_BYTES` of free space."""
    is_large = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= FREE_MIN_BYTES
    return SHARED_MEMORY if is_large else None
