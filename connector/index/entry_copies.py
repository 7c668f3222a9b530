"""Copies entries of an earlier definition of an index whose dimension tables have changed.

An entry is a function of one data file and of the attributes of its keys. If a definition differs from an earlier one
only by the snapshots of dimension tables, and no key of a data file has other attributes in the later snapshots, then
the entry of the earlier definition is right for the new definition. So a build copies such entries, and reads only the
keys of their data files. If no key has changed at all, it reads no data file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.progress import advance
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex, read_indexed_columns
from seamark.connector.index.lookups import DimensionRefused, Dimensions, find_places, read_dimensions
from seamark.connector.index.merges import copy_entries, read_file_ids
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.index.keys.lookups import DimensionSource, parse_lookup
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.runtime.errors import SeamarkError

_CHANGED_KEYS_FRACTION_MAX = 0.5
"""The maximum fraction of changed keys with which entries are copied. With more, almost every file has such a key."""
_EARLIER_DEFINITIONS_MAX = 3
"""The maximum number of earlier definitions whose dimension tables are read."""
_REGISTRATION_INTERVAL_MAX_S = 20 * 60
"""The maximum time without a registered index file, in seconds. The server rolls back a build that registers none for
an hour, if another build starts.
"""

FileId = tuple[int, int]


@dataclass(frozen=True)
class _ChangedKeys:
    """Keys for which a dimension table has other attributes in one snapshot than in another.

    Attributes:
        column_id: The field id of the column of the indexed table that contains such keys.
        keys: The keys.
    """

    column_id: int
    keys: pa.Array


def copy_unchanged_entries(
    client: IndexClient,
    task: IndexTask,
    earlier_files: Sequence[Mapping[str, str]],
    missing: dict[FileId, DataFile],
    dimensions: Dimensions,
) -> Iterator[WrittenIndex]:
    """Write index files with the entries of earlier definitions that are right for this definition, and yield them.

    The build makes an entry itself if it cannot be copied, for example because an index file is damaged or the snapshot
    of a dimension table has expired. The key columns of a data file are read at most once. If a key of the file has
    changed since the newest earlier definition, the build makes its entry too.

    Only the newest `_EARLIER_DEFINITIONS_MAX` definitions are used. The function ends early if it has written no index
    file for `_REGISTRATION_INTERVAL_MAX_S`, so that the build can register one in time.

    Args:
        client: The client.
        task: The index task of the build.
        earlier_files: The `earlier-index-files` of the build, the newest first.
        missing: The data files without entry. The function removes the files whose entries it has copied.
        dimensions: The dimension tables of the definition.
    """
    by_definition: defaultdict[str, list[str]] = defaultdict(list)
    for earlier_file in earlier_files:
        by_definition[earlier_file["definition-id"]].append(earlier_file["location"])
    read_ids: set[FileId] = set()
    deadline_s = time.monotonic() + _REGISTRATION_INTERVAL_MAX_S
    for definition_id, locations in islice(by_definition.items(), _EARLIER_DEFINITIONS_MAX):
        if not missing:
            return
        changes = _find_changes(client, task, definition_id, dimensions)
        for location in locations if changes is not None else ():
            advance(0, 0)  # This only reports that the job is active. No file is done.
            if not missing or time.monotonic() > deadline_s:
                return
            try:
                listed_files = read_file_ids(location, task.storage)
                unchanged_ids = _find_unchanged(task, listed_files, missing, changes or (), read_ids, deadline_s)
                if not unchanged_ids:
                    continue
                written = copy_entries(location, task.definition.id, unchanged_ids, task.folder, task.storage)
            except (OSError, SeamarkError, UnknownVersion, ValueError):
                continue
            for file_id in unchanged_ids:
                del missing[file_id]
            yield written
            deadline_s = time.monotonic() + _REGISTRATION_INTERVAL_MAX_S


def _find_changes(
    client: IndexClient, task: IndexTask, definition_id: str, dimensions: Dimensions
) -> list[_ChangedKeys] | None:
    """Return the keys that have changed since an earlier definition of the index.

    The result is None if the entries of the earlier definition should not be copied: the dimension tables at its
    snapshots cannot be read, or too many keys have changed.
    """
    terms = task.definition.terms
    earlier_terms = _read_earlier_terms(terms, definition_id)
    try:
        earlier_dimensions = read_dimensions(client, earlier_terms)
    except (
        ClientError,
        DimensionRefused,
        OSError,
        SeamarkError,
        ValueError,
    ):
        # For example, the snapshot of a dimension table has expired, or one of its keys was not unique.
        return None
    # The terms of one column may name several snapshots of a dimension table.
    changes: dict[tuple[int, DimensionSource, DimensionSource], _ChangedKeys] = {}
    changed_count = key_count = 0
    for term, earlier_term in zip(terms, earlier_terms, strict=True):
        lookup, earlier_lookup = parse_lookup(term.transform), parse_lookup(earlier_term.transform)
        if lookup is None or earlier_lookup is None or lookup.source == earlier_lookup.source:
            continue
        change = (term.column_id, earlier_lookup.source, lookup.source)
        if change in changes:
            continue
        table = dimensions[lookup.source]
        changed = find_changed_keys(earlier_dimensions[earlier_lookup.source], table)
        changes[change] = _ChangedKeys(term.column_id, changed)
        changed_count += len(changed)
        key_count += table.num_rows
    if changed_count > _CHANGED_KEYS_FRACTION_MAX * key_count:
        return None
    return [change for change in changes.values() if len(change.keys)]


def _read_earlier_terms(terms: Sequence[Term], definition_id: str) -> list[Term]:
    """Return the terms of an earlier definition, which differ only by the snapshots of dimension tables."""
    transforms = [earlier_term["transform"] for earlier_term in msgspec.json.decode(definition_id)["terms"]]
    return [replace(term, transform=transform) for term, transform in zip(terms, transforms, strict=True)]


def find_changed_keys(earlier: pa.Table, later: pa.Table) -> pa.Array:
    """Return the keys whose attributes differ between the earlier and the later rows of a dimension table.

    Keys that are only in the earlier rows, or only in the later rows, are included.

    Args:
        earlier: The earlier rows. The column `key` has distinct values, and the other columns are attributes.
        later: The later rows. Attributes that are not in both tables are not compared.
    """
    places = find_places(later["key"], earlier["key"].combine_chunks())
    is_same = pc.is_valid(places)
    for name in later.column_names:
        if name != "key" and name in earlier.column_names:
            earlier_values, later_values = _decode(earlier[name]).take(places), _decode(later[name])
            is_equal = pc.fill_null(pc.equal(earlier_values, later_values), False)
            both_null = pc.and_(pc.is_null(earlier_values), pc.is_null(later_values))
            is_same = pc.and_(is_same, pc.or_(is_equal, both_null))
    is_removed = pc.is_null(find_places(earlier["key"], later["key"].combine_chunks()))
    changed = pa.chunked_array(
        [*later["key"].filter(pc.invert(is_same)).chunks, *earlier["key"].filter(is_removed).chunks],
        later["key"].type,
    )
    return changed.combine_chunks()


def _decode(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of a dictionary array, which cannot be compared with those of another dictionary."""
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _find_unchanged(
    task: IndexTask,
    listed: Iterable[FileId],
    missing: Mapping[FileId, DataFile],
    changes: Sequence[_ChangedKeys],
    read_ids: set[FileId],
    deadline_s: float,
) -> set[FileId]:
    """Return the data files of an index file that have no entries yet, and whose rows certainly have no changed key.

    Args:
        task: The index that is built.
        listed: The data files of the index file.
        missing: The data files without entries, by their identity.
        changes: The changed keys. Without them, all missing files are unchanged.
        read_ids: The data files whose keys were read before. The function adds the files that it reads.
        deadline_s: The time, of `time.monotonic`, after which no data file is read.
    """
    unchanged = {file_id for file_id in listed if file_id in missing}
    for file_id in sorted(unchanged) if changes else ():
        if file_id in read_ids or time.monotonic() > deadline_s:
            unchanged.remove(file_id)
            continue
        read_ids.add(file_id)
        if not _is_unchanged(task, missing[file_id], changes):
            unchanged.remove(file_id)
        advance(0, 0)  # The job is alive.
    return unchanged


def _is_unchanged(task: IndexTask, file: DataFile, changes: Iterable[_ChangedKeys]) -> bool:
    """Return whether a data file certainly has no changed key. This is uncertain if the file cannot be read."""
    ids = tuple({change.column_id for change in changes})
    types = {term.column_id: to_row_type(term.source) for term in task.definition.terms}
    try:
        columns = read_indexed_columns(task, file, ids)
        return not any(
            pc.any(pc.is_in(columns[change.column_id].cast(types[change.column_id]), change.keys)).as_py()
            for change in changes
        )
    except (Unreadable, ValueError):
        return False
