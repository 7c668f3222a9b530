"""Tests of read-modify-write: a change is committed only if its rows are the same as when they were read."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import Conflict
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import BY_ID, build_rows, create_upsert_table, read_rows
from tests.connector.write.test_upserts_at_once import run_before_commits
from tests.seeds import mark_fast


def read_snapshot_and_ts(client: IndexClient, key: int) -> tuple[int | None, int | None]:
    """Return the snapshot that was read, and the column `ts` of a key, which the tests use as a counter.

    If no row has the key, the second value is None.
    """
    timestamps = scan(client, "db.t", ["ts"], where=f"id = {key}")
    values = timestamps.to_arrow()["ts"].to_pylist()
    return timestamps.snapshot_id, values[0] if values else None


CONCURRENT_CHANGES: dict[str, Any] = {
    "upsert": lambda client: upsert(client, "db.t", build_rows((1, "b", 9)), keys=["id"], mode="merge-on-read"),
    "copy": lambda client: upsert(client, "db.t", build_rows((1, "b", 9)), keys=["id"], mode="copy-on-write"),
    "equality": lambda client: upsert(client, "db.t", build_rows((1, "b", 9)), keys=["id"], strategy=EQUALITY),
    "delete": lambda client: delete(client, "db.t", where="id = 1"),
    "second row": lambda client: append(client, "db.t", build_rows((1, "a", 1))),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("version", "is_during_write"),
    [
        pytest.param(2, True, id="2-before its commit"),
        pytest.param(3, False, id="3-before it began"),
        pytest.param(2, False, id="2-before it began", marks=pytest.mark.slow),
        pytest.param(3, True, id="3-before its commit", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("concurrent_change", CONCURRENT_CHANGES)
def test_change_of_a_row_that_changed_since_it_was_read_is_refused(
    client: IndexClient,
    server: ServerThread,
    version: int,
    concurrent_change: str,
    mode: str,
    is_during_write: bool,
    monkeypatch: Any,
) -> None:
    create_upsert_table(client, version=version, properties=BY_ID if is_during_write else {})
    append(client, "db.t", build_rows((1, "a", 1), (2, "a", 1), (3, "a", 1)))
    snapshot, _ = read_snapshot_and_ts(client, 1)
    if is_during_write:
        run_before_commits(monkeypatch, lambda: CONCURRENT_CHANGES[concurrent_change](client))
    else:
        CONCURRENT_CHANGES[concurrent_change](client)
    with pytest.raises(Conflict, match="changed since snapshot") as error:
        upsert(client, "db.t", build_rows((1, "c", 2), (2, "c", 2)), keys=["id"], mode=mode, read_snapshot_id=snapshot)
    assert (error.value.status, error.value.kind) == (409, "RowsChangedException")
    files_before = server.list_written_files()
    with pytest.raises(Conflict, match="changed since snapshot"):
        delete(client, "db.t", keys=pa.table({"id": [1]}), mode=mode, read_snapshot_id=snapshot)
    assert server.list_written_files() == files_before
    assert (2, "a", 1, None) in read_rows(client)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_changes_of_unread_rows_and_rewrites_do_not_conflict(client: IndexClient, mode: str) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a", 1), (2, "a", 1)))
    snapshot, _ = read_snapshot_and_ts(client, 1)
    # This also moves row 1.
    upsert(client, "db.t", build_rows((2, "b", 2), (5, "b", 2)), keys=["id"], mode="copy-on-write")
    report = upsert(client, "db.t", build_rows((1, "c", 2)), keys=["id"], mode=mode, read_snapshot_id=snapshot)
    assert (report.updated, report.attempts) == (1, 1)
    assert read_rows(client) == [(1, "c", 2, None), (2, "b", 2, None), (5, "b", 2, None)]


def test_insert_is_refused_if_its_row_was_inserted_since_the_read(client: IndexClient) -> None:
    create_upsert_table(client)
    assert read_snapshot_and_ts(client, 1) == (None, None)
    upsert(client, "db.t", build_rows((1, "a", 1)), keys=["id"], read_snapshot_id=None)
    with pytest.raises(Conflict):
        upsert(client, "db.t", build_rows((1, "b", 1)), keys=["id"], read_snapshot_id=None)
    snapshot, _ = read_snapshot_and_ts(client, 2)
    upsert(client, "db.t", build_rows((2, "a", 1)), keys=["id"], read_snapshot_id=snapshot)
    with pytest.raises(Conflict):
        upsert(client, "db.t", build_rows((2, "b", 1)), keys=["id"], read_snapshot_id=snapshot)
    assert read_rows(client) == [(1, "a", 1, None), (2, "a", 1, None)]


def test_read_snapshot_outside_the_history_is_refused(client: IndexClient) -> None:
    unknown_id = 4711
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a", 1)))
    with pytest.raises(Conflict, match="has expired"):
        upsert(client, "db.t", build_rows((1, "b", 1)), keys=["id"], read_snapshot_id=unknown_id)
    with pytest.raises(ValueError, match="needs the stored rows"):
        upsert(client, "db.t", build_rows((1, "b", 1)), keys=["id"], strategy=EQUALITY, read_snapshot_id=unknown_id)
    with pytest.raises(ValueError, match="by keys, not by a predicate"):
        delete(client, "db.t", where="id = 1", read_snapshot_id=unknown_id)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("spec", [[], [("bucket[4]", 1)]], ids=["whole", "bucketed"])
@pytest.mark.parametrize("mode", mark_fast(MODES, 1))
def test_concurrent_increments_of_counters_are_all_counted(
    client: IndexClient, mode: str, spec: list[tuple[str, int]]
) -> None:
    create_upsert_table(client, spec=spec)
    append(client, "db.t", build_rows(*((key, "counter", 0) for key in range(4))))
    failures: list[Exception] = []

    def increment(number: int) -> None:
        own_client = IndexClient(client.url)
        try:
            for step in range(4):
                key = (number + step) % 2
                while True:
                    snapshot, value = read_snapshot_and_ts(own_client, key)
                    assert value is not None
                    try:
                        new_rows = build_rows((key, "counter", value + 1))
                        upsert(own_client, "db.t", new_rows, keys=["id"], mode=mode, read_snapshot_id=snapshot)
                        break
                    except Conflict:
                        continue
        except Exception as error:  # noqa: BLE001  the test reports it
            failures.append(error)
        finally:
            own_client.close()

    threads = [threading.Thread(target=increment, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    counters = {key: value for key, _, value, _ in read_rows(client)}
    # Three threads add 1 four times each, to the counters 0 and 1 alternately.
    assert counters == {0: 6, 1: 6, 2: 0, 3: 0}
    counters_of_main = scan(client, "db.t", ["ts"], where="id = 0", at=At(ref="main")).to_arrow()["ts"].to_pylist()
    assert counters_of_main == [6]


REPEATABLE_CHANGES: dict[str, Any] = {
    "upsert": lambda client, **options: upsert(client, "db.t", build_rows((1, "c", 2)), keys=["id"], **options),
    "delete": lambda client, **options: delete(client, "db.t", keys=pa.table({"id": [1]}), **options),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REPEATABLE_CHANGES)
@pytest.mark.parametrize("is_changed_again", [False, True], ids=["unchanged since", "changed since"])
def test_repeated_change_of_a_producer_is_a_duplicate_although_it_changed_the_rows(
    client: IndexClient, server: ServerThread, name: str, mode: str, is_changed_again: bool
) -> None:
    """After a lost reply, the producer does not know that its change was committed."""
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a", 1), (2, "a", 1)))
    snapshot, _ = read_snapshot_and_ts(client, 1)
    write_options: dict[str, Any] = {"mode": mode, "read_snapshot_id": snapshot}
    first_report = REPEATABLE_CHANGES[name](client, **write_options, producer=("counter", 3))
    if is_changed_again:
        upsert(client, "db.t", build_rows((1, "d", 3)), keys=["id"])
    rows_before, files_before = read_rows(client), server.list_written_files()
    second_report = REPEATABLE_CHANGES[name](client, **write_options, producer=("counter", 3))
    assert (second_report.duplicate, second_report.snapshot_id) == (True, first_report.snapshot_id)
    assert (read_rows(client), server.list_written_files()) == (rows_before, files_before)
    with pytest.raises(Conflict, match="changed since snapshot"):
        REPEATABLE_CHANGES[name](client, **write_options, producer=("counter", 4))
    with pytest.raises(Conflict, match="changed since snapshot"):
        REPEATABLE_CHANGES[name](client, **write_options)
    current_snapshot, _ = read_snapshot_and_ts(client, 1)
    assert not REPEATABLE_CHANGES[name](
        client, mode=mode, read_snapshot_id=current_snapshot, producer=("counter", 4)
    ).duplicate
