"""Index files held against themselves and against the data they describe: the audit behind `seamark index verify`.

Three questions, each harder than the last. Is the file whole (every checksum)? Does it count as many rows as its data
files have (an index that silently loses entries is the worst kind)? Does it say of sampled data files what is in them,
key by key, when these are read again?
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from seamark.connector.index.files import DataFile, IndexTask, keys_of_file
from seamark.metaserver.errors import Corrupt
from seamark.metaserver.iceberg.files.parquet import Unreadable
from seamark.metaserver.index.files.index_file import FilesTable, UnknownVersion, open_index_file
from seamark.metaserver.index.keys.keys import Keys
from seamark.metaserver.index.kinds.kinds import KINDS

KEYS_SAMPLED = 50
"""Of each sampled data file, for kinds that are asked key by key."""


@dataclass(frozen=True)
class Verdict:
    """`problems` is empty for a sound file. `sampled` data files were read, `gone` were to be and are there no more."""

    location: str
    files: int = 0
    rows: int = 0
    sampled: int = 0
    gone: int = 0
    problems: tuple[str, ...] = ()
    unread: bool = False
    """Its bytes could not be had, or are damaged: another reader may know better."""
    newer: bool = False
    """Of a version that is not known here: nothing is known to be wrong with it."""
    listed: FilesTable | None = field(default=None, compare=False, repr=False)
    """The data files that it describes, as far as it can be read."""


def verify_index_file(location: str, task: IndexTask, *, sample: int, rng: random.Random) -> Verdict:
    """Reads the whole index file, and up to `sample` of its data files. Never raises for what is wrong with it."""
    try:
        opened = open_index_file(task.storage.read(location), location)
        kind = KINDS[opened.header.kind]
        index = kind.open(opened.blob)
        index.verify()
    except UnknownVersion as error:
        return Verdict(location, problems=(str(error),), newer=True)
    except (Corrupt, ValueError, OSError) as error:
        return Verdict(location, problems=(str(error),), unread=True)
    verdict = Verdict(location, len(opened.files), opened.files.rows, listed=opened.files)
    said, wanted = (opened.header.table_uuid, opened.header.definition), (task.table_uuid, task.definition.id)
    problems = [f"it is of table and index {said}, not {wanted}"] if said != wanted else []
    if index.files != len(opened.files):
        problems.append(f"it indexes {index.files} data files and lists {len(opened.files)}")
    if miscounted := kind.check_rows(index, opened.files.rows):
        problems.append(miscounted)
    if problems:
        return replace(verdict, problems=tuple(problems))
    for number in rng.sample(range(len(opened.files)), min(sample, len(opened.files))):
        path = opened.files.paths[number]
        file = DataFile(path, int(opened.files.sizes[number]), int(opened.files.records[number]))
        try:
            columns = keys_of_file(task, file)
        except (Unreadable, ValueError):  # cleaned up since, or a table that no longer reads as it did
            verdict = replace(verdict, gone=verdict.gone + 1)
            continue
        verdict = replace(verdict, sampled=verdict.sampled + 1)
        found = kind.compare(index, number, columns, _sampled(columns[0], rng))
        problems.extend(f"{path}: {problem}" for problem in found)
    return replace(verdict, problems=tuple(problems))


def _sampled(keys: Keys, rng: random.Random) -> list[int]:
    """Rows that have a key."""
    present = np.arange(keys.rows) if keys.present is None else np.flatnonzero(keys.present)
    return rng.sample(present.tolist(), min(KEYS_SAMPLED, len(present)))
