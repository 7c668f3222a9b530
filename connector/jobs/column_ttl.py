"""Removes the values of expired columns, by the policy of a table (`formats/iceberg/metadata/column_ttl.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.policies import read_effective_properties
from seamark.connector.client.values import At
from seamark.connector.jobs.file_merges import drop_columns
from seamark.connector.read.tables import open_table
from seamark.connector.write.replacements import RewriteReport
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS, TtlPolicy
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.runtime import errors


def expire_columns(
    client: SeamarkClient, table: Name, *, dry_run: bool = False, now_ms: int | None = None
) -> RewriteReport:
    """Remove the columns that have expired by now.

    A partition with expired rows does not change until all of its rows have expired.

    Args:
        client: A client of the server.
        table: The table.
        dry_run: Whether to report the files that would be rewritten and an estimate of the size of the new files, and
            commit nothing.
        now_ms: The time at which the ages of columns are compared, in milliseconds since the epoch. None means the
            time of the clock.

    Raises:
        InvalidRequest: The table has no policy or an invalid policy, or a column cannot be dropped (`drop_columns`).
        Unreadable: A file cannot be read.
    """
    source_table = open_table(client, table, At(ref=MAIN))
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    try:
        policy = TtlPolicy.from_properties(
            {**read_effective_properties(client, table), **source_table.metadata.properties}
        )
        rules = [] if policy is None else policy.list_rules(source_table.metadata, now_ms)
    except errors.BadRequest as error:
        raise InvalidRequest(error.message) from None
    if policy is None:
        raise InvalidRequest(
            f"No column of the table has a maximum age; set the property {COLUMNS}, for example to 'payload: 90 days'"
        )
    return _sum_reports(
        drop_columns(client, table, rule.columns, where=rule.where, dry_run=dry_run, whole_partitions=True)
        for rule in rules
    )


def _sum_reports(reports: Iterable[RewriteReport]) -> RewriteReport:
    total = RewriteReport()
    for report in reports:
        for field in fields(RewriteReport):
            value = getattr(report, field.name)
            total_value = getattr(total, field.name)
            if isinstance(value, dict):
                for reason, count in value.items():
                    total_value[reason] = total_value.get(reason, 0) + count
            else:
                setattr(total, field.name, total_value + value)
    return total
