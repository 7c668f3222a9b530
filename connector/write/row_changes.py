"""A change of a table's rows as one commit: files that come and go, beside what was read to know them.

Where others were faster all is done anew from what stands, a bounded number of times, and the files of the attempt that
was refused are deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import At, Name, SeamarkClient
from seamark.connector.client.commits import CommitClient, Producer, back_off, producer_named
from seamark.connector.client.errors import BadRequest, Conflict, Refused
from seamark.connector.read.tables import OpenTable, in_sql, open_table
from seamark.connector.write.appends import WrittenFiles, commit
from seamark.connector.write.delete_files import WrittenDeletes
from seamark.connector.write.target import WriteTarget, target_of
from seamark.metaserver.iceberg.expressions.expression import Expression
from seamark.metaserver.iceberg.expressions.expression_json import expression_json
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata

ATTEMPTS = 50
_WAIT_S, _WAIT_MAX_S = 0.02, 2.0


@dataclass(frozen=True)
class Report:
    """What was done. Files are those of the attempt that was committed."""

    inserted: int = 0
    """Keys that no row had."""
    updated: int = 0
    """Keys of whose rows one is left, with new values."""
    deleted: int = 0
    """Rows that are gone, and no other came in their place."""
    stale: int = 0
    """Keys whose stored row is newer than the one given, and stayed."""
    files_read: int = 0
    """Data files of which anything was read."""
    files_written: int = 0
    """Data and delete files."""
    files_removed: int = 0
    """Data files, and delete files that new ones hold."""
    attempts: int = 1
    snapshot_id: int | None = None
    """None where nothing was to be changed and there is no producer."""
    duplicate: bool = False
    """The producer had committed this before; the numbers tell what this run would have done."""


@dataclass(frozen=True)
class RowChange:
    """For a commit: what was read, and files; `removed` are data files of which `data` has the rows that stay."""

    scope: Expression | None
    """None where nothing was read: it collides with nothing but a partition spec that it does not know."""
    report: Report
    data: WrittenFiles
    deletes: WrittenDeletes = field(default_factory=WrittenDeletes)
    removed: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be changed. Then only a producer commits, so that its number is recorded."""
        return not (self.data.files or self.deletes.files or self.removed or self.deletes.removed)

    def allowed(self, target: WriteTarget) -> RowChange:
        """With no more index files than a commit may bring."""
        return replace(self, data=self.data.with_allowed_indexes(target.storage))

    def body(self, opened: OpenTable) -> dict[str, Any]:
        read = {} if self.scope is None else {"scope": {"filter": expression_json(in_sql(self.scope))}}
        return {
            "read-snapshot-id": opened.snapshot_id,
            "schema-id": opened.metadata.current_schema_id,
            **read,
            "add": [*self.data.files, *self.deletes.files],
            "remove": [*self.removed, *self.deletes.removed],
            "index-files": list(self.data.index_files),
        }

    def done(self) -> Report:
        """The report, with the files."""
        paths = {one["file-path"] for one in (*self.data.files, *self.deletes.files)}
        removed = len(self.removed) + len(self.deletes.removed)
        return replace(self.report, files_written=len(paths), files_removed=removed)

    def discard(self, target: WriteTarget) -> None:
        self.data.discard(target.storage)
        self.deletes.discard(target.storage)


NOTHING = RowChange(None, Report(), WrittenFiles())


def committed(
    client: SeamarkClient,
    table: Name,
    prepared: Callable[[OpenTable, WriteTarget], RowChange],
    *,
    branch: str,
    producer: Producer | None,
    summary: Mapping[str, str] | None,
    attempts: int,
    history: bool = False,
) -> Report:
    """One commit of what is prepared, from the branch's head, and again where others were faster. With `history` what
    is opened tells all of the table's snapshots. Unwritable, before anything is written, for a table of version 1."""
    named: dict[str, Any] = {"branch": branch, "summary": dict(summary or {})}
    if (of := producer_named(producer)) is not None:
        named["producer"] = of
    named["change-id"] = str(uuid.uuid4())  # by which the server knows who has collided how often
    opened = open_table(client, table, At(ref=branch), history=history)
    check_takes_deletes(opened.metadata)
    named["table-uuid"] = opened.metadata.table_uuid
    number = 0
    while True:
        number += 1
        target = target_of(opened.metadata, opened.storage)
        try:
            change = prepared(opened, target).allowed(target)
        except Conflict:
            # Rows have changed since they were read: maybe by this very change, whose answer was lost.
            if (first := _first_answer(client, table, named)) is None:
                raise
            return Report(attempts=number, snapshot_id=first["snapshot-id"], duplicate=True)
        if change.is_empty and of is None:  # a producer's number is recorded: its repeat may find other rows
            return replace(change.report, attempts=number)
        try:
            answer = commit(client, table, {**named, **change.body(opened)}, partial(change.discard, target))
        except (Conflict, BadRequest) as error:
            if number >= attempts:
                raise
            if isinstance(error, Conflict):
                back_off(number, first_s=_WAIT_S, most_s=_WAIT_MAX_S)
            before, opened = opened, open_table(client, table, At(ref=branch), history=history)
            if not _is_anew(error, before.metadata, opened.metadata):
                raise
        else:
            return replace(
                change.done(), attempts=number, snapshot_id=answer["snapshot-id"], duplicate=answer["duplicate"]
            )


def _first_answer(client: SeamarkClient, table: Name, named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of what its producer has committed before; None where that is another change."""
    asked = {name: named[name] for name in ("producer", "branch", "table-uuid") if name in named}
    if "producer" not in asked:
        return None
    try:
        return CommitClient(client).commit(table, {**asked, "repeats-only": True})
    except (Conflict, BadRequest):  # a server of an older version does not know the question
        return None


def check_takes_deletes(metadata: TableMetadata) -> None:
    """Unwritable for a table whose format version has no deletes, so that rows can be appended only."""
    if metadata.format_version == 1:
        raise Unwritable(
            "A table of version 1 takes appends only: it has no position deletes and no equality deletes; upgrade it "
            "to version 2 or later"
        )


def _is_anew(error: Refused, before: TableMetadata, now: TableMetadata) -> bool:
    """Whether what was refused is to be done anew: not of another table by that name, where rows with the keys may mean
    anything; and what was no sound change, only where that was because of an upgrade, as a version has delete files of
    its own."""
    if now.table_uuid != before.table_uuid:
        return False
    return isinstance(error, Conflict) or now.format_version != before.format_version
