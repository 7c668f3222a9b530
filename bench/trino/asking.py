"""A client that sends statements by Trino's protocol and reads the statistics that Trino reports for each query.

The planning time is Trino's. The client measures the wall time, from the first sent byte to the last row.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

import urllib3

from bench.ssb.spark import FACT

_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6, "d": 8.64e7}
_AMOUNT = re.compile(r"([\d.]+)(\w+)")


@dataclass(frozen=True)
class TrinoAnswer:
    """The answer to a statement, and what Trino read for it.

    Attributes:
        files: The number of files of the fact table that Trino received.
        splits: The number of splits of these files that Trino read.
        kilobytes: The kilobytes that Trino read.
        proxy_plan: The proxy's response header, or empty without a proxy.
    """

    rows: list[tuple[Any, ...]]
    wall_ms: float
    planning_ms: float
    files: int
    splits: int
    kilobytes: float
    proxy_plan: str


class TrinoStatementFailed(Exception):
    """Trino refused or failed to run a statement. The message comes from Trino."""


class TrinoConnection:
    """A client with one connection to `url`.

    Statistics come from the coordinator at `coordinator`, without the proxy.
    """

    def __init__(self, url: str, coordinator: str) -> None:
        self._url, self._coordinator = url, coordinator
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(total=300))
        self._files: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        self._pool.clear()

    def ask(self, sql: str, schema: str) -> TrinoAnswer:
        started_s = time.perf_counter()
        query_id, rows, proxy_plan = self._run(self._url, sql, schema)
        return self._answer(query_id, rows, (time.perf_counter() - started_s) * 1000, proxy_plan)

    def read_rows(self, sql: str, schema: str) -> list[tuple[Any, ...]]:
        return self._run(self._url, sql, schema)[1]

    def _run(self, url: str, sql: str, schema: str) -> tuple[str, list[tuple[Any, ...]], str]:
        """Return the query's id, its rows, and the proxy's header.

        Raises:
            TrinoStatementFailed: Trino refused or failed to run the statement.
        """
        headers = {"X-Trino-User": "bench", "X-Trino-Catalog": "seamark", "X-Trino-Schema": schema}
        rows: list[tuple[Any, ...]] = []
        first = self._pool.request("POST", f"{url}/v1/statement", body=sql.encode(), headers=headers)
        page = json.loads(first.data)
        while True:
            rows += map(tuple, page.get("data") or ())
            if "nextUri" not in page:
                break
            page = json.loads(self._pool.request("GET", page["nextUri"], headers=headers).data)
        if "error" in page:
            raise TrinoStatementFailed(f"{page['error']['errorName']}: {page['error']['message'][:500]}")
        return page["id"], rows, first.headers.get("X-Seamark-Plan", "")

    def load_query_report(self, query_id: str) -> dict[str, Any]:
        """Return the coordinator's complete report about a query."""
        path = f"{self._coordinator}/v1/query/{query_id}"
        query_report: dict[str, Any] = json.loads(
            self._pool.request("GET", path, headers={"X-Trino-User": "bench"}).data
        )
        return query_report

    def _count_files(self, schema: str, table: str) -> int:
        """Return the number of files of a table or plan table. The time of this request does not count."""
        if (schema, table) not in self._files:
            _, rows, _ = self._run(self._coordinator, f'SELECT count(*) FROM "{schema}"."{table}$files"', schema)
            self._files[schema, table] = rows[0][0]
        return self._files[schema, table]

    def _answer(self, query_id: str, rows: list[tuple[Any, ...]], wall_ms: float, proxy_plan: str) -> TrinoAnswer:
        """Return the answer with the statistics that Trino's coordinator reports for the query."""
        query_report = self.load_query_report(query_id)
        stats = query_report["queryStats"]
        # A query that is answered from a cube does not read the fact table. The name of a planned table is the name of
        # the table, followed by `~plan~` and an id.
        facts = next((item for item in query_report["inputs"] if item["table"].partition("~")[0] == FACT), None)
        scans = [
            item
            for item in stats["operatorSummaries"]
            if facts and str(item["stageId"]) == facts["fragmentId"] and "Scan" in item["operatorType"]
        ]
        return TrinoAnswer(
            rows,
            wall_ms,
            _parse_duration_ms(stats["planningTime"]),
            self._count_files(facts["schema"], facts["table"]) if facts else 0,
            sum(scan["totalDrivers"] for scan in scans),
            sum(float(scan["physicalInputDataSize"].removesuffix("B")) for scan in scans) / 1000,
            proxy_plan,
        )


def _parse_duration_ms(text: str) -> float:
    """Return the milliseconds of a duration as Trino writes it, such as `343.47ms`."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration")
    return float(match[1]) * _MS[match[2]]
