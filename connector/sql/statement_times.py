"""Measures the time of a statement, and reports it for the query history.

The advisor predicts seconds from the reported times. If a report fails, it is dropped, so that the statement succeeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from seamark.connector.client.policies import report_statement_time
from seamark.connector.plans.async_client import Name
from seamark.connector.sql.reads import PlannedTableRead

_SECONDS_MIN = 1e-6
_log = logging.getLogger(__name__)


def measure_time(
    batches: Iterable[pa.RecordBatch], started_s: float, report: Callable[[float], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and report the time of the engine after the last batch.

    The time that the caller takes between two batches is not included. If the result is closed early, nothing is
    reported.

    Args:
        batches: The batches of the engine.
        started_s: The time of `time.perf_counter` when the engine began.
        report: A function that is called with the time that the engine took, in seconds.
    """
    iterator, seconds = iter(batches), time.perf_counter() - started_s
    while True:
        wait_started_s = time.perf_counter()
        batch = next(iterator, None)
        seconds += time.perf_counter() - wait_started_s
        if batch is None:
            break
        yield batch
    report(max(seconds, _SECONDS_MIN))


def report_times(
    client: SeamarkClient, reads: Sequence[PlannedTableRead], seconds: float, *, reports_run: bool
) -> None:
    """Report the time of a statement for each table that the statement read and whose reads the query history counts.

    The run is reported only once, with the first table that can be reported. An error is only logged, because the
    statement has succeeded.

    Args:
        client: The client of the catalog.
        reads: The reads of the statement.
        seconds: The time that the engine took.
        reports_run: Whether to report the run of the statement with all its tables for OpenLineage, a lineage service.
    """
    run_tables: Sequence[Name] = [table_read.named.name for table_read in reads] if reports_run else ()
    for table_read in reads:
        if table_read.statement:
            try:
                report_statement_time(
                    client,
                    table_read.named.name,
                    table_read.statement,
                    seconds=seconds,
                    files=len(table_read.tasks),
                    size_bytes=table_read.bytes,
                    run_tables=run_tables,
                )
                run_tables = ()
            except (ClientError, OSError) as error:
                _log.debug("the time of a statement is not reported: %s", error)
