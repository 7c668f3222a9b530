"""Two changes from one snapshot: their meaning, how an engine writes them, and their allowed outcomes.

The oracle is a list of rows, and a change is a function of it. A history of two changes is serialisable if a reader
sees the rows of one order or the other. Under snapshot isolation both changes apply to the snapshot, and no row may
have been written by both. The oracle does not use manifests, partitions or bounds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.commits.lake import BY_PART, CommitTable, Row

PARTS = (0, 1, 2)
BLIND_KINDS = ("append", "equality", "overwrite")
"""Kinds of changes that do not depend on rows that were read."""

READING_KINDS = ("delete", "update", "update", "count", "compact")
"""Kinds of changes that depend on rows that were read. Updates are drawn twice as often as each other kind."""


@dataclass
class StoredFile:
    """A data file of the snapshot on which two concurrent changes are based.

    `vector` is the commit entry of its deletion vector, or None.
    """

    path: str
    part: int
    rows: list[Row]
    deleted_positions: set[int] = field(default_factory=set)
    vector: dict[str, Any] | None = None

    @property
    def live_rows(self) -> list[tuple[int, Row]]:
        """(position, row) of each row that is not deleted."""
        return [(index, row) for index, row in enumerate(self.rows) if index not in self.deleted_positions]


@dataclass(frozen=True)
class Change:
    """A change of `kind` to the rows of `part` whose id is in `ids`.

    `effect` is the way in which an engine writes a delete or update: it rewrites the files ("rewrite"), or adds
    deletion vectors ("vectors") or position deletes that name their data file ("named") or do not ("unnamed"). `scope`
    is what the engine states about its reads.
    """

    kind: str
    part: int
    ids: frozenset[int]
    effect: str
    scope: str
    isolation: str
    number: int

    def matches(self, row: Row) -> bool:
        row_id, part, _ = row
        return part == self.part and row_id in self.ids

    @property
    def inserted_rows(self) -> list[Row]:
        return [(row_id, self.part, f"new{self.number}") for row_id in sorted(self.ids)]

    def update_row(self, row: Row) -> Row:
        row_id, part, value = row
        return (row_id, part, f"{value}+{self.number}")

    def apply(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows after the change."""
        old_rows = list(rows)
        if self.kind == "append":
            return old_rows + self.inserted_rows
        if self.kind in ("delete", "equality"):
            return [row for row in old_rows if not self.matches(row)]
        if self.kind == "update":
            return [self.update_row(row) if self.matches(row) else row for row in old_rows]
        if self.kind == "count":
            # The added row depends on the rows that the change has read.
            return [*old_rows, (1000 + sum(map(self.matches, old_rows)), self.part, f"count{self.number}")]
        if self.kind == "overwrite":
            return [(row_id, part, value) for row_id, part, value in old_rows if part != self.part] + self.inserted_rows
        assert self.kind == "compact"
        return old_rows

    @property
    def is_blind(self) -> bool:
        """Whether the change does not depend on the rows of the table, as an append."""
        return self.kind in BLIND_KINDS


def draw_change(rng: random.Random, version: int, number: int, parts: tuple[int, ...]) -> Change:
    """Return a random change. Most changes read rows; the first change is more often one that reads none.

    The possible effects depend on the format version, because only version 3 has deletion vectors.
    """
    effects = ["rewrite", "vectors"] if version == 3 else ["rewrite", "named", "unnamed"]
    return Change(
        kind=rng.choice((*BLIND_KINDS, *READING_KINDS) if number == 1 or rng.random() < 0.2 else READING_KINDS),
        part=rng.choice(parts),
        ids=frozenset(rng.sample(range(6), rng.randint(1, 4))),
        effect=rng.choice(effects),
        scope=rng.choice(["partitions", "filter", "ids", "all"]),
        isolation=rng.choice(["serializable", "snapshot"]),
        number=number,
    )


@dataclass
class ConcurrentChanges:
    """A table with its base snapshot, and two changes that read this snapshot."""

    lake: CommitTable
    version: int
    base: dict[str, StoredFile]
    snapshot_id: int
    first_change: Change
    second_change: Change

    @staticmethod
    async def make(api: Any, seed: int, name: str) -> ConcurrentChanges:
        """Create a table with random rows and deletes, and two changes that usually overlap."""
        rng = random.Random(seed)
        version = rng.choice([2, 3])
        lake = await CommitTable.create(api, name, version=version, spec=BY_PART)
        base: dict[str, StoredFile] = {}
        snapshot_id = 0
        for _ in range(rng.randint(1, 3)):  # Each round is a commit of the base.
            added_files = []
            for _ in range(rng.randint(1, 3)):
                part = rng.choice(PARTS)
                row_ids = rng.sample(range(6), rng.randint(1, 4))
                rows = [(row_id, part, f"r{rng.randrange(10**6)}") for row_id in row_ids]
                data = lake.write_data_file(rows)
                base[data["file-path"]] = StoredFile(data["file-path"], part, rows)
                added_files.append(data)
            snapshot_id = (await lake.commit({"add": added_files}))["snapshot-id"]
        if rng.random() < 0.6:
            snapshot_id = await _delete_random_row(lake, base, version, snapshot_id, rng)
        changes: list[Change] = []
        for number in (1, 2):
            # The second change prefers the partition of the first change: it is listed three times more, so that the
            # changes usually overlap.
            nearby_parts = tuple(change.part for change in changes) * 3
            change = draw_change(rng, version, number, (*PARTS, *nearby_parts))
            while not _changes_rows(change, base):
                change = draw_change(rng, version, number, (*PARTS, *nearby_parts))
            changes.append(change)
        return ConcurrentChanges(lake, version, base, snapshot_id, *changes)

    def list_rows(self) -> list[Row]:
        return [row for file in self.base.values() for _, row in file.live_rows]

    def build_body(self, change: Change) -> dict[str, Any]:
        """Return the change as an engine that read the base would send it."""
        return _BODY_FUNCTIONS[change.kind](self, change) | _describe_reads(self, change)

    def list_allowed_results(self) -> list[Counter[Row]]:
        """Return each set of rows that a reader may see when both changes are committed.

        The list is empty if the server must reject the second change.
        """
        base, first, second = self.list_rows(), self.first_change, self.second_change
        # A blind change reads no rows, so snapshot isolation adds nothing to its result.
        if second.isolation == "snapshot" and not second.is_blind:
            return self._list_snapshot_isolation_results()
        return [Counter(second.apply(first.apply(base))), Counter(first.apply(second.apply(base)))]

    def _list_snapshot_isolation_results(self) -> list[Counter[Row]]:
        base = Counter(self.list_rows())
        after_first = Counter(self.first_change.apply(self.list_rows()))
        after_second = Counter(self.second_change.apply(self.list_rows()))
        first_removals, second_removals = base - after_first, base - after_second
        removed_by_both = first_removals & second_removals
        if removed_by_both and (after_first - base or after_second - base):
            return []
        return [base - (first_removals | second_removals) + (after_first - base) + (after_second - base)]

    def must_commit(self) -> bool:
        """Return True if the second change cannot conflict with the first, so that the server must accept it."""
        first, second = self.first_change, self.second_change
        # A blind change reads no rows, so it conflicts with no other change.
        if second.is_blind:
            return True
        # A scope states which rows the change has read. A change of another partition does not conflict with it.
        is_disjoint = first.part != second.part
        is_scoped = second.scope != "all" or second.isolation == "snapshot" or second.kind == "compact"
        if is_disjoint and is_scoped:
            return True
        # A first change that only adds rows does not conflict with a change that only has to keep the rows that it
        # read.
        is_append = first.kind in ("append", "count")
        return is_append and (second.isolation == "snapshot" or second.kind == "compact")


def _changes_rows(change: Change, base: dict[str, StoredFile]) -> bool:
    live_rows = [row for file in base.values() if file.part == change.part for _, row in file.live_rows]
    if change.kind in ("delete", "update"):
        return any(map(change.matches, live_rows))
    return change.kind != "compact" or bool(live_rows)


async def _delete_random_row(
    lake: CommitTable, base: dict[str, StoredFile], version: int, snapshot_id: int, rng: random.Random
) -> int:
    """Delete one row of a random file of the base, and return the id of the new snapshot.

    Also record the deleted row in the file of the base.
    """
    file = rng.choice(list(base.values()))
    file.deleted_positions = {rng.randrange(len(file.rows))}
    if version == 3:
        (file.vector,) = lake.write_vectors({file.path: file.deleted_positions}, file.part)
        added_files = [file.vector]
    else:
        added_files = [lake.write_position_deletes([(file.path, index) for index in file.deleted_positions], file.part)]
    answer = await lake.commit({"add": added_files, "read-snapshot-id": snapshot_id})
    new_snapshot_id: int = answer["snapshot-id"]
    return new_snapshot_id


def _describe_reads(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    """Return the part of the request that states what the change has read."""
    if change.is_blind:
        return {}
    document: dict[str, Any] = {"read-snapshot-id": case.snapshot_id, "isolation": change.isolation}
    if change.kind == "compact":
        return document | {"operation": "replace"}
    part = {"type": "eq", "term": "part", "value": change.part}
    ids = {"type": "in", "term": "id", "values": sorted(change.ids)}
    scopes: dict[str, Any] = {
        "partitions": {"partitions": [{"spec-id": 0, "values": [change.part]}]},
        "filter": {"filter": part},
        "ids": {"filter": {"type": "and", "left": part, "right": ids}},
    }
    scope = scopes.get(change.scope)
    if scope is None and change.kind == "count":
        scope = {"filter": True}
    return document if scope is None else document | {"scope": scope}


def _append(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    return {"add": [case.lake.write_data_file(change.inserted_rows)]}


def _append_counted_rows(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    new_rows = [row for row in change.apply(case.list_rows()) if row[-1] == f"count{change.number}"]
    return {"add": [case.lake.write_data_file(new_rows)]}


def _overwrite(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    return {"add": [case.lake.write_data_file(change.inserted_rows)], "replace": {"partitions": "written"}}


def _delete_by_equality(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    return {"add": [case.lake.write_equality_deletes(sorted(change.ids), change.part)]}


def _compact(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    part_files = [file for file in case.base.values() if file.part == change.part]
    rows = [row for file in part_files for _, row in file.live_rows]
    return {"add": [case.lake.write_data_file(rows)], "remove": [{"file-path": file.path} for file in part_files]}


def _rewrite_files(case: ConcurrentChanges, change: Change) -> dict[str, Any]:
    """Return the request of a delete or update, written in the way that `change.effect` names."""
    matching_files = [file for file in case.base.values() if any(change.matches(row) for _, row in file.live_rows)]
    is_update = change.kind == "update"
    if change.effect == "rewrite":
        kept_rows = [
            change.update_row(row) if change.matches(row) else row
            for file in matching_files
            for _, row in file.live_rows
            if is_update or not change.matches(row)
        ]
        return {
            "add": [case.lake.write_data_file(kept_rows)] if kept_rows else [],
            "remove": [{"file-path": file.path} for file in matching_files],
        }
    positions_by_path = {
        file.path: {index for index, row in file.live_rows if change.matches(row)} for file in matching_files
    }
    new_rows = (
        [change.update_row(row) for file in matching_files for _, row in file.live_rows if change.matches(row)]
        if is_update
        else []
    )
    added_files: list[Any] = [case.lake.write_data_file(new_rows)] if new_rows else []
    removed_files: list[Any] = []
    if change.effect == "vectors":
        merged_positions = {file.path: positions_by_path[file.path] | file.deleted_positions for file in matching_files}
        added_files += case.lake.write_vectors(merged_positions, change.part)
        for file in matching_files:
            if file.vector is not None:
                offset = file.vector["content-offset"]
                removed_files.append({"file-path": file.vector["file-path"], "content-offset": offset})
    elif change.effect == "named":  # One delete file for each data file.
        added_files += [
            case.lake.write_position_deletes([(path, index) for index in positions], change.part, names_data_file=True)
            for path, positions in positions_by_path.items()
        ]
    else:
        paths_and_positions = [(path, index) for path, positions in positions_by_path.items() for index in positions]
        added_files.append(case.lake.write_position_deletes(paths_and_positions, change.part))
    return {"add": added_files, "remove": removed_files}


_BODY_FUNCTIONS: dict[str, Callable[[ConcurrentChanges, Change], dict[str, Any]]] = {
    "append": _append,
    "count": _append_counted_rows,
    "overwrite": _overwrite,
    "equality": _delete_by_equality,
    "compact": _compact,
    "delete": _rewrite_files,
    "update": _rewrite_files,
}
