"""The contract on SQLite, and what only SQLite promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.contract import PointerStoreContract


class TestSqlite(PointerStoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'seamark.db'}"
