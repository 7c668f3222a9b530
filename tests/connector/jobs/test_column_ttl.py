"""Tests that columns expire exactly in partitions that are completely old. The model has the time of each row."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
)
from pyiceberg.types import DateType, ListType, LongType, NestedField, StringType, TimestampType, TimestamptzType

from seamark.commands.main import cli
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_namespace_properties, change_table_properties
from seamark.connector.jobs.column_ttl import expire_columns
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import compact
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS, TIME_COLUMN, TtlPolicy
from seamark.metaserver.services.policy import check_policy
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.days import wait_for_day_with_seconds_left
from tests.seeds import first_seed

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
NOW = datetime(2026, 3, 15, 13, 37, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
UNITS = {"hour": HourTransform(), "day": DayTransform(), "month": MonthTransform(), "year": YearTransform()}
TIME_TYPES = {"date": (DateType(), pa.date32()), "timestamp": (TimestampType(), pa.timestamp("us"))}
TIME_TYPES["timestamptz"] = (TimestamptzType(), pa.timestamp("us", tz="UTC"))


@pytest.mark.parametrize(
    ("text", "ages_h"),
    [
        ("payload: 90 days", {"payload": 2160}),
        ("payload=90d, a.b = 2 w,c:1 year , d=12h", {"payload": 2160, "a.b": 336, "c": 8760, "d": 12}),
        ('"pay, ""load": 1d', {'pay, "load': 24}),
        ('{"payload": "90d", "x: y": "1 hour"}', {"payload": 2160, "x: y": 1}),
        ("", None),
    ],
)
def test_ttl_policy_is_parsed(text: str, ages_h: dict[str, int] | None) -> None:
    policy = TtlPolicy.from_properties({COLUMNS: text})
    assert ages_h == (None if policy is None else policy.ages_h)


@pytest.mark.parametrize(
    "text",
    ["payload", "payload: 0d", "payload: 9 moons", "a: 1d, a: 2d", "a: 1d,", ": 1d", "{", "{}", '{"a": 1}', "a: -1d"],
)
def test_invalid_ttl_policy_is_reported(text: str) -> None:
    assert "must list different columns" in str(check_policy({COLUMNS: text}))


def compute_partition_end(unit: str, time: datetime) -> datetime:
    """Return the exclusive end of the partition that contains the time."""
    start = time.replace(minute=0, second=0, microsecond=0)
    if unit == "hour":
        return start + timedelta(hours=1)
    start = start.replace(hour=0)
    if unit in ("day", "identity"):
        return start + timedelta(days=1)
    if unit == "month":
        # 32 days after the first day of a month, the next month has begun.
        return (start.replace(day=1) + timedelta(days=32)).replace(day=1)
    return start.replace(month=1, day=1, year=start.year + 1)


def create_table(server: ServerThread, kind: str, transform: Transform[Any, Any], **properties: str) -> pa.Schema:
    iceberg, arrow = TIME_TYPES[kind]
    schema = Schema(
        NestedField(1, "id", LongType(), required=False),
        NestedField(2, "at", iceberg, required=False),
        NestedField(3, "payload", StringType(), required=False),
        NestedField(4, "ext", StringType(), required=False),
        NestedField(5, "tags", ListType(6, StringType(), element_required=False), required=False),
        NestedField(7, "must", LongType(), required=True),
    )
    spec = PartitionSpec(PartitionField(2, 1000, transform, "at_part"))
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        options = {name.replace("_", "-"): value for name, value in properties.items()}
        catalog.create_table("db.t", schema, partition_spec=spec, properties=options)
    fields = [("id", pa.int64()), ("at", arrow), ("payload", pa.string()), ("ext", pa.string())]
    return pa.schema([*fields, ("tags", pa.list_(pa.string())), pa.field("must", pa.int64(), nullable=False)])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "unit"), [("date", "identity"), ("date", "month"), ("timestamp", "hour"), ("timestamptz", "day")]
)
def test_exactly_the_partitions_that_are_completely_old_lose_the_columns(
    client: IndexClient, server: ServerThread, kind: str, unit: str
) -> None:
    seed = first_seed()
    rng = random.Random(f"{seed} {kind} {unit}")
    arrow = create_table(server, kind, UNITS.get(unit, IdentityTransform()))
    span_h = {"hour": 12, "month": 24 * 400}.get(unit, 24 * 12)
    rows: dict[int, dict[str, Any]] = {}
    for first_id in (0, 30):
        new_rows = {}
        for number in range(first_id, first_id + 30):
            row_time = NOW - timedelta(hours=rng.randrange(span_h), minutes=rng.choice([0, 37, 38]))
            value: Any = (
                row_time.date()
                if kind == "date"
                else row_time
                if kind == "timestamptz"
                else row_time.replace(tzinfo=None)
            )
            new_rows[number] = {"id": number, "at": rng.choice([value, value, value, value, None]), "must": number}
            new_rows[number] |= {"payload": f"p{number}", "ext": rng.choice([None, "e"]), "tags": ["a", None]}
        append(client, "db.t", pa.Table.from_pylist(list(new_rows.values()), schema=arrow))
        rows |= new_rows
    ages_h = {"payload": span_h // 2, "tags": span_h // 2, "ext": span_h // 4}
    policy = ", ".join(f"{name}: {age}h" for name, age in ages_h.items())
    change_table_properties(client, "db.t", {COLUMNS: policy}, [])
    expected: dict[int, dict[str, Any]] = {}
    lost_count = 0
    for number, row in rows.items():
        expected[number] = dict(row)
        if row["at"] is None:
            continue
        row_time = row["at"]
        moment = (
            datetime(row_time.year, row_time.month, row_time.day, tzinfo=UTC)
            if type(row_time) is date
            else row_time.replace(tzinfo=UTC)
        )
        for name, age_h in ages_h.items():
            if compute_partition_end(unit, moment) <= NOW - timedelta(hours=age_h):
                expected[number][name] = None
                lost_count += 1
    assert 0 < lost_count < 3 * len(rows), seed
    dry_report = expire_columns(client, "db.t", dry_run=True, now_ms=NOW_MS)
    assert dry_report.files_before > 0
    assert dry_report.bytes_after < dry_report.bytes_before
    assert read_rows_by_id(client) == rows, seed
    report = expire_columns(client, "db.t", now_ms=NOW_MS)
    assert report.errors == []
    assert read_rows_by_id(client) == expected, seed
    assert expire_columns(client, "db.t", now_ms=NOW_MS).files_before == 0
    compact(client, "db.t")
    assert read_rows_by_id(client) == expected, seed
    # A plan uses the null counts of the new files, and may leave out only files whose values are all null.
    ids_with_payload = scan(client, "db.t", ["id"], "payload IS NOT NULL").to_arrow()["id"].to_pylist()
    assert sorted(ids_with_payload) == sorted(number for number, row in expected.items() if row["payload"] is not None)


def read_rows_by_id(client: IndexClient) -> dict[int, dict[str, Any]]:
    values = scan(client, "db.t", ["id", "at", "must", "payload", "ext", "tags"]).to_arrow().to_pylist()
    return {row["id"]: row for row in values}


@pytest.mark.slow
def test_health_counts_the_expired_columns_that_the_command_drops(client: IndexClient, server: ServerThread) -> None:
    arrow = create_table(server, "date", DayTransform())
    # The rows are 40, 30, 20 and 10 days old, so three of them are older than the 15 days of the policy. The server
    # uses the system clock.
    old_date = wait_for_day_with_seconds_left() - timedelta(days=40)
    rows = [
        {"id": n, "at": old_date + timedelta(days=10 * n), "payload": "x" * 50, "ext": None, "tags": None, "must": n}
        for n in range(4)
    ]
    append(client, "db.t", pa.Table.from_pylist(rows, schema=arrow))
    assert list_problems(client) == []
    change_namespace_properties(client, "db", {COLUMNS: "payload: 15 days"}, [])
    (problem,) = client.health("db.t")["problems"]
    assert problem["problem"] == "expired columns"
    assert problem["detail"].startswith("3 data files")
    environment = {"SEAMARK_URL": client.url}
    output = CliRunner().invoke(cli, ["run", "column-ttl", "db.t", "--dry-run"], env=environment)
    assert "3 files" in output.output
    result = CliRunner().invoke(cli, ["run", "column-ttl", "db.t"], env=environment)
    assert result.exit_code == 0, result.output
    assert list_problems(client) == []
    assert [row["payload"] for _, row in sorted(read_rows_by_id(client).items())] == [None, None, None, "x" * 50]


def list_problems(client: IndexClient) -> list[str]:
    return [problem["problem"] for problem in client.health("db.t")["problems"]]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, "No column of the table has a maximum age"),
        ({COLUMNS: "must: 1d"}, "is required"),
        ({COLUMNS: "at: 1d"}, "source of a partition field"),
        ({COLUMNS: "nothing: 1d"}, "There is no column"),
        ({COLUMNS: "payload: soon"}, "must list different columns"),
        ({COLUMNS: "payload: 1d", TIME_COLUMN: "id"}, "is not partitioned by its day"),
    ],
)
def test_ttl_policy_on_a_missing_or_unsuitable_column_is_refused(
    client: IndexClient, server: ServerThread, properties: dict[str, str], reason: str
) -> None:
    arrow = create_table(server, "date", DayTransform())
    row = {"id": 1, "at": date(2020, 1, 1), "payload": "p", "ext": "e", "tags": ["t"], "must": 1}
    append(client, "db.t", pa.Table.from_pylist([row], schema=arrow))
    change_table_properties(client, "db.t", properties, [])
    with pytest.raises(InvalidRequest, match=reason):
        expire_columns(client, "db.t")
    assert read_rows_by_id(client) == {1: row}
