"""Which files of a table will probably stay unchanged while a job rewrites them.

Some rows are changed all the time and others never, so a file that has stayed for long will probably stay longer. A job
therefore takes only files that are several times as old as it expects to take, if rows of the table were changed of
late. Files that were added later are replaced by a writer, or are old enough for the next job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from seamark.connector.read.lineage import SEQUENCE_NUMBER
from seamark.connector.read.tables import OpenTable, ScanTask

SETTLED_AGE_FACTOR = 4
"""A file is settled when it is this many times as old as the rewrite takes.

If the chance that a file is replaced falls with its age as 1/age, a fifth of the work is wasted.
"""
SETTLED_AGE_MAX_MS = 600_000
_REWRITE_BYTES_PER_MS = 32_000
_OPEN_FILE_MS = 10
"""Time of a rewrite by its bytes, and for each file that it opens."""
_CHANGES = ("overwrite", "delete")
"""Operations of snapshots that replace or delete rows."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def compute_settled_age_ms(tasks: Sequence[ScanTask], planned_ms: int) -> int:
    """Return the age from which on files are settled, for a rewrite of these tasks.

    Args:
        planned_ms: How long their plan took; it is made again for the commit, which takes about as long.
    """
    size_bytes = sum(task.size_bytes for task in tasks)
    return min(
        SETTLED_AGE_MAX_MS,
        SETTLED_AGE_FACTOR * (3 * planned_ms + _OPEN_FILE_MS * len(tasks) + size_bytes // _REWRITE_BYTES_PER_MS),
    )


def select_settled(opened: OpenTable, tasks: Sequence[ScanTask], age_ms: int, at_ms: int) -> list[ScanTask]:
    """Return the tasks whose files have at least this age at a time.

    Returns:
        All tasks, if no snapshot changed rows since `age_ms` before the time.

    Args:
        opened: The table, with all snapshots; the tasks have sequence numbers.
    """
    snapshots = sorted(opened.history, key=lambda snapshot: snapshot.sequence_number)
    young = [snapshot for snapshot in snapshots if snapshot.timestamp_ms > at_ms - age_ms]
    if not any(snapshot.summary_map().get("operation") in _CHANGES for snapshot in young):
        return list(tasks)
    first = young[0].sequence_number
    return [task for task in tasks if int(task.file.get(SEQUENCE_NUMBER, first)) < first]


def settle(
    opened: OpenTable,
    tasks: Sequence[ScanTask],
    choose: Callable[[Sequence[ScanTask]], Iterable[ScanTask]],
    planned_ms: int,
) -> tuple[Sequence[ScanTask], float]:
    """Select the settled tasks.

    Args:
        choose: Returns the tasks that the job would rewrite of some tasks.

    Returns:
        The tasks, and the seconds after which the others may be settled; 0 if there are none.
    """
    due = list(choose(tasks))
    if not due:
        return tasks, 0.0
    age_ms = compute_settled_age_ms(due, planned_ms)
    # The clock of the server wrote the snapshots; that of a job may be behind it.
    at_ms = max([now_ms(), *(snapshot.timestamp_ms for snapshot in opened.history)])
    settled = select_settled(opened, tasks, age_ms, at_ms)
    return settled, age_ms / 1000 if len(settled) < len(tasks) else 0.0
