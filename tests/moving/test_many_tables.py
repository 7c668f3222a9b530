"""Tests of the import of a catalog with ten thousand tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.many_tables import write_tables
from tests.recovery.world import list_pointers
from tests.services.command import run_seamark
from tests.services.seamark import Seamark

TABLES = 10_000
_TIMEOUT_S = 3000.0


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_ten_thousand_tables_are_imported_and_a_repeat_changes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "origin"
    expected = write_tables(home / "warehouse", TABLES, files=1)
    rebuilt = run_seamark("rebuild", "--home", str(home), timeout_s=_TIMEOUT_S)
    assert rebuilt.returncode == 0, rebuilt.stderr
    server_env = {"SEAMARK_ALLOWED_LOCATIONS": (home / "warehouse").as_uri()}
    with Seamark(home) as origin, Seamark(tmp_path / "target", env=server_env) as target:
        arguments = ("import", origin.base_url, "--url", target.base_url)
        for outcome in (f"{TABLES:,} tables and views imported", f"{TABLES:,} unchanged"):
            import_result = run_seamark(*arguments, timeout_s=_TIMEOUT_S)
            assert import_result.returncode == 0, import_result.stderr
            assert outcome in import_result.stdout
            assert list_pointers(target.base_url) == expected
