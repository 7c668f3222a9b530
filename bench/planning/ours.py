"""Seamark's planner in the process of the benchmark. Without HTTP, plans that take microseconds can be timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.planning.plans import KeptFiles, compute_fingerprint
from bench.planning.tables import GeneratedTable
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.plan.planner import Planner, open_planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.settings.settings import Settings


class OurPlanner:
    """A planner and the metadata of one table."""

    def __init__(self, planner: Planner, metadata: TableMetadata) -> None:
        self.planner, self.metadata = planner, metadata

    async def scan(self, expression: Any) -> tuple[float, ScanPlan]:
        """Plan a filter.

        Returns:
            The milliseconds from the JSON values of the filter to the rows that are kept, and the plan.
        """
        started_s = time.perf_counter()
        parsed_filter = TRUE if expression is True else parse_expression(expression)
        scan = await self.planner.bind_and_plan(self.metadata, ScanRequest(filter=parsed_filter))
        return (time.perf_counter() - started_s) * 1000, scan

    async def plan(self, expression: Any) -> KeptFiles:
        """Plan a filter like `scan`, and add the fingerprint of the answer, which is not timed."""
        elapsed_ms, scan = await self.scan(expression)
        paths, size = [], 0
        for row in scan.entry_ids.tolist():
            block, row_in_block = scan.view.locate(row)
            paths.append(block.get_raw("file_path", row_in_block) or b"")
            size += block.read_long("file_size_in_bytes", row_in_block) or 0
        return KeptFiles(elapsed_ms, len(paths), size, compute_fingerprint(paths))


@asynccontextmanager
async def open_our_planner(
    home: Path, table: GeneratedTable, *, disk: bool = False, memory_bytes: int | None = None
) -> AsyncIterator[OurPlanner]:
    """Open a planner for `table`.

    Args:
        disk: The planner also has a cache on the local disk below `home`, which remains after the block.
        memory_bytes: The memory budget of the planner; None means the default.
    """
    settings = Settings(home=home, warehouse=f"file://{table.folder}")
    if memory_bytes is not None:
        settings = dataclasses.replace(settings, plan_memory_bytes=memory_bytes)
    if not disk:
        settings = dataclasses.replace(settings, plan_disk_bytes=0)
    location = table.metadata_location
    metadata = decode_table(Path(location.removeprefix("file://")).read_bytes(), location)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects, open_planner(settings, objects, clock) as planner:
        yield OurPlanner(planner, metadata)
