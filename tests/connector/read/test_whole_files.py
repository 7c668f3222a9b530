"""Merge-on-read changes that delete the last row of a data file remove the file and its deletes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from seamark.connector.client.errors import Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import MERGE_ON_READ, delete, upsert
from tests.connector.write.test_upserts import build_rows, create_upsert_table, read_rows


def count_rows_and_deletes(client: IndexClient) -> list[tuple[int, int]]:
    """Return (number of rows, number of delete files) of each data file, sorted."""
    return sorted((task.records, len(task.deletes)) for task in plan(client, open_table(client, "db.t", CURRENT)))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_data_file_is_removed_with_its_last_row_and_its_deletes(client: IndexClient, version: int) -> None:
    create_upsert_table(client, version=version)
    append(client, "db.t", build_rows((1, "de", 1, "a"), (2, "de", 1, "b"), (3, "de", 1, "c")))
    append(client, "db.t", build_rows((4, "de", 1, "d"), (5, "de", 1, "e")))
    row_delete = delete(client, "db.t", keys=pa.table({"id": [1, 4]}), mode=MERGE_ON_READ)
    assert (row_delete.files_written, row_delete.files_removed) == (1, 0)
    assert count_rows_and_deletes(client) == [(2, 1), (3, 1)]
    report = upsert(client, "db.t", build_rows((2, "fr", 2, "B"), (3, "fr", 2, "C")), keys=["id"], mode=MERGE_ON_READ)
    assert (report.updated, report.files_written, report.files_removed) == (2, 1, 1)
    assert count_rows_and_deletes(client) == [(2, 0), (2, 1)]
    assert read_rows(client) == [(2, "fr", 2, "B"), (3, "fr", 2, "C"), (5, "de", 1, "e")]
    assert delete(client, "db.t", where="id > 0", mode=MERGE_ON_READ).files_written == 0
    assert count_rows_and_deletes(client) == []
    assert read_rows(client) == []


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_removal_of_a_file_is_repeated_after_a_concurrent_delete(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A statement that removes a whole file is refused if another delete of its rows has been committed meanwhile.

    The repeated statement uses the new snapshot, so it counts only the rows that the other delete has left.
    """
    create_upsert_table(client, version=version)
    append(client, "db.t", build_rows((1, "de", 1, "a"), (2, "de", 1, "b")))
    options = {"where": "id > 0", "mode": MERGE_ON_READ}
    send, pending_deletes = IndexClient._request, [1]

    def delete_before_commit(
        self: IndexClient, method: str, path: str, *arguments: object, **options: object
    ) -> object:
        if path.endswith("/commit") and pending_deletes:
            pending_deletes.pop()
            delete(self, "db.t", keys=pa.table({"id": [1]}), mode=MERGE_ON_READ)
        return send(self, method, path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexClient, "_request", delete_before_commit)
    with pytest.raises(Refused, match="deletes"):
        delete(client, "db.t", **options, attempts=1)  # type: ignore[arg-type]
    assert read_rows(client) == [(2, "de", 1, "b")]
    append(client, "db.t", build_rows((1, "de", 3, "A")))
    pending_deletes.append(1)
    report = delete(client, "db.t", where="land = 'de'", mode=MERGE_ON_READ)
    assert (report.attempts, report.deleted) == (2, 1)
    assert read_rows(client) == []
