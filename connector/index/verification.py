"""Verifies an index file: its checksums, its row counts, and its entries.

There are three checks. All checksums of the file must be correct. Its row counts must equal the row counts of its data
files, so that no entries are lost. Finally, a sample of its data files is read again, and the entries must match the
keys in them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from seamark.connector.index.files import DataFile, IndexTask, build_entry_of_file, read_file_keys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.index.index_file import FilesTable, open_index_file
from seamark.formats.index.keys.keys import Keys
from seamark.formats.index.kinds.kind import OpenedBlob, UnknownVersion
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.runtime.errors import Corrupt

SAMPLED_KEYS_PER_FILE = 50
"""The number of keys of each sampled data file that are compared, for index kinds that are compared key by key."""


@dataclass(frozen=True)
class VerificationResult:
    """The result of the verification of one index file.

    Attributes:
        problems: Empty if the index file is correct.
        sampled_files: The number of data files that were read.
        unreadable_files: The number of data files that could not be read, for example because they were deleted.
    """

    location: str
    files: int = 0
    rows: int = 0
    sampled_files: int = 0
    unreadable_files: int = 0
    problems: tuple[str, ...] = ()
    is_unreadable: bool = False
    """Whether the index file could not be read or is damaged. Another reader may be able to read it."""
    has_newer_version: bool = False
    """Whether the index file has a newer format version, which cannot be verified here. This is not an error."""
    listed: FilesTable | None = field(default=None, compare=False, repr=False)
    """The data files of the index file, or None if it could not be read."""


def verify_index_file(location: str, task: IndexTask, *, sample: int, rng: random.Random) -> VerificationResult:
    """Read a whole index file, and compare it with up to `sample` of its data files.

    Problems of the index file are reported in the result and never raised.
    """
    try:
        index_file = open_index_file(task.storage.read(location), location)
        kind = KINDS[index_file.header.kind]
        index = kind.open(index_file.blob)
        index.verify()
    except UnknownVersion as error:
        return VerificationResult(location, problems=(str(error),), has_newer_version=True)
    except (Corrupt, ValueError, OSError) as error:
        return VerificationResult(location, problems=(str(error),), is_unreadable=True)
    verdict = VerificationResult(location, len(index_file.files), index_file.files.rows, listed=index_file.files)
    actual, expected = (
        (index_file.header.table_uuid, index_file.header.definition),
        (task.table_uuid, task.definition.id),
    )
    problems = [f"the file belongs to table and index {actual}, not {expected}"] if actual != expected else []
    if index.files != len(index_file.files):
        problems.append(f"the file has entries for {index.files} data files, but lists {len(index_file.files)}")
    if count_problem := kind.check_rows(index, index_file.files.rows):
        problems.append(count_problem)
    if problems:
        return replace(verdict, problems=tuple(problems))
    for number in rng.sample(range(len(index_file.files)), min(sample, len(index_file.files))):
        path = index_file.files.paths[number]
        file = DataFile(path, int(index_file.files.sizes[number]), int(index_file.files.records[number]))
        try:
            differences = _compare_file(index, number, task, file, rng)
        except (
            Unreadable,
            ValueError,
        ):
            # The data file has been deleted, or can no longer be read with the current schema of the table.
            verdict = replace(verdict, unreadable_files=verdict.unreadable_files + 1)
            continue
        verdict = replace(verdict, sampled_files=verdict.sampled_files + 1)
        problems.extend(f"{path}: {problem}" for problem in differences)
    return replace(verdict, problems=tuple(problems))


def _compare_file(index: OpenedBlob, number: int, task: IndexTask, file: DataFile, rng: random.Random) -> Iterator[str]:
    """Read a data file, and compare its entry. Return a description of each difference.

    Entries with aggregates, as in cubes, are computed again. Other entries are compared with a sample of the rows.

    Raises:
        Unreadable: The file cannot be read.
        ValueError: The file cannot be indexed.
    """
    kind = KINDS[task.definition.kind]
    if kind.aggregates:
        return kind.compare_aggregates(index, number, build_entry_of_file(task, file))
    columns = read_file_keys(task, file)
    return kind.compare(index, number, columns, _sample_rows(columns[0], rng))


def _sample_rows(keys: Keys, rng: random.Random) -> list[int]:
    rows_with_keys = np.arange(keys.rows) if keys.present is None else np.flatnonzero(keys.present)
    return rng.sample(rows_with_keys.tolist(), min(SAMPLED_KEYS_PER_FILE, len(rows_with_keys)))
