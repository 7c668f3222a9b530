"""Check whether this server can write. It is the expensive part of GET /readyz, and is cached for some seconds.

A server with a full disk answers reads, but fails every commit, so a load balancer must not send requests to it. So
the check of readiness writes to the database, and measures the free space on the disks of the home and of a local
warehouse.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitConflict, SeamarkError
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.operations import TakeLease
from seamark.metaserver.store.port import PointerStore

INTERVAL_S = 5.0
"""The time for which a positive result is cached, in seconds. A negative result is cached for a fifth of this time."""
_NEGATIVE_FRACTION = 0.2
TIMEOUT_S = 2.0
_SMALL_DISK_DIVISOR = 20
_LEASE = "readiness"
_log = structlog.get_logger("seamark.health")


class Readiness:
    """Checks whether this worker can write. Concurrent probes share one check."""

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._check_lock = asyncio.Lock()
        self._answers = {"disk": "ok", "writes": "ok"}
        self._cached_until_s = float("-inf")
        self._holder = str(clock.uuid4())

    async def check(self) -> dict[str, str]:
        """Return the state of each checked component: "ok", or the problem without hosts and paths.

        The answers are cached for `INTERVAL_S`. Problems are cached for a shorter time, so that a recovery soon shows.
        """
        if self._clock.monotonic() < self._cached_until_s:
            return self._answers
        async with self._check_lock:
            if self._clock.monotonic() < self._cached_until_s:
                return self._answers
            self._answers = {"disk": await self._check_disk(), "writes": await self._check_writes()}
            is_good = all(answer == "ok" for answer in self._answers.values())
            self._cached_until_s = self._clock.monotonic() + INTERVAL_S * (1 if is_good else _NEGATIVE_FRACTION)
            return self._answers

    async def _check_disk(self) -> str:
        """Return "ok" if the disks have enough free space, or the problem."""
        minimum_bytes = self._settings.free_space_min_bytes
        try:
            async with asyncio.timeout(TIMEOUT_S):
                lacking_bytes = await asyncio.to_thread(
                    _measure_lacking_bytes, _list_folders(self._settings), minimum_bytes
                )
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s"
        except OSError as error:
            _log.warning("not ready", part="disk", error=str(error))
            return "failing"
        if lacking_bytes > 0:
            _log.warning("not ready", part="disk", lacking_bytes=lacking_bytes)
            return "full"
        return "ok"

    async def _check_writes(self) -> str:
        """Return "ok" if the database accepts a write, or the problem."""
        now_ms = self._clock.now_ms()
        # This lease ends when it begins, so it only tests whether the database accepts the write.
        probe = TakeLease(name=_LEASE, holder=self._holder, now_ms=now_ms, until_ms=now_ms)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._store.transact([probe])
        except CommitConflict:  # Another replica wrote at the same time, so the database accepts writes.
            return "ok"
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s"
        except SeamarkError as error:
            _log.warning("not ready", part="writes", error=error.message)
            return "failing"
        return "ok"


def _list_folders(settings: Settings) -> list[Path]:
    """Return the folders on local disks that the server writes to."""
    folders = [settings.home]
    for url in (settings.make_warehouse_uri(), settings.make_database_url()):
        parts = urlsplit(url)
        if parts.scheme in ("file", "sqlite"):
            path = Path(unquote(parts.path))
            folders.append(path.parent if parts.scheme == "sqlite" else path)
    return folders


def _measure_lacking_bytes(folders: Iterable[Path], minimum_bytes: int) -> int:
    """Return the free space in bytes that the fullest disk lacks. It is 0 or negative if no disk lacks space.

    A disk needs `minimum_bytes` bytes of free space, or a twentieth of its size if this is less. If a folder does not
    exist yet, the disk of its nearest existing parent is measured.
    """
    lacking_by_disk = []
    for folder in folders:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        usage = shutil.disk_usage(folder)
        lacking_by_disk.append(min(minimum_bytes, usage.total // _SMALL_DISK_DIVISOR) - usage.free)
    return max(lacking_by_disk)
