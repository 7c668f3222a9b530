"""How fast does a rebuild register the tables of a warehouse on the local disk?

Each table has three metadata files with 20 columns. The time is that of the whole command `seamark rebuild`, including
its start. The benchmark also times a backup, a restore and a move of the database of these tables.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from bench.report import OURS, Report, Row
from tests.recovery.many_tables import write_tables
from tests.services.command import run_seamark

TABLES = 10_000
GOAL_TABLES_PER_S = 500.0
_TIMEOUT_S = 600.0


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("recovery_rebuild", f"How fast are {TABLES:,} tables registered again?")
    count = 200 if quick else TABLES
    home, file, copy = folder / "home", folder / "backup", folder / "copy.db"
    write_tables(home / "warehouse", count)
    commands = (
        ("rebuild from the warehouse", ("rebuild", "--json"), GOAL_TABLES_PER_S),
        ("backup", ("backup", str(file)), None),
        ("restore, and comparison with the storage", ("restore", str(file), "--overwrite"), None),
        ("move to another database", ("migrate", "--to", f"sqlite://{copy}"), None),
    )
    for case, arguments, goal in commands:
        begun_s = time.perf_counter()
        result = run_seamark(*arguments, "--home", str(home), timeout_s=_TIMEOUT_S)
        rate = count / (time.perf_counter() - begun_s)
        assert result.returncode == 0, result.stderr
        if arguments[0] == "rebuild":
            assert len(json.loads(result.stdout)["registered"]) == count
        report.rows.append(
            Row(case, "rate", "tables/s", {OURS: rate}, lower_is_better=False, goal=None if quick else goal)
        )
    return report
