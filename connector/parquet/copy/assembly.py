"""Assembles a Parquet file from column chunks of old files.

Each column of a row group of the new file is copied from a row group with the same number of rows. Pages, CRCs of
pages, statistics and encodings are copied unchanged, and offsets are adapted. Bloom filters are written after their row
group. Page indexes are written at the end of the file, where readers fetch all of them in one request. Until the new
file is closed, its page indexes are in memory.

Encryption binds each module to its file and position. Therefore a chunk that is encrypted in the old or the new file is
decrypted and encrypted page by page (`reencryption.py`), together with its indexes and Bloom filter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.connector.arrow.arrays import Longs
from seamark.connector.parquet.copy.leaves import Leaf, list_leaves
from seamark.connector.parquet.copy.reencryption import MovedPages
from seamark.connector.parquet.copy.sinks import Sink
from seamark.connector.parquet.copy.source import Run, SourceFile
from seamark.connector.parquet.encryption.footers import FileEncryption
from seamark.connector.parquet.encryption.modules import ORDINAL_MAX, ChunkCipher, Module
from seamark.formats.iceberg.files import _footer, thrift
from seamark.formats.iceberg.files.footer import (
    MAGIC,
    PATCH,
    SORTING,
    PageWalk,
    ParquetFooter,
    RowGroup,
    encode_footer,
    encode_group,
    encode_path,
    make_group_fields,
    patch_chunks,
    shift_offset_index,
)

CREATED_BY = b"seamark version 1.0.0 (build 0)"
"""The name of the writer in the footer of a file whose chunks come from several writers.

Readers trust the statistics of an unknown writer (parquet-java: CorruptStatistics), so chunks of writers with wrong
statistics must not be copied.
"""
_SCHEMAS = frozenset(
    (
        b"ARROW:schema",
        b"iceberg.schema",
        b"pandas",
        b"parquet.avro.schema",
        b"org.apache.spark.sql.parquet.row.metadata",
    )
)
"""The keys in key-value metadata whose values are schemas, which describe the columns of the file."""
_SHIFTED = ("data_page", "index_page", "dictionary_page")
"""The fields of a chunk with the offsets of its first pages, which change when the chunk is moved."""
_COLUMN = 1
"""The field id of SortingColumn.column_idx."""


class Pick(NamedTuple):
    """The columns to copy from a row group.

    Attributes:
        source: The old file.
        group: The index of the row group in the old file.
        columns: The indexes of the chunks in the row group.
        targets: The indexes that the chunks have in the new row group.
    """

    source: SourceFile
    group: int
    columns: Sequence[int]
    targets: Sequence[int]

    @property
    def size_bytes(self) -> int:
        return int(self.source.footer.groups[self.group].read_values("packed_bytes")[list(self.columns)].sum())


@dataclass
class _CopiedChunks:
    """Column chunks of one old row group that are copied to the new file.

    Each attribute after `footer` has one item for each chunk.

    Attributes:
        footer: The footer of the old file.
        chunks: The position of each chunk among all chunks of the old file.
        values: The new offsets and sizes, as int64[chunks, PATCHED_FIELDS]. `PATCH` has the column of each field.
        targets: The indexes of the chunks in the new row group.
        ciphers: The ciphers in the new file, or None for a chunk that is not encrypted.
        paths: The encoded new paths of the columns, or None if the path does not change.
        column_indexes: The Parquet column indexes (bounds of pages), or None.
        offset_indexes: The Parquet offset indexes (positions of pages in the new file), or None.
    """

    footer: ParquetFooter
    chunks: Longs
    values: Longs
    targets: Sequence[int]
    ciphers: Sequence[ChunkCipher | None]
    paths: list[bytes | None]
    column_indexes: list[bytes | None]
    offset_indexes: list[bytes | None]


@dataclass
class _CopiedGroup:
    """A row group of the new file."""

    fields: thrift.Fields
    parts: list[_CopiedChunks] = field(default_factory=list)


class FileAssembler:
    """Assembles one file.

    Attributes:
        skeleton: The footer of a file without rows, with the schema and the column orders of the new file.
        encryption: The encryption of the new file, or None if it is not encrypted.
    """

    def __init__(self, sink: Sink, skeleton: ParquetFooter, encryption: FileEncryption | None = None) -> None:
        self._sink, self._skeleton, self._encryption = sink, skeleton, encryption
        self.leaves: list[Leaf] = list_leaves(skeleton)
        self._groups: list[_CopiedGroup] = []
        self._creators: set[bytes | None] = set()
        self._version = skeleton.version
        self._key_values: dict[bytes, bytes | None] | None = None
        """The key-values that all old files have in common, or None before the first file."""
        self.rows = 0
        self.split_offsets: list[int] = []
        sink.write(MAGIC if encryption is None else encryption.magic)

    @property
    def size_bytes(self) -> int:
        return self._sink.position

    def add(self, picks: Sequence[Pick]) -> None:
        """Add a row group. Its fields, except the columns, are copied from the row group of the first pick.

        Args:
            picks: The columns to copy, with the old row group of each. Together they must have each column of the new
                file exactly once.

        Raises:
            ValueError: The picks do not have each column exactly once, or have different numbers of rows. Or an
                encrypted file would have too many row groups.
            Unreadable: An old file is damaged. The new file must not be used after this error.
        """
        rows = picks[0].source.footer.groups[picks[0].group].rows
        targets = sorted(target for pick in picks for target in pick.targets)
        if targets != list(range(len(self.leaves))):
            raise ValueError("the picks of a row group must have one chunk for each column")
        if self._encryption is not None and len(self._groups) > ORDINAL_MAX:
            raise ValueError(f"an encrypted file has at most {ORDINAL_MAX + 1:,} row groups; merge fewer files")
        begin, parts = self._sink.position, []
        for pick in picks:
            footer = pick.source.footer
            group = footer.groups[pick.group]
            if group.rows != rows:
                raise ValueError(f"column chunks of {group.rows} and {rows} rows cannot be in the same row group")
            parts.append(self._copy(pick, group))
            self._creators.add(footer.created_by)
            if not pick.source.is_in_memory:
                self._keep_key_values(pick.source)
            self._version = max(self._version, footer.version)
        for pick, part in zip(picks, parts, strict=True):
            self._add_blooms(pick, part)
        fields = make_group_fields(
            picks[0].source.footer.groups[picks[0].group].fields,
            rows=rows,
            plain_bytes=sum(int(part.values[:, PATCH["plain_bytes"]].sum()) for part in parts),
            packed_bytes=sum(int(part.values[:, PATCH["packed_bytes"]].sum()) for part in parts),
            offset=begin,
            ordinal=len(self._groups),
            sorting=_translate_sorting(picks),
        )
        self._groups.append(_CopiedGroup(fields, parts))
        self.split_offsets.append(begin)
        self.rows += rows

    def _keep_key_values(self, source: SourceFile) -> None:
        """Keep the key-value pairs that are equal in this and all earlier old files.

        A pair with a schema of the file, as Spark and Arrow store it, is kept only if the new file has the same
        columns.
        """
        is_same = [leaf.names for leaf in source.leaves] == [leaf.names for leaf in self.leaves]
        key_values = {key: value for key, value in source.footer.key_values if is_same or key not in _SCHEMAS}
        common = key_values if self._key_values is None else self._key_values
        self._key_values = {
            key: value for key, value in common.items() if key in key_values and key_values[key] == value
        }

    def _copy(self, pick: Pick, group: RowGroup) -> _CopiedChunks:
        """Copy the column chunks that a pick selects from one old row group, and return them with their new offsets.

        Chunks that are next to each other are copied together. A chunk that is encrypted in the old or the new file is
        encrypted again page by page, so the offset and the size of each of its pages change.

        Args:
            pick: The old file, and the columns to copy.
            group: The old row group.
        """
        source, columns = pick.source, np.asarray(pick.columns, dtype=np.int64)
        ciphers = [self._make_cipher(target) for target in pick.targets]
        is_changed = np.array(
            [
                new is not None or source.find_cipher(group, column) is not None
                for column, new in zip(pick.columns, ciphers, strict=True)
            ],
            dtype=np.bool_,
        )
        # `PATCH` has the column of each field in `values`.
        values = np.stack([group.read_values(name)[columns] for name in PATCH], axis=1)
        values[:, PATCH["file_offset"]] = 0
        shifts = np.zeros(len(columns), dtype=np.int64)
        pages_by_column: dict[int, MovedPages] = {}
        for run, members in _divide_into_runs(pick, group, columns, is_changed):
            if is_changed[members[0]]:
                number = int(members[0])
                pages = source.reencrypt(
                    group, pick.columns[number], ciphers[number], self._sink, read_ahead_end=run.read_ahead_end
                )
                pages_by_column[number] = pages
                values[number, PATCH["packed_bytes"]] = sum(size for _, _, size in pages.pages)
                values[number, PATCH["plain_bytes"]] += pages.headers_grown
            else:
                shifts[members] = self._sink.position - run.begin
                source.copy(run, self._sink)
        # All pages of an unchanged chunk move by the same number of bytes. An offset of 0 means that there is none.
        for name in _SHIFTED:
            offsets = values[:, PATCH[name]]
            values[:, PATCH[name]] = np.where((offsets > 0) & ~is_changed, offsets + shifts, offsets)
        leaves = source.leaves
        paths = [
            None if leaves[column].names == self.leaves[target].names else encode_path(self.leaves[target].names)
            for column, target in zip(pick.columns, pick.targets, strict=True)
        ]
        column_indexes, offset_indexes = [], []
        try:
            for number, pages in pages_by_column.items():
                for name in _SHIFTED:
                    if values[number, PATCH[name]] > 0:
                        values[number, PATCH[name]] = pages.translate_offset(int(values[number, PATCH[name]]))
            for number, (column, shift) in enumerate(zip(pick.columns, shifts.tolist(), strict=True)):
                column_indexes.append(source.read_column_index(group, column))
                index = source.read_offset_index(group, column)
                if index is not None and number in pages_by_column:
                    index = _footer.move_pages(index, pages_by_column[number].to_array())
                elif index is not None:
                    index = shift_offset_index(index, int(group.begins[column]), int(group.ends[column]), shift)
                offset_indexes.append(index)
        except ValueError as error:
            raise source.make_unreadable_error(str(error)) from None
        return _CopiedChunks(
            source.footer,
            group.chunks[columns],
            values,
            pick.targets,
            ciphers,
            paths,
            column_indexes,
            offset_indexes,
        )

    def _make_cipher(self, column_number: int) -> ChunkCipher | None:
        """Return the cipher of a column of the new file, in the row group that is being added."""
        cipher = None if self._encryption is None else self._encryption.ciphers[column_number]
        return None if cipher is None else cipher.create_chunk_cipher(len(self._groups), column_number)

    def _add_blooms(self, pick: Pick, part: _CopiedChunks) -> None:
        """Copy the Bloom filters of chunks to the new file, and enter their positions and sizes in `part.values`.

        Raises:
            Unreadable: A Bloom filter of the old file is invalid.
        """
        group = pick.source.footer.groups[pick.group]
        try:
            for number, column in enumerate(pick.columns):
                bloom = pick.source.read_bloom(group, column)
                if bloom is not None:
                    cipher = part.ciphers[number]
                    if cipher is None:
                        data = b"".join(bloom)
                    else:
                        header = cipher.encrypt(Module.BLOOM_HEADER, bloom[0])
                        data = b"".join((header, cipher.encrypt(Module.BLOOM_BITSET, bloom[1])))
                    part.values[number, PATCH["bloom"]] = self._sink.position
                    part.values[number, PATCH["bloom_length"]] = len(data)
                    self._sink.write(data)
        except ValueError as error:
            raise pick.source.make_unreadable_error(str(error)) from None

    def close(self) -> bytes:
        """Write the page indexes and the footer, make the file durable, and return the footer before its encryption.

        The page indexes are written after all row groups, and their offsets are entered in the column chunks. An
        encrypted file contains the footer with encrypted column chunks.
        """
        parts = [part for group in self._groups for part in group.parts]
        for name, module in (("column_index", Module.COLUMN_INDEX), ("offset_index", Module.OFFSET_INDEX)):
            for part in parts:
                indexes = part.column_indexes if module is Module.COLUMN_INDEX else part.offset_indexes
                for number, index in enumerate(indexes):
                    if index is not None:
                        cipher = part.ciphers[number]
                        data = index if cipher is None else cipher.encrypt(module, index)
                        part.values[number, PATCH[name]] = self._sink.position
                        part.values[number, PATCH[f"{name}_length"]] = len(data)
                        self._sink.write(data)
        chunks = [self._assemble_chunks(group) for group in self._groups]
        footer = self._encode_footer(chunks, {})
        if self._encryption is None:
            self._sink.write(footer + len(footer).to_bytes(4, "little") + MAGIC)
        else:
            names = [leaf.names for leaf in self.leaves]
            encrypted_chunks = [
                [
                    self._encryption.encrypt_chunk(chunk, ordinal, column, names[column])
                    for column, chunk in enumerate(group)
                ]
                for ordinal, group in enumerate(chunks)
            ]
            plain_footer = self._encode_footer(encrypted_chunks, self._encryption.list_footer_fields())
            self._sink.write(self._encryption.encode_footer(plain_footer))
        self._sink.close()
        return footer

    def _encode_footer(self, chunks: Sequence[Sequence[bytes]], other_fields: Mapping[int, tuple[int, bytes]]) -> bytes:
        creators = self._creators
        return encode_footer(
            version=self._version,
            schema=self._skeleton.schema,
            rows=self.rows,
            groups=[encode_group(columns, group.fields) for columns, group in zip(chunks, self._groups, strict=True)],
            key_values=list((self._key_values or {}).items()),
            created_by=next(iter(creators)) if len(creators) == 1 else CREATED_BY,
            orders=self._skeleton.orders,
            later_fields={**self._skeleton.later_fields, **other_fields},
        )

    def _assemble_chunks(self, group: _CopiedGroup) -> list[bytes]:
        """Return the column chunks of a row group, before their encryption."""
        chunks: list[bytes] = [b""] * len(self.leaves)
        for part in group.parts:
            for target, chunk in zip(
                part.targets, patch_chunks(part.footer, part.chunks, part.values, part.paths), strict=True
            ):
                chunks[target] = chunk
        return chunks

    def abort(self) -> None:
        """Delete the file.

        The method never raises.
        """
        self._sink.abort()


def _divide_into_runs(
    pick: Pick, group: RowGroup, columns: Longs, is_changed: npt.NDArray[np.bool_]
) -> list[tuple[Run, Longs]]:
    """Divide the chunks into runs of contiguous bytes, in the order of the file.

    The runs are built from the last to the first, so that each run can take the end of the contiguous runs after it,
    up to which the file may be read ahead.

    Args:
        pick: The columns to copy from a row group.
        group: The row group.
        columns: The indexes of the chunks in the row group.
        is_changed: Whether the encryption of each column changes, as bool[columns]. The chunk of a column whose
            encryption changes is a separate run.

    Returns:
        The runs, each with the positions of its columns in `columns`.
    """
    begins, ends, values = group.begins[columns], group.ends[columns], group.read_values("values")[columns]
    order = np.argsort(begins, kind="stable")
    is_separate = is_changed[order]
    breaks = np.flatnonzero((begins[order][1:] != ends[order][:-1]) | is_separate[1:] | is_separate[:-1]) + 1
    runs: list[tuple[Run, Longs]] = []
    for members in reversed(np.split(order, breaks)):
        if len(members):
            page_walks = [PageWalk(int(begins[i]), int(ends[i]), int(values[i])) for i in members]
            begin, end = int(begins[members[0]]), int(ends[members[-1]])
            read_ahead_end = runs[-1][0].read_ahead_end if runs and runs[-1][0].begin == end else end
            runs.append((Run(begin, end, page_walks, read_ahead_end), members))
    return runs[::-1]


def _translate_sorting(picks: Sequence[Pick]) -> Any:
    """Return the sorting columns of the first pick's row group, up to the first column that is not copied, or None.

    The result is None if the row group states no sorting columns, or if its first sorting column is not copied.

    Rows are sorted by a later column only within equal values of the earlier columns, so the later columns are left
    out.
    """
    pick = picks[0]
    # The value of a list is a pair of the type of its items and the items.
    kind, columns = pick.source.footer.groups[pick.group].fields.get(SORTING, (0, None))
    if kind != thrift.LIST or columns is None or columns[0] != thrift.STRUCT:
        return None
    targets = dict(zip(pick.columns, pick.targets, strict=True))
    sorting = []
    for column in columns[1]:
        _, index = column.get(_COLUMN, (0, -1))
        target = targets.get(index)
        if target is None:
            break
        sorting.append({**column, _COLUMN: (thrift.I32, target)})
    return (thrift.STRUCT, sorting) if sorting else None
