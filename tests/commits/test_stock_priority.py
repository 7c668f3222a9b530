"""Tests that a client that reads a table, computes and commits succeeds during faster upserts, and that the upserts
continue.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import EqualTo

from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import upsert
from seamark.metaserver.commit.changes import commit_priority
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import build_rows, create_test_table
from tests.seeds import examples
from tests.waits import block_until

TRIES_MAX = 8
"""The maximum number of attempts of a client.

Three conflicts give priority. A group that commits at that time causes the fourth, and a busy machine causes more.
"""
PRIORITY_S = 100.0
"""The duration of priority. It is long enough for a client on a busy machine to read, compute and commit."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    monkeypatch.setattr(commit_priority, "_PRIORITY_MIN_S", PRIORITY_S)
    with ServerThread(
        tmp_path, warehouse=tmp_path.as_uri(), commit_turn_s=PRIORITY_S, storage_timeout_s=2 * PRIORITY_S
    ) as server:
        yield server


def test_row_changes_of_pyiceberg_commit_during_upserts_of_other_rows(server: ServerThread) -> None:
    row_count, is_over, upsert_counts = examples(20, 1), threading.Event(), [0, 0]

    def upsert_until_over(writer: int) -> None:
        with closing(IndexClient(server.url)) as client:
            while not is_over.is_set():
                upsert(client, "db.t", build_rows([1000 * (writer + 1) + upsert_counts[writer] % 50]), keys=["id"])
                upsert_counts[writer] += 1

    with open_catalog(server.url) as catalog, closing(IndexClient(server.url)) as client:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows(range(row_count)))
        writers = [threading.Thread(target=upsert_until_over, args=(writer,)) for writer in range(2)]
        for writer in writers:
            writer.start()
        try:
            block_until(lambda: all(upsert_counts))
            tries = [delete_with_retries(catalog, number) for number in range(row_count)]
            upserts_before = sum(upsert_counts)
            block_until(lambda: sum(upsert_counts) > upserts_before)
        finally:
            is_over.set()
            for writer in writers:
                writer.join()
        ids = {row["id"] for row in catalog.load_table("db.t").scan().to_arrow().to_pylist()}
    assert max(tries) <= TRIES_MAX, tries
    assert not ids & set(range(row_count))
    assert ids == {
        1000 * (writer + 1) + number for writer in range(2) for number in range(min(upsert_counts[writer], 50))
    }


def delete_with_retries(catalog: object, number: int) -> int:
    """Delete the row with the id `number` as users of PyIceberg do: after a conflict, repeat all steps.

    Return the number of attempts. If too many attempts fail, return `10 * TRIES_MAX`, so that the test ends.
    """
    for tries in range(1, 10 * TRIES_MAX):
        try:
            catalog.load_table("db.t").delete(EqualTo("id", number))  # type: ignore[attr-defined,call-arg]
        except CommitFailedException:
            continue
        return tries
    return 10 * TRIES_MAX
