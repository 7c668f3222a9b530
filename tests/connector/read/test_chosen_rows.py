"""Chosen rows of files equal the rows of a full scan, also if strings are read as dictionary codes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.parquet import coded_strings
from seamark.connector.read.chosen_rows import read_chosen
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import MERGE_ON_READ, delete
from seamark.formats.iceberg.expressions.expression import TRUE
from tests.connector.write.test_upserts import create_upsert_table
from tests.seeds import first_seed

ROWS, FILES = 12_000, 3
COLUMNS = {"id": "long", "few": "string", "own": "string", "mixed": "string", "raw": "binary", "price": "double"}
FIELDS = [
    {"id": number, "name": name, "required": False, "type": kind}
    for number, (name, kind) in enumerate(COLUMNS.items(), 1)
]
FIELDS.append(
    {
        "id": 20,
        "name": "few.s",
        "required": False,
        "type": {"type": "struct", "fields": [{"id": 21, "name": "few", "required": False, "type": "string"}]},
    }
)
PAGES = {"write.parquet.page-row-limit": "500", "write.parquet.dict-size-bytes": "2000"}


def make_rows(start: int, rng: random.Random) -> pa.Table:
    """Return rows with the ids from `start`.

    Column `few` has few different values, and `own` has a different value in each row.
    """
    ids = range(start, start + ROWS)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "few": pa.array([rng.choice([None, "", "zwölf", f"w{id_ % 9}"]) for id_ in ids]),
        "own": pa.array([f"{id_}-{rng.random()}" for id_ in ids]),
        # The dictionary of this column becomes full in the middle of the file, and the pages after that are plain.
        "mixed": pa.array([f"m{id_ % 7}" if id_ < start + ROWS // 2 else f"m{id_}" for id_ in ids]),
        "raw": pa.array([rng.choice([None, b"\x00\xff", b"r"]) for _ in ids], pa.binary()),
        "price": pa.array([id_ % 5 / 4 for id_ in ids]),
        "few.s": pa.array([{"few": f"s{id_ % 3}"} for id_ in ids], pa.struct([("few", pa.string())])),
    }
    return pa.table(columns)


@pytest.mark.slow
@pytest.mark.parametrize("all_strings_coded", [False, True])
def test_chosen_rows_equal_the_rows_of_a_scan(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch, all_strings_coded: bool
) -> None:
    seed = first_seed()
    source = random.Random(seed)
    create_upsert_table(client, fields=FIELDS, properties=PAGES)
    for number in range(FILES):
        append(client, "db.t", make_rows(number * ROWS, source))
    delete(client, "db.t", keys=pa.table({"id": source.sample(range(FILES * ROWS), 500)}), mode=MERGE_ON_READ)
    if all_strings_coded:
        monkeypatch.setattr(coded_strings, "_PLAIN_VALUE_MIN_BYTES", 1 << 20)
    coded_columns = _record_coded_columns(monkeypatch)
    opened_table = open_table(client, "db.t", At())
    tasks = list(plan(client, opened_table, TRUE))
    assert len(tasks) == FILES
    names = [*COLUMNS, "few.s"]
    read_plan = plan_read(opened_table, names, TRUE, positions=True)
    full_tables = [
        pa.Table.from_batches(batches)
        for batches in read_chosen(read_plan, opened_table.storage, [(task, np.arange(ROWS)) for task in tasks])
    ]
    assert not coded_columns, "a read of all rows decodes all strings"
    for share in (0.001, 0.1, 0.2):
        positions_by_task = [
            np.sort(np.array(source.sample(range(ROWS), int(ROWS * share)), dtype=np.int64)) for _ in tasks
        ]
        chosen_rows = read_chosen(read_plan, opened_table.storage, list(zip(tasks, positions_by_task, strict=True)))
        for rows, full_table, positions in zip(chosen_rows, full_tables, positions_by_task, strict=True):
            chosen_mask = np.isin(full_table.column(len(names)).to_numpy(), positions)
            actual = pa.Table.from_batches(rows, full_table.schema)
            assert actual.equals(full_table.filter(pa.array(chosen_mask))), f"seed {seed}: {share}"
    assert {name for names_of_group in coded_columns for name in names_of_group} >= {"few"}
    assert ("mixed" in {name for names_of_group in coded_columns for name in names_of_group}) == all_strings_coded


def _record_coded_columns(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list to which each read of a row group adds the columns that are read as codes."""
    select_columns: Callable[..., list[str]] = coded_strings.select_coded_columns
    coded_columns_by_group: list[list[str]] = []

    def select_and_record(*arguments: object) -> list[str]:
        coded_columns_by_group.append(select_columns(*arguments))
        return coded_columns_by_group[-1]

    monkeypatch.setattr("seamark.connector.read.file_rows.select_coded_columns", select_and_record)
    return coded_columns_by_group
