"""A table of many small data files, in which a query finds a row by its key.

Each row has its number in four columns. In `in_record`, `in_bloom` and `in_bitmap`, every file spans nearly all values,
so that statistics exclude no file. Each of these columns has an index of the kind in its name. `in_order` increases
from file to file. A commit adds a thousand files in one manifest.

Each run writes the files again with Seamark's writer, into a folder in memory if the system has one. Readers would find
the files in the page cache in any case, and syncing ten thousand files to a disk would take longer than all
measurements.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa

from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import open_destination
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from tests.services.seamark import Seamark

NAMESPACE, TABLE, ONE_FILE_TABLE = "bench", "points", "one"
"""`ONE_FILE_TABLE` is a table with the rows of the first file only."""
ROWS = 100
"""The number of rows in each file."""
FILES_PER_COMMIT = 1000
INDEX_KIND_BY_COLUMN = {"in_record": "record", "in_bloom": "bloom", "in_bitmap": "bitmap"}
ORDERED_COLUMN = "in_order"
FPP = 1e-6
"""The false positive rate, so low that none of 10,000 files is a false positive."""
_FIELDS = {
    **dict.fromkeys((*INDEX_KIND_BY_COLUMN, ORDERED_COLUMN), "long"),
    "city": "string",
    "price": "double",
    "note": "string",
}
_ARROW = {"long": pa.int64(), "string": pa.string(), "double": pa.float64()}
_PRIME_BY_COLUMN = dict(zip(INDEX_KIND_BY_COLUMN, (7_368_787, 5_915_587, 8_460_769), strict=True))
"""Primes. Their multiples, modulo the number of rows, take each value exactly once."""


def compute_key(column: str, number: int, files: int) -> int:
    """Return the value of a column in row `number`. The values of all rows are different.

    Multiples of a prime that does not divide the number of rows, modulo that number, are a permutation of the row
    numbers.
    """
    return number if column == ORDERED_COLUMN else number * _PRIME_BY_COLUMN[column] % (files * ROWS)


def build_rows(file: int, files: int) -> pa.RecordBatch:
    """Return the rows of data file number `file`, of `files` files.

    An indexed column has the multiples of a prime, modulo the number of all rows, so its values are a permutation of
    the row numbers.
    """
    numbers = np.arange(file * ROWS, (file + 1) * ROWS)
    columns = {column: pa.array(numbers * step % (files * ROWS)) for column, step in _PRIME_BY_COLUMN.items()}
    other_columns = [
        [f"CITY OF {number % 250:03d}" for number in numbers],
        numbers / 100,
        [f"Note about {number}" for number in numbers],
    ]
    schema = pa.schema([pa.field(name, _ARROW[kind]) for name, kind in _FIELDS.items()])
    return pa.RecordBatch.from_arrays(
        [*columns.values(), pa.array(numbers), *map(pa.array, other_columns)], schema=schema
    )


@contextmanager
def run_server_with_points(files: int, home: Path) -> Iterator[Seamark]:
    """Run a server, fill the table for lookups of single rows with `files` data files, and yield the server."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="seamark-bench-", dir=memory if memory.is_dir() else None) as folder:
        env = {"SEAMARK_LOG_LEVEL": "warning"}
        with Seamark(home, warehouse=f"file://{folder}", env=env) as server:
            _fill_table(server, files)
            yield server


def _fill_table(server: Seamark, files: int) -> None:
    """Create the table for lookups, with indexes and `files` data files, and a table with only the first file."""
    with closing(IndexClient(server.base_url)) as client:
        client._request("POST", "/v1/namespaces", {}, json.dumps({"namespace": [NAMESPACE]}).encode())
        for table in (TABLE, ONE_FILE_TABLE):
            _create_table(client, table)
        destination = open_destination(client, (NAMESPACE, ONE_FILE_TABLE))
        destination.commit(client, write_batches(destination.target, [build_rows(0, files)]))
        for column, kind in INDEX_KIND_BY_COLUMN.items():
            fpp = FPP if kind == "bloom" else None
            client.put_index((NAMESPACE, TABLE), column, kind=kind, columns=[column], fpp=fpp)
        destination = open_destination(client, (NAMESPACE, TABLE))
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            starts = range(0, files, FILES_PER_COMMIT)
            for written_files in pool.map(partial(_write_files, destination.target, files), starts):
                destination.commit(client, written_files)


def _create_table(client: IndexClient, table: str) -> None:
    fields = [
        {"id": number, "name": name, "required": False, "type": kind}
        for number, (name, kind) in enumerate(_FIELDS.items(), 1)
    ]
    # Each batch is larger than the target size, so it becomes one file.
    body = {"name": table, "schema": {"type": "struct", "fields": fields}, "properties": {TARGET_FILE_BYTES: "2000"}}
    client._request("POST", f"/v1/namespaces/{NAMESPACE}/tables", {}, json.dumps(body).encode())


def _write_files(target: WriteTarget, files: int, start: int) -> WrittenFiles:
    return write_batches(
        target, (build_rows(number, files) for number in range(start, min(start + FILES_PER_COMMIT, files)))
    )
