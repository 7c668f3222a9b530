"""Files without field ids are indexed, planned and read by the table's name mapping, which changes."""

from __future__ import annotations

import datetime
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.audits import verify_sample
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.index.verification import VerificationResult
from seamark.connector.read.scans import scan
from seamark.connector.write.upserts import MODES, upsert
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.seeds import examples, first_seed, mark_fast

COLUMNS = ["id", "name", "note", "at"]
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("note", pa.string()), ("at", pa.timestamp("us"))])
INDEXES = {
    "by_id": {"kind": "bloom", "columns": ["id"], "fpp": 0.001},
    "by_name": {"kind": "bitmap", "columns": ["name"]},
    "by_note": {"kind": "bloom", "columns": ["lower(note)"], "fpp": 0.001},
    "by_key": {"kind": "record", "columns": ["id"]},
    "by_time": {"kind": "bloom", "columns": ["at"], "fpp": 0.001},
}
NAME_MAPPING = "schema.name-mapping.default"


@pytest.fixture
def catalog(server: ServerThread) -> Iterator[RestCatalog]:
    with open_catalog(server.url) as new_catalog:
        yield new_catalog


def draw_rows(rng: random.Random, count: int) -> pa.Table:
    # The values differ, so that an exchange of the columns is visible.
    names, notes = ["Ann", "ann", "Bob", None], ["x", "X", "y", None]
    first_time = datetime.datetime(1000, 1, 1)
    return pa.table(
        {
            "id": pa.array([rng.choice([None, *range(200)]) for _ in range(count)], pa.int64()),
            "name": pa.array([rng.choice(names) for _ in range(count)], pa.string()),
            "note": pa.array([rng.choice(notes) for _ in range(count)], pa.string()),
            "at": pa.array([first_time + datetime.timedelta(days=rng.randrange(900_000)) for _ in range(count)]),
        },
        schema=SCHEMA,
    )


def write_import_file(folder: Path, number: int, rows: pa.Table, names: dict[str, str], rng: random.Random) -> str:
    """Write a file without field ids, and return its URI.

    Its columns have the given names, in random order. Some files have INT96 timestamps.
    """
    order = rng.sample(COLUMNS, len(COLUMNS))
    renamed_rows = rows.select(order).rename_columns([names[column] for column in order])
    path = folder / f"{number}.parquet"
    pq.write_table(renamed_rows, path, use_deprecated_int96_timestamps=rng.random() < 0.5)
    return path.as_uri()


def add_file(table: Table, location: str, rows: int) -> None:
    """Add a file to the table without column bounds, because a later name mapping may contradict them.

    PyIceberg's `add_files` requires the table's column names.
    """
    size_bytes = Path(urlsplit(location).path).stat().st_size
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=rows,
        file_size_in_bytes=size_bytes,
        spec_id=0,
    )
    file.spec_id = 0
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def encode_mapping(names: dict[str, list[str]]) -> str:
    entries = [{"field-id": number, "names": names[column]} for number, column in enumerate(COLUMNS, 1)]
    return json.dumps(entries)


def check_verdict(verdict: VerificationResult) -> bool:
    assert not verdict.problems
    return True


def format_literal(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return f"'{value.isoformat()}'"
    return f"'{value}'" if isinstance(value, str) else str(value)


def draw_filter(rng: random.Random, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    """Return a filter on a random column, and a function that returns whether a row matches it.

    The filter compares the column with a value of the rows. In one case of five, it requires that the column is null.
    """
    column = rng.choice(["id", "name", "name", "note", "at"])
    values = [row[column] for row in rows if row[column] is not None] or [5 if column == "id" else "Ann"]
    value = rng.choice(values)
    if rng.random() < 0.2:
        return f"{column} IS NULL", lambda row: row[column] is None
    return f"{column} = {format_literal(value)}", lambda row: row[column] == value


@pytest.mark.parametrize("seed", mark_fast((first_seed() + number for number in range(4)), 1))
def test_readers_find_columns_by_the_current_name_mapping(
    server: ServerThread, catalog: RestCatalog, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "imported"
    folder.mkdir()
    table = catalog.create_table("db.t", schema=SCHEMA, properties={"write.metadata.metrics.default": "none"})
    with closing(IndexClient(server.url)) as client:
        for name, index in INDEXES.items():
            client.put_index("db.t", name, **index)
    # The rows of each file, and the names of its columns. The names are None if the file has field ids.
    files: list[tuple[list[dict[str, Any]], dict[str, str] | None]] = []
    mapped_columns: dict[str, list[str]] | None = None
    pruned_count = 0
    for step in range(examples(12, 8)):
        action = rng.choice(["import", "import", "append", "swap", "swap", "alias", "build", "build"])
        if action == "append":
            rows = draw_rows(rng, 30)
            table.append(rows)
            files.append((rows.to_pylist(), None))
        elif action == "import" or mapped_columns is None:
            rows = draw_rows(rng, 30)
            mapped_columns = mapped_columns or {column: [column] for column in COLUMNS}
            names = {column: rng.choice(mapped_columns[column]) for column in COLUMNS}
            location = write_import_file(folder, step, rows, names, rng)
            with table.transaction() as transaction:
                transaction.set_properties({NAME_MAPPING: encode_mapping(mapped_columns)})
            add_file(table, location, rows.num_rows)
            files.append((rows.to_pylist(), names))
        elif action == "swap":  # `name` then reads the column that was `note`, and `note` the column that was `name`.
            mapped_columns = {**mapped_columns, "name": mapped_columns["note"], "note": mapped_columns["name"]}
        elif action == "alias":
            mapped_columns = {column: [*names, f"{column}_{step}"] for column, names in mapped_columns.items()}
        if action == "build":
            with closing(IndexClient(server.url)) as client:
                for name in INDEXES:
                    report = build(client, "db.t", name, InProcessWorkers())
                    assert report.files_not_indexed == 0
                    verify_sample(
                        client,
                        "db.t",
                        name,
                        sample=9,
                        verified_locations=set(),
                        on_verdict=lambda verdict, _: check_verdict(verdict),
                    )
        with table.transaction() as transaction:
            if mapped_columns is not None:
                transaction.set_properties({NAME_MAPPING: encode_mapping(mapped_columns)})
        expected = [
            row if names is None else read_by_mapping(row, names, mapped_columns or {})
            for file_rows, names in files
            for row in file_rows
        ]
        if not expected:
            continue
        with closing(SeamarkClient(server.url)) as client, closing(IndexClient(server.url)) as indexes:
            for _ in range(6):
                where, matches = draw_filter(rng, expected)
                actual_rows = Counter(
                    tuple(row[column] for column in COLUMNS)
                    for batch in scan(client, "db.t", where=where)
                    for row in batch.to_pylist()
                )
                assert actual_rows == Counter(tuple(row[c] for c in COLUMNS) for row in expected if matches(row)), where
                explanation = indexes.explain("db.t", where)
                pruned_count += sum(index["files-removed"] for index in explanation.indexes)
    assert pruned_count > 0


def read_by_mapping(row: dict[str, Any], names: dict[str, str], mapped_columns: dict[str, list[str]]) -> dict[str, Any]:
    """Return a row of an imported file as readers see it. They find its columns by the current name mapping.

    Args:
        row: The values by column of the table.
        names: The name in the file of each column.
        mapped_columns: The names in files under which readers look for each column, in this order.
    """
    named_values = {names[column]: value for column, value in row.items()}
    return {
        column: next((named_values[name] for name in mapped_columns[column] if name in named_values), None)
        for column in COLUMNS
    }


def import_files(table: Table, folder: Path, parts: list[pa.Table]) -> None:
    """Import files as users do: PyIceberg sets the name mapping."""
    folder.mkdir()
    for number, rows in enumerate(parts):
        pq.write_table(rows, folder / f"{number}.parquet")
    table.add_files([(folder / f"{number}.parquet").as_uri() for number in range(len(parts))])


def make_rows(ids: list[int], name: str, note: str | None = None) -> pa.Table:
    timestamps = [datetime.datetime(2026, 1, 1)] * len(ids)
    return pa.table({"id": ids, "name": [name] * len(ids), "note": [note] * len(ids), "at": timestamps}, schema=SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_imported_rows_are_upserted(server: ServerThread, catalog: RestCatalog, tmp_path: Path, mode: str) -> None:
    table = catalog.create_table("db.t", schema=SCHEMA)
    parts = [make_rows([part + 20 * number for number in range(50)], "old") for part in range(20)]
    import_files(table, tmp_path / "imported", parts)
    with closing(IndexClient(server.url)) as indexes:
        indexes.put_index("db.t", "by_key", **INDEXES["by_key"])
        assert build(indexes, "db.t", "by_key", InProcessWorkers()).files_not_indexed == 0
    with closing(SeamarkClient(server.url)) as client:
        report = upsert(client, "db.t", make_rows([7, 27, 5000], "new"), keys=["id"], mode=mode)
    assert (report.updated, report.inserted) == (2, 1)
    rows = catalog.load_table("db.t").scan().to_arrow()
    assert Counter(rows["name"].to_pylist()) == {"old": 998, "new": 3}
    assert sorted(rows.filter(pc.equal(rows["name"], "new"))["id"].to_pylist()) == [7, 27, 5000]


def test_imported_dimension_prunes_the_facts(server: ServerThread, catalog: RestCatalog, tmp_path: Path) -> None:
    facts = catalog.create_table("db.facts", schema=SCHEMA)
    import_files(facts, tmp_path / "facts", [make_rows([part, part + 100], "fact") for part in range(10)])
    dimension = catalog.create_table(
        "db.dimension", schema=SCHEMA, properties={"write.metadata.metrics.default": "none"}
    )
    import_files(
        dimension, tmp_path / "dimension", [make_rows([3, 5], "few", "other"), make_rows([1, 2, 4], "other", "few")]
    )
    join = {"table": ["db", "dimension"], "on": {"id": "id"}, "predicate": "name = 'few'"}
    with closing(IndexClient(server.url)) as client:
        client.put_index("db.facts", "by_id", kind="bitmap", columns=["id"])
        assert build(client, "db.facts", "by_id", InProcessWorkers()).files_not_indexed == 0
        assert client.plan_table("db.facts", joins=[join]).files == 2
        swapped_mapping = {"id": ["id"], "name": ["note"], "note": ["name"], "at": ["at"]}
        with dimension.transaction() as transaction:
            transaction.set_properties({NAME_MAPPING: encode_mapping(swapped_mapping)})
        assert client.plan_table("db.facts", joins=[join]).files == 3
