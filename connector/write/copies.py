"""Writes data files of a partition from row groups of other files: copies large row groups, and encodes the others.

Copying a row group costs about as much as copying its bytes. Encoding its rows costs many times more. But a small row
group makes every later read slower, so small row groups are encoded together. A row group is copied if all of these
conditions hold:

- It has at least `CopyPolicy.copied_min_bytes` bytes.
- None of its rows is deleted.
- Its columns have the ids and types that the table's writer would give them now. The names may differ.
- Its columns are optional in the file if they are optional in the new file. Writers such as Spark store an optional
  column as required if their rows have no null. If all files of a merge store a column as required, the merged file
  also does.
- Readers return null for columns that the file does not have: the columns are optional, have no default, and are not
  the source of a partition field.

A new file has the encryption of its old files. Files with different encryption do not share a new file. Metrics of
encrypted columns are not written to manifests, because manifests are not encrypted. Partition values come from the old
file's manifest entry, and never from its rows. Rows are not sorted by encrypted columns.

The rows of all other row groups are read with all deletes applied, and encoded. `CopyCounts` counts the reasons. If the
table has row lineage, the lineage columns are always encoded. They are small, and their values must be computed if they
are inherited from the old file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import UNKNOWN, conform
from seamark.connector.arrow.partitions import Partition
from seamark.connector.parquet.copy.assembly import FileAssembler, Pick
from seamark.connector.parquet.copy.leaves import Leaf, LeafMatch, find_required_columns, match_leaves
from seamark.connector.parquet.copy.protection import (
    PUBLISHES_ORDER,
    FileProtection,
    find_protection,
    hide_values,
    require_same_scheme,
)
from seamark.connector.parquet.copy.sinks import open_sink
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import EncryptionScheme, ParquetKeys
from seamark.connector.parquet.metrics import Metrics, list_leaves, list_modes
from seamark.connector.read.deleted_rows import DeletedRowSet, Deletes
from seamark.connector.read.file_rows import read_partition
from seamark.connector.read.lineage import NAMES, ROW_ID_NAME
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask
from seamark.connector.write.data_files import (
    ROW_GROUP_BYTES,
    ROW_GROUP_BYTES_DEFAULT,
    build_writer_options,
    encode_row_group,
    make_empty_file,
    parse_footer,
)
from seamark.connector.write.row_origins import OriginLog
from seamark.connector.write.table_writer import IndexBuilder, WrittenFiles
from seamark.connector.write.target import WriteTarget, has_lineage_columns
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.footer import ParquetFooter
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    parse_int,
    parse_long,
)
from seamark.formats.iceberg.types.reserved import LAST_UPDATED_SEQUENCE_NUMBER, ROW_ID

SMALL_ROW_GROUP_DIVISOR = 8
"""A row group is small if its size is less than the target size of row groups divided by this number."""
_ENCODED_RATIO_MIN = 0.001
"""The minimum ratio of the encoded size of rows to their size in memory that is assumed for the next rows.

With a lower ratio, for example after rows with equal values, the next row group could become much too large.
"""
_ORIGIN = ""
"""The name of the temporary column with the origins of the rows that are sorted."""
_BUFFERED_BYTES_MAX = 256 << 20
"""The maximum size of buffered rows that wait for their row group."""
_WRITER = re.compile(rb"(parquet-mr|parquet-cpp) version (\d+)\.(\d+)")
_CORRECT_STATISTICS_SINCE = {b"parquet-mr": (1, 10), b"parquet-cpp": (1, 3)}
"""The first version of each writer whose statistics are correct.

Readers recognise older versions by the name of the writer in the file, and ignore their statistics. A copy would
replace this name.
"""


@dataclass(frozen=True)
class CopyPolicy:
    """The rules by which row groups are copied or encoded.

    Attributes:
        copied_min_bytes: The minimum size of a row group that is copied.
        target_bytes: The size at which a new file is closed.
        row_group_bytes: The size of a row group whose rows are encoded.
        keep_order: Whether each old file is rewritten to one new file with its rows in the same order.
        sorts: Whether all rows are encoded and sorted by the table's sort order. It is set only for encrypted files,
            because another writer sorts the rows of all other files.
    """

    copied_min_bytes: int
    target_bytes: int
    row_group_bytes: int
    keep_order: bool = False
    sorts: bool = False

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> CopyPolicy:
        target_bytes = max(1, parse_long(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))
        row_group = min(target_bytes, max(1, parse_int(properties, ROW_GROUP_BYTES, ROW_GROUP_BYTES_DEFAULT)))
        return CopyPolicy(max(1, row_group // SMALL_ROW_GROUP_DIVISOR), target_bytes, row_group)


@dataclass
class CopyCounts:
    """The numbers of row groups that were copied and encoded.

    Attributes:
        encoded: The number of row groups that were encoded, by the reason why they were not copied.
    """

    copied: int = 0
    copied_bytes: int = 0
    encoded: Counter[str] = field(default_factory=Counter)

    def add(self, counts: CopyCounts) -> None:
        self.copied += counts.copied
        self.copied_bytes += counts.copied_bytes
        self.encoded.update(counts.encoded)


class CopyWriter:
    """Writes the new files, partition by partition.

    As a context manager, it deletes its files on an exception.
    """

    def __init__(
        self,
        source_table: OpenTable,
        target: WriteTarget,
        policy: CopyPolicy,
        origins: OriginLog,
        keys: ParquetKeys | None = None,
    ) -> None:
        """Open the writer.

        Args:
            source_table: The table, with the schema of the new files.
            target: A target of the same schema. It has the lineage columns if the rows have row ids.
            policy: The rules by which row groups are copied.
            origins: The log that records the origin of each written row: its number among the rows of all old files.
            keys: The keys of encrypted files. If it is None, encrypted files are refused.
        """
        self._keys = keys
        self._protection: FileProtection | None = None
        self._source_table, self._target, self._policy, self._origins = source_table, target, policy, origins
        self.counts = CopyCounts()
        self._names = [field.name for field in source_table.schema.fields]
        self._has_lineage = has_lineage_columns(target)
        read_names = [*self._names, *NAMES] if self._has_lineage else self._names
        self._read_plan = plan_read(source_table, read_names, TRUE, positions=True)
        self._deletes = Deletes(source_table.storage, source_table.metadata)
        self._file_properties: dict[str, _FileProperties] = {}
        self._layouts: dict[frozenset[int], _Layout] = {}
        self._layout = self._find_layout(frozenset())
        self._check = None if keys is None else require_same_scheme(self._find_scheme, self._layout.leaves, keys)
        self._reader = TaskReader(self._read_plan, source_table.storage, threads=False, keys=keys, check=self._check)
        lineage_plan = plan_read(source_table, NAMES if self._has_lineage else [], TRUE, positions=True)
        self._lineage_reader = TaskReader(
            lineage_plan, source_table.storage, threads=False, keys=keys, check=self._check
        )
        self._indexes = IndexBuilder(target.indexes)
        self._files: list[dict[str, Any]] = []
        self._file: _OpenFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_origins: list[Longs] = []
        """The origins of the rows in `_waiting`."""
        self._encoded_ratio = 1.0
        """The size of the encoded rows of the last row group, divided by their size in memory. 1 before the first."""
        self._partition: tuple[Partition, list[Any]] = ((), [])
        self._sort_order = 0

    def __enter__(self) -> CopyWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def find_copyable_partition(self, tasks: Sequence[ScanTask]) -> Partition | None:
        """Return the partition of these files, or None if this writer is not used, because it would copy no row group.

        No row group can be copied if all files are small, or if their rows must be partitioned again. Small and sorted
        files are still handled here if one of them is encrypted, because only this writer can write encrypted files.
        """
        self._file_properties.clear()
        are_all_small = all(task.size_bytes < self._policy.copied_min_bytes for task in tasks)
        encodes_all_rows = (are_all_small or self._policy.sorts) and not self._policy.keep_order
        if encodes_all_rows and not any(map(self._is_encrypted, tasks)):
            return None
        if any(task.spec_id != self._target.spec.spec_id for task in tasks):
            return None
        try:
            values = read_partition(self._read_plan, tasks[0])
        except ValueError:
            return None
        partition = tuple(values.get(spec_field.field_id or 0) for spec_field in self._target.spec.fields)
        partition_json = tasks[0].file.get("partition") or []
        return partition if list(self._target.partitioner.convert_to_json(partition)) == list(partition_json) else None

    def _is_encrypted(self, task: ScanTask) -> bool:
        return self._keys is not None and self._inspect(task).scheme is not None

    def _inspect(self, task: ScanTask) -> _FileProperties:
        """Return the cached properties of an old file that determine how the new file is written.

        Raises:
            Unreadable: The file cannot be read.
        """
        file_properties = self._file_properties.get(task.path)
        if file_properties is None:
            with SourceFile(task.path, self._source_table.storage, keys=self._keys) as source:
                file_properties = _FileProperties(find_required_columns(source.leaves), self._find_protection(source))
            self._file_properties[task.path] = file_properties
        return file_properties

    def write(self, tasks: Sequence[tuple[ScanTask, int]], partition: Partition) -> None:
        """Write the live rows of the files of one partition.

        With `keep_order`, each file is finished before the next file begins. Otherwise, files with the same encryption
        are merged into the same new files. A column is then required in a new file only if all these files require it.

        Args:
            tasks: The files, each with the origin of its first row: its number among the rows of all old files.
            partition: The partition.

        Raises:
            Unreadable: A file cannot be read.
            Unwritable: The rows cannot be written.
        """
        self._partition = partition, list(tasks[0][0].file.get("partition") or [])
        for members in self._group_by_scheme(tasks):
            self._protection = None if self._keys is None else self._inspect(members[0][0]).protection
            if self._protection is not None and self._policy.sorts:
                self._protection.refuse(self._target.sort_order.column_ids, PUBLISHES_ORDER)
            self._sort_order = self._target.sort_order.order_id if self._policy.sorts else 0
            if not self._policy.keep_order:
                self._layout = self._find_layout(self._find_required([task for task, _ in members]))
            for task, origin in members:
                if self._policy.keep_order:
                    self._layout = self._find_layout(self._find_required([task]))
                if self._policy.keep_order:
                    self._sort_order = int(task.file.get("sort-order-id") or 0)
                self._write_file(task, origin)
                if self._policy.keep_order:
                    self._finish_file()
            self._finish_file()

    def _group_by_scheme(self, tasks: Sequence[tuple[ScanTask, int]]) -> Iterable[Sequence[tuple[ScanTask, int]]]:
        """Group the files by their encryption.

        Raises:
            Unreadable: A file cannot be read.
        """
        if self._keys is None:
            return [tasks]
        schemes: dict[EncryptionScheme | None, list[tuple[ScanTask, int]]] = {}
        for task, origin in tasks:
            schemes.setdefault(self._inspect(task).scheme, []).append((task, origin))
        return schemes.values()

    def _find_scheme(self, path: str) -> EncryptionScheme | None:
        """Return the encryption that an old file had when the encryption of the new file was chosen."""
        return self._file_properties[path].scheme

    def _find_required(self, tasks: Sequence[ScanTask]) -> frozenset[int]:
        """Return the ids of the optional primitive columns that all these files store as required.

        Raises:
            Unreadable: A file cannot be read.
        """
        common: frozenset[int] | None = None
        for task in sorted(tasks, key=lambda task: -task.size_bytes):
            required = self._inspect(task).required
            common = required if common is None else common & required
            if not common:
                break
        return (common or frozenset()) - find_required_columns(self._find_layout(frozenset()).leaves)

    def _find_layout(self, required: frozenset[int]) -> _Layout:
        layout = self._layouts.get(required)
        if layout is None:
            layout = self._layouts[required] = _Layout.from_target(self._target, required)
        return layout

    def _write_file(self, task: ScanTask, origin: int) -> None:
        """Copy the large row groups of a file, and encode the live rows of its other row groups.

        All rows of a small file are encoded. With `keep_order`, the rows before a copied row group are encoded first.
        Otherwise, the rows to encode are collected until the end of the file.

        Raises:
            Unreadable: The file cannot be read.
        """
        if task.size_bytes < self._policy.copied_min_bytes or self._policy.sorts:
            self.counts.encoded["the table has a sort order" if self._policy.sorts else "the file is small"] += 1
            self._buffer_rows(task, None, origin)
            return
        with SourceFile(task.path, self._source_table.storage, keys=self._keys) as source:
            if self._check is not None:
                self._check(task.path, source)
            if source.footer.rows != task.records:
                raise Unreadable(
                    task.path, f"the file has {source.footer.rows} rows; the manifest entry says {task.records}"
                )
            leaf_match = self._match(source)
            deleted_rows = self._deletes.load(task.path, task.deletes)
            first_row, positions_to_encode = 0, list[Longs]()
            for number, group in enumerate(source.footer.groups):
                reason = leaf_match.reason or self._explain_why_not_copied(
                    group.size_bytes, deleted_rows, first_row, group.rows
                )
                if reason:
                    self.counts.encoded[reason] += 1
                    positions_to_encode.append(np.arange(first_row, first_row + group.rows))
                elif group.rows:
                    if self._policy.keep_order and positions_to_encode:
                        self._buffer_rows(task, np.concatenate(positions_to_encode), origin)
                        positions_to_encode = []
                    self._copy(source, number, leaf_match, task, first_row, origin)
                first_row += group.rows
            if positions_to_encode:
                self._buffer_rows(task, np.concatenate(positions_to_encode), origin)

    def _find_protection(self, source: SourceFile) -> FileProtection | None:
        """Return the encryption of a new file with the rows of an old file.

        Raises:
            Unreadable: The encryption of the new file is uncertain.
        """
        return None if self._keys is None else find_protection(source, self._layout.leaves, self._keys)

    def _match(self, source: SourceFile) -> LeafMatch:
        """Return the old file's column for each column of the new file, or the reason why nothing can be copied.

        The column is -1 if nulls or row lineage values are written instead. A missing column cannot be filled with
        nulls if readers expect a value: a required column, a column with a default, or a source of a partition field.
        """
        creator = _WRITER.match(source.footer.created_by or b"")
        if creator and (int(creator[2]), int(creator[3])) < _CORRECT_STATISTICS_SINCE[creator[1]]:
            return LeafMatch((), "an old writer wrote wrong statistics")
        lineage = {ROW_ID, LAST_UPDATED_SEQUENCE_NUMBER} if self._has_lineage else set()
        leaf_match = match_leaves(self._layout.leaves, source.leaves)
        if leaf_match.reason:
            return leaf_match
        columns = list(leaf_match.columns)
        partition_source_ids = {
            source_id for spec_field in self._target.spec.fields for source_id in spec_field.sources
        }
        by_id = {field.id: field for field in self._target.schema.fields}
        for position, leaf in enumerate(self._layout.leaves):
            top = by_id[leaf.ids[0] or 0]
            if top.id in lineage:
                columns[position] = -1  # The lineage columns are always encoded.
            elif columns[position] < 0 and (
                top.required or top.initial_default is not None or top.id in partition_source_ids
            ):
                return LeafMatch((), f"the file lacks column {top.name}, which is not null for readers")
        return LeafMatch(columns)

    def _explain_why_not_copied(self, size_bytes: int, deleted_rows: DeletedRowSet, first_row: int, rows: int) -> str:
        """Return the reason why a row group cannot be copied, or "" if it can be copied."""
        if size_bytes < self._policy.copied_min_bytes:
            return "the row group is small"
        if deleted_rows.keys:
            return "equality deletes apply to it"
        if deleted_rows.mark_deleted_positions(first_row, rows) is not None:
            return "some of its rows are deleted"
        return ""

    def _copy(
        self, source: SourceFile, number: int, leaf_match: LeafMatch, task: ScanTask, first_row: int, origin: int
    ) -> None:
        """Copy a row group to the current file. Columns that the old file does not have are added.

        Args:
            source: The old file.
            number: The position of the row group in the file.
            leaf_match: The old file's column for each column of the new file, or -1.
            task: The scan task of the old file.
            first_row: The position of the first row of the row group in the file.
            origin: The number of the file's first row among the rows of all old files. The log records such a number
                for each new row.
        """
        group = source.footer.groups[number]
        if self._policy.keep_order:
            self._flush()
        present_columns = [(column, position) for position, column in enumerate(leaf_match.columns) if column >= 0]
        missing = [position for position, column in enumerate(leaf_match.columns) if column < 0]
        picks = [
            Pick(
                source, number, [column for column, _ in present_columns], [position for _, position in present_columns]
            )
        ]
        if missing:
            picks.append(self._fill_missing(task, first_row, group.rows, missing))
            if not present_columns:
                picks = picks[1:]
        file = self._open_file(sum(pick.size_bytes for pick in picks))
        self._origins.add_run(file.location, file.assembler.rows, origin + first_row, group.rows)
        file.metrics.add_copied(_count_nans(task, source))
        file.assembler.add(picks)
        self.counts.copied += 1
        self.counts.copied_bytes += group.size_bytes

    def _fill_missing(self, task: ScanTask, first_row: int, rows: int, missing: Sequence[int]) -> Pick:
        """Return the columns that are not copied, encoded in memory: lineage columns, and nulls for missing columns.

        Row ids are consecutive in most files, so they are stored as differences and without a dictionary.
        """
        ids = {self._layout.leaves[position].ids[0] for position in missing}
        fields = [field for field in self._target.schema.fields if field.id in ids]
        lineage = self._read_lineage(task, first_row, rows) if self._has_lineage else {}
        positions = {field.id: position for position, field in enumerate(_select_written_fields(self._target))}
        arrow = pa.schema([self._layout.arrow.field(positions[field.id]) for field in fields])
        columns = [
            lineage.get(field.name, pa.nulls(rows, kind.type)) for field, kind in zip(fields, arrow, strict=True)
        ]
        options = build_writer_options(self._target.properties)
        options["use_dictionary"] = [name for name in arrow.names if name != ROW_ID_NAME]
        if ROW_ID_NAME in lineage:
            options["column_encoding"] = {ROW_ID_NAME: "DELTA_BINARY_PACKED"}
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, arrow, **options) as writer:
            writer.write_table(pa.table(columns, schema=arrow), row_group_size=rows)
        source = SourceFile(task.path, None, bytes(sink.getvalue()))
        return Pick(source, 0, list(range(len(missing))), list(missing))

    def _read_lineage(self, task: ScanTask, first_row: int, rows: int) -> dict[str, pa.Array]:
        batches = list(self._lineage_reader.read(task, np.arange(first_row, first_row + rows)))
        table = pa.Table.from_batches(batches)
        if table.num_rows != rows:
            raise Unreadable(task.path, f"{table.num_rows} of the {rows} rows of a row group were read")
        return {name: table.column(position).combine_chunks() for position, name in enumerate(NAMES)}

    def _buffer_rows(self, task: ScanTask, positions: Longs | None, origin: int) -> None:
        """Add the live rows at these positions to the buffer, and write the buffer when it is full.

        Args:
            task: The scan task of the old file.
            positions: The positions, or None for all rows of the file.
            origin: The number of the file's first row among the rows of all old files. For each new row, the log of row
                origins (`OriginLog`) records the number of its old row.
        """
        columns = list(range(len(self._read_plan.names)))
        full_bytes = self._policy.target_bytes if self._policy.sorts else self._policy.row_group_bytes
        for batch in self._reader.read(task, positions):
            with hide_values(self._protection):
                rows = conform(batch.select(columns), self._target.schema, self._layout.arrow)
            self._waiting.append(rows)
            self._waiting_origins.append(batch.column(len(columns)).to_numpy() + origin)
            size_bytes = sum(buffered_batch.nbytes for buffered_batch in self._waiting)
            if size_bytes * self._encoded_ratio >= full_bytes or size_bytes >= _BUFFERED_BYTES_MAX:
                self._flush()

    def _flush(self) -> None:
        """Write the buffered rows as one row group, or as one sorted file.

        A sorted file is divided into row groups. The origin of a row is its number among the rows of all old files. The
        origins are sorted together with the rows, as an additional last column.
        """
        if not self._waiting:
            return
        rows, origins = pa.Table.from_batches(self._waiting), np.concatenate(self._waiting_origins)
        self._waiting, self._waiting_origins = [], []
        if not self._policy.sorts or self._target.ordering is None:
            self._write_group(rows, origins)
            return
        sorted_rows = self._target.ordering.sort(rows.append_column(_ORIGIN, pa.array(origins)))
        step = max(1, int(rows.num_rows * self._policy.row_group_bytes / max(1.0, rows.nbytes * self._encoded_ratio)))
        for first_row in range(0, rows.num_rows, step):
            group = sorted_rows.slice(first_row, step)
            self._write_group(group.select(list(range(rows.num_columns))), group.column(rows.num_columns).to_numpy())
        self._close_file()

    def _write_group(self, rows: pa.Table, origins: Longs) -> None:
        data = encode_row_group(rows, self._target.schema, self._target.properties)
        self._encoded_ratio = max(_ENCODED_RATIO_MIN, len(data) / max(1, rows.nbytes))
        source = SourceFile("rows in memory", None, data)
        columns = range(len(self._layout.leaves))
        file = self._open_file(len(data))
        self._origins.add(file.location, file.assembler.rows, origins)
        file.metrics.add(rows)
        file.assembler.add([Pick(source, 0, columns, columns)])

    def _open_file(self, size_bytes: int) -> _OpenFile:
        """Return the file to which a row group of this size is added. Open a new file if the current file is full.

        With `keep_order` or `sorts`, a file is never full: it has all rows of an old file, or all rows that were sorted
        together.
        """
        is_single = self._policy.keep_order or self._policy.sorts
        if self._file and not is_single and self._file.assembler.size_bytes + size_bytes > self._policy.target_bytes:
            self._close_file()
        if self._file is None:
            location = self._target.generate_location(self._partition[0])
            encryption = None if self._protection is None else self._protection.create_encryption(location)
            assembler = FileAssembler(open_sink(location, self._target.storage), self._layout.footer, encryption)
            modes = list_modes(self._target.schema, self._target.properties, self._target.sort_order)
            self._file = _OpenFile(location, assembler, Metrics(list_leaves(self._target.schema), modes))
        return self._file

    def _finish_file(self) -> None:
        self._flush()
        self._close_file()

    def _close_file(self) -> None:
        """Close the current file, add its ContentFile to the written files, and build its indexes."""
        file = self._file
        if file is None:
            return
        footer = file.assembler.close()
        self._file = None
        content_file = {
            "content": "data",
            "file-path": file.location,
            "file-format": "PARQUET",
            "file-size-in-bytes": file.assembler.size_bytes,
            "record-count": file.assembler.rows,
            **file.metrics.collect(
                parse_footer(footer), secret=self._protection.secret_ids if self._protection else ()
            ),
            "split-offsets": file.assembler.split_offsets,
            "spec-id": self._target.spec.spec_id,
            "partition": self._partition[1],
            "sort-order-id": self._sort_order,
        }
        self._files.append(content_file)
        self._indexes.add(content_file, None)

    def close(self) -> WrittenFiles:
        index_files, skipped_indexes = self._indexes.close()
        return WrittenFiles(tuple(self._files), index_files, skipped_indexes)

    def abort(self) -> None:
        """Delete the written files, and ignore errors of the storage. The method never raises."""
        if self._file is not None:
            self._file.assembler.abort()
            self._file = None
        WrittenFiles(tuple(self._files), tuple(self._indexes.written)).discard(self._target.storage)


@dataclass(frozen=True)
class _FileProperties:
    """The properties of an old file that its new file must have.

    Attributes:
        required: The ids of the columns that are required in the old file.
        protection: The encryption of the new file, or None if it is not encrypted.
    """

    required: frozenset[int]
    protection: FileProtection | None

    @property
    def scheme(self) -> EncryptionScheme | None:
        return None if self.protection is None else self.protection.scheme


@dataclass(frozen=True)
class _Layout:
    """The columns of a new file.

    Attributes:
        arrow: The Arrow schema.
        leaves: The leaf columns of the schema.
        footer: The footer of an empty file with the schema.
    """

    arrow: pa.Schema
    footer: ParquetFooter
    leaves: Sequence[Leaf]

    @staticmethod
    def from_target(target: WriteTarget, required: frozenset[int]) -> _Layout:
        """Return the layout for a target.

        Args:
            required: The ids of columns that are required in the file although they are optional in the table.
        """
        arrow = pa.schema(
            [
                kind.with_nullable(False) if field.id in required else kind
                for field, kind in zip(_select_written_fields(target), target.arrow, strict=True)
            ]
        )
        source = make_empty_file(arrow, target.schema)
        return _Layout(arrow, source.footer, source.leaves)


@dataclass(frozen=True)
class _OpenFile:
    """A new file to which row groups are added."""

    location: str
    assembler: FileAssembler
    metrics: Metrics


def _count_nans(task: ScanTask, source: SourceFile) -> dict[int, int]:
    """Return the NaN counts of each row group by column id, as far as the counts of the whole file determine them.

    The count 0 of a file is the count of each row group. Another count is known only if one row group has all rows.
    """
    counts = task.file.get("nan-value-counts") or {"keys": [], "values": []}
    is_single = sum(group.rows > 0 for group in source.footer.groups) == 1
    return {key: count for key, count in zip(counts["keys"], counts["values"], strict=True) if not count or is_single}


def _select_written_fields(target: WriteTarget) -> Iterator[Any]:
    """Yield the fields of the schema for which files have columns. A field of the type `unknown` has only nulls."""
    return (field for field in target.schema.fields if field.type != UNKNOWN)
