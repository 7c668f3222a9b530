"""Index files held against themselves and against the data they describe: the audit behind `seamark index verify`.

Three questions, each harder than the last. Is the file whole (every checksum)? Does it count as many rows as its data
files have (an index that silently loses entries is the worst kind)? Does it say of sampled data files what is in them,
key by key, when these are read again?
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from connector.index.files import DataFile, IndexTask, keys_of_file
from metaserver.errors import Corrupt
from metaserver.iceberg.files.parquet import Unreadable
from metaserver.index.files.index_file import FilesTable, UnknownVersion, open_index_file
from metaserver.index.keys.hashing import hash_halves, hash_keys
from metaserver.index.keys.keys import Key, KeyRange, KeyRanges, Keys, mask_of
from metaserver.index.kinds.bitmap import Bitmap
from metaserver.index.kinds.bits import positions
from metaserver.index.kinds.bloom import Bloom
from metaserver.index.kinds.kinds import KINDS
from metaserver.index.kinds.record import Record

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
        index = KINDS[opened.header.kind].open(opened.blob)
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
    if isinstance(index, Record) and index.count != opened.files.rows:
        problems.append(f"it has {index.count} entries for {opened.files.rows} rows")
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
        problems.extend(f"{path}: {problem}" for problem in _compared(index, number, columns, rng))
    return replace(verdict, problems=tuple(problems))


def _compared(index: Bloom | Bitmap | Record, number: int, columns: list[Keys], rng: random.Random) -> Iterator[str]:
    if isinstance(index, Record):
        yield from _compare_record(index, number, columns)
        return
    keys = columns[0]
    present = np.arange(keys.rows) if keys.present is None else np.flatnonzero(keys.present)
    hashes = hash_keys(keys, 0)
    for row in rng.sample(present.tolist(), min(KEYS_SAMPLED, len(present))):
        if isinstance(index, Bloom):
            if not index.probe(hashes[row : row + 1])[number]:
                yield f"the filter does not know the value of row {row}"
            continue
        key = _key(keys, row)
        ranges = KeyRanges(keys.kind, (KeyRange(key, key),))
        found = positions(index.rows(number, ranges))
        expected = present[hashes[present] == hashes[row]]  # two values of one hash are not met with
        if index.exact(ranges) and not np.array_equal(found, expected):
            yield f"the bitmap has {len(found)} rows with the value of row {row}; there are {len(expected)}"
    if isinstance(index, Bloom):
        return
    nulls = 0 if keys.valid is None else keys.rows - int(mask_of(keys.valid, keys.rows).sum())
    told = len(positions(index.rows(number, KeyRanges(keys.kind, (), nulls=True))))
    if told != nulls:
        yield f"the bitmap has {told} nulls; there are {nulls}"


def _key(keys: Keys, row: int) -> Key:
    if keys.codes is not None:
        return int(keys.codes[row])
    assert keys.starts is not None
    assert keys.heap is not None
    return keys.heap[keys.starts[row] : keys.starts[row + 1]].tobytes()


def _compare_record(index: Record, number: int, columns: list[Keys]) -> Iterator[str]:
    rows = columns[0].rows
    if int(index.counts[number]) != rows:
        yield f"the index has {int(index.counts[number])} entries; there are {rows} rows"
    asked, files, places = index.lookup(*hash_halves(columns))
    found = np.zeros(rows, dtype=np.bool_)
    mine = (files == number) & (places == asked)
    found[asked[mine]] = True
    if not found.all():
        yield f"the index does not find the key of row {int(np.flatnonzero(~found)[0])} where it is"
