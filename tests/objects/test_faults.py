"""Tests that the failing store behaves as each fault says, because other tests rely on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import RetryLater, SeamarkError, StorageError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from tests.objects.contract import ObjectStoreContract
from tests.objects.faults import Fault, FaultyObjects


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    async with open_objects(Settings(home=tmp_path), SystemClock()) as objects:
        yield FaultyObjects(objects)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return f"file://{tmp_path}/warehouse/corner"


class TestFaultyObjectsWithoutFaults(ObjectStoreContract):
    """The contract's tests for the store that can inject faults. Here it injects none."""


@pytest.mark.parametrize(
    ("fault", "error", "is_written"),
    [
        (Fault.BEFORE, RetryLater, False),
        (Fault.BROKEN, StorageError, False),
        (Fault.FULL, RetryLater, False),
        (Fault.LOST_REPLY, RetryLater, True),
    ],
)
async def test_fault_leaves_the_state_that_it_claims(
    store: FaultyObjects, base: str, fault: Fault, error: type[SeamarkError], is_written: bool
) -> None:
    store.script_faults("create", fault, None)
    with pytest.raises(error, match="injected"):
        await store.create(f"{base}/x", b"x")
    assert await store.inner.exists(f"{base}/x") is is_written
    await store.create(f"{base}/y", b"y")


async def test_slow_storage_call_succeeds(store: FaultyObjects, base: str) -> None:
    store.script_faults("create", Fault.SLOW)
    await store.create(f"{base}/x", b"x")
    assert store.trace == ["create SLOW"]


async def test_same_seed_causes_the_same_faults(tmp_path: Path) -> None:
    async def call_store(home: Path, seed: int) -> list[str]:
        """Return the trace of injected faults after 40 creations and deletions."""
        settings = Settings(home=home)
        async with open_objects(settings, SystemClock()) as inner:
            faulty = FaultyObjects(inner, seed=seed, rates={Fault.BEFORE: 0.3, Fault.LOST_REPLY: 0.3, Fault.FULL: 0.1})
            for number in range(40):
                for call in (
                    faulty.create(f"{settings.make_warehouse_uri()}/{number}", b""),
                    faulty.delete(f"{settings.make_warehouse_uri()}/{number}"),
                ):
                    try:
                        await call
                    except RetryLater:
                        pass
            return faulty.trace

    first_trace = await call_store(tmp_path / "a", 7)
    assert first_trace == await call_store(tmp_path / "b", 7)
    assert first_trace != await call_store(tmp_path / "c", 8)
    assert {line.split()[1] for line in first_trace} == {"ok", "BEFORE", "LOST_REPLY", "FULL"}
    assert "delete FULL" not in first_trace
