"""Tests of the uses of tables that clients report for the query history."""

from __future__ import annotations

import pytest

from seamark.connector.analysis.scans import find_scans
from seamark.connector.plans.scan import NO_USE, TableUse

COLUMNS = dict.fromkeys(["amount", "c", "code", "day", "k", "p", "q", "region", "ts", "x", "y", "z"], "int")
CASES = {
    "SELECT region, sum(amount), count(*) FROM s.t WHERE day > 3 GROUP BY region": [
        TableUse(("region",), (("sum", "amount"), ("count", "")), ("amount", "day", "region"))
    ],
    "SELECT date_trunc('day', ts), count(DISTINCT c) FROM s.t GROUP BY ROLLUP (date_trunc('day', ts), region)": [
        TableUse(("region", "ts"), (("count", "c"),), ("c", "region", "ts"))
    ],
    "SELECT a.x, max(b.y), sum(a.p * a.q) FROM s.t a JOIN s.u b ON a.k = b.k WHERE b.z = 1 GROUP BY a.x": [
        TableUse(("x",), (("sum", ""),), ("k", "p", "q", "x"), ("k",)),
        TableUse((), (("max", "y"), ("sum", "")), ("k", "y", "z"), ("k",)),
    ],
    "SELECT x FROM s.t WHERE y + 1 = (SELECT max(y) FROM s.u)": [
        TableUse(columns=("x", "y")),
        TableUse((), (("max", "y"),), ("y",)),
    ],
    "SELECT x FROM s.t WHERE EXISTS (SELECT 1 FROM s.u WHERE u.k = t.k)": [
        TableUse(columns=("k", "x"), joins=("k",)),
        TableUse(columns=("k",), joins=("k",)),
    ],
    "SELECT * FROM s.t WHERE y = 3": [NO_USE],
    "SELECT a.*, b.x FROM s.t a JOIN s.u b USING (k)": [
        TableUse(joins=("k",)),
        TableUse(columns=("k", "x"), joins=("k",)),
    ],
    "SELECT count(DISTINCT) FROM s.t": [TableUse((), (("count", ""),))],
    # Names of more than 500 characters are left out, and so are all columns if there are more than 64.
    f"SELECT x, sum({'s' * 501}) FROM s.t GROUP BY x, {'g' * 501}": [TableUse(("x",), (), ("x",))],
    f"SELECT {', '.join(f'c{number}' for number in range(65))} FROM s.t": [NO_USE],
}


@pytest.mark.parametrize("statement", CASES)
def test_scan_has_the_columns_groupings_aggregates_and_joins_of_its_select(statement: str) -> None:
    assert [scan.use for scan in find_scans(statement, find_columns=lambda _: COLUMNS)] == CASES[statement]
