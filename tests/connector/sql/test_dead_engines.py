"""An engine that does not answer is told in one line with its address."""

from __future__ import annotations

import pytest

from seamark.connector.client.errors import Unreachable
from seamark.connector.sql.trino_engine import TrinoAddress, TrinoRows
from tests.services.process import free_port


def test_a_dead_trino_is_named_by_its_address() -> None:
    port = free_port()
    with pytest.raises(Unreachable) as caught:
        TrinoRows(TrinoAddress.parse(f"http://127.0.0.1:{port}"), "SELECT 1")
    assert caught.value.message == f"Trino does not answer at 127.0.0.1:{port}: Connection refused"
