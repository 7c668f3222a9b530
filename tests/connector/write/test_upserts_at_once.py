"""Tests of upserts during other commits: after conflicts, with lost answers, and by eight concurrent writers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import Conflict, InvalidRequest, Refused, ServerFailed
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.row_changes import Report
from seamark.connector.write.upserts import delete, upsert
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import BY_ID, FIELDS, MODES, build_rows, create_upsert_table, read_rows
from tests.seeds import examples, mark_fast


def run_before_commits(monkeypatch: pytest.MonkeyPatch, *operations: Any) -> list[int]:
    """Run the first operation before the next commit, the second before the commit after it, and so on.

    Returns:
        A list with one item: the number of commit attempts.
    """
    commit, remaining_operations, attempts = CommitClient.commit, list(operations), [0]

    def run_and_commit(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        attempts[0] += 1
        if remaining_operations:
            operation = remaining_operations.pop(0)
            monkeypatch.setattr(CommitClient, "commit", commit)
            operation()
            monkeypatch.setattr(CommitClient, "commit", run_and_commit)
        answer: dict[str, Any] = commit(self, table, body)
        return answer

    monkeypatch.setattr(CommitClient, "commit", run_and_commit)
    return attempts


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_conflicting_upsert_is_repeated_on_the_new_snapshot(
    client: IndexClient, server: ServerThread, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client)
    upsert(client, "db.t", build_rows((1, "a", 1), (2, "a", 1)), keys=["id"])
    files_before = server.list_written_files()
    new_files: list[Path] = []

    def write_concurrently() -> None:
        files_before = server.list_written_files()
        upsert(client, "db.t", build_rows((1, "b", 2), (3, "b", 2)), keys=["id"], mode="merge-on-read")
        new_files.extend(server.list_written_files() - files_before)

    attempts = run_before_commits(monkeypatch, write_concurrently)
    report = upsert(client, "db.t", build_rows((1, "c", 3), (3, "c", 3)), keys=["id"], columns=["land"], mode=mode)
    assert (report.attempts, attempts[0]) == (2, 2)
    assert (report.updated, report.inserted) == (2, 0)
    assert read_rows(client) == [(1, "c", 2, None), (2, "a", 1, None), (3, "c", 2, None)]
    # The first attempt left no file.
    assert len(server.list_written_files() - files_before - set(new_files)) == report.files_written


def test_upsert_is_repeated_after_a_concurrent_append_of_its_keys(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a")))
    run_before_commits(
        monkeypatch,
        lambda: append(client, "db.t", build_rows((7, "a"))),
        lambda: append(client, "db.t", build_rows((8, "a"))),
    )
    report = upsert(client, "db.t", build_rows((7, "b")), keys=["id"])
    assert (report.attempts, report.updated) == (2, 1)  # Row 8 has none of the upserted keys.
    assert [row[:2] for row in read_rows(client)] == [(1, "a"), (7, "b"), (8, "a")]


def test_upsert_gives_up_after_its_attempts_and_leaves_no_file(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client)
    upsert(client, "db.t", build_rows((1, "a")), keys=["id"])
    other_paths = set()

    def write_concurrently() -> None:
        files_before = server.list_written_files()
        upsert(client, "db.t", build_rows((1, "b")), keys=["id"])
        other_paths.update(server.list_written_files() - files_before)

    files_before = server.list_written_files()
    run_before_commits(monkeypatch, write_concurrently, write_concurrently, write_concurrently)
    with pytest.raises(Refused) as error:
        upsert(client, "db.t", build_rows((1, "c")), keys=["id"], attempts=3)
    assert error.value.status == 409
    assert read_rows(client)[0][1] == "b"
    assert server.list_written_files() == files_before | other_paths


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda client: upsert(client, "db.t", build_rows((1, "b")), keys=["id"]),
        lambda client: delete(client, "db.t", keys=pa.table({"id": [1]})),
        lambda client: upsert(client, "db.t", build_rows((1, "b")), keys=["id"], strategy=EQUALITY),
    ],
    ids=["upsert", "delete", "unlocated"],
)
def test_change_of_a_table_that_is_recreated_during_it_is_refused(
    client: IndexClient, server: ServerThread, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a")))

    def write_concurrently() -> None:
        """Recreate the table with other columns and without the key."""
        client._request("DELETE", "/v1/namespaces/db/tables/t", {})
        create_upsert_table(client, fields=[FIELDS[1]])

    files_before = server.list_written_files()
    attempts = run_before_commits(monkeypatch, write_concurrently)
    with pytest.raises(Conflict):
        change(client)
    assert attempts[0] == 1
    assert server.list_written_files() == files_before
    assert scan(client, "db.t").to_arrow().num_rows == 0


def test_change_without_effect_on_a_recreated_table_is_refused(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a")))

    def write_concurrently() -> None:
        client._request("DELETE", "/v1/namespaces/db/tables/t", {})
        create_upsert_table(client)
        append(client, "db.t", build_rows((5, "a")))

    run_before_commits(monkeypatch, write_concurrently)
    with pytest.raises(Conflict):
        delete(client, "db.t", keys=pa.table({"id": [1]}))
    assert [row[0] for row in read_rows(client)] == [5]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_change_during_an_upgrade_uses_the_new_format_version(
    client: IndexClient, server: ServerThread, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, version=2)
    append(client, "db.t", build_rows((1, "a"), (2, "a")))
    files_before = server.list_written_files()
    run_before_commits(monkeypatch, lambda: upgrade(client, 3))
    report = upsert(client, "db.t", build_rows((1, "b")), keys=["id"], mode=mode)
    assert read_rows(client) == [(1, "b", None, None), (2, "a", None, None)]
    assert len(server.list_written_files() - files_before) == report.files_written  # No attempt left a file.


def test_upsert_refused_for_a_reason_other_than_a_conflict_is_not_repeated(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, version=2)
    attempts = run_before_commits(monkeypatch)
    with pytest.raises(InvalidRequest):
        upsert(client, "db.t", build_rows((1, "b")), keys=["id"], summary={"total-records": "8"})
    assert attempts[0] == 1


def upgrade(client: IndexClient, version: int) -> None:
    update = {"action": "upgrade-format-version", "format-version": version}
    body = {"requirements": [], "updates": [update]}
    client._request("POST", "/v1/namespaces/db/tables/t", {}, json.dumps(body).encode())


def test_upsert_with_a_lost_reply_is_committed_once(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a"), (2, "a")))
    send_request, lost_count = type(client)._request, [0]

    def lose_first_answer(self: Any, method: str, path: str, *args: Any, **options: Any) -> bytes:
        answer = send_request(self, method, path, *args, **options)
        if path.endswith("/commit") and not lost_count[0]:
            lost_count[0] += 1
            raise ServerFailed("gone", status=502)
        return answer

    monkeypatch.setattr("seamark.connector.client.client.SeamarkClient._request", lose_first_answer)
    report = upsert(
        client, "db.t", build_rows((1, "b"), (3, "b")), keys=["id"], producer=("job", 1), mode="merge-on-read"
    )
    assert (lost_count[0], report.duplicate, report.attempts) == (1, True, 1)
    assert [row[:2] for row in read_rows(client)] == [(1, "b"), (2, "a"), (3, "b")]
    written_files = server.list_written_files()
    second_report = upsert(client, "db.t", build_rows((1, "x")), keys=["id"], producer=("job", 1))
    assert server.list_written_files() == written_files
    assert (second_report.duplicate, second_report.snapshot_id) == (True, report.snapshot_id)
    assert [row[:2] for row in read_rows(client)] == [(1, "b"), (2, "a"), (3, "b")]


def run_in_threads(client: IndexClient, operations: Sequence[Any]) -> None:
    """Run each operation in its own thread, with its own client."""
    with ThreadPoolExecutor(len(operations)) as pool:
        futures = [pool.submit(operation, IndexClient(client.url)) for operation in operations]
    for future in futures:
        future.result()


@pytest.mark.parametrize("mode", mark_fast(MODES, 1))
def test_concurrent_upserts_to_different_buckets_have_no_conflicts(client: IndexClient, mode: str) -> None:
    bucket_count, row_count = 8, 400
    create_upsert_table(client, spec=[(f"bucket[{bucket_count}]", 1)])
    append(client, "db.t", pa.table({"id": list(range(row_count)), "ts": pa.array([0] * row_count, pa.int32())}))
    rounds = 1 + examples(5, 2)
    keys_by_bucket = [read_file_keys(task.path) for task in plan(client, open_table(client, "db.t", CURRENT))]
    assert len(keys_by_bucket) == bucket_count
    reports: list[Report] = []

    def build_writer(keys: list[int]) -> Any:
        def upsert_rounds(own_client: IndexClient) -> None:
            for round_number in range(1, rounds):
                # Each round changes about a third of the keys of the bucket.
                input_rows = build_rows(*((key, None, round_number) for key in keys[round_number::3]))
                reports.append(upsert(own_client, "db.t", input_rows, keys=["id"], precombine="ts", mode=mode))

        return upsert_rounds

    run_in_threads(client, [build_writer(keys) for keys in keys_by_bucket])
    assert len(reports) == bucket_count * (rounds - 1)
    assert {report.attempts for report in reports} == {1}
    expected = dict.fromkeys(range(row_count), 0)
    for keys in keys_by_bucket:
        for round_number in range(1, rounds):
            expected |= dict.fromkeys(keys[round_number::3], round_number)
    assert {row[0]: row[2] for row in read_rows(client)} == expected
    assert len(read_rows(client)) == row_count


def read_file_keys(path: str) -> list[int]:
    with pa.memory_map(path.removeprefix("file://")) as source:
        values: list[int] = pq.read_table(source, columns=["id"])["id"].to_pylist()
    return values


@pytest.mark.parametrize("mode", mark_fast(MODES, 1))
def test_concurrent_upserts_to_one_bucket_all_succeed(client: IndexClient, mode: str) -> None:
    create_upsert_table(client, spec=[("bucket[1]", 1)], properties=BY_ID)
    append(client, "db.t", pa.table({"id": [1, 2, 3], "ts": pa.array([-1] * 3, pa.int32())}))
    attempts: list[int] = []
    rounds, writer_count = examples(4, 2), 8

    def build_writer(number: int) -> Any:
        def upsert_rounds(own_client: IndexClient) -> None:
            for round_number in range(rounds):
                input_rows = build_rows(
                    (1, None, round_number * writer_count + number),
                    (2 + number % 2, None, round_number * writer_count + number),
                    (number + 10, None, round_number),
                )
                attempts.append(
                    upsert(own_client, "db.t", input_rows, keys=["id"], precombine="ts", mode=mode).attempts
                )

        return upsert_rounds

    run_in_threads(client, [build_writer(number) for number in range(writer_count)])
    assert max(attempts) > 1, "no upsert had a conflict"
    # Of the rows that all writers upsert in all rounds, the row with the largest `ts` remains.
    assert [(row[0], row[2]) for row in read_rows(client)] == [
        (1, writer_count * rounds - 1),
        (2, writer_count * rounds - 2),
        (3, writer_count * rounds - 1),
        *((10 + n, rounds - 1) for n in range(writer_count)),
    ]
