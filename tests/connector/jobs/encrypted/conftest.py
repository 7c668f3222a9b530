"""A key file for the encrypted tables of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamark.connector.parquet.encryption.keys import KEY_FILE, KMS_CLASS
from tests.connector.parquet import encrypted


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the process of the test a key service and a key file for tables of the namespace `db`."""
    monkeypatch.setenv(KMS_CLASS, "tests.connector.parquet.encrypted:PyArrowKms")
    monkeypatch.setenv(KEY_FILE, encrypted.write_key_file(tmp_path, "db"))
