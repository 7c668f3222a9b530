"""Encoder of plans as JSON: `file-scan-tasks` and `delete-files` (REST spec, schema `ScanTasks`).

The text is written file by file from the columns of the blocks. Text that many files share (residual, partition,
format) is encoded once and copied; no object is built per file. The JSON is produced in pieces of a few hundred files,
so that the sender can yield to the event loop between pieces.

Clients require more than the specification: Java's executors fail if `residual-filter` is missing, and its client
rejects `delete-files` if there are no tasks. `content_files.py` describes PyIceberg's requirements for partitions.
Seamark's own client computes residuals itself, so it does not request residuals. It requests sequence numbers, which
the specification does not define (`TaskForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, repeat
from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Expression, Op, collect_predicates
from seamark.formats.iceberg.expressions.expression_json import encode_expression, to_transform_json
from seamark.formats.iceberg.expressions.residuals import (
    collect_tautologies,
    make_bindable,
    make_tautology,
    match_both_zeros,
    remove_nan,
    weaken_residual,
)
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import encode_json as to_json
from seamark.formats.runtime.memoization import computed_once
from seamark.metaserver.index.blocks.block import Block, read_longs_at
from seamark.metaserver.planner.answer._answer import CHOICE, CONSTANT, write
from seamark.metaserver.planner.answer.content_files import (
    STANDARD_DIALECT,
    UNCACHED_TEXTS,
    BlockLayout,
    ClientDialect,
    FileStats,
    Part,
    PartitionTextCache,
    PartitionTexts,
    encode_contents,
    encode_formats,
    encode_keys,
    error_context,
    get_layout,
    get_partition_texts,
)
from seamark.metaserver.planner.deletes.delete_index import assign_first_row_ids, read_sequence_numbers
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

FILES_PER_PIECE = 125
"""The number of files in one piece. Encoding a piece takes about 0.25 ms."""
STATS_PER_PIECE = 500
"""The maximum product of the files and the requested columns of one piece, if statistics are requested."""
_FILES_PER_PIECE_MIN = 10
"""The minimum number of files in one piece, however many columns are requested."""
RESIDUAL_VALUES_MAX = 200_000
"""The maximum number of literals and predicates that are evaluated to compute the residuals of one answer.

Partitions beyond this limit have the whole filter as their residual.
"""
_RESIDUALS_MAX = 10_000
_RESIDUAL_BYTES_MIN = 1024
"""The size in bytes up to which a residual is always written, even if the limit for all residuals is exhausted."""
_KEY = b',"residual-filter":'
_FALSE_RESIDUAL = _KEY + b"false"


class TaskForm(NamedTuple):
    """The options by which scan tasks differ from the form in the specification."""

    residuals: bool = True
    """Whether tasks have residuals.

    If it is False, a filter with thousands of values is not repeated for each file.
    """
    residual_bytes: int = 4 << 20
    """The maximum size of all residuals of one answer. A residual is the part of the filter that the client must apply
    to the rows of a file.
    """
    exact_residuals: bool = False
    """Whether the client may filter rows by the residual alone.

    If it is True, no residual is weakened, and `ScanTaskWriter.files_max` limits the number of files in an answer.
    """
    sequence_numbers: bool = False
    """Whether to write `data-sequence-number` of each data file."""
    whole_files: bool = False
    """Whether the client may rewrite whole files. If it may, its reader must not skip rows because of a residual."""


FULL = TaskForm()


class ScanTaskWriter:
    """Writes the scan tasks of one answer.

    The iterator of `write_tasks` must be exhausted before `write_delete_files` is called.
    """

    def __init__(
        self,
        scan: ScanPlan,
        *,
        stats: Sequence[int] = (),
        dialect: ClientDialect = STANDARD_DIALECT,
        form: TaskForm = FULL,
        texts: PartitionTextCache = UNCACHED_TEXTS,
    ) -> None:
        """Prepare the writer.

        Args:
            scan: The plan.
            stats: The ids of the columns whose statistics the client requested.
            dialect: The way in which the client reads partition values and residuals.
            form: The differences between the tasks and the standard form.
            texts: The cache of encoded partition tuples, which all answers share.
        """
        self._scan = scan
        self._partitions = get_partition_texts(scan, dialect)
        self._texts = texts
        self._residuals = _Residuals(scan, form, dialect) if form.residuals else None
        self._form = form
        self._stats = tuple(sorted(set(stats)))
        self._deletes: dict[int, int] = {}
        """The number of each delete file in the answer, by the row of the delete file."""

    @computed_once
    def files_max(self) -> int | None:
        """The maximum number of files in one answer whose exact residuals fit into it; at least 1.

        The value is None if residuals do not limit the answer, because they are short or may be weakened.
        """
        if self._residuals is None or not self._form.exact_residuals:
            return None
        # A residual has only terms of the filter, so no residual is longer than the whole filter.
        filter_bytes = len(to_json(self._residuals.encode(self._scan.bound)))
        return None if filter_bytes <= _RESIDUAL_BYTES_MIN else max(1, self._form.residual_bytes // filter_bytes)

    def write_tasks(self, entry_ids: Longs) -> Iterator[bytes]:
        """Yield the items of `file-scan-tasks` for these ascending entry ids, as pieces to concatenate.

        An entry id is the number of a data file in the view of the snapshot. Pieces have fewer files if the client
        requested statistics, so that a piece does not become too large.

        Raises:
            Corrupt: The manifest entry of a file is invalid; the message names the manifest.
            NotAcceptable: JSON cannot represent a value.
        """
        size = (
            FILES_PER_PIECE if not self._stats else max(_FILES_PER_PIECE_MIN, STATS_PER_PIECE // (1 + len(self._stats)))
        )
        comma = b""
        if self._residuals is not None:
            self._residuals.set_file_count(len(entry_ids))
        for block, first, local in _iterate_blocks(self._scan.view.locate, entry_ids):
            files = _Files(block, self._partitions, self._texts, self._stats)
            for start in range(0, len(local), size):
                part = local[start : start + size]
                residuals: Part | None = None
                if self._residuals is not None:
                    with error_context(block):
                        part, residuals = self._residuals.encode_rows(block, files.columns, part)
                if not len(part):
                    continue
                references = [
                    self._encode_references(deletes) for deletes in self._scan.find_deletes_by_file(part + first)
                ]
                yield comma + files.write(part, references, self._encode_inherited(block, first, part), residuals)
                comma = b","

    def _encode_inherited(self, block: Block, first: int, rows: Longs) -> list[bytes] | None:
        """Return the JSON of the fields that files inherit from their manifest, for rows of a block.

        The result is None if there are no such fields.

        Row ids exist only since format version 3. Sequence numbers are written only if the form requires them.

        Args:
            block: The block of the manifest.
            first: The entry id of the block's first row.
            rows: The rows.
        """
        manifest = self._scan.view.find_manifest(first)
        fields = []
        with error_context(block):
            if (ids := assign_first_row_ids(manifest, block, rows)) is not None:
                fields.append([b',"first-row-id":%d' % row_id for row_id in ids.tolist()])
            if self._form.sequence_numbers:
                numbers = read_sequence_numbers(manifest, block, rows).tolist()
                fields.append([b',"data-sequence-number":%d' % number for number in numbers])
        return [b"".join(parts) for parts in zip(*fields, strict=True)] if fields else None

    def write_delete_files(self) -> Iterator[bytes]:
        """Yield the items of `delete-files` that the tasks refer to, as pieces to concatenate."""
        if not self._deletes:
            return
        comma = b""
        blocks_and_rows = map(self._scan.view.locate_delete, self._deletes)
        for _, group in groupby(blocks_and_rows, key=lambda block_and_row: id(block_and_row[0])):
            blocks, rows = zip(*group, strict=True)
            files = _Files(blocks[0], self._partitions, self._texts)
            local = np.array(rows, dtype=np.int64)
            for start in range(0, len(local), FILES_PER_PIECE):
                yield comma + files.write(local[start : start + FILES_PER_PIECE])
                comma = b","

    def _encode_references(self, deletes: Sequence[int]) -> bytes:
        """Return the JSON field that refers to the delete files of a data file, or an empty text without delete files.

        A delete file is identified by its row in the view. It gets the next number when a task first refers to it,
        and `write_delete_files` writes the delete files in the order of these numbers.
        """
        if not deletes:
            return b""
        numbers = self._deletes
        references = ",".join([str(numbers.setdefault(row, len(numbers))) for row in deletes])
        return f',"delete-file-references":[{references}]'.encode()


def _iterate_blocks(locate: Callable[[int], tuple[Block, int]], entry_ids: Longs) -> Iterator[tuple[Block, int, Longs]]:
    """Yield (block, entry id of its first row, requested rows of the block) for each block with a requested row.

    Args:
        locate: A function that returns the block of an entry id, and the row of the entry in the block.
        entry_ids: The numbers of the requested files, ascending.
    """
    start = 0
    while start < len(entry_ids):
        entry_id = int(entry_ids[start])
        block, local = locate(entry_id)
        first = entry_id - local
        end = len(entry_ids)
        if int(entry_ids[-1]) >= first + block.rows:  # Few plans keep files of several blocks.
            end = int(entry_ids.searchsorted(first + block.rows))
        yield block, first, entry_ids[start:end] - first
        start = end


class _Files:
    """Writes content files (REST spec, schemas `DataFile`, `PositionDeleteFile`, `EqualityDeleteFile`) of one block."""

    def __init__(
        self,
        block: Block,
        partitions: PartitionTexts,
        texts: PartitionTextCache,
        stats_column_ids: tuple[int, ...] = (),
    ) -> None:
        """Read the layout of the block.

        The answer has statistics of the columns in `stats_column_ids` for data files.

        Raises:
            Corrupt: The layout is invalid; the message names the manifest.
        """
        self._block = block
        self.columns = get_layout(block)
        self._partitions = partitions
        self._texts = texts
        self._stats = FileStats(block, stats_column_ids) if block.content == 0 and stats_column_ids else None

    def write(
        self,
        rows: Longs,
        references: list[bytes] | None = None,
        numbers: list[bytes] | None = None,
        residuals: Part | None = None,
    ) -> bytes:
        """Return JSON objects separated by commas: scan tasks if there are `references`, otherwise files.

        Args:
            rows: The rows of the files in the block.
            references: For each row, the JSON field of its references to delete files, or None to write files.
            numbers: For each row, the JSON of the numbers that it inherits from the manifest.
            residuals: The JSON of the residuals: the filters that the client must still apply to the rows.

        Raises:
            Corrupt: A file is invalid; the message names the manifest.
        """
        block, columns = self._block, self.columns
        with error_context(block):
            parts: list[Part] = [
                (CONSTANT, columns.opening if references is None else b'{"data-file":' + columns.opening),
                columns.content or (CHOICE, encode_contents(block, rows)),
                columns.path,
                columns.format or (CHOICE, encode_formats(block, rows)),
                (CHOICE, self._partitions.write_texts(block, columns, rows, self._texts)),
                *columns.optional,
            ]
            if numbers is not None:
                parts.append((CHOICE, numbers))
            if self._stats is not None:
                parts.append((CHOICE, self._stats.write(rows)))
            parts.append((CONSTANT, b"}"))
            if references is not None:
                parts.append((CHOICE, references))
                if residuals is not None:
                    parts.append(residuals)
                parts.append((CONSTANT, b"}"))
            return write(rows, tuple(parts), block.rows, b",")


class _ResidualForm(NamedTuple):
    """The properties of one file that decide how its residual can be simplified."""

    nan_free: bool
    """Whether the file has no NaN in the columns that the filter tests for NaN."""
    read_whole: bool
    """Whether the client's reader returns all rows of the file only if the residual is `true`."""


_PLAIN = _ResidualForm(nan_free=False, read_whole=False)


class _Residuals:
    """Encodes residuals as JSON. Files with the same residual share one encoded text.

    The total size of the residuals in one answer is limited. If a long residual would be repeated for too many files,
    it is omitted, and the client uses its filter, as the specification defines. A client that requires residuals gets
    a weaker, short residual (`iceberg.residuals.weakened`), because Spark and PyIceberg also apply their own filter.
    A client that may use the residual as its only filter gets every residual in full, and fewer files in one answer.

    Files of one partition may have different forms of the partition's residual. A file without NaN in the tested
    columns needs no test for NaN, which would prevent Java's reader from skipping row groups. If the client may write
    the rows of a file again, the residual is `true`, or has a form with which Java skips no row group. ORC has no
    such form.
    """

    def __init__(self, scan: ScanPlan, form: TaskForm, dialect: ClientDialect) -> None:
        self._scan = scan
        self._total_bytes_max = form.residual_bytes
        """The maximum size of all residuals of the answer."""
        self._exact = form.exact_residuals
        self._needs_residuals = dialect.needs_residuals
        self._bound_by_name = dialect.binds_residuals
        self._residual_bytes_max = form.residual_bytes
        """The maximum size of one residual. `set_file_count` divides the total by the number of files."""
        self._remaining_values = RESIDUAL_VALUES_MAX
        """The number of literals and predicates that may still be evaluated."""
        self._tautologies = collect_tautologies(scan.bound)
        self._whole_files = form.whole_files
        self.encode = to_transform_json if form.whole_files else encode_expression
        self._is_java = dialect.filters_by_residual
        self._filter_values = 0
        """The number of literals and predicates in the filter."""
        self._nan_columns: set[int] = set()
        for predicate in collect_predicates(scan.bound):
            self._filter_values += 1 + len(predicate.values)
            if self._is_java and predicate.op is Op.IS_NAN:
                self._nan_columns.add(predicate.column_id)
        self._by_key: dict[tuple[object, ...], bytes] = {}
        self._encoded_residuals: dict[tuple[int, _ResidualForm], tuple[Expression, bytes]] = {}

    def set_file_count(self, files: int) -> None:
        """Divide the size limit of residuals by the number of files in the answer.

        Residuals that were encoded under another limit are forgotten.
        """
        residual_bytes_max = max(_RESIDUAL_BYTES_MIN, self._total_bytes_max // max(1, files))
        if residual_bytes_max != self._residual_bytes_max:
            self._residual_bytes_max = residual_bytes_max
            self._by_key.clear()
            self._encoded_residuals.clear()

    def encode_rows(self, block: Block, layout: BlockLayout, rows: Longs) -> tuple[Longs, Part]:
        """Return the rows of the block whose partitions may match, and their residuals as encoded JSON members.

        The second result is a pair: CONSTANT and the residual of all rows, or CHOICE and a list with a residual for
        each row. Each residual includes its JSON key.

        A plan may keep files of partitions that cannot match, if the filter has long lists or the time budget is
        exhausted. Such files are left out here: if partition values decide the filter, Spark does not filter the rows
        of a file, but counts them from metadata.
        """
        deciding_fields = self._scan.find_deciding_fields(block.spec_id)
        # A form says whether the file has no NaN, and whether the client reads the whole file. None means neither.
        forms = self._choose_forms(block, rows)
        if not deciding_fields:
            if forms is None:
                return rows, (CONSTANT, self._encode_residual(self._scan.bound, _PLAIN))
            return rows, (CHOICE, [self._encode_residual(self._scan.bound, form) for form in forms])
        partition_fields = block.partition_fields
        fields = [position for position, (field_id, _) in enumerate(partition_fields) if field_id in deciding_fields]
        kind = (block.spec_id, partition_fields)
        texts = []
        partitions = encode_keys(block, layout, fields, rows)
        for row, key, form in zip(rows.tolist(), partitions, forms or repeat(_PLAIN), strict=False):
            text = self._by_key.get((*kind, key, form))
            if text is None:
                if len(self._by_key) >= _RESIDUALS_MAX:
                    self._by_key.clear()
                text = self._by_key[*kind, key, form] = self._encode_partition(block, row, form)
            texts.append(text)
        if _FALSE_RESIDUAL in texts:
            matching_positions = [position for position, text in enumerate(texts) if text != _FALSE_RESIDUAL]
            rows, texts = rows[matching_positions], [texts[position] for position in matching_positions]
        return rows, (CHOICE, texts)

    def _choose_forms(self, block: Block, rows: Longs) -> list[_ResidualForm] | None:
        """Return the form of each file's residual, or None if all files have the form without special cases.

        A file is free of NaN if its counts of NaN are 0 in all columns that the filter tests. A client that rewrites
        files must read all rows of a file. No form of a residual prevents Java's ORC reader from skipping rows, so an
        ORC file must then be read as a whole.
        """
        if not (self._nan_columns or self._whole_files):
            return None
        is_nan_free = np.full(len(rows), bool(self._nan_columns))
        for column_id in self._nan_columns:
            counts = block.find_count_column("nan_value_counts", column_id)
            is_nan_free &= False if counts is None else read_longs_at(counts, rows) == 0
        is_read_whole = np.zeros(len(rows), dtype=np.bool_)
        if self._whole_files:
            is_read_whole |= [b"orc" in text for text in encode_formats(block, rows)]
        if not (is_nan_free.any() or is_read_whole.any()):
            return None
        return list(map(_ResidualForm, is_nan_free.tolist(), is_read_whole.tolist()))

    def _encode_partition(self, block: Block, row: int, form: _ResidualForm) -> bytes:
        """Return the residual of the row's partition with its JSON key.

        Computing a residual takes time for each value of the filter. After a limit of values, the residual is the whole
        filter, or FALSE if the partition cannot match.
        """
        fields, partition = block.partition_fields, block.partition(row)
        if self._remaining_values < self._filter_values:
            may_match = self._scan.may_match(block.spec_id, fields, partition)
            return self._encode_residual(self._scan.bound, form) if may_match else _FALSE_RESIDUAL
        self._remaining_values -= self._filter_values
        return self._encode_residual(self._scan.compute_partition_residual(block.spec_id, fields, partition), form)

    def _encode_residual(self, residual: Expression, form: _ResidualForm) -> bytes:
        """Return the residual with its JSON key. Equal residuals are encoded once."""
        # The key is the identity of the expression. Partitions share residuals, and comparing or hashing a long
        # list of values is slow.
        residual_and_text = self._encoded_residuals.get((id(residual), form))
        if residual_and_text is None:
            if len(self._encoded_residuals) >= _RESIDUALS_MAX:
                self._encoded_residuals.clear()
            # The reference to the expression prevents that another expression gets the same identity.
            residual_and_text = self._encoded_residuals[id(residual), form] = (
                residual,
                self._encode_bounded(residual, form),
            )
        return residual_and_text[1]

    def _encode_bounded(self, residual: Expression, form: _ResidualForm) -> bytes:
        """Encode a residual, usually in at most `_residual_bytes_max` bytes.

        If the residual is longer and the client needs it, it is replaced by a shorter condition that more rows satisfy.
        If the client does not need it, it is omitted. If the client filters rows by the residual alone, the residual is
        not replaced, and can have any length.

        Args:
            residual: The part of the filter that the client must apply to the rows of a file.
            form: Whether the file has no NaN, and whether the client must read the whole file.
        """
        if form.nan_free:  # The filter admits NaN for engines that order it above all numbers. The file has no NaN.
            residual = remove_nan(residual)
        if self._is_java:
            residual = match_both_zeros(residual)
        # PyIceberg does not bind residuals, but counts a file's rows from metadata if the residual is TRUE.
        bindable = make_bindable(residual, self._scan.metadata.current_schema) if self._bound_by_name else residual
        if bindable is not residual and not self._needs_residuals:
            return b""
        # A client that rewrites files must read all their rows, so its residual must not let it skip rows.
        if self._whole_files and bindable != FALSE and (form.read_whole or not self._exact):
            return _KEY + b"true"
        # Instead of a literal of unknown value, the filter has a condition that is always true. If only such conditions
        # remain, write one of them, because the residual TRUE would say that all rows match the filter.
        if bindable == TRUE and self._tautologies:
            bindable = make_tautology(self._tautologies[0])
        text = to_json(self.encode(bindable))
        if self._exact or len(text) <= self._residual_bytes_max:
            return _KEY + text
        if not self._needs_residuals:
            return b""
        short_json = to_json(encode_expression(weaken_residual(bindable)))
        # If the weakened residual is still too long, write a condition that all rows satisfy.
        if len(short_json) > self._residual_bytes_max:
            short_json = to_json(encode_expression(make_tautology(collect_predicates(bindable)[0])))
        return _KEY + short_json
