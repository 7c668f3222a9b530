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
    page_rows = 100
    monkeypatch.setattr(choosing, "PAGE_ROWS", page_rows)
    seed = first_seed()
    rng = random.Random(seed)
    create_upsert_table(client, fields=FIELDS)
    keys_by_file = [[rng.randrange(300) for _ in range(rng.randrange(200, 1500))] for _ in range(4)]
    for number, keys in enumerate(keys_by_file):
        ids = range(number, number + 4 * len(keys), 4)  # The ids of the four files differ.
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("k", pa.int64())])
        append(client, "db.t", pa.table({"id": ids, "k": keys}, schema))
    if is_indexed:
        client.put_index("db.t", "by_k", kind="bitmap", columns=["k"])
        with closing(InProcessWorkers()) as workers:
            build(client, "db.t", "by_k", workers)
    table = open_table(client, "db.t", CURRENT)
    for wanted_key in (rng.randrange(300) for _ in range(10)):
        row_count = estimate_remaining_rows(client, table, bind_filter(f"k = {wanted_key}", table))
        # planned: the rows of the planned files. touched: the rows of their pages with a matching row. chosen: the
        # matching rows, or all rows of a file without an index.
        expected = RemainingRows()
        for keys in keys_by_file:
            matching_rows = [row for row, key in enumerate(keys) if key == wanted_key]
            if is_indexed and matching_rows:
                pages = {row // page_rows for row in matching_rows}
                expected.planned += len(keys)
                expected.touched += min(len(keys), page_rows * len(pages))
                expected.chosen += len(matching_rows)
            # Without an index, only the bounds of a file can leave it out.
            elif not is_indexed and min(keys) <= wanted_key <= max(keys):
                expected.planned += len(keys)
                expected.touched += len(keys)
                expected.chosen += len(keys)
        assert row_count == expected, seed


def test_seamark_reader_is_chosen_if_it_skips_enough_pages() -> None:
    """`touched` is the number of rows in the pages that are read.

    With the fixed cost `BREAK_EVEN_ROWS`, it must be less than `BREAK_EVEN_FRACTION` of the planned rows.
    """
    many_rows = 100 * BREAK_EVEN_ROWS
    assert RemainingRows(planned=many_rows, touched=BREAK_EVEN_ROWS, chosen=1).suits_seamark
    assert RemainingRows(
        planned=many_rows, touched=int(BREAK_EVEN_FRACTION * many_rows) - BREAK_EVEN_ROWS - 1, chosen=1
    ).suits_seamark
    assert not RemainingRows(
        planned=many_rows, touched=int(BREAK_EVEN_FRACTION * many_rows) - BREAK_EVEN_ROWS, chosen=1
    ).suits_seamark
    assert not RemainingRows(planned=BREAK_EVEN_ROWS, touched=1, chosen=1).suits_seamark
    assert not RemainingRows().suits_seamark
