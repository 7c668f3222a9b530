"""Computes the statistics of a table: the number of distinct values of each column, and totals of each partition.

The statistics are stored in files to which the table's metadata refers (Iceberg spec, "Table Statistics" and "Partition
Statistics").

Sketches of distinct values can be merged. If an earlier snapshot has statistics, only files that these statistics do
not include are read. Values of removed rows stay in a sketch. If many rows were removed, columns are read completely
again.

The commit of statistics does not change a snapshot, so it does not conflict with writers.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from seamark.connector.arrow.distinct_values import add_values
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, InvalidRequest, Refused
from seamark.connector.client.names import Name
from seamark.connector.client.policies import read_effective_properties
from seamark.connector.client.progress import add_expected_work, advance
from seamark.connector.client.storage import Storage
from seamark.connector.client.updates import update_table
from seamark.connector.client.values import At
from seamark.connector.jobs.partition_statistics import is_partitioned, write_partition_statistics
from seamark.connector.read.read_ahead import read_tasks
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import join_small_batches
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.puffin import Blob, read_footer, read_footer_size, write_puffin
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import get_metadata_folder, parse_count
from seamark.formats.iceberg.metadata.snapshot import BlobMetadata, PartitionStatisticsFile, StatisticsFile
from seamark.formats.iceberg.metadata.statistics import (
    NDV,
    REMOVED,
    THETA,
    KnownStatistics,
    StatisticsPolicy,
    find_known_statistics,
)
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.keys.theta import SketchBuilder, ThetaSketch
from seamark.formats.runtime.errors import Corrupt

_FILE_BYTES_MAX = 256 << 20
"""The maximum size of an existing statistics file that is read."""
_SKETCH_BYTES_MAX = 16 << 20


@dataclass
class StatisticsReport:
    """The result of a computation of statistics.

    Attributes:
        columns: The number of columns for which the number of distinct values is known.
        columns_read: The number of these columns that were read completely.
        files: The number of data files that were read.
        partitions: The number of partitions in the partition statistics.
    """

    snapshot_id: int | None = None
    columns: int = 0
    columns_read: int = 0
    files: int = 0
    files_total: int = 0
    rows: int = 0
    partitions: int = 0
    size_bytes: int = 0


def compute_statistics(
    client: SeamarkClient, table: Name, *, full: bool = False, if_stale: bool = False, dry_run: bool = False
) -> StatisticsReport:
    """Compute the statistics of the current snapshot.

    Without a snapshot, or if the statistics need not be computed, the report is empty.

    Args:
        full: Whether to read all files, including files that earlier statistics include.
        if_stale: Whether to compute the statistics only if they are stale according to the policy.
        dry_run: Whether to report the files that would be read, and read and commit nothing.

    Raises:
        InvalidRequest: The policy is invalid.
        Unreadable: A file cannot be read.
        Refused: The server refuses the commit.
    """
    engine_table = client.load_table(table, history=True)
    metadata = decode_table(engine_table.metadata, engine_table.location)
    policy = StatisticsPolicy.from_properties({**read_effective_properties(client, table), **metadata.properties})
    snapshot = metadata.current_snapshot
    if snapshot is None:
        return StatisticsReport()
    newest = find_known_statistics(metadata, snapshot)
    if if_stale and not newest.is_stale(metadata, policy):
        return StatisticsReport()
    source_table = open_table(client, table, At(snapshot.snapshot_id))
    return _Computation(client, metadata, policy, newest, source_table).run(full=full, dry_run=dry_run)


class _Computation:
    """Computes the statistics of one snapshot."""

    def __init__(
        self,
        client: SeamarkClient,
        metadata: TableMetadata,
        policy: StatisticsPolicy,
        newest: KnownStatistics,
        source_table: OpenTable,
    ) -> None:
        self._client, self._metadata, self._newest, self._source_table = client, metadata, newest, source_table
        self._types = policy.list_column_types(source_table.schema)
        if not self._types:
            raise InvalidRequest("The table has none of the columns for which statistics are requested")
        self._snapshot_id = newest.snapshot.snapshot_id
        self._percent = policy.changed_percent

    def run(self, *, full: bool, dry_run: bool) -> StatisticsReport:
        """Read the new rows, and commit the statistics.

        A sketch is a summary of a column from which its number of distinct values is estimated. New files are read for
        all columns, and added to the stored sketches. Old files are read for columns without a usable sketch.

        Args:
            full: Whether to ignore the stored sketches, so that all files are read for all columns.
            dry_run: Whether to return only the numbers of files and rows that would be read. Then nothing is read and
                committed.
        """
        known_sketches = {} if full else self._load_sketches()
        tasks = list(plan(self._client, self._source_table))
        new_tasks = tasks if not known_sketches else self._select_uncounted(tasks)
        uncounted_columns = self._types.keys() - known_sketches.keys()
        report = StatisticsReport(
            self._snapshot_id,
            len(self._types),
            len(uncounted_columns),
            len(tasks if uncounted_columns else new_tasks),
            len(tasks),
        )
        report.rows = sum(task.records for task in (tasks if uncounted_columns else new_tasks))
        if dry_run:
            return report
        paths = {task.path for task in new_tasks}
        builders = {column: SketchBuilder() for column in self._types}
        self._read([task for task in tasks if task.path in paths], self._types.keys(), builders)
        self._read([task for task in tasks if task.path not in paths], uncounted_columns, builders)
        sketches = {
            column: ThetaSketch.union(
                [builder.build(), known_sketches[column][0] if column in known_sketches else ThetaSketch()]
            )
            for column, builder in builders.items()
        }
        removed_rows = {column: count for column, (_, count) in known_sketches.items()}
        self._commit(sketches, removed_rows, report)
        return report

    def _load_sketches(self) -> dict[int, tuple[ThetaSketch, int]]:
        """Return the usable sketches of the newest statistics, by column id.

        Each sketch has the number of rows that were removed since all files were read for the column. Columns with too
        many removed rows are left out. The result is empty if there is no statistics file, or if the file is too large
        or cannot be read.
        """
        file, newest = self._newest.file, self._newest
        blobs = {column: blob for column, blob in newest.list_blobs(self._metadata).items() if column in self._types}
        if file is None or not blobs or file.file_size_in_bytes > _FILE_BYTES_MAX:
            return {}
        usable: dict[int, tuple[ThetaSketch, int]] = {}
        try:
            sketches = _read_sketches(self._source_table.storage, file, blobs)
        except (OSError, ValueError, Corrupt):
            # The file was deleted or is damaged, so the data files are read again.
            return {}
        for column, sketch in sketches.items():
            removed_rows = newest.removed + parse_count(blobs[column].properties or {}, REMOVED, 0)
            if removed_rows * 100 < self._percent * max(1, newest.rows):
                usable[column] = sketch, removed_rows
        return usable

    def _select_uncounted(self, tasks: Iterable[ScanTask]) -> list[ScanTask]:
        """Return the tasks of files whose rows the newest statistics do not include."""
        snapshots = self._newest.uncounted
        if not snapshots:
            return []
        counted_paths: set[str] = set()
        for page in self._client.iter_files(self._source_table.name, content="data", at=At(self._snapshot_id)):
            for path, added_snapshot_id in zip(
                page["file_path"].to_pylist(), page["snapshot_id"].to_pylist(), strict=True
            ):
                if added_snapshot_id is not None and added_snapshot_id not in snapshots:
                    counted_paths.add(path)
        return [task for task in tasks if task.path not in counted_paths]

    def _read(
        self, tasks: Collection[ScanTask], columns: Collection[int], builders: Mapping[int, SketchBuilder]
    ) -> None:
        if not tasks or not columns:
            return
        fields = [field for field in self._source_table.schema.fields if field.id in columns]
        read_plan = plan_read(self._source_table, [field.name for field in fields], TRUE)
        add_expected_work(len(tasks), sum(task.size_bytes for task in tasks))
        with closing(read_tasks(read_plan, self._source_table.storage, tasks)) as task_batches:
            for batch in join_small_batches(_report_progress(task_batches)):
                for field, column in zip(fields, batch.columns, strict=True):
                    add_values(builders[field.id], column, self._types[field.id])

    def _commit(
        self, sketches: Mapping[int, ThetaSketch], removed_rows: Mapping[int, int], report: StatisticsReport
    ) -> None:
        """Write the sketches and the partition statistics into files, and commit them for the snapshot."""
        storage, folder = (
            self._source_table.storage,
            get_metadata_folder(self._metadata.location, self._metadata.properties),
        )
        sequence_number = self._newest.snapshot.sequence_number
        location = f"{folder}/{self._snapshot_id}-{uuid.uuid4()}.stats"
        blobs = []
        for column, sketch in sketches.items():
            properties = {NDV: str(min(round(sketch.estimate), max(self._newest.rows, len(sketch.hashes))))}
            properties |= {REMOVED: str(removed_rows[column])} if removed_rows.get(column) else {}
            blobs.append(
                Blob(THETA, [sketch.encode()], (column,), None, properties, self._snapshot_id, sequence_number)
            )
        data = b"".join(write_puffin(blobs, {"created-by": "Seamark"}))
        file = StatisticsFile(
            self._snapshot_id,
            location,
            len(data),
            read_footer_size(data, location),
            tuple(BlobMetadata(THETA, self._snapshot_id, sequence_number, b.fields, dict(b.properties)) for b in blobs),
        )
        updates = [{"action": "set-statistics", "statistics": msgspec.to_builtins(file)}]
        locations = [location]
        try:
            storage.write(location, [data])
            if is_partitioned(self._metadata):
                location = f"{folder}/partition-stats-{self._snapshot_id}-{uuid.uuid4()}.parquet"
                locations.append(location)
                report.partitions, size = write_partition_statistics(
                    self._client, self._source_table, self._metadata, location, self._snapshot_id
                )
                partition_file = PartitionStatisticsFile(self._snapshot_id, location, size)
                update = {"partition-statistics": msgspec.to_builtins(partition_file)}
                updates.append({"action": "set-partition-statistics", **update})
                report.size_bytes += size
            self._set_statistics(updates)
        except (Refused, OSError, InvalidRequest):
            for location in locations:
                with suppress(OSError):
                    storage.delete(location)
            raise
        report.size_bytes += len(data)

    def _set_statistics(self, updates: list[dict[str, object]]) -> None:
        """Commit the statistics files. They are removed again if their snapshot has expired in the meantime.

        Args:
            updates: The updates of the table's metadata, with the actions `set-statistics` and
                `set-partition-statistics`.
        """
        requirements = [{"type": "assert-table-uuid", "uuid": self._metadata.table_uuid}]
        update_table(self._client, self._source_table.name, requirements, updates)
        # If the snapshot has expired in the meantime, no other job would remove the statistics file.
        with suppress(ClientError):
            engine_table = self._client.load_table(self._source_table.name, history=True)
            current_metadata = decode_table(engine_table.metadata, engine_table.location)
            if current_metadata.snapshot(self._snapshot_id) is None:
                # The removal of `set-statistics` is `remove-statistics`.
                actions = [str(update["action"]).replace("set-", "remove-") for update in updates]
                removals = [{"action": action, "snapshot-id": self._snapshot_id} for action in actions]
                update_table(self._client, self._source_table.name, requirements, removals)


def _report_progress(task_batches: Iterable[tuple[ScanTask, Iterable[pa.RecordBatch]]]) -> Iterator[pa.RecordBatch]:
    for task, batches in task_batches:
        yield from batches
        advance(1, task.size_bytes)


def _read_sketches(storage: Storage, file: StatisticsFile, blobs: Mapping[int, BlobMetadata]) -> dict[int, ThetaSketch]:
    """Return the sketches by column.

    Raises:
        Corrupt: The file is damaged.
        ValueError: A sketch has an unknown compression codec, or is invalid.
        OSError: The file cannot be read.
    """
    data = storage.read(file.statistics_path)
    footer = read_footer(data, len(data), file.statistics_path)
    sketches = {}
    for blob in footer.blobs:
        if blob.type == THETA and len(blob.fields) == 1 and blob.fields[0] in blobs:
            compressed_sketch = data[blob.offset : blob.offset + blob.length]
            sketches[blob.fields[0]] = ThetaSketch.decode(_inflate(compressed_sketch, blob.compression_codec))
    return sketches


def _inflate(compressed_sketch: memoryview, codec: str | None) -> bytes | memoryview:
    """Return a stored sketch, decompressed if it is compressed.

    Raises:
        ValueError: The codec is unknown.
        Corrupt: The sketch has more than `_SKETCH_BYTES_MAX` bytes.
    """
    if codec is None:
        return compressed_sketch
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(compressed_sketch)), codec) as stream:
        sketch_bytes = bytes(stream.read(_SKETCH_BYTES_MAX + 1))
    if len(sketch_bytes) > _SKETCH_BYTES_MAX:
        raise Corrupt(f"a decompressed sketch has more than {_SKETCH_BYTES_MAX:,} bytes")
    return sketch_bytes
