"""How much faster is a merge of Parquet files, or a column drop, that copies chunks than one that decodes them?

The files have the form that writers produce: zstd, dictionaries, page indexes, row groups of 16 MB. The peer is
pyarrow, which reads each row group and writes it again. Both use one core. Times are CPU seconds of the process. The
lower bound is a plain copy of the files. All files are in the page cache. Seamark and the plain copy call fsync.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import OURS, Report, Row
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.assembly import FileAssembler, Pick
from seamark.connector.parquet.copy.leaves import match_leaves
from seamark.connector.parquet.copy.sinks import open_sink
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.write.data_files import build_writer_options
from seamark.formats.iceberg.files.footer import PATCH, encode_group, patch_chunks, read_footer

FILES, ROWS, GROUP_ROWS = 8, 1_200_000, 300_000
QUICK_FILES, QUICK_ROWS = 2, 20_000
CHUNKS_WIDE, GROUPS_WIDE = 100, 120
"""The columns and row groups of a footer with 12,000 chunks."""
DROPPED_COLUMN = "payload"


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("parquet_copies", "What does it save to copy column chunks?", peer="pyarrow, reading and writing")
    count, rows = (QUICK_FILES, QUICK_ROWS) if quick else (FILES, ROWS)
    paths = [write_data_file(folder / f"{number}.parquet", number, rows) for number in range(count)]
    schema = pq.read_schema(paths[0])
    remaining_schema = pa.schema([field for field in schema if field.name != DROPPED_COLUMN])
    size_mb = sum(path.stat().st_size for path in paths) / 1e6
    rounds = 1 if quick else 3
    for case, columns in (("merge", schema), (f"drop {DROPPED_COLUMN}, and merge", remaining_schema)):
        values = measure_cpu_s(
            {
                OURS: lambda out, columns=columns: _copy_rows(paths, out, columns),
                "pyarrow": lambda out, columns=columns: _decode_and_rewrite(paths, out, columns),
                "file copy": lambda out: _copy_plainly(paths, out),
            },
            folder / "out.parquet",
            rounds,
        )
        speeds = {name: size_mb / seconds for name, seconds in values.items()}
        report.rows.append(Row(case, "speed of a core", "MB/s", speeds, lower_is_better=False, peer="pyarrow"))
        report.rows.append(
            Row(f"{case}, and a plain copy", "speed of a core", "MB/s", speeds, lower_is_better=False, peer="file copy")
        )
    report.rows.append(_measure_footer(rounds))
    report.notes.append(f"{count} files, {size_mb:,.0f} MB together.")
    return report


def write_data_file(path: Path, number: int, rows: int, encryption: Any = None) -> Path:
    rng = np.random.default_rng(number)
    fields = [("id", pa.int64()), ("city", pa.string()), ("price", pa.float64()), (DROPPED_COLUMN, pa.string())]
    schema = pa.schema(
        [
            pa.field(name, kind, metadata={"PARQUET:field_id": str(place + 1)})
            for place, (name, kind) in enumerate(fields)
        ]
    )
    cities = np.array([f"city {city}" for city in range(250)])
    table = pa.table(
        {
            "id": rng.integers(0, 1 << 40, rows),
            "city": cities[rng.integers(0, 250, rows)],
            "price": rng.random(rows),
            DROPPED_COLUMN: np.char.mod("%d", rng.integers(0, 1 << 60, rows)),
        },
        schema=schema,
    )
    options = build_writer_options({})
    pq.write_table(table, path, row_group_size=GROUP_ROWS, encryption_properties=encryption, **options)
    return path


def measure_cpu_s(operations: dict[str, Callable[[Path], None]], out: Path, rounds: int) -> dict[str, float]:
    """Return the CPU seconds of each operation, the median of interleaved rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds):
        for name in operations if number % 2 else reversed(operations):
            out.unlink(missing_ok=True)
            started_s = time.process_time()
            operations[name](out)
            seconds[name].append(time.process_time() - started_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _copy_rows(paths: Sequence[Path], out: Path, schema: pa.Schema) -> None:
    empty_file_path = out.with_suffix(".skeleton")
    # The assembler takes the schema from the footer of a file without rows.
    with pq.ParquetWriter(empty_file_path, schema, store_schema=False):
        pass
    with ExitStack() as stack:
        target = stack.enter_context(SourceFile(str(empty_file_path), Storage()))
        assembler = FileAssembler(open_sink(str(out), Storage()), target.footer)
        for path in paths:
            source = stack.enter_context(SourceFile(str(path), Storage()))
            columns = match_leaves(target.leaves, source.leaves).columns
            for number in range(len(source.footer.groups)):
                assembler.add([Pick(source, number, columns, range(len(columns)))])
        assembler.close()


def _decode_and_rewrite(paths: Sequence[Path], out: Path, schema: pa.Schema) -> None:
    with pq.ParquetWriter(out, schema, **build_writer_options({})) as writer:
        for path in paths:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(number, schema.names, use_threads=False))


def _copy_plainly(paths: Sequence[Path], out: Path) -> None:
    """Copy the files by the kernel, as `cp` does, and call fsync, as Seamark does for its file."""
    with out.open("wb") as sink:
        for path in paths:
            with path.open("rb") as source:
                bytes_left = path.stat().st_size
                while bytes_left:
                    bytes_left -= os.copy_file_range(source.fileno(), sink.fileno(), bytes_left)
        os.fsync(sink.fileno())


def _measure_footer(rounds: int) -> Row:
    sink = pa.BufferOutputStream()
    table = pa.table({f"c{number}": [f"v{row}" for row in range(GROUPS_WIDE)] for number in range(CHUNKS_WIDE)})
    pq.write_table(table, sink, row_group_size=1, write_page_index=True)
    data = bytes(sink.getvalue())
    raw = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    milliseconds = []
    for _ in range(max(3, rounds)):
        started_s = time.process_time()
        footer = read_footer(raw)
        for group in footer.groups:
            values = np.stack([group.read_values(name) for name in PATCH], axis=1)
            values[:, PATCH["data_page"]] += 1 << 30
            encode_group(patch_chunks(footer, group.chunks, values, [None] * CHUNKS_WIDE), group.fields)
        milliseconds.append((time.process_time() - started_s) * 1e3)
    started_s = time.process_time()
    pq.read_metadata(pa.BufferReader(data))
    reading = (time.process_time() - started_s) * 1e3
    values_ms = {OURS: statistics.median(milliseconds), "pyarrow, reading only": reading}
    return Row("footer of 12,000 chunks", "read and patched", "ms", values_ms, peer="pyarrow, reading only", goal=60)
