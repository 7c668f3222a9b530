"""The writers that write a batch into a table: the common interface, and the writers of Seamark.

A table is a clone of a base (`tables.py`) in its own folder. The benchmark measures `upsert`, from rows in memory or a
Parquet file to the end of the commit. All other work happens between the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from pyspark.sql import DataFrame, SparkSession

from bench.writing.tables import COLUMNS, KEY, NAMESPACE, BaseTable, RowBatch, clone_table, register_metadata
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.spark.frames.upserts import DRIVER_ROWS
from seamark.connector.spark.frames.writes import write
from seamark.connector.write.upserts import upsert

MERGE_ON_READ, COPY_ON_WRITE = "merge-on-read", "copy-on-write"
DDL = ", ".join(f"{name} {'bigint' if kind == 'long' else kind}" for name, kind in COLUMNS.items())
INDEX = "keys"
MODES = ("write.merge.mode", "write.update.mode", "write.delete.mode")


class BenchWriter(Protocol):
    """A writer of batches into one table."""

    name: str
    folder: Path
    """The folder of the table's own files."""

    def upsert(self, batch: RowBatch) -> float | None:
        """Write a batch.

        Returns:
            The seconds that count for the benchmark, if they are only a part of the call. Otherwise None: then the
            time of the whole call counts.
        """
        ...

    def count_rows_by_version(self) -> dict[int, int]:
        """Return the number of rows of the table by version."""
        ...

    def delete_old_files(self) -> None:
        """Delete files that the table no longer uses, if the writer rewrites whole tables."""
        ...


# Ours


@dataclass(frozen=True)
class OurTable:
    """A table in the catalog `catalog` of the Spark session, which Seamark's writers write."""

    client: IndexClient
    spark: SparkSession
    catalog: str
    name: str
    folder: Path

    @staticmethod
    def create(
        base: BaseTable,
        client: IndexClient,
        spark: SparkSession,
        catalog: str,
        folder: Path,
        *,
        mode: str,
        is_indexed: bool,
    ) -> OurTable:
        """Clone the base into a new folder, register the clone, and give it a record index if `is_indexed`."""
        register_metadata(client, folder.name, clone_table(base, folder, dict.fromkeys(MODES, mode)))
        table = OurTable(client, spark, catalog, folder.name, folder)
        if is_indexed:
            client.put_index(table.identifier, INDEX, kind="record", columns=[KEY])
            with closing(InProcessWorkers()) as workers:
                build(client, table.identifier, INDEX, workers)
        return table

    @property
    def identifier(self) -> tuple[str, str]:
        return NAMESPACE, self.name

    def count_rows_by_version(self) -> dict[int, int]:
        return count_versions(self.spark.table(f"{self.catalog}.{NAMESPACE}.{self.name}"))

    def delete_old_files(self) -> None:
        delete_unused_files(self.folder, set(self.client.files(self.identifier)["file_path"].to_pylist()))


class _SeamarkWriter:
    def __init__(self, name: str, table: OurTable, *, strategy: str | None = None) -> None:
        self.name, self._table, self._strategy = name, table, strategy
        self.folder = table.folder

    def count_rows_by_version(self) -> dict[int, int]:
        return self._table.count_rows_by_version()

    def delete_old_files(self) -> None:
        self._table.delete_old_files()


class PythonWriter(_SeamarkWriter):
    """Writes rows from memory in this process, with `seamark.connector.write.upserts`."""

    def upsert(self, batch: RowBatch) -> None:
        upsert(self._table.client, self._table.identifier, batch.rows, keys=[KEY], strategy=self._strategy)


class SparkFrameWriter(_SeamarkWriter):
    """Writes a DataFrame that reads the batch's file, with `seamark.connector.spark.frames.writes`.

    If `by_tasks` is true, Spark tasks write even if the driver could.
    """

    def __init__(self, name: str, table: OurTable, *, strategy: str | None = None, by_tasks: bool = False) -> None:
        super().__init__(name, table, strategy=strategy)
        self._driver_rows = 0 if by_tasks else DRIVER_ROWS

    def upsert(self, batch: RowBatch) -> None:
        table, frame = self._table, build_frame(self._table.spark, batch)
        options = {"strategy": self._strategy, "driver_rows": self._driver_rows}
        write(frame, table.identifier, client=table.client, mode="upsert", keys=[KEY], **options)


# The common interface


def build_frame(spark: SparkSession, batch: RowBatch) -> DataFrame:
    """Return a data frame of the batch's file with a known schema. Without it, Spark would read the schema in a job."""
    return spark.read.schema(DDL).parquet(str(batch.path))


def count_versions(frame: DataFrame) -> dict[int, int]:
    return {row[0]: row[1] for row in sorted(frame.groupBy("version").count().collect())}


def delete_unused_files(folder: Path, live: set[str]) -> None:
    """Delete the Parquet files below the folder that are not in `live` (paths or URIs)."""
    live_paths = {item.removeprefix("file:").replace("///", "/") for item in live}
    for path in (folder / "data").rglob("*.parquet"):
        if str(path) not in live_paths:
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop writes this checksum file.


@contextmanager
def configure_session(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """Change the settings of the session within the block."""
    old_settings = {name: spark.conf.get(name, None) for name in conf}
    for name, value in conf.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old_value in old_settings.items():
            if old_value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old_value)


def count_read_bytes() -> dict[int, int]:
    """Return the bytes that this process and each of its descendants have read, by process id.

    The numbers include system calls on files, sockets and pipes, but not reads of memory maps.
    """
    own_process = psutil.Process()
    return dict(_list_read_bytes([own_process, *own_process.children(recursive=True)]))


def _list_read_bytes(processes: Iterable[psutil.Process]) -> Iterator[tuple[int, int]]:
    for process in processes:
        with suppress(psutil.Error):  # The process has just ended.
            yield process.pid, int(process.io_counters().read_chars)


def sum_bytes_read_since(bytes_before: Mapping[int, int]) -> int:
    """Return the bytes that the running processes have read since `bytes_before` was measured.

    Reads of processes that have ended meanwhile are unknown.
    """
    return sum(size - bytes_before.get(pid, 0) for pid, size in count_read_bytes().items())


def list_file_sizes(folder: Path) -> dict[Path, int]:
    """Return the sizes of the files by path, without the checksum files (`.crc`) that Hadoop adds."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc"}
