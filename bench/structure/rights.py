"""`python -m bench.structure.rights [--quick]` measures the time of a decision of the built-in authorizer.

Each case asks for a privilege that only the last grant gives, so the decision reads all grants of the login.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from bench.report import OURS, Report, Row
from seamark.metaserver.access.authorizer import GrantAuthorizer
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.store.model import Grant

GOAL_US = 50.0
TABLE = Securable(("shop", "eu"), "table", "orders")
GRANT_COUNTS = (1, 10, 100)


def make_principal(grant_count: int) -> Principal:
    """Return a login with grants and denials on other objects, and one grant on the table."""
    other_grants = [
        Grant("ann", "writer", ("shop", f"team{number}"))
        if number % 2
        else Grant("ann", "read", ("shop", "eu"), "table", f"t{number}", deny=number % 4 == 0)
        for number in range(grant_count - 1)
    ]
    return Principal("ann", (*other_grants, Grant("ann", "read", *TABLE)))


async def measure_decision_us(principal: Principal, decisions: int) -> float:
    """Return the microseconds of a decision, in the fastest of five rounds."""
    authorizer = GrantAuthorizer(None)
    rounds = []
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(decisions):
            assert await authorizer.allows(principal, "planTableScan", TABLE)
        rounds.append(time.perf_counter() - began_s)
    return min(rounds) / decisions * 1_000_000


async def run(*, quick: bool = False) -> Report:
    report = Report("rights", "What does a decision about rights cost?", peer="no peer")
    for grant_count in GRANT_COUNTS:
        decision_us = await measure_decision_us(make_principal(grant_count), 200 if quick else 20_000)
        report.rows.append(Row(f"{grant_count} grants", "decision", "µs", {OURS: decision_us}, goal=GOAL_US))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structure.rights", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run")
    report = asyncio.run(run(quick=parser.parse_args().quick))
    for row in report.rows:
        print(f"{row.case}: {row.values[OURS]:.2f} {row.unit} (goal: at most {row.goal} {row.unit})")


if __name__ == "__main__":
    main()
