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
    add_lengths,
    encode_records,
    encode_varint,
    encode_varints,
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
BLOCK_BYTES = 64_000
DEFLATE_LEVEL = 9
FILES_PER_DAY = 1600
SYNC = bytes(range(16))
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
    expected = {"format": FORMAT, "folder": str(folder)}
    marker = folder / "made.json"
    if marker.exists():
        document = json.loads(marker.read_text())
        if {key: document.get(key) for key in expected} == expected:
            return GeneratedTable(
                folder, files, column_count, files_per_day, document["metadata_bytes"], manifest_entries
            )
    building = cache.resolve() / f".{name}-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    try:
        (building / "metadata").mkdir(parents=True)
        plan = _Plan(
            str(building), f"file://{folder}", files, column_count, files_per_day, manifest_entries, deflate_level
        )
        written_rows = _write_table(plan, workers, progress)
        marker_text = json.dumps({**expected, "metadata_bytes": written_rows})
        (building / marker.name).write_text(marker_text)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return GeneratedTable(folder, files, column_count, files_per_day, written_rows, manifest_entries)


@dataclass(frozen=True)
class _Plan:
    """The arguments of a worker process.

    Attributes:
        building: The folder in which the table is generated, before it is renamed.
        location: The location of the table after the rename.
    """

    building: str
    location: str
    files: int
    columns: int
    files_per_day: int
    manifest_entries: int
    deflate_level: int = DEFLATE_LEVEL

    @property
    def manifests(self) -> int:
        return -(-self.files // self.manifest_entries)

    def find_manifest(self, number: Ints) -> Ints:
        """Return the number of the manifest that lists each file."""
        return number // self.manifest_entries


@dataclass(frozen=True)
class FileStatistics:
    """The statistics of up to 8,000 consecutive files; `size` has the size of each file in bytes."""

    batch: FileBatch
    size: Ints
    columns: tuple[StatisticsColumn, ...]
    stats: list[Stats]


def read_statistics(table: GeneratedTable) -> Iterator[FileStatistics]:
    """Yield the random statistics of the table's files in their order, without reading a manifest."""
    plan = _build_plan(table)
    return (_draw_statistics(plan, first) for first in range(0, plan.manifests, BATCH_MANIFESTS))


def build_file_names(table: GeneratedTable, batch: FileBatch) -> Cells:
    """Return the last part of each file's path, the file name."""
    return _build_names(_build_plan(table), batch)


def _build_plan(plan_columns: GeneratedTable) -> _Plan:
    return _Plan(
        "",
        f"file://{plan_columns.folder}",
        plan_columns.files,
        plan_columns.columns,
        plan_columns.files_per_day,
        plan_columns.manifest_entries,
    )


def _draw_statistics(plan: _Plan, first: int) -> FileStatistics:
    """Draw the statistics of the files of up to eight manifests, from the manifest `first` on.

    Each batch has its own random generator, so batches can be drawn in any order.
    """
    last = min(first + BATCH_MANIFESTS, plan.manifests)
    entries = plan.manifest_entries
    number = np.arange(first * entries, min(last * entries, plan.files), dtype=np.int64)
    chance = np.random.default_rng((FORMAT, plan.files, plan.columns, first))
    records = chance.integers(50_000, 4_000_000, len(number), dtype=np.int64)
    batch = FileBatch(number, plan.files, plan.files_per_day, records, chance)
    size = records * 40 + batch.draw_numbers(1 << 20)
    columns = build_columns(plan.columns)
    return FileStatistics(batch, size, columns, [column.make(batch) for column in columns])


def _write_table(plan: _Plan, workers: int | None, progress: Callable[[int, int], None]) -> int:
    """Write all files of the table, and return the total bytes of its manifests."""
    manifests: list[dict[str, Any]] = []
    for batch in _write_batches(plan, workers):
        manifests += batch
        progress(len(manifests), plan.manifests)
    head = {
        "format-version": "2",
        "snapshot-id": str(layout.compute_snapshot_id(len(manifests) - 1)),
        "sequence-number": str(len(manifests)),
    }
    list_name = (
        f"snap-{layout.compute_snapshot_id(len(manifests) - 1)}-1-{uuid.uuid5(uuid.NAMESPACE_URL, plan.location)}.avro"
    )
    with (Path(plan.building) / "metadata" / list_name).open("wb") as file:
        # The newest manifest is first, as engines write manifest lists.
        fastavro.writer(file, layout.build_manifest_file_schema(), reversed(manifests), codec="deflate", metadata=head)
    document = layout.build_table_metadata(
        plan.location, f"{plan.location}/metadata/{list_name}", build_columns(plan.columns), manifests
    )
    (Path(plan.building) / "metadata" / "v1.metadata.json").write_text(json.dumps(document, indent=1))
    return sum(manifest["manifest_length"] for manifest in manifests)


def _write_batches(plan: _Plan, workers: int | None) -> Iterator[list[dict[str, Any]]]:
    starts = range(0, plan.manifests, BATCH_MANIFESTS)
    processes = min(len(starts), workers or os.cpu_count() or 1)
    if processes == 1:
        for start in starts:
            yield _write_batch(plan, start)
        return
    # The processes are not forked, because the caller may have threads.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_write_batch, [plan] * len(starts), starts)


def _write_batch(plan: _Plan, first: int) -> list[dict[str, Any]]:
    """Write up to eight manifests from the manifest `first` on.

    Returns:
        The records of the manifests for the manifest list, in order.
    """
    last = min(first + BATCH_MANIFESTS, plan.manifests)
    statistics = _draw_statistics(plan, first)
    batch, records = statistics.batch, statistics.batch.records
    data, lengths = encode_records(_encode_entries(plan, statistics))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    header = _build_header(statistics.columns)
    results = []
    for manifest in range(first, last):
        first_entry = (manifest - first) * plan.manifest_entries
        rows = slice(first_entry, min(first_entry + plan.manifest_entries, batch.rows))
        name = f"{_commit_uuid(plan.location, manifest)}-m0.avro"
        places = ends[rows.start : rows.stop + 1]
        entries = data[places[0] : places[-1]].tobytes()
        content = header + b"".join(_encode_blocks(entries, places - places[0], plan.deflate_level))
        (Path(plan.building) / "metadata" / name).write_bytes(content)
        days, buckets = batch.day[rows], batch.bucket[rows]
        results.append(
            layout.build_manifest_file(
                manifest,
                f"{plan.location}/metadata/{name}",
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


def _encode_entries(plan: _Plan, statistics: FileStatistics) -> list[Cells]:
    """Return the fields of the entries in the order of `layout.build_entry_schema`.

    In unions, the byte 0 means null and the byte 2 means a value.
    """
    batch, drawn_columns, stats, size = statistics.batch, statistics.columns, statistics.stats, statistics.size
    rows = batch.rows
    manifest = plan.find_manifest(batch.number)
    status_bytes, inherited_bytes = b"\x02", b"\x00\x00"
    return [
        fill_cells(status_bytes + b"\x02", rows),
        encode_varints(layout.compute_snapshot_id(0) + manifest * 7919),
        fill_cells(inherited_bytes + b"\x00", rows),  # Both sequence numbers, and content 0 (data).
        add_lengths(_build_paths(plan, batch)),
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
        *_split_offsets(size),
        fill_cells(b"\x00\x02\x00\x00", rows),  # No equality ids; sort order 0; no referenced data file.
    ]


def _build_paths(plan: _Plan, batch: FileBatch) -> Cells:
    """Return the paths of the files: …/data/day=2024-01-01/user_id_bucket=3/ and the file name."""
    rows = batch.rows
    first_day = int(batch.day.min())
    days = [layout.format_day(day).encode() for day in range(first_day, int(batch.day.max()) + 1)]
    day_words = np.frombuffer(b"".join(days), np.uint8).reshape(-1, 10)
    return join_cells(
        fill_cells(f"{plan.location}/data/day=".encode(), rows),
        Cells(day_words[batch.day - first_day]),
        fill_cells(b"/user_id_bucket=", rows),
        format_decimal(batch.bucket),
        fill_cells(b"/", rows),
        _build_names(plan, batch),
    )


def _build_names(plan: _Plan, batch: FileBatch) -> Cells:
    """Return names of the form 00012-34567-<uuid of the commit>-0-00001.parquet, as Spark names the files of a task."""
    rows = batch.rows
    manifest = plan.find_manifest(batch.number)
    first, last = int(manifest.min()), int(manifest.max())
    commits = [str(_commit_uuid(plan.location, number)).encode() for number in range(first, last + 1)]
    commit_words = np.frombuffer(b"".join(commits), np.uint8).reshape(-1, 36)
    return join_cells(
        format_digits(batch.number % plan.manifest_entries, 5),
        fill_cells(b"-", rows),
        format_decimal(batch.number + 10_000),
        fill_cells(b"-", rows),
        Cells(commit_words[manifest - first]),
        fill_cells(b"-0-00001.parquet", rows),
    )


def _encode_counts(columns: tuple[StatisticsColumn, ...], values: list[Ints]) -> list[Cells]:
    """Encode a map from column id to a number."""
    rows = len(values[0])
    parts = [fill_cells(b"\x02" + encode_varint(len(columns)), rows)]
    for column, value in zip(columns, values, strict=True):
        parts += [fill_cells(encode_varint(column.id), rows), encode_varints(value)]
    return [*parts, fill_cells(b"\x00", rows)]


def _select_nan_columns(
    columns: tuple[StatisticsColumn, ...], stats: list[Stats]
) -> tuple[tuple[StatisticsColumn, ...], list[Ints]]:
    floats = [(column, stat.nans) for column, stat in zip(columns, stats, strict=True) if stat.nans is not None]
    return tuple(column for column, _ in floats), [nans for _, nans in floats]


def _encode_bounds(columns: tuple[StatisticsColumn, ...], stats: list[Stats], values: list[Cells]) -> list[Cells]:
    """Encode a map from column id to bytes, without the columns of which a file has only nulls."""
    rows = values[0].matrix.shape[0]
    absent_count = sum(
        ((~stat.present).astype(np.int64) for stat in stats if stat.present is not None), np.zeros(rows, np.int64)
    )
    parts = [fill_cells(b"\x02", rows), encode_varints(len(columns) - absent_count)]
    for column, stat, bound in zip(columns, stats, values, strict=True):
        pair = join_cells(fill_cells(encode_varint(column.id), rows), add_lengths(bound))
        parts.append(pair if stat.present is None else filter_cells(pair, stat.present))
    return [*parts, fill_cells(b"\x00", rows)]


def _split_offsets(size: Ints) -> list[Cells]:
    """Return one offset for each row group of 128 MB. The first offset is after the magic bytes."""
    groups = -(-size // ROW_GROUP_BYTES)
    offsets = (
        filter_cells(encode_varints(np.full(len(size), 4 + group * ROW_GROUP_BYTES)), groups > group)
        for group in range(int(groups.max()))
    )
    return [encode_varints(groups), *offsets, fill_cells(b"\x00", len(size))]


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
