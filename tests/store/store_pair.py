"""Two stores open on one database, as in two replicas. Every part of the contract uses them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import (
    NS,
)


class StorePair:
    """The fixtures of two stores over one database. A subclass has the fixture `url`."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> SimulatedClock:
        return SimulatedClock(seed=1)

    @pytest.fixture
    async def store(self, url: str, clock: SimulatedClock) -> AsyncIterator[GeneratorStore]:
        async with open_store(url, clock=clock) as store:
            assert isinstance(store, GeneratorStore)
            await store.transact([CreateNamespace(NS, {})])
            yield store
            await store.check_invariants()

    @pytest.fixture
    async def other_store(
        self, url: str, clock: SimulatedClock, store: GeneratorStore
    ) -> AsyncIterator[GeneratorStore]:
        async with open_store(url, clock=clock) as other_store:
            assert isinstance(other_store, GeneratorStore)
            yield other_store
