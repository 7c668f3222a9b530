"""How fast does the console show a page of a large catalog? Run `python -m bench.console`.

The server has 10,000 tables, and one table with 100,000 files. Chromium has an empty cache at each visit. The
browser measures the time from the start of the navigation to the first paint. The data are complete when no
request is open. There is no peer, because no other Iceberg catalog has such pages.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from playwright.async_api import Browser

from bench.measure import Sample
from bench.report import OURS, Report
from bench.run import run_benches
from tests.console.browser import open_browser, open_page
from tests.console.world import create_many_tables, make_large
from tests.server.rig import RunningServer, run_server

GOAL_MS = 1000.0
TABLES, FILES = 10_000, 100_000
LARGE_TABLE_PATH = "#/table/db/large"
PAGES = {
    f"{TABLES:,} tables": "#/tables",
    f"a table of {FILES:,} files": LARGE_TABLE_PATH,
    "its layout by a number": f"{LARGE_TABLE_PATH}/layout?column=customer_id",
    "its layout by a string": f"{LARGE_TABLE_PATH}/layout?column=country",
    "a plan of it": f"{LARGE_TABLE_PATH}/explain?where=customer_id+%3D+4711",
}
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("console", "How fast does the console show a page of a large catalog?", peer="there is none")
    visits = 1 if quick else 7
    async with run_server(folder, log_level="warning") as server, open_browser() as browser:
        await create_many_tables(server, 100 if quick else TABLES)
        await make_large(server, 1000 if quick else FILES)
        for case, address in PAGES.items():
            await _measure_visit(browser, server, address)  # Warms the caches of the server and the browser.
            samples = [await _measure_visit(browser, server, address) for _ in range(visits)]
            first_paints, complete_times = zip(*samples, strict=True)
            report.add(case, "first paint", "ms", {OURS: list(first_paints)}, _read_latency_ms, goal=GOAL_MS)
            report.add(case, "all data", "ms", {OURS: list(complete_times)}, _read_latency_ms)
    return report


async def _measure_visit(browser: Browser, server: RunningServer, address: str) -> tuple[Sample, Sample]:
    """Visit a page, and return the times until the first paint and until the last response."""
    async with open_page(browser, server.url) as page:
        started_s = time.perf_counter()
        await page.open(address)
        whole_ms = (time.perf_counter() - started_s) * 1000
        return Sample(latencies_ms=[await page.run(_PAINT)]), Sample(latencies_ms=[whole_ms])


def _read_latency_ms(sample: Sample) -> float:
    return sample.latencies_ms[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="make a short run that writes no results")
    run_benches({"console": run}, ["console"], quick=parser.parse_args().quick)


if __name__ == "__main__":
    main()
