"""A simulated disk that loses unsynced writes at a power cut, tears writes, becomes full and fails.

`SimulatedDisk` implements `LogFiles`. A process can read unsynced writes, but only a sync makes them durable.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SECTOR_BYTES = 512


class Crash(BaseException):
    """Ends the simulated process during an operation of the disk. The code under test does not catch it."""


@dataclass
class SimulatedFile:
    """A file of the simulated disk.

    Processes read `visible`. A power cut leaves `durable` and some of the changes in `unsynced_changes`.
    """

    visible: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced_changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    """The changes since the last sync: a write at a position, or a truncation (None)."""


def _apply(data: bytearray, position: int, part: bytes | None) -> None:
    """Write the bytes at the position, or truncate the file there if they are None. Zeros fill a gap before them."""
    if part is None:
        del data[position:]
    else:
        data.extend(bytes(max(0, position + len(part) - len(data))))
        data[position : position + len(part)] = part


class SimulatedDisk:
    """The files of one folder.

    Attributes:
        on_operation: A function that is called before each write and sync, with the name of the operation. It may raise
            OSError or Crash.
        free_bytes: The free space of the disk. Each file uses as much as its size.
    """

    def __init__(self) -> None:
        self.files: dict[str, SimulatedFile] = {}
        self.on_operation: Callable[[str], None] = lambda _operation: None
        self.free_bytes = 1 << 60
        self.syncs = 0

    # -- faults

    def cut_power(self, rng: random.Random) -> None:
        """Simulate a power failure: lose a random part of the writes that were not synced.

        A write is stored completely, in some of its sectors, or not at all. A sector is never stored in part.
        """
        for file in self.files.values():
            for position, part in file.unsynced_changes:
                if part is None:
                    if rng.random() < 0.5:
                        _apply(file.durable, position, None)
                    continue
                weights = (2, 6, 2)  # Partial writes are the most difficult for the log, so they are the most frequent.
                outcome = rng.choices(("complete", "partial", "lost"), weights)[0]
                start = 0
                while start < len(part):
                    sector_end = ((position + start) // SECTOR_BYTES + 1) * SECTOR_BYTES
                    end = min(len(part), sector_end - position)
                    if outcome == "complete" or (outcome == "partial" and rng.random() < 0.5):
                        _apply(file.durable, position + start, part[start:end])
                    start = end
            file.unsynced_changes.clear()
            file.visible[:] = file.durable

    # -- LogFiles

    def list_names(self) -> list[str]:
        return sorted(self.files)

    def describe(self, name: str) -> str:
        return f"/simulated/{name}"

    def create(self, name: str, data: bytes, reserve_bytes: int = 0) -> None:
        self.on_operation("create")
        size_bytes = max(len(data), reserve_bytes)
        self.use_space(size_bytes)
        content = bytearray(data) + bytes(size_bytes - len(data))
        self.files[name] = SimulatedFile(content, bytearray(content))
        self.on_operation("created")

    def replace(self, name: str, data: bytes) -> None:
        self.on_operation("create")
        self.use_space(len(data))
        self.free_bytes += len(self.files[name].visible)
        self.files[name] = SimulatedFile(bytearray(data), bytearray(data))
        self.on_operation("created")

    def open(self, name: str) -> OpenSimulatedFile:
        return OpenSimulatedFile(self, self.files[name])

    def read(self, name: str, position: int, length: int) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", name)
        return bytes(self.files[name].visible[position : position + length])

    def read_whole(self, name: str) -> bytes:
        return self.read(name, 0, 1 << 60)

    def measure_size(self, name: str) -> int:
        return len(self.files[name].visible)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.on_operation("remove")
            file = self.files.pop(name, None)
            self.free_bytes += len(file.visible) if file is not None else 0

    def use_space(self, size_bytes: int) -> None:
        if size_bytes > self.free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free_bytes -= size_bytes


class OpenSimulatedFile:
    """An open file of the simulated disk, which implements `LogFile`."""

    def __init__(self, disk: SimulatedDisk, file: SimulatedFile) -> None:
        self._disk = disk
        self._file = file

    def write(self, position: int, parts: Sequence[bytes]) -> None:
        """Write each part in two halves, so that a fault may occur between them."""
        for part in parts:
            half_bytes = len(part) // 2
            for half_position, data in ((position, part[:half_bytes]), (position + half_bytes, part[half_bytes:])):
                self._disk.on_operation("write")
                self._disk.use_space(max(0, half_position + len(data) - len(self._file.visible)))
                _apply(self._file.visible, half_position, data)
                self._file.unsynced_changes.append((half_position, data))
            position += len(part)

    def sync(self) -> None:
        self._disk.on_operation("sync")
        self._disk.syncs += 1
        self._file.durable[:] = self._file.visible
        self._file.unsynced_changes.clear()
        self._disk.on_operation("synced")

    def truncate(self, size_bytes: int) -> None:
        self._disk.free_bytes += max(0, len(self._file.visible) - size_bytes)
        _apply(self._file.visible, size_bytes, None)
        self._file.unsynced_changes.append((size_bytes, None))

    def reserve(self, size_bytes: int) -> None:
        missing_bytes = size_bytes - len(self._file.visible)
        if missing_bytes > 0:
            self._disk.use_space(missing_bytes)
            self._file.visible.extend(bytes(missing_bytes))
            self._file.unsynced_changes.append((size_bytes - missing_bytes, bytes(missing_bytes)))

    def close(self) -> None:
        pass


class DirectRunner:
    """Runs the operations of the disk at once, in the event loop."""

    async def write(self, work):
        return work()

    async def read(self, work):
        return work()


def copy_disk(disk: SimulatedDisk, *, durable: bool = False) -> SimulatedDisk:
    """Return a copy of the disk, with the bytes that another process would read.

    Args:
        durable: If True, copy only the durable bytes, which is the least that a power cut leaves.
    """
    disk_copy = SimulatedDisk()
    for name, file in disk.files.items():
        data = file.durable if durable else file.visible
        disk_copy.files[name] = SimulatedFile(bytearray(data), bytearray(data))
    return disk_copy
