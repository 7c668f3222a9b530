"""Checks the row counts of a change with the operation `replace`, which must not change any rows.

Streams, conflict checks and statistics ignore a `replace`, and the server may undo it when an engine commits on an
older snapshot. Therefore rows would be lost without an error if a writer changed rows in a `replace` by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.manifests.content_file import DATA, EQUALITY_DELETES
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.commit.change_requests.change import Change
from seamark.metaserver.commit.change_requests.change_body import REPLACE
from seamark.metaserver.commit.snapshots.manifest_filter import FilesToRemove, drop_dead_manifests
from seamark.metaserver.commit.snapshots.manifests import Manifests, run_by_count
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.strings import read_strings

_DELETE_FILES_MAX = 10_000
"""The maximum number of delete files whose rows are counted. The table is locked while they are read."""


async def check_row_counts(
    manifests: Manifests, manifest_files: Sequence[ManifestFile], change: Change, to_remove: FilesToRemove
) -> None:
    """Check that the added data files of a `replace` can have the same rows as the removed data files.

    The check fails if the added files have more rows than the removed files, or fewer rows than the position deletes
    leave in the removed files. The number of rows that equality deletes remove is unknown. A row count below 0 also
    means unknown. The change may add deletes of rows in the added files, because other writers may have replaced these
    rows since.

    Args:
        manifests: Reads the manifests.
        manifest_files: The manifests of the newest snapshot of the branch.
        change: The change.
        to_remove: The files that the change removes.

    Raises:
        BadRequest: The row counts differ.
    """
    if change.operation != REPLACE:
        return
    count = len(to_remove.files) + len(change.data) + len(change.deletes)
    counts = await run_by_count(count, partial(_count_rows, change, to_remove))
    if counts is None:
        return
    removed_rows, added_rows, deleted_rows, is_exact = counts
    if added_rows - deleted_rows > removed_rows and is_exact:
        raise BadRequest(
            f"operation is replace, but the added data files have {added_rows:,} rows, of which {deleted_rows:,} are "
            "deleted, and "
            f"the removed data files have {removed_rows:,} (record-count). A replacement must have the same rows. Set "
            "operation to overwrite, or omit it"
        )
    if added_rows >= removed_rows:
        return
    deleted_rows_max = await _count_deleted_rows(manifests, manifest_files, to_remove)
    if deleted_rows_max is not None and added_rows < removed_rows - deleted_rows_max:
        raise BadRequest(
            f"operation is replace, but the added data files have {added_rows:,} rows, and the removed data files have "
            f"{removed_rows:,} (record-count), of which at most {deleted_rows_max:,} are deleted. A replacement must "
            "have the same "
            "rows. Set operation to overwrite, or omit it"
        )


class _Counts(NamedTuple):
    removed_rows: int
    """The number of rows of the removed data files."""
    added_rows: int
    """The number of rows of the added data files."""
    deleted_rows: int
    """The maximum number of rows that the added delete files remove."""
    is_exact: bool
    """Whether the added delete files remove rows by position."""


def _count_rows(change: Change, to_remove: FilesToRemove) -> _Counts | None:
    """Return the row counts of the change, or None if the row count of a removed data file is unknown.

    A negative count represents an unknown count.
    """
    removed_counts = [file.record_count for file in to_remove.files if file.content == DATA]
    if removed_counts and min(removed_counts) < 0:
        return None
    added_rows, deleted_rows = (sum(file.record_count for file in files) for files in (change.data, change.deletes))
    return _Counts(
        sum(removed_counts), added_rows, deleted_rows, all(file.content != EQUALITY_DELETES for file in change.deletes)
    )


async def _count_deleted_rows(
    manifests: Manifests, manifest_files: Sequence[ManifestFile], to_remove: FilesToRemove
) -> int | None:
    """Return the maximum number of rows that deletes remove from the removed data files, or None if it is unknown.

    It is unknown if the number of delete files is unknown or very large.
    """
    deletes = [manifest for manifest in drop_dead_manifests(manifest_files) if manifest.content != DATA]
    counts = [(manifest.added_files_count, manifest.existing_files_count) for manifest in deletes]
    if sum(math.inf if None in count else sum(filter(None, count)) for count in counts) > _DELETE_FILES_MAX:
        return None
    blocks = await manifests.read_blocks(deletes)
    return await run_by_count(
        len(to_remove.files) + sum(block.rows for block in blocks),
        partial(_count_rows_of_applicable_deletes, blocks, to_remove),
    )


def _count_rows_of_applicable_deletes(blocks: Sequence[Block], to_remove: FilesToRemove) -> int | None:
    """Return the number of rows of the delete files that may apply to removed data files, or None if it is unknown.

    An equality delete may remove any number of rows. A position delete file without a data file may apply to any file,
    so all its rows count.

    Args:
        blocks: The delete files of the newest snapshot of the branch.
        to_remove: The files that the change removes.
    """
    data_paths = {file.file_path.encode() for file in to_remove.files if file.content == DATA}
    deleted_rows_max = 0
    for block in blocks:
        rows = np.arange(block.rows, dtype=np.int64)
        if (block.read_longs("content") == EQUALITY_DELETES).any():
            return None
        records = block.read_longs("record_count")
        referenced_paths = read_strings(block.find_text_column("referenced_data_file"), rows)
        may_apply = np.array([path is None or path in data_paths for path in referenced_paths], dtype=np.bool_)
        if (records[may_apply] < 0).any():
            return None
        deleted_rows_max += int(records[may_apply].sum())
    return deleted_rows_max
