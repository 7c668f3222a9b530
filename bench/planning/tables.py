"""Generated Iceberg tables with any number of files. Only the metadata that planning reads is written.

Tables have format version 2 and manifests with 1,000 entries, deflated as Java writes them (level 9, blocks of 64,000
bytes). Each manifest comes from its own append, whose snapshot has been expired. Tables are partitioned by
identity(day) and bucket(16, user_id), and have column sizes, value, null and NaN counts, and bounds of every column.
Data files are named, but do not exist.

A table is in `<cache>/<files>x<columns>/`. It is generated once and kept: `made.json` contains the version of the
generator and the folder, because manifests name each other by absolute path.
`python -m bench.planning.tables FILES …` generates tables in advance.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import numpy as np

from bench.planning import layout
from bench.planning.columns import BUCKETS, FileBatch, StatisticsColumn, Stats, build_columns
from bench.planning.ragged import (
    Cells,
    Ints,
    encode_records,
    encode_varint,
    encode_varints,
    encode_with_lengths,
    fill_cells,
    filter_cells,
    format_decimal,
    format_digits,
    join_cells,
)

FORMAT = 1
"""The version of the generator.

It must increase when the generator's bytes change, so that existing tables are generated again.
"""

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "bench" / "planning"
MANIFEST_ENTRIES = 1000
BATCH_MANIFESTS = 8
"""The number of manifests that a worker process draws and writes together."""
_BYTES_PER_ROW = 40
_FURTHER_FILE_BYTES_MAX = 1 << 20
"""The size of a data file is `_BYTES_PER_ROW` for each row, and a random number of bytes below this constant."""
BLOCK_BYTES = 64_000
DEFLATE_LEVEL = 9
FILES_PER_DAY = 1600
SYNC = bytes(range(16))
_UNION_VALUE = b"\x02"
"""Avro's encoding of the second type of a union, whose first type is null: a value follows."""
_END_OF_BLOCKS = b"\x00"
"""The length 0, which ends the blocks of an Avro array or map."""
ROW_GROUP_BYTES = 128 << 20


@dataclass(frozen=True)
class GeneratedTable:
    """A generated table on local disk."""

    folder: Path
    files: int
    columns: int
    files_per_day: int
    metadata_bytes: int
    """The total length of all manifests."""
    manifest_entries: int = MANIFEST_ENTRIES

    @property
    def metadata_location(self) -> str:
        return f"file://{self.folder}/metadata/v1.metadata.json"


def generate_table(
    files: int,
    *,
    column_count: int = 20,
    files_per_day: int = FILES_PER_DAY,
    manifest_entries: int = MANIFEST_ENTRIES,
    deflate_level: int = DEFLATE_LEVEL,
    cache: Path = CACHE,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> GeneratedTable:
    """Return the table with `files` files. If it is not below `cache`, generate it completely or not at all.

    Args:
        files_per_day: A multiple of the 16 buckets.
        progress: Called during the generation with the number of manifests written, and of all manifests.
    Raises:
        ValueError: An argument is out of range.
    """
    if files < 1 or column_count < 20 or files_per_day % BUCKETS or files_per_day < BUCKETS:
        raise ValueError(
            "a generated table needs at least 1 file and 20 columns, and a multiple of 16 files per day; it has"
            f" {files} files, {column_count} columns and {files_per_day} files per day"
        )
    name = f"{files}x{column_count}" + ("" if files_per_day == FILES_PER_DAY else f"-{files_per_day}")
    if (manifest_entries, deflate_level) != (MANIFEST_ENTRIES, DEFLATE_LEVEL):
        name += f"-{manifest_entries}-level{deflate_level}"
    folder = cache.resolve() / name
    required_marker = {"format": FORMAT, "folder": str(folder)}
    marker = folder / "made.json"
    if marker.exists():
        stored_marker = json.loads(marker.read_text())
        if {key: stored_marker.get(key) for key in required_marker} == required_marker:
            return GeneratedTable(
                folder, files, column_count, files_per_day, stored_marker["metadata_bytes"], manifest_entries
            )
    building_folder = cache.resolve() / f".{name}-{os.getpid()}"
    shutil.rmtree(building_folder, ignore_errors=True)
    try:
        (building_folder / "metadata").mkdir(parents=True)
        task = _GenerationTask(
            str(building_folder),
            f"file://{folder}",
            files,
            column_count,
            files_per_day,
            manifest_entries,
            deflate_level,
        )
        metadata_bytes = _write_table(task, workers, progress)
        marker_text = json.dumps({**required_marker, "metadata_bytes": metadata_bytes})
        (building_folder / marker.name).write_text(marker_text)
        shutil.rmtree(folder, ignore_errors=True)
        building_folder.rename(folder)
    finally:
        shutil.rmtree(building_folder, ignore_errors=True)
    return GeneratedTable(folder, files, column_count, files_per_day, metadata_bytes, manifest_entries)


@dataclass(frozen=True)
class _GenerationTask:
    """The arguments of a worker process.

    Attributes:
        building_folder: The folder in which the table is generated, before it is renamed.
        location: The location of the table after the rename.
        entries_per_manifest: The number of entries of each manifest, except the last.
    """

    building_folder: str
    location: str
    files: int
    columns: int
    files_per_day: int
    entries_per_manifest: int
    deflate_level: int = DEFLATE_LEVEL

    @property
    def manifests(self) -> int:
        return -(-self.files // self.entries_per_manifest)

    def find_manifest(self, number: Ints) -> Ints:
        """Return the number of the manifest that lists each file."""
        return number // self.entries_per_manifest


@dataclass(frozen=True)
class FileStatistics:
    """The statistics of up to 8,000 consecutive files; `size` has the size of each file in bytes."""

    batch: FileBatch
    size: Ints
    columns: tuple[StatisticsColumn, ...]
    stats: list[Stats]


def read_statistics(table: GeneratedTable) -> Iterator[FileStatistics]:
    """Yield the random statistics of the table's files in their order, without reading a manifest."""
    task = _make_generation_task(table)
    return (_draw_statistics(task, first) for first in range(0, task.manifests, BATCH_MANIFESTS))


def build_file_names(table: GeneratedTable, batch: FileBatch) -> Cells:
    """Return the last part of each file's path, the file name."""
    return _build_names(_make_generation_task(table), batch)


def _make_generation_task(table: GeneratedTable) -> _GenerationTask:
    return _GenerationTask(
        building_folder="",  # The table exists, so no worker uses the folder.
        location=f"file://{table.folder}",
        files=table.files,
        columns=table.columns,
        files_per_day=table.files_per_day,
        entries_per_manifest=table.manifest_entries,
    )


def _draw_statistics(task: _GenerationTask, first: int) -> FileStatistics:
    """Draw the statistics of the files of `BATCH_MANIFESTS` manifests, or of the rest, from the manifest `first` on.

    Each batch has its own random generator, so batches can be drawn in any order.
    """
    last = min(first + BATCH_MANIFESTS, task.manifests)
    entries = task.entries_per_manifest
    file_numbers = np.arange(first * entries, min(last * entries, task.files), dtype=np.int64)
    rng = np.random.default_rng((FORMAT, task.files, task.columns, first))
    records = rng.integers(50_000, 4_000_000, len(file_numbers), dtype=np.int64)
    batch = FileBatch(file_numbers, task.files, task.files_per_day, records, rng)
    size = records * _BYTES_PER_ROW + batch.draw_numbers(_FURTHER_FILE_BYTES_MAX)
    columns = build_columns(task.columns)
    return FileStatistics(batch, size, columns, [column.make(batch) for column in columns])


def _write_table(task: _GenerationTask, workers: int | None, progress: Callable[[int, int], None]) -> int:
    """Write all files of the table, and return the total bytes of its manifests."""
    manifests: list[dict[str, Any]] = []
    for batch in _write_batches(task, workers):
        manifests += batch
        progress(len(manifests), task.manifests)
    head = {
        "format-version": "2",
        "snapshot-id": str(layout.compute_snapshot_id(len(manifests) - 1)),
        "sequence-number": str(len(manifests)),
    }
    list_name = (
        f"snap-{layout.compute_snapshot_id(len(manifests) - 1)}-1-{uuid.uuid5(uuid.NAMESPACE_URL, task.location)}.avro"
    )
    with (Path(task.building_folder) / "metadata" / list_name).open("wb") as file:
        # The newest manifest is first, as engines write manifest lists.
        fastavro.writer(file, layout.build_manifest_file_schema(), reversed(manifests), codec="deflate", metadata=head)
    document = layout.build_table_metadata(
        task.location, f"{task.location}/metadata/{list_name}", build_columns(task.columns), manifests
    )
    (Path(task.building_folder) / "metadata" / "v1.metadata.json").write_text(json.dumps(document, indent=1))
    return sum(manifest["manifest_length"] for manifest in manifests)


def _write_batches(task: _GenerationTask, workers: int | None) -> Iterator[list[dict[str, Any]]]:
    starts = range(0, task.manifests, BATCH_MANIFESTS)
    processes = min(len(starts), workers or os.cpu_count() or 1)
    if processes == 1:
        for start in starts:
            yield _write_batch(task, start)
        return
    # The processes are not forked, because the caller may have threads.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_write_batch, [task] * len(starts), starts)


def _write_batch(task: _GenerationTask, first: int) -> list[dict[str, Any]]:
    """Write `BATCH_MANIFESTS` manifests, or the rest, from the manifest `first` on.

    Returns:
        The records of the manifests for the manifest list, in order.
    """
    last = min(first + BATCH_MANIFESTS, task.manifests)
    statistics = _draw_statistics(task, first)
    batch, records = statistics.batch, statistics.batch.records
    data, lengths = encode_records(_encode_entries(task, statistics))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    header = _build_header(statistics.columns)
    results = []
    for manifest in range(first, last):
        first_entry = (manifest - first) * task.entries_per_manifest
        rows = slice(first_entry, min(first_entry + task.entries_per_manifest, batch.rows))
        name = f"{_commit_uuid(task.location, manifest)}-m0.avro"
        entry_offsets = ends[rows.start : rows.stop + 1]
        entries = data[entry_offsets[0] : entry_offsets[-1]].tobytes()
        content = header + b"".join(_encode_blocks(entries, entry_offsets - entry_offsets[0], task.deflate_level))
        (Path(task.building_folder) / "metadata" / name).write_bytes(content)
        days, buckets = batch.day[rows], batch.bucket[rows]
        results.append(
            layout.build_manifest_file(
                manifest,
                f"{task.location}/metadata/{name}",
                len(content),
                len(days),
                int(records[rows].sum()),
                (int(days.min()), int(days.max())),
                (int(buckets.min()), int(buckets.max())),
            )
        )
    return results


def _commit_uuid(location: str, manifest: int) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{location}/{manifest}")


def _build_header(columns: tuple[StatisticsColumn, ...]) -> bytes:
    """Return the header of an Avro container: magic, metadata, sync marker."""
    head = io.BytesIO()
    fastavro.writer(
        head,
        layout.build_entry_schema(),
        [],
        codec="deflate",
        metadata=layout.build_manifest_header(columns),
        sync_marker=SYNC,
    )
    return head.getvalue()


def _encode_blocks(data: bytes, ends: Ints, level: int) -> Iterator[bytes]:
    """Yield the blocks of an Avro container. A block ends with the first entry that makes it larger than 64,000 bytes.

    Args:
        ends: int64[entries + 1], the end of each entry in `data`, with a leading 0.
    """
    start = 0
    while start < len(ends) - 1:
        stop = min(int(np.searchsorted(ends, ends[start] + BLOCK_BYTES)), len(ends) - 1)
        packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed_bytes = packer.compress(data[ends[start] : ends[stop]]) + packer.flush()
        yield encode_varint(stop - start) + encode_varint(len(packed_bytes)) + packed_bytes + SYNC
        start = stop


def _encode_entries(task: _GenerationTask, statistics: FileStatistics) -> list[Cells]:
    """Return the fields of the entries in the order of `layout.build_entry_schema`.

    In unions, the byte 0 means null and the byte 2 means a value.
    """
    batch, drawn_columns, stats, size = statistics.batch, statistics.columns, statistics.stats, statistics.size
    rows = batch.rows
    manifest = task.find_manifest(batch.numbers)
    status_bytes, inherited_bytes = b"\x02", b"\x00\x00"
    return [
        fill_cells(status_bytes + b"\x02", rows),
        encode_varints(layout.compute_snapshot_id(0) + manifest * layout.SNAPSHOT_ID_STEP),
        fill_cells(inherited_bytes + b"\x00", rows),  # Both sequence numbers, and content 0 (data).
        encode_with_lengths(_build_paths(task, batch)),
        fill_cells(b"\x0ePARQUET\x02", rows),
        encode_varints(batch.day),
        fill_cells(b"\x02", rows),
        encode_varints(batch.bucket),
        encode_varints(batch.records),
        encode_varints(size),
        *_encode_counts(
            drawn_columns, [size // len(drawn_columns) + batch.draw_numbers(1 << 16) for _ in drawn_columns]
        ),
        *_encode_counts(drawn_columns, [batch.records] * len(drawn_columns)),
        *_encode_counts(drawn_columns, [column.nulls for column in stats]),
        *_encode_counts(*_select_nan_columns(drawn_columns, stats)),
        *_encode_bounds(drawn_columns, stats, [column.lower for column in stats]),
        *_encode_bounds(drawn_columns, stats, [column.upper for column in stats]),
        fill_cells(b"\x00\x02", rows),  # No key metadata; then split offsets.
        *_encode_split_offsets(size),
        fill_cells(b"\x00\x02\x00\x00", rows),  # No equality ids; sort order 0; no referenced data file.
    ]


def _build_paths(task: _GenerationTask, batch: FileBatch) -> Cells:
    """Return the paths of the files: …/data/day=2024-01-01/user_id_bucket=3/ and the file name."""
    rows = batch.rows
    first_day = int(batch.day.min())
    days = [layout.format_day(day).encode() for day in range(first_day, int(batch.day.max()) + 1)]
    day_words = np.frombuffer(b"".join(days), np.uint8).reshape(-1, 10)
    return join_cells(
        fill_cells(f"{task.location}/data/day=".encode(), rows),
        Cells(day_words[batch.day - first_day]),
        fill_cells(b"/user_id_bucket=", rows),
        format_decimal(batch.bucket),
        fill_cells(b"/", rows),
        _build_names(task, batch),
    )


def _build_names(task: _GenerationTask, batch: FileBatch) -> Cells:
    """Return names of the form 00012-34567-<uuid of the commit>-0-00001.parquet, as Spark names the files of a task."""
    rows = batch.rows
    manifest = task.find_manifest(batch.numbers)
    first, last = int(manifest.min()), int(manifest.max())
    commits = [str(_commit_uuid(task.location, number)).encode() for number in range(first, last + 1)]
    commit_words = np.frombuffer(b"".join(commits), np.uint8).reshape(-1, 36)
    return join_cells(
        format_digits(batch.numbers % task.entries_per_manifest, 5),
        fill_cells(b"-", rows),
        format_decimal(batch.numbers + 10_000),
        fill_cells(b"-", rows),
        Cells(commit_words[manifest - first]),
        fill_cells(b"-0-00001.parquet", rows),
    )


def _encode_counts(columns: tuple[StatisticsColumn, ...], values: list[Ints]) -> list[Cells]:
    """Encode an optional map from column id to a number, as Avro's array of pairs.

    Args:
        values: The numbers of each column, one for each file.
    """
    file_count = len(values[0])
    parts = [fill_cells(_UNION_VALUE + encode_varint(len(columns)), file_count)]
    for column, numbers in zip(columns, values, strict=True):
        parts += [fill_cells(encode_varint(column.id), file_count), encode_varints(numbers)]
    return [*parts, fill_cells(_END_OF_BLOCKS, file_count)]


def _select_nan_columns(
    columns: tuple[StatisticsColumn, ...], stats: list[Stats]
) -> tuple[tuple[StatisticsColumn, ...], list[Ints]]:
    floats = [(column, stat.nans) for column, stat in zip(columns, stats, strict=True) if stat.nans is not None]
    return tuple(column for column, _ in floats), [nans for _, nans in floats]


def _encode_bounds(columns: tuple[StatisticsColumn, ...], stats: list[Stats], values: list[Cells]) -> list[Cells]:
    """Encode an optional map from column id to bytes, without the columns of which a file has only nulls.

    Args:
        values: The bounds of each column, one for each file.
    """
    file_count = values[0].matrix.shape[0]
    absent_counts = sum(
        ((~stat.present).astype(np.int64) for stat in stats if stat.present is not None), np.zeros(file_count, np.int64)
    )
    parts = [fill_cells(_UNION_VALUE, file_count), encode_varints(len(columns) - absent_counts)]
    for column, stat, bound in zip(columns, stats, values, strict=True):
        pair = join_cells(fill_cells(encode_varint(column.id), file_count), encode_with_lengths(bound))
        parts.append(pair if stat.present is None else filter_cells(pair, stat.present))
    return [*parts, fill_cells(_END_OF_BLOCKS, file_count)]


def _encode_split_offsets(size: Ints) -> list[Cells]:
    """Encode the Avro array of split offsets of each file: the count, the offsets, and the byte that ends the array.

    There is one offset for each row group of 128 MB. The first is 4, after the magic bytes of Parquet.
    """
    groups = -(-size // ROW_GROUP_BYTES)
    offsets = (
        filter_cells(encode_varints(np.full(len(size), 4 + group * ROW_GROUP_BYTES)), groups > group)
        for group in range(int(groups.max()))
    )
    return [encode_varints(groups), *offsets, fill_cells(_END_OF_BLOCKS, len(size))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning.tables", description=__doc__)
    parser.add_argument("files", nargs="+", type=int, help="files of each table to make")
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--files-per-day", type=int, default=FILES_PER_DAY)
    parser.add_argument("--cache", type=Path, default=CACHE)
    arguments = parser.parse_args()
    for files in arguments.files:
        started_s = time.perf_counter()
        generated_table = generate_table(
            files, column_count=arguments.columns, files_per_day=arguments.files_per_day, cache=arguments.cache
        )
        elapsed_s = time.perf_counter() - started_s
        print(
            f"{generated_table.folder}: {files:,} files, "
            f"{generated_table.metadata_bytes / files:.0f} B an entry, {elapsed_s:.1f} s"
        )


if __name__ == "__main__":
    main()
