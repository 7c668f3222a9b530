"""A fixture with the certificate authority that signs the certificates of the server and of its clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    new_authority = Authority(tmp_path)
    new_authority.issue("server")
    return new_authority
