"""A real SQLite store, and a clock that only a test advances."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(seed=7)


@pytest.fixture
async def store(tmp_path: Path, clock: SimulatedClock) -> AsyncIterator[PointerStore]:
    async with open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=clock) as store:
        yield store
