"""The groupings and aggregates that clients report for the query history."""

from __future__ import annotations

import pytest

from seamark.connector.analysis.scans import find_scans
from seamark.connector.plans.scan import NO_AGGREGATION, Aggregation

CASES = {
    "SELECT region, sum(amount), count(*) FROM s.t WHERE day > 3 GROUP BY region": [
        Aggregation(("region",), (("sum", "amount"), ("count", "")))
    ],
    "SELECT date_trunc('day', ts), count(DISTINCT c) FROM s.t GROUP BY ROLLUP (date_trunc('day', ts), region)": [
        Aggregation(("region", "ts"), (("count", "c"),))
    ],
    "SELECT a.x, max(b.y), sum(a.p * a.q) FROM s.t a JOIN s.u b ON a.k = b.k GROUP BY a.x": [
        Aggregation(("x",), (("sum", ""),)),
        Aggregation((), (("max", "y"), ("sum", ""))),
    ],
    "SELECT x FROM s.t WHERE y = (SELECT max(y) FROM s.u)": [NO_AGGREGATION, Aggregation((), (("max", "y"),))],
    "SELECT x FROM s.t WHERE y = 3": [NO_AGGREGATION],
    "SELECT count(DISTINCT) FROM s.t": [Aggregation((), (("count", ""),))],
    f"SELECT x, sum({'s' * 501}) FROM s.t GROUP BY x, {'g' * 501}": [Aggregation(("x",))],
}


@pytest.mark.parametrize("statement", CASES)
def test_scan_has_the_grouping_and_the_aggregates_of_its_select(statement: str) -> None:
    assert [scan.aggregation for scan in find_scans(statement)] == CASES[statement]
