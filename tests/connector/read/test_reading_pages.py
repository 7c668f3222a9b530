"""Scans that need few rows read only the pages that contain them, and return the right rows."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.read_plan import FILE, POSITION
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import COPY_ON_WRITE, MERGE_ON_READ, delete, upsert
from tests.connector.write.test_upserts import create_upsert_table
from tests.seeds import first_seed, mark_fast

ROWS = 60_000
FIELDS = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "word", "required": False, "type": "string"},
    {"id": 3, "name": "price", "required": False, "type": "double"},
    {
        "id": 4,
        "name": "tags",
        "required": False,
        "type": {"type": "list", "element-id": 5, "element": "string", "element-required": False},
    },
]
PAGES = {"write.parquet.page-row-limit": "1000", "write.parquet.row-group-size-bytes": str(1 << 20)}
Row = tuple[str | None, float | None]


def list_model_rows(model: dict[int, Row], ids: list[int]) -> list[dict[str, Any]]:
    return [{"id": id_, "word": model[id_][0], "price": model[id_][1]} for id_ in ids]


def make_rows(model: dict[int, Row]) -> pa.Table:
    columns = {"id": list(model), "word": [row[0] for row in model.values()]}
    columns |= {"price": [row[1] for row in model.values()]}
    return pa.table(columns, pa.schema([("id", pa.int64()), ("word", pa.string()), ("price", pa.float64())]))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", [MERGE_ON_READ, COPY_ON_WRITE])
@pytest.mark.parametrize("bitmaps", mark_fast([True, False], 1))
def test_few_rows_of_a_table_with_deletes_are_read_by_pages(client: IndexClient, mode: str, bitmaps: bool) -> None:
    seed = first_seed()
    source = random.Random(seed)
    create_upsert_table(client, fields=FIELDS, properties=PAGES)
    ids = list(range(ROWS))
    source.shuffle(ids)
    model: dict[int, Row] = {
        id_: (source.choice([None, f"w{id_ % 70}"]), source.choice([None, source.random()])) for id_ in ids
    }
    append(client, "db.t", make_rows(model))
    removed_ids = source.sample(ids, 300)
    delete(client, "db.t", keys=pa.table({"id": pa.array(removed_ids, pa.int64())}), mode=mode)
    for removed_id in removed_ids:
        del model[removed_id]
    changed_rows = dict.fromkeys(source.sample(sorted(model), 200), ("new", -1.0))
    upsert(client, "db.t", make_rows(changed_rows), keys=["id"], mode=mode)
    model |= changed_rows
    if bitmaps:
        client.put_index("db.t", "by_id", kind="bitmap", columns=["id"])
        with closing(InProcessWorkers()) as workers:
            build(client, "db.t", "by_id", workers)
    page_reads = 0
    for _ in range(12):
        wanted_ids = source.sample(range(ROWS), source.choice((1, 3, 8))) + removed_ids[:2] + list(changed_rows)[:1]
        where = f"id IN ({', '.join(map(str, wanted_ids))})"
        actual_rows = scan(client, "db.t", ["price", "id", "word"], where)
        rows = sorted(actual_rows.to_arrow().select(["id", "word", "price"]).to_pylist(), key=lambda row: row["id"])
        assert rows == list_model_rows(model, sorted({number for number in wanted_ids if number in model})), (
            f"seed {seed}: {where}"
        )
        page_reads += actual_rows.counts.row_groups_by_pages
    assert page_reads > 5, f"seed {seed}"
    changed_id = next(iter(changed_rows))
    found_rows = scan(client, "db.t", ["word", FILE, POSITION], f"id = {changed_id}").to_arrow()
    ids_by_position = {
        (row[FILE], row[POSITION]): row["id"]
        for row in scan(client, "db.t", ["id", FILE, POSITION]).to_arrow().to_pylist()
    }
    assert [ids_by_position[row[FILE], row[POSITION]] for row in found_rows.to_pylist()] == [changed_id]
