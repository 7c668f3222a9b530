"""A finished plan as JSON: `file-scan-tasks` and `delete-files` (REST spec, schema `ScanTasks`).

Written as text, file by file, from the columns of the blocks: what many files share (the residual, the partition, the
format) is written once and joined in, and no object is built per file. Answers come in pieces of a few hundred files,
so that whoever sends them can let others have their turn in between.

What clients insist on, beyond the specification: Java's fails on its executors without `residual-filter`, and refuses
`delete-files` without tasks. For what PyIceberg wants of partitions see `partition_text.py`. Our own asks for no
residuals, which it makes itself, and for sequence numbers, which the specification forgot (`TaskForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from metaserver.iceberg.expressions.expression import Expression, predicates_of
from metaserver.iceberg.expressions.expression_json import expression_json
from metaserver.iceberg.expressions.residuals import nameable, tautology, weakened
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.packing import Longs
from metaserver.planner.answer._answer import CHOICE, CONSTANT, write
from metaserver.planner.answer.block_layout import BlockLayout, Part, contents, formats, keys, located, naming
from metaserver.planner.answer.file_stats import FileStats
from metaserver.planner.answer.partition_text import STANDARD, ClientDialect, PartitionTexts, partition_texts
from metaserver.planner.deletes.inheritance import first_row_ids, sequence_numbers
from metaserver.planner.scan.scan import Scan
from metaserver.wire import encode_json as to_json

FILES_PER_PIECE = 125
"""About a quarter of a millisecond of work."""
STATS_PER_PIECE = 500
"""Columns times files, where statistics are asked for."""
RESIDUAL_VALUES_MAX = 200_000
"""Predicates and values that may be evaluated for the partitions of one answer; those beyond have the residual that the
whole filter has."""
_RESIDUALS_MAX = 10_000
_RESIDUAL_BYTES_MIN = 1024
"""A residual that is no longer is always told."""
_KEY = b',"residual-filter":'
_NEVER = _KEY + b"false"


class TaskForm(NamedTuple):
    """What tasks tell otherwise than the standard has it."""

    residuals: bool = True
    """Of thousands of values each file would repeat them all."""
    residual_bytes: int = 4 << 20
    """Of all residuals of one answer; see `_Residuals`."""
    exact_residuals: bool = False
    """The client may filter rows by the residual alone: none is weakened, and `ScanTaskWriter.files_max` bounds the
    answer."""
    sequence_numbers: bool = False
    """`data-sequence-number` of each data file."""


FULL = TaskForm()


class ScanTaskWriter:
    """The tasks of one answer. `tasks` is to be exhausted before `delete_files` is asked."""

    def __init__(
        self, scan: Scan, *, stats: Sequence[int] = (), dialect: ClientDialect = STANDARD, form: TaskForm = FULL
    ) -> None:
        """`stats` are ids of columns whose statistics the client asked for."""
        self._scan = scan
        self._partitions = partition_texts(scan, dialect)
        self._residuals = _Residuals(scan, form, dialect) if form.residuals else None
        self._form = form
        self._stats = tuple(sorted(set(stats)))
        self._deletes: dict[int, int] = {}

    @cached_property
    def files_max(self) -> int | None:
        """The number of files whose exact residuals fit into one answer, whatever their partitions; at least one.

        None where residuals do not limit it: they are short, or may be weakened.
        """
        if self._residuals is None or not self._form.exact_residuals:
            return None
        # A residual is the filter less some of its terms, so the whole filter is the longest one.
        longest = len(to_json(expression_json(self._scan.bound)))
        return None if longest <= _RESIDUAL_BYTES_MIN else max(1, self._form.residual_bytes // longest)

    def tasks(self, rows: Longs) -> Iterator[bytes]:
        """The items of `file-scan-tasks` for these rows of the view, ascending; pieces to be joined without anything.

        Corrupt, naming the manifest, for a file that cannot be answered. NotAcceptable for one that JSON cannot carry.
        """
        size = FILES_PER_PIECE if not self._stats else max(10, STATS_PER_PIECE // (1 + len(self._stats)))
        comma = b""
        if self._residuals is not None:
            self._residuals.share_among(len(rows))
        for block, first, local in _runs(self._scan.view.locate, rows):
            files = _Files(block, self._partitions, self._stats)
            for start in range(0, len(local), size):
                part = local[start : start + size]
                residuals: Part | None = None
                if self._residuals is not None:
                    with naming(block):
                        part, residuals = self._residuals.of_rows(block, files.columns, part)
                if not len(part):
                    continue
                references = [self._references(found) for found in self._scan.deletes_of(part + first)]
                yield comma + files.write(part, references, self._numbers(block, first, part), residuals)
                comma = b","

    def _numbers(self, block: Block, first: int, rows: Longs) -> list[bytes] | None:
        """What these rows of a block have from the manifest list; None where that is nothing, as in version 2."""
        manifest = self._scan.view.manifest_of(first)
        found = []
        with naming(block):
            if (ids := first_row_ids(manifest, block, rows)) is not None:
                found.append([b',"first-row-id":%d' % one for one in ids.tolist()])
            if self._form.sequence_numbers:
                numbers = sequence_numbers(manifest, block, rows).tolist()
                found.append([b',"data-sequence-number":%d' % one for one in numbers])
        return [b"".join(parts) for parts in zip(*found, strict=True)] if found else None

    def delete_files(self) -> Iterator[bytes]:
        """The items of `delete-files`, those that the tasks so far refer to; pieces as above. Nothing for none."""
        comma = b""
        found = map(self._scan.view.locate_delete, self._deletes)
        for _, alike in groupby(found, key=lambda place: id(place[0])):
            places = list(alike)
            files = _Files(places[0][0], self._partitions)
            local = np.array([row for _, row in places], dtype=np.int64)
            for start in range(0, len(local), FILES_PER_PIECE):
                yield comma + files.write(local[start : start + FILES_PER_PIECE])
                comma = b","

    def _references(self, found: Sequence[int]) -> bytes:
        if not found:
            return b""
        index = self._deletes
        places = ",".join([str(index.setdefault(one, len(index))) for one in found])
        return f',"delete-file-references":[{places}]'.encode()


def _runs(locate: Callable[[int], tuple[Block, int]], rows: Longs) -> Iterator[tuple[Block, int, Longs]]:
    """(block, the view's row of its first, rows within it), block by block."""
    start = 0
    while start < len(rows):
        row = int(rows[start])
        block, local = locate(row)
        first = row - local
        end = int(np.searchsorted(rows, first + block.rows))
        yield block, first, rows[start:end] - first
        start = end


class _Files:
    """Writes content files (REST spec, schemas `DataFile`, `PositionDeleteFile`, `EqualityDeleteFile`) of one block."""

    def __init__(
        self,
        block: Block,
        partitions: PartitionTexts,
        stats: tuple[int, ...] = (),
    ) -> None:
        """Corrupt, naming the manifest."""
        self._block = block
        self.columns = located(block)
        self._partitions = partitions
        self._stats = FileStats(block, stats) if block.content == 0 and stats else None

    def write(
        self,
        rows: Longs,
        references: list[bytes] | None = None,
        numbers: list[bytes] | None = None,
        residuals: Part | None = None,
    ) -> bytes:
        """JSON objects, commas between them: scan tasks with `references`, without them the files alone.

        Corrupt, naming the manifest.
        """
        with naming(self._block):
            return self._written(rows, references, numbers, residuals)

    def _written(
        self, rows: Longs, references: list[bytes] | None, numbers: list[bytes] | None, residuals: Part | None
    ) -> bytes:
        block, columns = self._block, self.columns
        parts: list[Part] = [
            (CONSTANT, columns.opening if references is None else b'{"data-file":' + columns.opening),
            columns.content or (CHOICE, contents(block, rows)),
            columns.path,
            columns.format or (CHOICE, formats(block, rows)),
            (CHOICE, self._partitions.texts(block, columns, rows)),
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


class _Residuals:
    """The residual of each file as JSON, written once for all that share it.

    Those of one answer take a bounded number of bytes: where all files together would repeat a long residual too often,
    they go without, and the client filters by what it asked for, as the specification has it. Clients that need one get
    a weaker one that is short (`iceberg.residuals.weakened`): Spark and PyIceberg filter rows by their own filter.
    A client that may filter rows by the residual alone gets every residual in full, and fewer files in one answer.
    """

    def __init__(self, scan: Scan, form: TaskForm, dialect: ClientDialect) -> None:
        self._scan = scan
        self._limit_bytes = form.residual_bytes
        self._exact = form.exact_residuals
        self._needed = dialect.needs_residuals
        self._bound_by_name = dialect.binds_residuals
        self._longest = form.residual_bytes
        self._work = RESIDUAL_VALUES_MAX
        self._size = sum(1 + len(one.values) for one in predicates_of(scan.bound))
        self._whole: bytes | None = None
        self._by_key: dict[tuple[object, ...], bytes] = {}
        self._written: dict[int, tuple[Expression, bytes]] = {}

    def share_among(self, files: int) -> None:
        """Of so many files the answer is made."""
        longest = max(_RESIDUAL_BYTES_MIN, self._limit_bytes // max(1, files))
        if longest != self._longest:
            self._longest, self._whole = longest, None
            self._by_key.clear()
            self._written.clear()

    def of_rows(self, block: Block, columns: BlockLayout, rows: Longs) -> tuple[Longs, Part]:
        """The rows of the block whose files may hold a matching row, and their residuals, each with its key.

        A plan keeps files of partitions that cannot match: it takes long lists for their range, and its time may end.
        Spark reads such a file's rows unfiltered where partitions decide the filter, and counts them by the metadata.
        """
        deciding = self._scan.deciding(block.spec_id)
        if not deciding:
            return rows, (CONSTANT, self._of_all())
        stored = block.partition_fields
        fields = [place for place, (field_id, _) in enumerate(stored) if field_id in deciding]
        kind = (block.spec_id, stored)
        found = []
        for row, key in zip(rows.tolist(), keys(block, columns, fields, rows), strict=True):
            text = self._by_key.get((*kind, key))
            if text is None:
                if len(self._by_key) >= _RESIDUALS_MAX:
                    self._by_key.clear()
                text = self._by_key[*kind, key] = self._of_partition(block, row)
            found.append(text)
        if _NEVER in found:
            left = [place for place, text in enumerate(found) if text != _NEVER]
            rows, found = rows[left], [found[place] for place in left]
        return rows, (CHOICE, found)

    def _of_all(self) -> bytes:
        if self._whole is None:
            self._whole = self._text(self._scan.bound)
        return self._whole

    def _of_partition(self, block: Block, row: int) -> bytes:
        fields, partition = block.partition_fields, block.partition(row)
        if self._work < self._size:
            return self._of_all() if self._scan.may_match(block.spec_id, fields, partition) else _NEVER
        self._work -= self._size
        return self._text(self._scan.residual_in(block.spec_id, fields, partition))

    def _text(self, residual: Expression) -> bytes:
        # By identity: partitions share residuals, and a long list of values takes long to compare or to hash.
        known = self._written.get(id(residual))
        if known is None:
            if len(self._written) >= _RESIDUALS_MAX:
                self._written.clear()
            known = self._written[id(residual)] = (residual, self._bounded(residual))
        return known[1]

    def _bounded(self, residual: Expression) -> bytes:
        # PyIceberg binds no residual, but counts the rows of a file without looking at them where it is TRUE.
        named = nameable(residual, self._scan.metadata.current_schema) if self._bound_by_name else residual
        if named is not residual and not self._needed:
            return b""
        text = to_json(expression_json(named))
        if self._exact or len(text) <= self._longest:
            return _KEY + text
        if not self._needed:
            return b""
        short = to_json(expression_json(weakened(named)))
        if len(short) > self._longest:
            short = to_json(expression_json(tautology(predicates_of(named)[0])))
        return _KEY + short
