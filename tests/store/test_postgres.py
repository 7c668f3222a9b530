"""The contract on a real PostgreSQL server, and what only PostgreSQL promises."""

from __future__ import annotations

import pytest

from tests.store.contract import PointerStoreContract


class TestPostgres(PointerStoreContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url
