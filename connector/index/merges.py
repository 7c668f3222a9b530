"""Merges small index files of one definition into a larger index file.

The scheme is a tiered LSM tree. Builds write index files of level 0. When a level has `MERGED_FILES_MIN` files, they
are merged into a file of the next level. Therefore a table has few index files after any number of writes, and each
entry is copied once for each level. Entries are copied as bytes if the index kind supports it. No data file is read.
If a data file has two entries, the newer entry is kept. Entries of data files that no snapshot contains are dropped.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from seamark.connector.arrow.arrays import Mask
from seamark.connector.client.storage import Storage
from seamark.connector.groups import divide
from seamark.connector.index.files import WrittenIndex
from seamark.formats.iceberg.files.puffin import read_footer_size
from seamark.formats.index.index_file import FilesTable, IndexFile, assemble_index_file, open_index_file, read_header
from seamark.formats.index.kinds.kind import OpenedBlob, UnknownVersion
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER
from seamark.formats.runtime.errors import Corrupt

MERGED_FILES_MIN = 8
"""The minimum number of index files of one level that are merged."""
SIZE_MAX_BYTES = 512 << 20
"""The approximate maximum size of a merged file. A file of at least half this size is not merged again."""

_TAIL_BYTES = 16 << 10
"""The number of bytes at the end of an index file that usually contain the footer."""


@dataclass(frozen=True)
class MergedIndex(WrittenIndex):
    """The index file of a merge.

    Attributes:
        unsupported: The locations of index files that were left out, because this program does not know their version.
    """

    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegisteredFile:
    """A live index file in the list of the catalog."""

    location: str
    level: int
    size_bytes: int
    created_ms: int


def select_merge(
    files: Iterable[RegisteredFile], *, fanout: int = MERGED_FILES_MIN, size_max_bytes: int = SIZE_MAX_BYTES
) -> list[RegisteredFile]:
    """Return the files to merge now, the oldest first. The result is empty if no merge is due.

    If the merge of a level is due, the result has the files of the lowest such level. Otherwise, it has the files that
    must move to another folder. Files of at least half of the maximum size are not merged again.

    Args:
        files: The live index files of one index.
        fanout: The number of files of a level from which their merge is due.
        size_max_bytes: The maximum total size of the files of a merge.
    """
    levels: dict[int, list[RegisteredFile]] = {}
    misplaced_files: list[RegisteredFile] = []
    for file in sorted(files, key=lambda file: (file.created_ms, file.location)):
        if file.size_bytes < size_max_bytes // 2:
            levels.setdefault(file.level, []).append(file)
        if f"/{FORMER_INDEX_FOLDER}/" in file.location:
            misplaced_files.append(file)
    for _, level_files in sorted(levels.items()):
        if len(level_files) >= fanout and len(chosen_files := _take_first(level_files, size_max_bytes)) > 1:
            return chosen_files
    return _take_first(misplaced_files, size_max_bytes)


def _take_first(files: Sequence[RegisteredFile], size_max_bytes: int) -> list[RegisteredFile]:
    """Return the first files up to this total size. If there is a file, at least one is returned."""
    return next(divide(files, lambda file: (file.size_bytes,), (size_max_bytes,)), [])


def find_unsupported_files(locations: Iterable[str], storage: Storage) -> list[str]:
    """Return the index files whose version this program does not know. Only their footers are read.

    A damaged file is not returned. The merge reports it. The footer is read again if it is longer than the first read.
    """
    unsupported_locations: list[str] = []
    for location in locations:
        with suppress(Corrupt):
            try:
                with storage.open_input_file(location) as file:
                    size_bytes = file.size()
                    tail = _read_tail(file, size_bytes, _TAIL_BYTES)
                    footer_bytes = read_footer_size(tail, location)
                    tail = tail if footer_bytes <= len(tail) else _read_tail(file, size_bytes, footer_bytes)
                    read_header(tail, size_bytes, location)
            except UnknownVersion:
                unsupported_locations.append(location)
    return unsupported_locations


def _read_tail(file: pa.NativeFile, size_bytes: int, length: int) -> bytes:
    length = min(size_bytes, length)
    return bytes(file.read_at(length, size_bytes - length))


def merge_index_files(
    locations: Sequence[str],
    folder: str,
    storage: Storage,
    *,
    dropped_entries: Mapping[str, Iterable[int]] | None = None,
) -> MergedIndex:
    """Merge index files of one table and definition into a new file, and write it durably.

    A file of an unknown version is left out: a program that knows the version may still use it. The `location` of the
    result is None if no entry is left.

    Args:
        locations: The index files, the oldest first.
        folder: The location of the new file.
        storage: The storage of the index files.
        dropped_entries: The ordinals of data files to leave out, by the location of the index file.

    Raises:
        Corrupt: The structure of an index file is damaged. The message has its location.
        ValueError: The content of an index file is invalid, or the files have different tables or definitions.
    """
    index_files, blobs, unsupported_locations = _open_index_files(locations, storage)
    identities = {
        (index_file.header.table_uuid, index_file.header.definition, index_file.header.kind)
        for index_file in index_files
    }
    if len(identities) > 1:
        raise ValueError(f"index files of different tables or definitions cannot be merged: {', '.join(locations)}")
    masks = _mask_entries(index_files, dropped_entries or {})
    if not any(mask.any() for mask in masks):
        return MergedIndex(location=None, files=0, rows=0, size_bytes=0, skipped=(), unsupported=unsupported_locations)
    header = index_files[0].header
    kind = KINDS[header.kind]
    files = FilesTable.merge(zip((index_file.files for index_file in index_files), masks, strict=True))
    parts = assemble_index_file(
        header.definition,
        header.kind,
        files,
        map(memoryview, kind.merge(list(zip(blobs, masks, strict=True)))),
        table_uuid=header.table_uuid,
        field_ids=header.field_ids,
        level=max(index_file.header.level for index_file in index_files) + 1,
    )
    location = f"{folder}/{uuid.uuid4()}.puffin"
    return MergedIndex(
        location=location,
        files=len(files),
        rows=files.rows,
        size_bytes=storage.write(location, parts),
        skipped=(),
        unsupported=unsupported_locations,
    )


def read_file_ids(location: str, storage: Storage) -> list[tuple[int, int]]:
    """Return the identities of the data files of an index file, each as two 64-bit numbers (high, low).

    Raises:
        Corrupt: The file is damaged.
        UnknownVersion: This program does not know its version.
    """
    index_file = open_index_file(storage.read(location), location)
    return [(high, low) for high, low in index_file.files.ids.tolist()]


def copy_entries(
    location: str, definition_id: str, file_ids: Collection[tuple[int, int]], folder: str, storage: Storage
) -> WrittenIndex:
    """Write entries of an index file as an index file of another definition of the same kind and columns.

    Args:
        location: The index file.
        definition_id: The other definition. The caller ensures that the entries are the same for it.
        file_ids: The identities of the data files whose entries are copied. The index file has all of them.
        folder: The location of the new file.
        storage: The storage of the index files.

    Raises:
        Corrupt: The file is damaged.
        UnknownVersion: This program does not know its version.
        ValueError: The file is damaged.
    """
    index_file = open_index_file(storage.read(location), location)
    header = index_file.header
    kind = KINDS[header.kind]
    mask = np.array([tuple(file_id) in file_ids for file_id in index_file.files.ids.tolist()], dtype=np.bool_)
    files = FilesTable.merge([(index_file.files, mask)])
    parts = assemble_index_file(
        definition_id,
        header.kind,
        files,
        map(memoryview, kind.merge([(kind.open(index_file.blob), mask)])),
        table_uuid=header.table_uuid,
        field_ids=header.field_ids,
        level=header.level,
    )
    new_location = f"{folder}/{uuid.uuid4()}.puffin"
    return WrittenIndex(new_location, len(files), files.rows, storage.write(new_location, parts), ())


def _open_index_files(
    locations: Sequence[str], storage: Storage
) -> tuple[list[IndexFile], list[OpenedBlob], tuple[str, ...]]:
    """Return the index files, their opened blobs, and the locations of files of an unknown version."""
    index_files: list[IndexFile] = []
    blobs: list[OpenedBlob] = []
    unsupported_locations: list[str] = []
    for location in locations:
        try:
            index_file = open_index_file(storage.read(location), location)
            blob = KINDS[index_file.header.kind].open(index_file.blob)
        except UnknownVersion:
            unsupported_locations.append(location)
            continue
        index_files.append(index_file)
        blobs.append(blob)
    return index_files, blobs, tuple(unsupported_locations)


def _mask_entries(index_files: Sequence[IndexFile], dropped_entries: Mapping[str, Iterable[int]]) -> list[Mask]:
    """Return a mask of the entries to keep for each index file, as bool[data files].

    An entry is kept if it is not dropped and no newer index file has an entry for the same data file.

    Args:
        index_files: The index files, the oldest first.
        dropped_entries: The indexes of the entries to drop, by the location of the index file.
    """
    seen_ids: set[tuple[int, int]] = set()
    masks: list[Mask] = []
    for index_file in reversed(index_files):
        mask = np.ones(len(index_file.files), dtype=np.bool_)
        mask[list(dropped_entries.get(index_file.header.location, ()))] = False
        for number, (high, low) in enumerate(index_file.files.ids.tolist()):
            if mask[number]:
                mask[number] = (high, low) not in seen_ids
                seen_ids.add((high, low))
        masks.append(mask)
    return masks[::-1]
