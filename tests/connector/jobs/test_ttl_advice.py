"""Tests of advice on column TTLs: it names columns that neither plans nor scan reports read."""

from __future__ import annotations

import json
import random
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.transforms import DayTransform, MonthTransform

from seamark.commands.main import cli
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import advise_ttl
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import parse_statement
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import compact
from seamark.metaserver.api.admin import ttl_advice
from seamark.metaserver.catalog.column_usage import COLUMNS_MAX, ColumnRead, select_columns_of_read
from seamark.metaserver.store.model import ALL_AGES, EVERY_COLUMN, NAMED_COLUMNS
from seamark.metaserver.store.operations import AddColumnReads
from tests.connector.jobs.test_column_ttl import create_table
from tests.connector.server_thread import ServerThread
from tests.days import wait_for_day_with_seconds_left
from tests.seeds import first_seed

COLUMNS = {"id": 1, "at": 2, "payload": 3, "ext": 4, "tags": 5}


def append_rows_by_age(
    client: IndexClient, server: ServerThread, transform: Any, ages_d: range, kind: str = "date"
) -> date:
    """Append a row for each age in days, and return today's date."""
    arrow, today = create_table(server, kind, transform), wait_for_day_with_seconds_left()
    rows = []
    for number, age_d in enumerate(ages_d):
        day = today - timedelta(days=age_d)
        value = day if kind == "date" else datetime(day.year, day.month, day.day, 12)
        rows.append({"id": number, "at": value, "payload": "p" * 99, "ext": "e", "tags": ["t"], "must": number})
    append(client, "db.t", pa.Table.from_pylist(rows, schema=arrow))
    return today


def record_reads(
    client: IndexClient, server: ServerThread, *columns: int, days: int = 40, age_d: int = ALL_AGES
) -> None:
    """Record one read of each column `days` days ago, of partitions that were at most `age_d` days old."""
    entry = server.run(server.components.catalog.tables.load(("db",), "t")).entry
    today = server.components.catalog.column_usage.today
    # NAMED_COLUMNS counts reads that named their columns. The advice needs the share of these reads.
    reads = tuple((column, age_d, 1) for column in (*columns, NAMED_COLUMNS))
    server.run(server.components.store.transact([AddColumnReads(entry.uuid, today - days, reads)]))


def list_advised_ages(client: IndexClient, days: int = 30) -> dict[str, int]:
    return {advice["column"]: advice["older-than-days"] for advice in advise_ttl(client, "db.t", days)["advice"]}


def test_removal_of_a_column_is_advised_from_the_age_that_no_query_has_read(
    client: IndexClient, server: ServerThread
) -> None:
    """If no query reads a column in partitions from some age on, its values in these partitions can be removed.

    The advised age is the lowest of 7, 30 and 365 days that no query has read. A column gets no advice if queries have
    read all ages.
    """
    today = append_rows_by_age(client, server, DayTransform(), range(0, 400, 10))
    record_reads(client, server, 1)
    assert list_advised_ages(client) == {"id": 7, "payload": 7, "ext": 7, "tags": 7}
    # The query reads the partitions of the last 35 days; the oldest of them ended 29 days ago.
    recent = f"at >= DATE '{today - timedelta(days=35)}'"
    scan(client, "db.t", ["payload"], recent).to_arrow()
    assert list_advised_ages(client) == {"id": 7, "payload": 30, "ext": 7, "tags": 7}
    scan(client, "db.t", ["id"], f"ext = 'e' AND at >= DATE '{today - timedelta(days=205)}'").to_arrow()
    assert list_advised_ages(client) == {"id": 365, "payload": 30, "ext": 365, "tags": 7}
    scan(client, "db.t", ["tags"]).to_arrow()
    assert list_advised_ages(client) == {"id": 365, "payload": 30, "ext": 365}
    compact(client, "db.t")  # The reads of a job do not count as reads of a query.
    actual = advise_ttl(client, "db.t")
    assert (actual["reads"], actual["reads-with-columns"], actual["confidence"]) == (4, 4, 1.0)
    payload = next(advice for advice in actual["advice"] if advice["column"] == "payload")
    # The partitions are 0 to 390 days old. Of these 40 partitions, 36 are more than 30 days old.
    assert payload["partitions"] == payload["files"] == 36
    environment = {"SEAMARK_URL": client.url}
    output = CliRunner().invoke(cli, ["advise", "ttl", "db.t"], env=environment)
    assert output.exit_code == 0, output.output
    assert payload["statement"] in " ".join(output.output.split())
    statement = parse_statement(payload["statement"])
    assert statement is not None
    report = run_statement(client, statement, utc=True)
    assert report.files_before == 36
    rows = scan(client, "db.t", ["at"], "payload IS NOT NULL").to_arrow()["at"].to_pylist()
    assert min(rows) == today - timedelta(days=30)
    assert "payload" not in list_advised_ages(client)


@pytest.mark.slow
def test_random_reads_prevent_advice_for_their_columns_and_ages(client: IndexClient, server: ServerThread) -> None:
    seed = first_seed()
    rng = random.Random(seed)
    kind = rng.choice(["date", "timestamp"])
    today = append_rows_by_age(client, server, rng.choice([DayTransform(), MonthTransform()]), range(0, 900, 30), kind)
    record_reads(client, server, 1, age_d=0)
    read_dates: dict[str, date] = {}
    for _ in range(12):
        oldest_day = today - timedelta(days=rng.randrange(900))
        columns = rng.sample(list(COLUMNS), rng.randint(1, 2))
        literal = f"DATE '{oldest_day}'" if kind == "date" else f"TIMESTAMP '{oldest_day} 00:00:00'"
        scan(client, "db.t", columns, f"at >= {literal}").to_arrow()
        for column in columns:
            read_dates[column] = min(oldest_day, read_dates.get(column, oldest_day))
        for column, age_d in list_advised_ages(client).items():
            oldest_read = read_dates.get(column)
            # A partition can begin up to 31 days before the day that the query names.
            assert oldest_read is None or oldest_read > today - timedelta(days=age_d) - timedelta(days=31), (
                seed,
                column,
            )
    for advice in advise_ttl(client, "db.t")["advice"]:
        statement = parse_statement(advice["statement"])
        assert statement is not None
        run_statement(client, statement, utc=True)
        times_without_value = set(
            scan(client, "db.t", ["at"], f"{advice['column']} IS NULL").to_arrow()["at"].to_pylist()
        )
        lost_days = {value if kind == "date" else value.date() for value in times_without_value}
        assert all(advice["column"] not in read_dates or day < read_dates[advice["column"]] for day in lost_days), (
            seed,
            advice,
        )


def test_scan_reports_count_as_reads_and_lower_the_confidence_if_they_name_no_columns(
    client: IndexClient, server: ServerThread
) -> None:
    append_rows_by_age(client, server, DayTransform(), range(0, 100, 10))
    record_reads(client, server, 1)

    def report_scan(**fields: Any) -> None:
        body = {
            "report-type": "scan-report",
            "table-name": "db.t",
            "snapshot-id": 1,
            "filter": True,
            "schema-id": 0,
            "projected-field-ids": [],
            "projected-field-names": [],
            "metrics": {},
            **fields,
        }
        client._request("POST", "/v1/namespaces/db/tables/t/metrics", {}, json.dumps(body).encode())

    spark_fields = {"metadata": {"engine-name": "spark"}}
    report_scan(**spark_fields, **{"projected-field-ids": [3], "projected-field-names": ["payload"]})
    assert list_advised_ages(client) == {"id": 7, "ext": 7, "tags": 7}
    sanitized_filter = {"type": "eq", "term": "ext", "value": "(hash-12345678)"}
    report_scan(**spark_fields, filter=sanitized_filter, **{"projected-field-ids": [1]})
    assert list_advised_ages(client) == {"tags": 7}
    assert advise_ttl(client, "db.t")["confidence"] == 1.0
    report_scan(**{"projected-field-ids": [1, 2, 3, 4, 5, 6]})  # Some engines always name all columns.
    report_scan(**{"projected-field-ids": ["x"], "filter": {"type": "no"}})
    actual = advise_ttl(client, "db.t")
    # The last two of the five reports do not show which columns were read.
    assert (actual["reads"], actual["reads-with-columns"], actual["confidence"]) == (5, 3, 0.6)
    assert list_advised_ages(client) == {"tags": 7}
    report_scan(**spark_fields, **{"projected-field-ids": [1, 2, 3, 4, 5, 6]})
    assert list_advised_ages(client) == {}


def test_missing_advice_has_a_reason(client: IndexClient, server: ServerThread) -> None:
    append_rows_by_age(client, server, DayTransform(), range(0, 100, 10))
    assert "has not seen a read" in advise_ttl(client, "db.t")["reason"]
    scan(client, "db.t", ["id"]).to_arrow()
    assert "for 0 days" in advise_ttl(client, "db.t")["reason"]
    with pytest.raises(InvalidRequest, match="unread-days"):
        advise_ttl(client, "db.t", 0)


def test_counters_are_limited_and_further_reads_count_for_every_column(
    client: IndexClient, server: ServerThread
) -> None:
    append_rows_by_age(client, server, DayTransform(), range(0, 100, 10))
    usage = server.components.catalog.column_usage
    uuid = server.run(server.components.catalog.tables.load(("db",), "t")).entry.uuid
    usage._limit = 6
    for number in range(5):
        for _ in range(2):
            usage.add(ColumnRead(uuid, select_columns_of_read((number + 1,)), 0), "rita")
    usage.add(ColumnRead(uuid, select_columns_of_read((7,)), 0), "ron")
    usage.add(ColumnRead("of no table", select_columns_of_read((1,)), 0), "ron")
    usage.add(ColumnRead("of a table that the database refuses", select_columns_of_read((1 << 63,)), 0), "ron")
    assert len(usage._counts) == 7
    actual = server.run(usage.flush_and_list_table_reads(uuid))
    # Rita has half of the limit. Her four reads of the columns 4 and 5 count as reads of every column, in partitions of
    # every age. All 11 reads of both users name their columns.
    assert {(count.column_id, count.oldest_age_d): count.reads for count in actual} == {
        (1, 0): 2,
        (2, 0): 2,
        (3, 0): 2,
        (7, 0): 1,
        (EVERY_COLUMN, ALL_AGES): 4,
        (NAMED_COLUMNS, ALL_AGES): 11,
    }
    assert select_columns_of_read(range(1, COLUMNS_MAX + 2)) == {EVERY_COLUMN}
    usage._limit = 20
    for number in range(3):  # A read of 100 columns counts as much as seven reads of few columns.
        usage.add(ColumnRead(uuid, select_columns_of_read(range(1000 * number + 1, 1000 * number + 101)), 0), "rita")
    assert [EVERY_COLUMN in read.columns for read in usage._counts] == [False, True]


@pytest.mark.parametrize(
    ("name", "identifier"), [("day", "day"), ("not", '"not"'), ("case", '"case"'), ("a b", '"a b"'), ('x"y', '"x""y"')]
)
def test_reserved_words_are_quoted_in_proposed_statements(name: str, identifier: str) -> None:
    assert ttl_advice._quote_identifier(name) == identifier
