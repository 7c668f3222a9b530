"""Selects the files of a table that will probably stay unchanged while a job rewrites them.

A file that has not changed for a long time will probably stay unchanged. If rows of the table were changed recently, a
job rewrites only files that are several times as old as the expected duration of the job. A younger file will be
replaced by a writer, or will be old enough for the next job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from seamark.connector.read.lineage import SEQUENCE_NUMBER
from seamark.connector.read.tables import OpenTable, ScanTask

SETTLED_AGE_FACTOR = 4
"""The minimum age of a settled file, as a multiple of the duration of the rewrite.

If the probability that a file is replaced is proportional to 1/age, a fifth of the work is wasted.
"""
SETTLED_AGE_MAX_MS = 600_000
"""The maximum age that a settled file needs, for large rewrites."""
_PLANNINGS = 3
"""The time for planning in a rewrite, as a multiple of the time for the first plan."""
_REWRITE_BYTES_PER_MS = 32_000
"""The number of bytes that a rewrite reads and writes in a millisecond."""
_OPEN_FILE_MS = 10
"""The time that a rewrite needs for each file that it opens, in addition to the time for its bytes."""
_CHANGES = ("overwrite", "delete")
"""The operations of snapshots that replace or delete rows."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def compute_settled_age_ms(tasks: Sequence[ScanTask], planned_ms: int) -> int:
    """Return the age from which files count as settled, for a rewrite of the given tasks.

    A settled file is so old that writers will probably not replace it during the rewrite. The age is a multiple of the
    estimated time of the rewrite: planning, opening the files, and reading and writing their bytes.

    Args:
        tasks: The tasks.
        planned_ms: The time that planning the tasks has taken. The commit plans them again, which takes about as long.
    """
    size_bytes = sum(task.size_bytes for task in tasks)
    return min(
        SETTLED_AGE_MAX_MS,
        SETTLED_AGE_FACTOR
        * (_PLANNINGS * planned_ms + _OPEN_FILE_MS * len(tasks) + size_bytes // _REWRITE_BYTES_PER_MS),
    )


def select_settled(source_table: OpenTable, tasks: Sequence[ScanTask], age_ms: int, at_ms: int) -> list[ScanTask]:
    """Return the tasks whose files have at least a given age at a given time.

    If no snapshot has changed rows in the `age_ms` before this time, all tasks are returned. The age of a file is known
    by its sequence number, which is the number of the snapshot that added it. Without the number, a file is young.

    Args:
        source_table: The table, with all snapshots.
        tasks: The tasks, with sequence numbers.
        age_ms: The minimum age.
        at_ms: The time, in milliseconds since the epoch.
    """
    snapshots = sorted(source_table.history, key=lambda snapshot: snapshot.sequence_number)
    young_snapshots = [snapshot for snapshot in snapshots if snapshot.timestamp_ms > at_ms - age_ms]
    if not any(snapshot.build_summary_map().get("operation") in _CHANGES for snapshot in young_snapshots):
        return list(tasks)
    first_young_number = young_snapshots[0].sequence_number
    return [task for task in tasks if int(task.file.get(SEQUENCE_NUMBER, first_young_number)) < first_young_number]


def select_settled_tasks(
    source_table: OpenTable,
    tasks: Sequence[ScanTask],
    choose_rewritten: Callable[[Sequence[ScanTask]], Iterable[ScanTask]],
    planned_ms: int,
) -> tuple[Sequence[ScanTask], float]:
    """Select the tasks whose files will probably stay unchanged while a job rewrites them.

    Args:
        source_table: The table, with all snapshots.
        tasks: The tasks, with sequence numbers.
        choose_rewritten: A function that returns the tasks of its argument that the job would rewrite.
        planned_ms: The time that planning the tasks has taken.

    Returns:
        The settled tasks, and the number of seconds after which the other tasks may be settled. It is 0 if there are no
        other tasks. If the job would rewrite none of the tasks, all of them are returned.
    """
    tasks_to_rewrite = list(choose_rewritten(tasks))
    if not tasks_to_rewrite:
        return tasks, 0.0
    age_ms = compute_settled_age_ms(tasks_to_rewrite, planned_ms)
    # The times of snapshots come from the clock of the server, and the clock of a job may be behind it.
    at_ms = max([now_ms(), *(snapshot.timestamp_ms for snapshot in source_table.history)])
    settled_tasks = select_settled(source_table, tasks, age_ms, at_ms)
    return settled_tasks, age_ms / 1000 if len(settled_tasks) < len(tasks) else 0.0
