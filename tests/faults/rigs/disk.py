"""A small separate disk (tmpfs) that a test can fill completely and empty again."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A mounted file system, which can be filled or made read-only. It has 24 MiB, unless a test asks for more."""

    root: Path

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with (self.root / "ballast").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(b"\0" * size):
                        pass
                except OSError:
                    continue

    def free_space(self) -> None:
        (self.root / "ballast").unlink()

    async def make_read_only(self) -> None:
        """Remount the disk read-only.

        The kernel refuses this while any process has a file open for writing, for example a process that is ending.
        """
        command = ["mount", "-o", "remount,ro", str(self.root)]
        async with asyncio.timeout(60):
            while subprocess.run(command, capture_output=True, check=False).returncode:
                await asyncio.sleep(0.05)


@contextmanager
def mount_small_disk(root: Path, size: str = "24m") -> Iterator[SmallDisk]:
    """Mount a small disk at `root`.

    Skip the test if this user may not mount.
    """
    root.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "seamark-test", str(root)], capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"a full disk needs the right to mount a tmpfs: {result.stderr.strip()}")
    try:
        yield SmallDisk(root)
    finally:
        # Unmount lazily, because a process that is still ending must not keep the test's folder.
        subprocess.run(["umount", "--lazy", str(root)], check=True)
