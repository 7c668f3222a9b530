"""The changes that wait for a table, and the changes of a group that were applied to one state of the table."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.change_requests.change import ChangeRequest
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.commit.changes.change_application import ChangeApplication
from seamark.metaserver.commit.changes.commit_priority import ChangeId
from seamark.metaserver.commit.changes.commit_result import CommitResult
from seamark.metaserver.commit.changes.producers import LastCommit
from seamark.metaserver.commit.snapshots.snapshot_producer import ProducedSnapshot
from seamark.metaserver.store.model import Entry, RegisteredIndexFile


class PendingChange:
    """A change that waits for its commit, and its future outcome."""

    def __init__(self, caller: Caller, uuid: str, application: ChangeApplication, requested_ms: int) -> None:
        """Create a change that is not queued yet.

        Args:
            caller: The principal that requests the change.
            uuid: The UUID of the table for which the change was prepared.
            application: The change, and the steps that apply it to the current state of the table.
            requested_ms: The time of the request.
        """
        self.caller = caller
        self.uuid = uuid
        """The UUID of the table for which the change was prepared."""
        self.application = application
        self.index_files: Sequence[RegisteredIndexFile] = ()
        self.requested_ms = requested_ms
        change_id = application.request.change_id
        self.change_key: ChangeId | None = None if change_id is None else (caller.principal_name, change_id)
        """The principal and its id of the change, or None. Several attempts of one change have the same key."""
        self.queued_s = 0.0
        """The time at which the change was queued, on a monotonic clock."""
        self.started = False
        """Whether a group has begun to commit the change."""
        self.offered = False
        """Whether the change was passed to `publish`. Then its files may be live, even if the outcome is unknown."""
        self.done: asyncio.Future[CommitResult] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, because asyncio warns about exceptions that are never retrieved. The request that
        # waits for the result may have ended.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def request(self) -> ChangeRequest:
        return self.application.request

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def succeed(self, result: CommitResult) -> None:
        if not self.done.done():
            self.done.set_result(result)


class ChangeQueue:
    """The waiting changes of one table, and the task that commits them."""

    def __init__(self) -> None:
        self.waiting: deque[PendingChange] = deque()
        self.changed = asyncio.Event()
        """Set when a change is added, or when an engine or another change gets or loses its priority to commit."""
        self.task: asyncio.Task[None] | None = None


class GroupAttempt:
    """One attempt to apply the changes of a group to the current state of the table.

    The changes of a group are committed together.

    `base` is the metadata before the group, and `metadata` the result of the changes so far.
    """

    def __init__(self, entry: Entry, base: TableMetadata, removal_note: str | None) -> None:
        self.entry = entry
        self.removal_note = removal_note
        """The note of the table's last removal of orphan files (`removed_files.py`)."""
        self.base = base
        self.metadata = base
        self.produced: list[tuple[PendingChange, ProducedSnapshot]] = []
        self.repeats: list[PendingChange] = []
        """The repeats of changes of this group by the same producer. They get the answer of the first change."""
        self.refused: list[tuple[PendingChange, SeamarkError | Collision]] = []
        """The changes that conflict with an earlier change of this group."""
        self.producers: dict[str, LastCommit] = {}
        self.keys: set[str] = set()
        """The idempotency keys of the applied changes."""
        self.same_key_changes: list[PendingChange] = []
        """The changes whose idempotency key is in `keys`. They get the answer of the first change with the same key."""
        self.definitions: dict[str, str] | None = None
        """By location, the index definitions of the index files of the table and of the applied changes."""

    async def wait_until_stored(self) -> None:
        """Wait until the files of the changes are stored. If a file could not be stored, raise its error."""
        for pending, _ in self.produced:
            await pending.application.settle()
