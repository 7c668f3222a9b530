"""The choice of a reader in Spark.

The row counts equal those of the table, and Seamark leaves small and scattered reads to Iceberg's reader.
"""

from __future__ import annotations

import random
from contextlib import closing

import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.scans import bind_filter
from seamark.connector.read.tables import open_table
from seamark.connector.spark import reader_choice as choosing
from seamark.connector.spark.reader_choice import (
    BREAK_EVEN_FRACTION,
    BREAK_EVEN_ROWS,
    RemainingRows,
    estimate_remaining_rows,
)
from seamark.connector.write.appends import append
from tests.connector.write.test_upserts import create_upsert_table
from tests.seeds import first_seed

FIELDS = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "k", "required": False, "type": "long"},
]


@pytest.mark.parametrize("is_indexed", [True, False])
def test_row_counts_from_pages_and_indexes_equal_the_row_counts_of_the_files(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch, is_indexed: bool
) -> None:
    monkeypatch.setattr(choosing, "PAGE_ROWS", 100)
    seed = first_seed()
    source = random.Random(seed)
    create_upsert_table(client, fields=FIELDS)
    files = [[source.randrange(300) for _ in range(source.randrange(200, 1500))] for _ in range(4)]
    for number, keys in enumerate(files):
        ids = [number + 4 * place for place in range(len(keys))]
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("k", pa.int64())])
        append(client, "db.t", pa.table({"id": ids, "k": keys}, schema))
    if is_indexed:
        client.put_index("db.t", "by_k", kind="bitmap", columns=["k"])
        with closing(InProcessWorkers()) as workers:
            build(client, "db.t", "by_k", workers)
    table = open_table(client, "db.t", CURRENT)
    for request in (source.randrange(300) for _ in range(10)):
        row_count = estimate_remaining_rows(client, table, bind_filter(f"k = {request}", table))
        expected = RemainingRows()
        for keys in files:
            places = [place for place, key in enumerate(keys) if key == request]
            if is_indexed and places:
                pages = {place // 100 for place in places}
                expected.planned += len(keys)
                expected.touched += min(len(keys), 100 * len(pages))
                expected.chosen += len(places)
            elif not is_indexed and min(keys) <= request <= max(keys):
                expected.planned += len(keys)
                expected.touched += len(keys)
                expected.chosen += len(keys)
        assert row_count == expected, seed


def test_seamark_reader_is_chosen_if_it_skips_enough_pages() -> None:
    large_rows = 100 * BREAK_EVEN_ROWS
    assert RemainingRows(planned=large_rows, touched=BREAK_EVEN_ROWS, chosen=1).suits_seamark
    assert RemainingRows(
        planned=large_rows, touched=int(BREAK_EVEN_FRACTION * large_rows) - BREAK_EVEN_ROWS - 1, chosen=1
    ).suits_seamark
    assert not RemainingRows(
        planned=large_rows, touched=int(BREAK_EVEN_FRACTION * large_rows) - BREAK_EVEN_ROWS, chosen=1
    ).suits_seamark
    assert not RemainingRows(planned=BREAK_EVEN_ROWS, touched=1, chosen=1).suits_seamark
    assert not RemainingRows().suits_seamark
