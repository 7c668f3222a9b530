"""A row group that statistics rule out contains no row that matches the filter."""

from __future__ import annotations

import io
import random
from datetime import date, datetime, timedelta

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.parquet.row_groups import RowGroups
from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types import schema as iceberg
from tests.planner.lakes.schemas import Field, Schema
from tests.seeds import first_seed

KINDS = {"id": "long", "d": "date", "ts": "timestamp", "name": "string", "x": "double"}
FIELDS = tuple(Field(number, name, False, kind) for number, (name, kind) in enumerate(KINDS.items(), 1))
SCHEMA = msgspec.convert(Schema(0, FIELDS).build_json(), type=iceberg.Schema)
ARROW = {
    "id": pa.int64(),
    "d": pa.date32(),
    "ts": pa.timestamp("us"),
    "name": pa.string(),
    "x": pa.float64(),
}
GROUP_ROWS = 5


def draw_rows(rng: random.Random) -> pa.Table:
    """Return 60 rows that are sorted by all columns, so that row groups have narrow ranges.

    Some values are null, and every ninth float is NaN.
    """
    # The steps of 7 days, 31 hours and 1/4 give neighbouring rows different values of all columns.
    start = rng.randint(0, 900)
    rows = [
        {
            "id": number - 100,
            "d": date(2018, 12, 1) + timedelta(days=7 * number),
            "ts": datetime(2018, 12, 30, 23) + timedelta(hours=31 * number),
            "name": f"n{number:04}",
            "x": number / 4 if number % 9 else float("nan"),
        }
        for number in range(start, start + 60)
    ]
    for row in rows:
        for name in row:
            if rng.random() < 0.05:
                row[name] = None
    fields = [pa.field(field.name, ARROW[field.name], metadata={"PARQUET:field_id": str(field.id)}) for field in FIELDS]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


def draw_filter(rng: random.Random, rows: pa.Table, depth: int = 2) -> str:
    if depth and rng.random() < 0.7:
        connective = rng.choice(("AND", "AND", "OR"))
        return f"({draw_filter(rng, rows, depth - 1)} {connective} {draw_filter(rng, rows, depth - 1)})"
    row = rng.choice(rows.to_pylist())
    op = rng.choice(("=", "<", "<=", ">", ">=", "<>"))
    day, moment = row["d"] or date(2020, 1, 1), row["ts"] or datetime(2020, 1, 1)
    return rng.choice(
        (
            f"id {op} {row['id'] or 0}",
            f"bucket(4, id) = {rng.randint(0, 3)}",
            f"d {op} DATE '{day}'",
            f"year(d) {op} {day.year}",
            f"months(d) = {12 * (day.year - 1970) + day.month - 1}",
            f"ts {op} TIMESTAMP '{moment}'",
            f"CAST(ts AS date) {op} DATE '{moment.date()}'",
            f"year(ts) = {moment.year}",
            f"name {op} '{row['name'] or ''}'",
            f"name LIKE '{(row['name'] or 'n')[:3]}%'",
            f"truncate(2, name) = '{(row['name'] or 'n')[:2]}'",
            f"x {op} {0.0 if row['x'] is None or row['x'] != row['x'] else row['x']}",
            f"{rng.choice(list(KINDS))} IS {rng.choice(('', 'NOT '))}NULL",
        )
    )


def test_row_groups_with_matching_rows_are_read() -> None:
    seed = first_seed()
    omitted_count = 0
    for number in range(200):
        rng = random.Random(f"{seed}/{number}")
        rows = draw_rows(rng)
        text = draw_filter(rng, rows)
        where = bind(parse_sql(text, SCHEMA, nan_above=True).expression, SCHEMA, (), case_sensitive=True)
        columns = {field.id: rows.column(field.name).combine_chunks() for field in FIELDS}
        matches = evaluate_filter(where, columns, len(rows))
        out = io.BytesIO()
        pq.write_table(rows, out, row_group_size=GROUP_ROWS)
        file = pq.read_metadata(pa.BufferReader(out.getvalue()))
        groups = RowGroups(file, rows.schema, where)
        for group in range(file.num_row_groups):
            group_matches = matches[group * GROUP_ROWS : (group + 1) * GROUP_ROWS]
            may_match = groups.may_match(group)
            assert may_match or not group_matches.any(), f"seed {seed}/{number}: group {group} of {text}"
            omitted_count += not may_match
    assert omitted_count > 500
