"""Tests of changes that claim to replace files by files with the same rows.

The server rejects a change if and only if its files cannot have the same rows. A plain model of random tables counts
rows and deletes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.api.client import Api
from tests.commits.claims import ClaimedTable
from tests.seeds import IS_EXPLORING, first_seed

TABLES, ROUNDS = 6, 12
VECTOR_OFFSET = 4
DELETES = {"content": "position-deletes"}


@dataclass
class CountedFile:
    """A data file, and its deletes."""

    rows: int
    deleted_positions: set[int] = field(default_factory=set)
    named_positions: int = 0
    """The number of rows in delete files for only this data file. These delete files are removed with it."""
    vector: str | None = None


@dataclass
class RowCountModel:
    """A table under random commits, and the row count of each of its files."""

    table: ClaimedTable
    version: int
    rng: random.Random
    files: dict[str, CountedFile] = field(default_factory=dict)
    shared_positions: int = 0
    """The number of rows in delete files for several data files. They stay when the data files are removed."""
    has_equality_deletes: bool = False
    file_count: int = 0
    """The number of files that were built, from which their names follow."""
    read_snapshot: int | None = None

    def build_file(self, rows: int, **fields: Any) -> dict[str, Any]:
        self.file_count += 1
        return self.table.build_data_file(f"{self.file_count}", rows=rows, **fields)

    async def commit(self, add: list[dict[str, Any]], remove: list[dict[str, Any]] | None = None) -> None:
        answer = await self.table.commit(read_snapshot_id=self.read_snapshot, add=add, remove=remove or [])
        self.read_snapshot = answer["snapshot-id"]

    async def append(self) -> None:
        added_files = [self.build_file(self.rng.randint(1, 20)) for _ in range(self.rng.randint(1, 3))]
        self.files |= {added["file-path"]: CountedFile(added["record-count"]) for added in added_files}
        await self.commit(added_files)

    async def delete(self) -> None:
        """Delete rows of one file or of two files.

        In version 2, some of these rows may already be deleted, and a delete file may be for both files. In version 3,
        a new vector of a file contains all its deleted rows and replaces the old vector.
        """
        added_files, removed_files, rows_of_shared_file = [], [], 0
        shares_delete_file = self.version == 2 and self.rng.random() < 0.5
        for path in self.rng.sample(sorted(self.files), min(len(self.files), self.rng.randint(1, 2))):
            file = self.files[path]
            positions = set(self.rng.sample(range(file.rows), self.rng.randint(1, file.rows)))
            file.deleted_positions |= positions
            if shares_delete_file:
                rows_of_shared_file += len(positions)
                continue
            delete_fields: dict[str, Any] = {**DELETES, "referenced-data-file": path}
            if self.version == 3:
                if file.vector is not None:
                    removed_files.append({"file-path": file.vector, "content-offset": VECTOR_OFFSET})
                delete_fields |= {"file-format": "puffin", "content-offset": VECTOR_OFFSET, "content-size-in-bytes": 50}
            delete_file = self.build_file(
                len(file.deleted_positions if self.version == 3 else positions), **delete_fields
            )
            file.vector = delete_file["file-path"]
            replaced_positions = 0 if self.version == 2 else file.named_positions
            file.named_positions += delete_file["record-count"] - replaced_positions
            added_files.append(delete_file)
        self.shared_positions += rows_of_shared_file
        await self.commit(
            added_files + ([self.build_file(rows_of_shared_file, **DELETES)] if rows_of_shared_file else []),
            removed_files,
        )

    async def delete_by_value(self) -> None:
        delete_fields: dict[str, Any] = {"content": "equality-deletes", "equality-ids": [1]}
        await self.commit([self.build_file(1, **delete_fields)])
        self.has_equality_deletes = True

    async def replace(self) -> str:
        """Replace random files by one file, and return the outcome.

        A replacement must not add rows, and must not lose more rows than the deletes may have removed. The new file
        has a number of rows near these two limits.
        """
        chosen_paths = self.rng.sample(sorted(self.files), min(len(self.files), self.rng.randint(1, 3)))
        files = [self.files[path] for path in chosen_paths]
        rows = sum(file.rows for file in files)
        live_row_count = rows - sum(len(file.deleted_positions) for file in files)
        # Each position in a delete file may delete a different row, so all positions are subtracted.
        rows_min = rows - self.shared_positions - sum(file.named_positions for file in files)
        stated_rows = self.rng.choice(
            [live_row_count, live_row_count, rows, rows + 1, rows + 5, rows_min, rows_min - 1, rows_min - 3]
        )
        added_rows = max(0, stated_rows)
        # Equality deletes may have removed any number of rows, so there is no lower limit with them.
        is_too_few = not self.has_equality_deletes and added_rows < rows_min
        is_accepted = added_rows <= rows and not is_too_few
        assert is_accepted or added_rows != live_row_count
        new_files = [self.build_file(added_rows)] if added_rows else []
        remove = [{"file-path": path} for path in chosen_paths]
        answer = await self.table.send(
            operation="replace", read_snapshot_id=self.read_snapshot, add=new_files, remove=remove
        )
        assert answer.status == (200 if is_accepted else 400), (answer.raw, added_rows, rows_min, rows)
        if not is_accepted:
            assert "operation is replace" in answer.error[2]
            return "too few rows" if is_too_few else "too many rows"
        self.read_snapshot = answer.json["snapshot-id"]
        for path in chosen_paths:
            del self.files[path]
        self.files |= {added["file-path"]: CountedFile(added_rows) for added in new_files}
        return "replaced"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
async def test_replacement_is_rejected_exactly_if_it_cannot_have_the_same_rows(api: Api, version: int) -> None:
    seed = first_seed()
    print(f"TEST_SEED={seed}")
    outcomes = set()
    for number in range(TABLES):
        rng = random.Random(f"{seed} {version} {number}")
        table = await ClaimedTable.create(api, {"x": "long"}, name=f"t{number}", version=version)
        model = RowCountModel(table, version, rng)
        for _ in range(ROUNDS):
            if not model.files or rng.random() < 0.3:
                await model.append()
            elif rng.random() < 0.4:
                await model.delete()
            elif rng.random() < 0.05:
                await model.delete_by_value()
            else:
                outcomes.add(await model.replace())
    assert IS_EXPLORING or outcomes == {"replaced", "too few rows", "too many rows"}


async def test_overwrite_may_change_the_number_of_rows(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "long"})
    old_file = table.build_data_file("old", rows=3)
    read_snapshot = (await table.commit(add=[old_file]))["snapshot-id"]
    body: dict[str, Any] = {
        "read_snapshot_id": read_snapshot,
        "add": [table.build_data_file("new", rows=7)],
        "remove": [{"file-path": old_file["file-path"]}],
    }
    response = await table.send(**body, operation="replace")
    assert response.error[:2] == (400, "BadRequestException")
    await table.commit(**body, operation="overwrite")
    assert await table.list_live_files() == ["new"]


async def test_rows_of_new_files_that_are_deleted_at_once_do_not_count(api: Api) -> None:
    """A replacement may not add rows, but deletes in the same commit reduce the rows of its new file.

    A compaction adds such deletes if a writer has deleted rows of its input files meanwhile. Here, a file of 3 rows is
    replaced by a file of 5 rows, of which 1 or 2 are deleted.
    """
    table = await ClaimedTable.create(api, {"x": "long"})
    old_file = table.build_data_file("old", rows=3)
    read_snapshot = (await table.commit(add=[old_file]))["snapshot-id"]
    new_file = table.build_data_file("new", rows=5)
    body: dict[str, Any] = {
        "operation": "replace",
        "read_snapshot_id": read_snapshot,
        "remove": [{"file-path": old_file["file-path"]}],
    }
    delete_fields: dict[str, Any] = {**DELETES, "referenced-data-file": new_file["file-path"]}
    response = await table.send(**body, add=[new_file, table.build_data_file("one", rows=1, **delete_fields)])
    assert response.error[:2] == (400, "BadRequestException")
    await table.commit(**body, add=[new_file, table.build_data_file("two", rows=2, **delete_fields)])
    assert await table.list_live_files() == ["new"]
