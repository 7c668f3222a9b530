"""The tables of the benchmarks, the batches that writers write, and the rows that a table must have afterwards.

A row has ten columns. Its number identifies it. The key is a UUID as text that is computed from the number, so keys are
in no order, and the keys of a batch can be drawn again without storing them. `version` is 0 in a new table, and
the number of the batch in rows of a batch. So the expected number of rows of each version is known without reading
rows.

A base table is in `.cache/bench/writing`, once for each number of rows and layout. Seamark's writer writes it, and only
clones read it. A clone is a separate table whose first snapshot has the base's data files. Neither Iceberg nor Seamark
deletes these files automatically, because the clones set `gc.enabled` to false.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.client.client import SeamarkClient
from seamark.connector.write.appends import open_destination
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.connector.write.target import WriteTarget
from tests.services.process import CACHE
from tests.services.seamark import Seamark

FORMAT = 1
"""The version of the rows and files. It must increase when they change, so that stored bases are replaced."""
BASES = CACHE / "bench" / "writing"
NAMESPACE = "bench"
FILES = BUCKETS = 16
FLAT, BUCKETED = "flat", "bucketed"
BATCH_ROWS = 10_000
UPDATED_FRACTION = 0.9
"""The fraction of a batch with keys that the base has. The other keys are new."""
KEY = "k"
COLUMNS = {
    KEY: "string",
    "version": "long",
    "customer": "int",
    "city": "string",
    "status": "string",
    "quantity": "int",
    "discount": "int",
    "price": "double",
    "tax": "double",
    "note": "string",
}
ARROW = {"string": pa.string(), "long": pa.int64(), "int": pa.int32(), "double": pa.float64()}
_CHUNK_ROWS = 1 << 18
_HEX = np.frombuffer("".join(f"{number:02x}" for number in range(256)).encode(), dtype="S2")
_DASHES = (8, 13, 18, 23)
_CITIES = pa.array([f"CITY OF {number:03d}" for number in range(250)])
_STATES = pa.array(["ordered", "paid", "packed", "sent", "returned"])
_NOTES = pa.array([f"Customer#{number:09d}" for number in range(30_000)])

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")


# Rows


def make_uuid_texts(numbers: Numbers) -> pa.Array:
    """Return the UUID of each row number as text."""
    halves = np.stack([_mix_bits(numbers, 1), _mix_bits(numbers, 2)], axis=1).astype(">u8")
    digits = _HEX[halves.view(np.uint8).reshape(len(numbers), 16)].view(np.uint8).reshape(len(numbers), 32)
    texts = np.full((len(numbers), 36), ord("-"), dtype=np.uint8)
    texts[:, [place for place in range(36) if place not in _DASHES]] = digits
    offsets = np.arange(0, 36 * len(numbers) + 1, 36, dtype=np.int32)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(texts))


def _mix_bits(numbers: Numbers, half: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each number, by the finalizer of SplitMix64, which maps different numbers to different hashes.

    Args:
        half: 1 or 2, the half of the 128-bit UUID. Twice the number plus `half` is different for each number and half.
    """
    mixed = numbers.astype(np.uint64) * np.uint64(2) + np.uint64(half)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def build_rows(numbers: Numbers, version: int) -> pa.Table:
    count = len(numbers)
    draw = np.random.default_rng([version, int(numbers[0]) if count else 0])
    columns = [
        make_uuid_texts(numbers),
        np.full(count, version),
        draw.integers(0, 1_000_000, count, dtype=np.int32),
        _CITIES.take(pa.array(draw.integers(0, len(_CITIES), count))),
        _STATES.take(pa.array(draw.integers(0, len(_STATES), count))),
        draw.integers(1, 51, count, dtype=np.int32),
        draw.integers(0, 11, count, dtype=np.int32),
        draw.integers(100, 1_000_000, count) / 100,
        draw.integers(0, 9, count) / 100,
        _NOTES.take(pa.array(draw.integers(0, len(_NOTES), count))),
    ]
    schema = pa.schema([pa.field(name, ARROW[kind], nullable=name != KEY) for name, kind in COLUMNS.items()])
    return pa.table(columns, schema=schema)


@dataclass(frozen=True)
class RowBatch:
    """The rows of a batch. `path` is a Parquet file with the same rows, which jobs read."""

    batch_number: int
    row_numbers: Numbers
    rows: pa.Table
    path: Path


@dataclass
class Batches:
    """The batches for a table of `base_rows` rows, and the rows that the table must have after them.

    The batches are the same in each run.
    """

    base_rows: int
    folder: Path
    batch_rows: int = BATCH_ROWS
    drawn_count: int = 0
    _rows_by_batch: dict[int, Numbers] = field(default_factory=dict)

    def write_next_batch(self) -> RowBatch:
        """Draw the next batch, write it as a Parquet file, and return it.

        Its row numbers are distinct and in random order.
        """
        self.drawn_count += 1
        draw = np.random.default_rng([self.base_rows, self.drawn_count])
        updated_rows = min(int(self.batch_rows * UPDATED_FRACTION), self.base_rows)
        new_numbers = (
            self.base_rows
            + (self.drawn_count - 1) * (self.batch_rows - updated_rows)
            + np.arange(self.batch_rows - updated_rows)
        )
        numbers = np.concatenate([draw.choice(self.base_rows, updated_rows, replace=False), new_numbers])
        rows = build_rows(draw.permutation(numbers), self.drawn_count)
        self._rows_by_batch[self.drawn_count] = numbers
        path = self.folder / f"batch-{self.base_rows}-{self.drawn_count}.parquet"
        pq.write_table(rows, path)
        return RowBatch(self.drawn_count, numbers, rows, path)

    def count_expected_rows(self, applied_batches: Iterable[int]) -> dict[int, int]:
        """Return the expected number of rows by version after the batches `applied_batches`, in this order.

        The version of a row is the number of the last batch that wrote it, or 0 if none did.
        """
        last_batch_by_row: dict[int, int] = {}
        for batch_number in applied_batches:
            last_batch_by_row |= dict.fromkeys(self._rows_by_batch[batch_number].tolist(), batch_number)
        versions, counts = np.unique(np.array([*last_batch_by_row.values()], dtype=np.int64), return_counts=True)
        untouched_rows = self.base_rows - sum(row_number < self.base_rows for row_number in last_batch_by_row)
        expected_counts = {0: untouched_rows} if untouched_rows else {}
        return {**expected_counts, **dict(zip(versions.tolist(), counts.tolist(), strict=True))}


# Base tables and their clones


@dataclass(frozen=True)
class BaseTable:
    """A table with the rows 0 to `rows`, in 16 files, or in 16 buckets by key with one file each."""

    rows: int
    layout: str
    metadata: Mapping[str, Any]
    """The table's metadata JSON."""
    size_bytes: int


def open_base(rows: int, layout: str, *, bases: Path = BASES) -> BaseTable:
    """Return the base table, and create it if it does not exist. It needs 40 bytes of disk space for each row."""
    return load_or_create_base(rows, layout, partial(_write_files, rows=rows, layout=layout), bases=bases)


def load_or_create_base(
    rows: int, layout: str, make: Callable[[Path], tuple[WrittenFiles, dict[str, Any]]], *, bases: Path
) -> BaseTable:
    """Return the table from which each run starts, and create its files below `bases` if they do not exist.

    Args:
        make: Writes the files into a folder, and returns them with the metadata of a table that contains them.
    """
    folder = bases.resolve() / f"{rows}-{layout}"
    marker = folder / "made.json"
    expected = {"format": FORMAT, "folder": str(folder)}
    if marker.exists():
        document = json.loads(marker.read_text())
        if {name: document[name] for name in expected} == expected:
            return BaseTable(rows, layout, document["metadata"], document["size_bytes"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written_files, metadata = make(folder)
    shutil.rmtree(folder / "home", ignore_errors=True)
    marker.write_text(json.dumps({**expected, "metadata": metadata, "size_bytes": written_files.size_bytes}))
    return BaseTable(rows, layout, metadata, written_files.size_bytes)


def _write_files(folder: Path, rows: int, layout: str) -> tuple[WrittenFiles, dict[str, Any]]:
    with run_server(folder) as client:
        create_bench_table(client, "base", BUCKETS if layout == BUCKETED else 0, {})
        destination = open_destination(client, (NAMESPACE, "base"))
        ends = np.linspace(0, rows, FILES + 1).astype(int).tolist()
        parts = list(pairwise(ends))
        if layout == FLAT:
            written_files = write_at_once(partial(_write_part, destination.target), parts)
        else:  # One writer writes all rows, so that each bucket has one file.
            written_files = write_batches(
                destination.target, (batch for part in parts for batch in _build_batches(*part))
            )
        destination.commit(client, written_files)
        return written_files, read_metadata(client, "base")


@contextmanager
def run_server(folder: Path) -> Iterator[SeamarkClient]:
    """Run a server whose tables are in the folder, and yield its client."""
    env = {"SEAMARK_LOG_LEVEL": "warning"}
    with (
        Seamark(folder / "home", warehouse=f"file://{folder}/warehouse", env=env) as server,
        closing(SeamarkClient(server.base_url)) as client,
    ):
        yield client


def write_at_once(write: Callable[[T], WrittenFiles], parts: Iterable[T]) -> WrittenFiles:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return WrittenFiles.join(pool.map(write, parts))


def read_metadata(client: SeamarkClient, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(client.load_table((NAMESPACE, name), history=True).metadata)
    return metadata


def _write_part(target: WriteTarget, part: tuple[int, int]) -> WrittenFiles:
    return write_batches(target, _build_batches(*part))


def _build_batches(start: int, end: int) -> Iterator[pa.RecordBatch]:
    for offset in range(start, end, _CHUNK_ROWS):
        yield from build_rows(np.arange(offset, min(end, offset + _CHUNK_ROWS)), 0).to_batches()


def create_bench_table(
    client: SeamarkClient, name: str, buckets: int, properties: Mapping[str, str], columns: Mapping[str, str] = COLUMNS
) -> None:
    """Create an empty table in the namespace of the benchmarks, with buckets by key unless `buckets` is 0."""
    fields = [
        {"id": number, "name": column, "required": column == KEY, "type": kind}
        for number, (column, kind) in enumerate(columns.items(), 1)
    ]
    bucket = {"source-id": 1, "field-id": 1000, "name": "bucket", "transform": f"bucket[{buckets}]"}
    _create_namespace(client)
    body = {
        "name": name,
        "schema": {"type": "struct", "fields": fields},
        "partition-spec": {"fields": [bucket] if buckets else []},
        "properties": {"format-version": "3", **properties},
    }
    client._request("POST", f"/v1/namespaces/{NAMESPACE}/tables", {}, json.dumps(body).encode())


def _create_namespace(client: SeamarkClient) -> None:
    if (NAMESPACE,) not in list(client.namespaces()):
        client._request("POST", "/v1/namespaces", {}, json.dumps({"namespace": [NAMESPACE]}).encode())


def clone_table(base: BaseTable, folder: Path, properties: Mapping[str, str]) -> Path:
    """Write the first metadata file of a clone below `folder/metadata`, and return its path.

    The file is named as a Hadoop catalog names it.
    """
    metadata = dict(base.metadata)
    metadata |= {"table-uuid": str(uuid.uuid4()), "location": folder.as_uri(), "metadata-log": []}
    metadata["properties"] = {**metadata["properties"], "gc.enabled": "false", **properties}
    path = folder / "metadata" / "v1.metadata.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(metadata))
    path.with_name("version-hint.text").write_text("1")
    return path


def register_metadata(client: SeamarkClient, name: str, metadata: Path) -> None:
    _create_namespace(client)
    body = json.dumps({"name": name, "metadata-location": metadata.as_uri()}).encode()
    client._request("POST", f"/v1/namespaces/{NAMESPACE}/register", {}, body)
