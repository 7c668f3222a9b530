"""An index of the delete files that apply to data files (Iceberg spec, "Scan Planning"). It is built once per view.

All delete files that the specification requires are returned:

- A position delete applies to one data file if its `referenced_data_file`, or its equal path bounds, name that file.
- All other position deletes, and equality deletes, apply to their partition.
- An equality delete of an unpartitioned spec applies to all files.

An equality delete is omitted if its statistics and the statistics of the data file prove that no key equals a row.
Java's DeleteFileIndex does the same, but with the faults that `equality.py` lists.

If metadata contradict the specification:

- All deletion vectors of a data file are returned, and the reader rejects them.
- A deletion vector older than its data file does not apply.
- A deletion vector without a data file, and an entry without a sequence number to inherit, raise `Corrupt`, because
  neither applying nor omitting deletes is safe.

The memory is proportional to the number of delete files. Entries of data files are read during a lookup.

The module also resolves the values that entries inherit from the manifest list: sequence numbers, by which deletes
apply, and first row ids. They depend on the snapshot's manifest list: a manifest older than its table's row ids has a
first row id only in later snapshots (Iceberg spec, "Sequence Number Inheritance" and "First Row ID Inheritance").
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import cast

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ADDED
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.reserved import DELETED_PATH
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY, UNITS_PER_DAY
from seamark.formats.index.packing import MISSING, NONE, Form, Longs, decode_value
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.strings import read_codes, read_strings
from seamark.metaserver.planner.deletes.equality import EqualityDelete, EqualityDeletes
from seamark.metaserver.planner.view.view import TableView


def read_sequence_numbers(manifest: ManifestFile, block: Block, rows: Longs) -> Longs:
    """Return the data sequence numbers of these rows of the block, int64[rows].

    An added file without a sequence number inherits the sequence number of the manifest.

    Raises:
        Corrupt: A file has no sequence number and cannot inherit one; the message names the manifest.
    """
    sequences = block.read_longs("sequence_number")[rows]
    is_missing = sequences == MISSING
    if not is_missing.any():
        return sequences
    if manifest.sequence_number:
        # Only an added file may inherit. Version 1 manifests have the number 0, and all their files get 0.
        invalid_rows = np.flatnonzero(is_missing & (block.read_longs("status")[rows] != ADDED))
        if len(invalid_rows):
            name = block.read_text("file_path", int(rows[invalid_rows[0]]))
            raise Corrupt(
                f"Manifest {block.location}: the entry of {name} has no sequence number, and its "
                "status is not ADDED, so it cannot inherit one"
            )
    return np.where(is_missing, manifest.sequence_number, sequences)


def assign_first_row_ids(manifest: ManifestFile, block: Block, rows: Longs) -> Longs | None:
    """Return the first row ids of data files, int64[rows].

    Files without an id are assigned ids in order, starting at the manifest's first row id. The id of such a file is
    the manifest's id plus the record counts of all earlier files without an id. So the counts of earlier files are
    needed, too.

    Returns:
        None if the manifest has no first row id. In this case, the first row ids of its files are ignored.
    """
    if manifest.first_row_id is None or not len(rows):
        return None
    end = int(rows.max()) + 1
    stored_ids = block.read_longs("first_row_id")[:end]
    is_missing = stored_ids == MISSING
    counts = np.where(is_missing, block.read_longs("record_count")[:end], 0)
    row_ids = np.where(is_missing, manifest.first_row_id + np.cumsum(counts) - counts, stored_ids)
    return row_ids[rows]


_POSITIONS, _EQUALITY = 1, 2
"""The content of a delete file, as manifests store it."""
_ROWS_PER_PATH_MIN = 4
"""The minimum number of data files for each searched path with which a search by the bytes of the paths saves time."""
_GLOBAL = 0
"""The scope of equality deletes that apply to all partitions. Partitions are numbered from 1."""

Partition = tuple[object, ...]


class DeleteIndex:
    """The delete files that apply to each data file of a view. An instance is immutable.

    `specs` and `schemas` are all specs and schemas of the table's metadata. The specs and schemas determine which
    specs are unpartitioned, which columns are required, and which columns were promoted.
    """

    def __init__(self, view: TableView, specs: Iterable[PartitionSpec], schemas: Iterable[Schema]) -> None:
        """Build the index.

        Raises:
            Corrupt: An entry is not a delete file or lacks a required field; the message names the manifest.
        """
        self._view = view
        self._specs = {spec.spec_id: spec for spec in specs}
        self._schemas = tuple(schemas)
        self._is_unpartitioned_by_spec = {spec_id: _is_unpartitioned(spec) for spec_id, spec in self._specs.items()}
        self._fields: dict[int, tuple[int, ...]] = {}
        self._units_per_day: dict[tuple[int, int], int] = {}
        self._partitions: dict[int, dict[Partition, int]] = {}
        self._partition_count = 0
        self._paths: dict[bytes, int] = {}
        vectors, by_path, by_partition = _DeleteCollector(), _DeleteCollector(), _DeleteCollector()
        equality: list[EqualityDelete] = []
        for number, block in enumerate(view.delete_blocks):
            for field_id, _ in block.partition_fields:
                field_ids = self._fields.get(block.spec_id, ())
                self._fields[block.spec_id] = tuple(sorted({*field_ids, field_id}))
            self._collect_entries(number, block, vectors, by_path, by_partition, equality)
        self._vectors, self._by_path = _DeletesByGroup(vectors), _DeletesByGroup(by_path)
        self._by_partition = _DeletesByGroup(by_partition)
        self._equality = EqualityDeletes(view.delete_blocks, equality, self._schemas) if equality else None
        self._sorted_paths = sorted(self._paths)

    def find_deletes_for_file(self, entry_id: int) -> tuple[int, ...]:
        """Return the delete files that apply to one data file, as their numbers in the view of the table, ascending."""
        return self.find_deletes(np.array([entry_id], dtype=np.int64))[0]

    def find_deletes(self, entry_ids: Longs) -> list[tuple[int, ...]]:
        """Return the delete files that apply to each data file. `entry_ids`, int64[n], may have any order.

        A delete file is given by its delete row, which is its number in the view. It applies by its sequence number,
        and by the path or the partition of the data file.

        Files with the same delete files share one tuple.

        Raises:
            Corrupt: A data file has no sequence number.
        """
        deletes_by_file: list[tuple[int, ...]] = [()] * len(entry_ids)
        if not len(entry_ids) or not self._view.delete_file_count:
            return deletes_by_file
        sequences = np.empty(len(entry_ids), dtype=np.int64)
        paths = np.full(len(entry_ids), -1, dtype=np.int64)
        partitions = np.full(len(entry_ids), -1, dtype=np.int64)
        for number, positions, local in self._group_by_block(entry_ids):
            block = self._view.blocks[number]
            sequences[positions] = read_sequence_numbers(self._view.manifests[number], block, local)
            if self._paths:
                paths[positions] = self._find_path_ids(block, local)
            if block.spec_id in self._partitions:
                partitions[positions] = self._find_partition_ids(block, local)
        self._add_position_deletes(deletes_by_file, sequences, paths, partitions)
        if self._equality is not None:
            self._add_equality_deletes(self._equality, deletes_by_file, entry_ids, sequences, partitions)
        return deletes_by_file

    def _collect_entries(
        self,
        number: int,
        block: Block,
        vectors: _DeleteCollector,
        by_path: _DeleteCollector,
        by_partition: _DeleteCollector,
        equality: list[EqualityDelete],
    ) -> None:
        """Add the entries of a delete manifest to the groups that lookups search.

        Position deletes are grouped by the path of their only data file, or else by partition. Deletion vectors are
        separate, because they replace other position deletes. Equality deletes have the scope of their partition, or
        apply to the whole table if their spec is unpartitioned.

        Raises:
            Corrupt: An entry is not a delete file or lacks a required field; the message names the manifest.
        """
        first = self._view.delete_starts[number]
        sequences = read_sequence_numbers(
            self._view.delete_manifests[number], block, np.arange(block.rows, dtype=np.int64)
        )
        contents = block.read_longs("content")
        invalid_rows = np.flatnonzero((contents != _POSITIONS) & (contents != _EQUALITY))
        if len(invalid_rows):
            name = block.read_text("file_path", int(invalid_rows[0]))
            raise Corrupt(f"Delete manifest {block.location} lists {name}, which is not a delete file")
        rows = np.flatnonzero(contents == _POSITIONS)
        if len(rows):
            is_vector = _are_vectors(block, rows)
            paths = self._number_paths(_read_referenced_files(block, rows, is_vector))
            for collector, is_member in ((vectors, is_vector), (by_path, ~is_vector & (paths >= 0))):
                collector.add(paths[is_member], sequences[rows[is_member]], first + rows[is_member])
            other_rows = rows[paths < 0]
            by_partition.add(self._number_partitions(block, other_rows), sequences[other_rows], first + other_rows)
        rows = np.flatnonzero(contents == _EQUALITY)
        if len(rows):
            is_unpartitioned = self._is_unpartitioned_by_spec.get(block.spec_id, not block.partition_fields)
            scopes = np.full(len(rows), _GLOBAL) if is_unpartitioned else self._number_partitions(block, rows)
            columns = block.read_lists("equality_ids")
            for row, scope, sequence in zip(rows.tolist(), scopes.tolist(), sequences[rows].tolist(), strict=True):
                # An equality delete applies only to data files with strictly lower sequence numbers.
                ids = tuple(columns[row] or ())
                equality.append(EqualityDelete(first + row, number, row, scope, sequence - 1, ids))

    def _number_paths(self, paths: list[bytes | None]) -> Longs:
        """Return an id for each path, int64[paths]. The id for None is -1.

        A path that has no id yet is assigned the next id.
        """
        path_ids = self._paths
        ids = [-1 if path is None else path_ids.setdefault(path, len(path_ids)) for path in paths]
        return np.array(ids, dtype=np.int64)

    def _number_partitions(self, block: Block, rows: Longs) -> Longs:
        """Return an id for the partition of each row, int64[rows].

        A partition that has no id yet is assigned the next id. Ids begin with 1, because 0 (`_GLOBAL`) represents the
        whole table.
        """
        if not len(rows):
            return rows
        scope_by_partition = self._partitions.setdefault(block.spec_id, {})
        ids = []
        for partition in self._read_partitions(block, rows):
            scope = scope_by_partition.get(partition)
            if scope is None:
                self._partition_count += 1
                scope = scope_by_partition[partition] = self._partition_count
            ids.append(scope)
        return np.array(ids, dtype=np.int64)

    def _find_partition_ids(self, block: Block, rows: Longs) -> Longs:
        """Return the ids of the rows' partitions, int64[rows]. A partition without delete files has the id -1."""
        ids = map(self._partitions[block.spec_id].get, self._read_partitions(block, rows), repeat(-1))
        return np.fromiter(ids, dtype=np.int64, count=len(rows))

    def _read_partitions(self, block: Block, rows: Longs) -> Iterable[Partition]:
        """Return the partition of each row: the values of the spec's fields, ordered by field id.

        Manifests of the same spec may have the fields in a different order, so the order is always that of the ids.
        """
        ids = self._fields.get(block.spec_id, ())
        return (
            zip(*(self._read_values(block, field_id, rows) for field_id in ids), strict=True)
            if ids
            else repeat((), len(rows))
        )

    def _read_values(self, block: Block, field_id: int, rows: Longs) -> Sequence[object]:
        """Return the partition values of one field as objects that can be compared, or None for null.

        If a date column was promoted to timestamps, older manifests have days. They are converted to the unit of
        timestamps, so that equal values compare as equal.
        """
        values = _read_partition_values(block, field_id, rows)
        is_date = (field_id, "date") in block.partition_fields
        units_per_day = self._count_units_per_day(block.spec_id, field_id) if is_date else 1
        if units_per_day == 1:
            return values
        return [value * units_per_day if isinstance(value, int) else None for value in values]

    def _count_units_per_day(self, spec_id: int, field_id: int) -> int:
        """Return the number of units of a partition field in one day, such as microseconds for a timestamp.

        It is greater than 1 only for an identity field whose column is a timestamp in one of the table's schemas.
        """
        units = self._units_per_day.get((spec_id, field_id))
        if units is None:
            spec = self._specs.get(spec_id)
            sources = [
                field.source_id
                for field in (() if spec is None else spec.fields)
                if field.field_id == field_id and field.transform.lower() == IDENTITY
            ]
            columns = [schema.column(source) for schema in self._schemas for source in sources if source is not None]
            kinds = [column.type for column in columns if column is not None and isinstance(column.type, str)]
            units = self._units_per_day[spec_id, field_id] = max(
                (UNITS_PER_DAY.get(kind, 1) for kind in kinds), default=1
            )
        return units

    def _find_path_ids(self, block: Block, rows: Longs) -> Longs:
        """Return the ids of the rows' paths, int64[rows]. A path that no delete file names has the id -1."""
        ids = np.full(len(rows), -1, dtype=np.int64)
        column = block.find_text_column("file_path")
        if column is None:
            return ids
        common, width = column.packed.common, column.packed.width
        first = bisect_left(self._sorted_paths, common)
        last = bisect_right(self._sorted_paths, common, lo=first, key=lambda path: path[: len(common)])
        if first == last:
            return ids
        positions = np.arange(len(rows))
        if width and (last - first) * _ROWS_PER_PATH_MIN <= len(rows):
            # If few paths are searched, decode only the paths whose bytes after the common prefix match one of them.
            heads = [path[len(common) : len(common) + width] for path in self._sorted_paths[first:last]]
            codes_of_heads = np.array(
                [int.from_bytes(head.ljust(width, b"\0"), "big") for head in heads], dtype=np.uint64
            )
            positions = np.flatnonzero(np.isin(read_codes(column, rows), codes_of_heads))
        ids_found = map(self._paths.get, cast("list[bytes]", read_strings(column, rows[positions])), repeat(-1))
        ids[positions] = np.fromiter(ids_found, dtype=np.int64, count=len(positions))
        return ids

    def _group_by_block(self, entry_ids: Longs) -> Iterator[tuple[int, Longs, Longs]]:
        """Yield (block number, positions in `entry_ids`, rows of the block) for each block with requested files.

        Args:
            entry_ids: The entry ids of data files, which number the files of all blocks.
        """
        numbers, rows_in_block = self._view.split_entry_ids(entry_ids)
        order = np.argsort(numbers, kind="stable")
        ends = [*(np.flatnonzero(np.diff(numbers[order])) + 1).tolist(), len(entry_ids)]
        for start, end in pairwise((0, *ends)):
            positions = order[start:end]
            number = int(numbers[positions[0]])
            yield number, positions, rows_in_block[positions]

    def _add_position_deletes(
        self, deletes_by_file: list[tuple[int, ...]], sequences: Longs, paths: Longs, partitions: Longs
    ) -> None:
        """Add the position deletes of each data file to `deletes_by_file`.

        If a data file has a deletion vector, only the deletion vector is added.
        """
        vectors = self._vectors.find_first_position(paths, sequences)
        has_no_vector = vectors < 0
        by_path = self._by_path.find_first_position(np.where(has_no_vector, paths, -1), sequences)
        by_partition = self._by_partition.find_first_position(np.where(has_no_vector, partitions, -1), sequences)
        positions = np.flatnonzero((vectors >= 0) | (by_path >= 0) | (by_partition >= 0))
        if not len(positions):
            return
        parts = [
            (deletes, starts[positions])
            for deletes, starts in (
                (self._vectors, vectors),
                (self._by_path, by_path),
                (self._by_partition, by_partition),
            )
            if (starts >= 0).any()
        ]
        # The start positions in all parts determine which deletes apply. So number the combinations of start positions
        # (a start is -1 or more). All files of a combination have the same deletes, so compute these only for one file
        # of each combination (`examples`).
        combinations = np.zeros(len(positions), dtype=np.int64)
        examples = positions
        for _, starts in parts:
            _, examples, combinations = np.unique(
                combinations * (starts.max() + 2) + starts + 1, return_index=True, return_inverse=True
            )
        tuples = _join_delete_files([(deletes, starts[examples]) for deletes, starts in parts])
        for position, combination in zip(positions.tolist(), combinations.tolist(), strict=True):
            deletes_by_file[position] = tuples[combination]

    def _add_equality_deletes(
        self,
        equality: EqualityDeletes,
        deletes_by_file: list[tuple[int, ...]],
        rows: Longs,
        sequences: Longs,
        partitions: Longs,
    ) -> None:
        """Add the equality deletes of each data file to `deletes_by_file`. Files with equal results share one tuple.

        The scope of an equality delete is its partition, or the whole table.

        Args:
            equality: The equality deletes.
            deletes_by_file: The delete files of each data file.
            rows: The entry ids of the data files.
            sequences: The data sequence numbers of the data files.
            partitions: The partition id of each data file, from 1.
        """
        deletes_by_position: dict[int, list[int]] = {}
        blocks = [
            (self._view.blocks[number], positions, rows_in_block)
            for number, positions, rows_in_block in self._group_by_block(rows)
        ]
        global_scopes = np.full(len(rows), _GLOBAL, dtype=np.int64)
        for positions, deletes in equality.iter_applicable_pairs(blocks, sequences, (global_scopes, partitions)):
            order = np.argsort(positions, kind="stable")
            sorted_positions, sorted_deletes = positions[order], deletes[order].tolist()
            starts = [0, *(np.flatnonzero(np.diff(sorted_positions)) + 1).tolist()]
            for start, end in pairwise((*starts, len(sorted_deletes))):
                deletes_by_position.setdefault(int(sorted_positions[start]), []).extend(sorted_deletes[start:end])
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        for position, equality_deletes in deletes_by_position.items():
            merged_deletes = tuple(sorted((*deletes_by_file[position], *equality_deletes)))
            deletes_by_file[position] = shared.setdefault(merged_deletes, merged_deletes)


class _DeleteCollector:
    """Collects delete files with their groups and sequence numbers. A group is the id of a path or of a partition."""

    def __init__(self) -> None:
        self._parts: list[tuple[Longs, Longs, Longs]] = []

    def add(self, groups: Longs, sequences: Longs, deletes: Longs) -> None:
        self._parts.append((groups, sequences, deletes))

    def collect_columns(self) -> tuple[Longs, Longs, Longs]:
        """Return three parallel columns with one row for each added pair of a group and a delete file.

        The columns are the group (the id of a path or of a partition), the sequence number of the delete file, and its
        position among the delete files of the view.
        """
        if not self._parts:
            return (np.empty(0, dtype=np.int64),) * 3
        groups, sequences, deletes = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        return groups, sequences, deletes


class _DeletesByGroup:
    """Delete files sorted by group, then by sequence number.

    With this order, the delete files that apply to a data file are at the end of the data file's group.
    """

    def __init__(self, collector: _DeleteCollector) -> None:
        groups, sequences, deletes = collector.collect_columns()
        order = np.lexsort((deletes, sequences, groups))
        self._groups: Longs = groups[order]
        # For empty input, np.unique imports modules, which takes tens of milliseconds in the first plan of a process.
        self._distinct: Longs = np.unique(sequences) if len(sequences) else sequences
        # Replace sequence numbers by ranks, so that the group and the rank fit into one integer key.
        self._keys: Longs = self._combine_key(self._groups, np.searchsorted(self._distinct, sequences[order]))
        self.deletes: list[int] = deletes[order].tolist()
        self.ends: Longs = np.searchsorted(self._groups, self._groups, side="right")
        """int64[deletes]: the end of each entry's group."""

    def _combine_key(self, groups: Longs, ranks: Longs) -> Longs:
        return groups * (len(self._distinct) + 1) + ranks

    def find_first_position(self, groups: Longs, sequences: Longs) -> Longs:
        """Return, for each group, the position of its first delete file with an equal or higher sequence number.

        The position is -1 if no delete file of the group has such a number, or if the group is -1.
        """
        if not len(self._groups):
            return np.full(len(groups), -1, dtype=np.int64)
        positions = np.searchsorted(self._keys, self._combine_key(groups, np.searchsorted(self._distinct, sequences)))
        valid_positions = np.minimum(positions, len(self._groups) - 1)
        is_found = (positions == valid_positions) & (self._groups[valid_positions] == groups)
        return np.where(is_found, positions, -1)


def _join_delete_files(parts: Sequence[tuple[_DeletesByGroup, Longs]]) -> list[tuple[int, ...]]:
    """Return the sorted delete files of each example.

    An example is a data file that represents all files with the same delete files.

    Args:
        parts: Delete files, sorted by group and sequence number, and int64[examples], the position of the first delete
            file that applies to each example; -1 if there is none. All later delete files of the same group, such as a
            partition, also apply to the example.
    """
    counts = sum(np.where(starts >= 0, deletes.ends[starts] - starts, 0) for deletes, starts in parts)
    if len(parts) == 1 and np.all(counts == 1):
        deletes, starts = parts[0]
        return [(deletes.deletes[position],) for position in starts.tolist()]
    delete_lists: list[list[int]] = [[] for _ in range(len(parts[0][1]))]
    for deletes, starts in parts:
        ends = deletes.ends[starts].tolist()
        for example_deletes, start, end in zip(delete_lists, starts.tolist(), ends, strict=True):
            if start >= 0:
                example_deletes += deletes.deletes[start:end]
    return [tuple(sorted(example_deletes)) for example_deletes in delete_lists]


def _is_unpartitioned(spec: PartitionSpec) -> bool:
    return all(field.is_void for field in spec.fields)


def _are_vectors(block: Block, rows: Longs) -> npt.NDArray[np.bool_]:
    """Return whether each position delete is a deletion vector, bool[rows]. Only deletion vectors are Puffin files."""
    formats = read_strings(block.find_text_column("file_format"), rows)
    vectors = {name for name in set(formats) if name is not None and name.lower() == b"puffin"}
    return np.array([name in vectors for name in formats], dtype=np.bool_)


def _read_referenced_files(block: Block, rows: Longs, is_vector: npt.NDArray[np.bool_]) -> list[bytes | None]:
    """Return the single data file that each position delete refers to, or None if a delete may refer to several files.

    Truncated bounds suffice: if the lower bound equals the upper bound, it is the full path.

    Raises:
        Corrupt: A deletion vector does not name its data file; the message names the manifest.
    """
    referenced_files = read_strings(block.find_text_column("referenced_data_file"), rows)
    if None not in referenced_files:
        return referenced_files
    lower = read_strings(block.get_bound_column("lower", DELETED_PATH), rows)
    upper = read_strings(block.get_bound_column("upper", DELETED_PATH), rows)
    for position, (name, low, high) in enumerate(zip(referenced_files, lower, upper, strict=True)):
        if name is not None:
            continue
        if is_vector[position]:
            path = block.read_text("file_path", int(rows[position]))
            raise Corrupt(f"Manifest {block.location}: a deletion vector in {path} has no referenced_data_file")
        if low == high:
            referenced_files[position] = low
    return referenced_files


def _read_partition_values(block: Block, field_id: int, rows: Longs) -> Sequence[object]:
    """Return the values of one partition field as objects, or None for null.

    Objects are equal if the partition values are equal. Floats are compared by their bits (spec, "Scan Planning",
    note 3): NaN equals itself, and 0.0 differs from -0.0. A number equals the same number of a promoted type.
    """
    kind_and_column = block.find_partition_column(field_id)
    kind, packed_column = kind_and_column or ("", None)
    if packed_column is None:
        return [None] * len(rows)
    column = block.read_column(packed_column)
    if packed_column.form == Form.STRINGS:
        texts = read_strings(column, rows)
        if not kind.startswith("decimal"):
            return texts
        return [None if text is None else decode_value(Form.STRINGS, kind, text) for text in texts]
    if packed_column.form == Form.FLOATS:
        doubles = column.doubles()[rows]
        doubles[np.isnan(doubles)] = np.nan
        values: list[object] = doubles.view(np.int64).tolist()
    else:
        values = column.read_longs()[rows].tolist()
    if packed_column.presence != NONE:
        for position in np.flatnonzero(~column.present()[rows]).tolist():
            values[position] = None
    return values
