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
from itertools import groupby
from typing import NamedTuple

import numpy as np

from metaserver.iceberg.expression_json import expression_json
from metaserver.iceberg.expressions import Expression
from metaserver.iceberg.residuals import nameable
from metaserver.index.block import Block
from metaserver.index.packing import Longs
from metaserver.planner._answer import CHOICE, CONSTANT, write
from metaserver.planner.file_stats import FileStats
from metaserver.planner.inherited import first_row_ids, sequence_numbers
from metaserver.planner.located import Located, Part, contents, formats, keys, located, naming
from metaserver.planner.partition_text import STANDARD, Dialect, PartitionTexts, partition_texts
from metaserver.planner.scan import Scan
from metaserver.wire import encode_json as to_json

FILES_PER_PIECE = 125
"""About a quarter of a millisecond of work."""
STATS_PER_PIECE = 500
"""Columns times files, where statistics are asked for."""
_RESIDUALS_MAX = 10_000


class TaskForm(NamedTuple):
    """What tasks tell otherwise than the standard has it."""

    residuals: bool = True
    """Of thousands of values each file would repeat them all."""
    sequence_numbers: bool = False
    """`data-sequence-number` of each data file."""


FULL = TaskForm()


class Answer:
    """The tasks of one answer. `tasks` is to be exhausted before `delete_files` is asked."""

    def __init__(
        self, scan: Scan, *, stats: Sequence[int] = (), dialect: Dialect = STANDARD, form: TaskForm = FULL
    ) -> None:
        """`stats` are ids of columns whose statistics the client asked for."""
        self._scan = scan
        self._partitions = partition_texts(scan, dialect)
        self._residuals = _Residuals(scan) if form.residuals else None
        self._form = form
        self._stats = tuple(sorted(set(stats)))
        self._deletes: dict[int, int] = {}

    def tasks(self, rows: Longs) -> Iterator[bytes]:
        """The items of `file-scan-tasks` for these rows of the view, ascending; pieces to be joined without anything.

        Corrupt, naming the manifest, for a file that cannot be answered. NotAcceptable for one that JSON cannot carry.
        """
        size = FILES_PER_PIECE if not self._stats else max(10, STATS_PER_PIECE // (1 + len(self._stats)))
        comma = b""
        for block, first, local in _runs(self._scan.view.locate, rows):
            files = _Files(block, self._partitions, self._residuals, self._stats)
            numbers = self._numbers(block, first, local)
            for start in range(0, len(local), size):
                part = local[start : start + size]
                references = [self._references(found) for found in self._scan.deletes_of(part + first)]
                yield comma + files.write(part, references, None if numbers is None else numbers[start : start + size])
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
        residuals: _Residuals | None = None,
        stats: tuple[int, ...] = (),
    ) -> None:
        """Corrupt, naming the manifest."""
        self._block = block
        self._columns = located(block)
        self._partitions = partitions
        self._residuals = residuals
        self._stats = FileStats(block, stats) if block.content == 0 and stats else None

    def write(self, rows: Longs, references: list[bytes] | None = None, numbers: list[bytes] | None = None) -> bytes:
        """JSON objects, commas between them: scan tasks with `references`, without them the files alone.

        Corrupt, naming the manifest.
        """
        with naming(self._block):
            return self._written(rows, references, numbers)

    def _written(self, rows: Longs, references: list[bytes] | None, numbers: list[bytes] | None) -> bytes:
        block, columns = self._block, self._columns
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
            if self._residuals is not None:
                parts += [(CONSTANT, b',"residual-filter":'), self._residuals.part(block, columns, rows)]
            parts.append((CONSTANT, b"}"))
        return write(rows, tuple(parts), block.rows, b",")


class _Residuals:
    """The residual of each file as JSON, written once for all that share it."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._whole: bytes | None = None
        self._by_key: dict[tuple[object, ...], bytes] = {}
        self._written: dict[int, tuple[Expression, bytes]] = {}

    def part(self, block: Block, columns: Located, rows: Longs) -> Part:
        """Those of rows of the block."""
        deciding = self._scan.deciding(block.spec_id)
        if not deciding:
            if self._whole is None:
                self._whole = self._text(self._scan.bound)
            return CONSTANT, self._whole
        stored = block.partition_fields
        fields = [place for place, (field_id, _) in enumerate(stored) if field_id in deciding]
        kind = (block.spec_id, stored)
        found = []
        for row, key in zip(rows.tolist(), keys(block, columns, fields, rows), strict=True):
            text = self._by_key.get((*kind, key))
            if text is None:
                if len(self._by_key) >= _RESIDUALS_MAX:
                    self._by_key.clear()
                residual = self._scan.residual_in(block.spec_id, stored, block.partition(row))
                text = self._by_key[*kind, key] = self._text(residual)
            found.append(text)
        return CHOICE, found

    def _text(self, residual: Expression) -> bytes:
        # By identity: partitions share residuals, and a long list of values takes long to compare or to hash.
        known = self._written.get(id(residual))
        if known is None:
            if len(self._written) >= _RESIDUALS_MAX:
                self._written.clear()
            told = nameable(residual, self._scan.metadata.current_schema)
            known = self._written[id(residual)] = (residual, to_json(expression_json(told)))
        return known[1]
