"""Tests of located upserts beside a stream of equality upserts: other keys do not conflict, and no writer starves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.connector.write.test_upserts import BY_ID, build_rows, create_upsert_table
from tests.connector.write.test_upserts_at_once import run_before_commits
from tests.seeds import mark_fast

SPECS: dict[str, list[tuple[str, int]]] = {"whole": [], "bucketed": [("bucket[4]", 1)]}
OWN_KEYS = range(31, 171, 14)
"""Ten odd keys. The other writer changes only even keys."""


def create_filled_table(client: IndexClient, version: int, spec: str, **options: Any) -> None:
    create_upsert_table(client, version=version, spec=SPECS[spec], **options)
    append(client, "db.t", build_rows(*((key, "old", 0) for key in range(200))))


def read_writers(client: IndexClient) -> dict[int, str]:
    """Return the writer of each row by key. The rows have the name of their writer in the column `land`."""
    values = scan(client, "db.t", ["id", "land"]).to_arrow().to_pylist()
    assert len(values) == len({value["id"] for value in values}), "a key occurs twice"
    return {value["id"]: value["land"] for value in values}


@contextmanager
def run_upsert_stream(url: str, keys: list[int]) -> Iterator[list[int]]:
    """Run equality upserts of `keys` in a thread until the context ends.

    Yields:
        A list with one item, the number of upserts that are committed.
    """
    stop, write_count, failures = threading.Event(), [0], []

    def write() -> None:
        client = IndexClient(url)
        try:
            while not stop.is_set():
                batch = build_rows(*((key, f"stream{write_count[0]}", write_count[0]) for key in keys))
                upsert(client, "db.t", batch, keys=["id"], strategy=EQUALITY)
                write_count[0] += 1
        except Exception as error:  # noqa: BLE001  the test reports it
            failures.append(error)
        finally:
            client.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield write_count
    finally:
        stop.set()
        thread.join()
    assert not failures


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("is_indexed", [False, True], ids=["plain", "indexed"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("version", [2, 3])
def test_concurrent_equality_upserts_of_different_keys_do_not_conflict(
    client: IndexClient, version: int, spec: str, is_indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_filled_table(client, version, spec, properties=BY_ID if is_indexed else {})
    other_rows = build_rows(*((key, "theirs", 1) for key in range(0, 200, 2)))
    run_before_commits(monkeypatch, lambda: upsert(client, "db.t", other_rows, keys=["id"], strategy=EQUALITY))
    own_rows = build_rows(*((key, "ours", 1) for key in OWN_KEYS))
    report = upsert(client, "db.t", own_rows, keys=["id"], mode="merge-on-read")
    assert (report.attempts, report.updated) == (1, 10)
    expected = {key: "theirs" if key % 2 == 0 else "old" for key in range(200)}
    assert read_writers(client) == expected | dict.fromkeys(OWN_KEYS, "ours")
    run_before_commits(monkeypatch, lambda: upsert(client, "db.t", other_rows, keys=["id"], strategy=EQUALITY))
    delete_report = delete(client, "db.t", keys=pa.table({"id": [31, 45]}), mode="merge-on-read")
    assert (delete_report.attempts, delete_report.deleted) == (1, 2)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("is_delete", [False, True], ids=["upsert", "delete"])
@pytest.mark.parametrize("mode", MODES)
def test_concurrent_equality_change_of_the_same_key_is_a_conflict(
    client: IndexClient, version: int, spec: str, is_delete: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_filled_table(client, version, spec)

    def write_concurrently() -> None:
        if is_delete:
            delete(client, "db.t", keys=pa.table({"id": [10, 59, 190]}), strategy=EQUALITY)
        else:
            upsert(
                client, "db.t", build_rows(*((key, "theirs") for key in (10, 59, 190))), keys=["id"], strategy=EQUALITY
            )

    run_before_commits(monkeypatch, write_concurrently)
    report = upsert(client, "db.t", build_rows((31, "ours"), (59, "ours")), keys=["id"], mode=mode)
    assert report.attempts == 2
    writer_by_key = read_writers(client)
    assert (writer_by_key[31], writer_by_key[59]) == ("ours", "ours")
    assert writer_by_key.get(10) == (None if is_delete else "theirs")


def test_key_of_several_columns_is_compared_as_a_whole(client: IndexClient, monkeypatch: pytest.MonkeyPatch) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a"), (1, "c"), (2, "b")))
    other_rows = build_rows((1, "c", 1), (2, "a", 1))
    run_before_commits(monkeypatch, lambda: upsert(client, "db.t", other_rows, keys=["id", "land"], strategy=EQUALITY))
    report = upsert(client, "db.t", build_rows((1, "a", 5)), keys=["id", "land"], mode="merge-on-read")
    assert (report.attempts, report.updated) == (1, 1)
    values = scan(client, "db.t", ["id", "land", "ts"]).to_arrow().to_pylist()
    assert sorted(tuple(value.values()) for value in values) == [(1, "a", 5), (1, "c", 1), (2, "a", 1), (2, "b", None)]


def test_delete_by_another_column_conflicts_with_equality_deletes(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_filled_table(client, 3, "whole")
    run_before_commits(
        monkeypatch, lambda: upsert(client, "db.t", build_rows((7, "x")), keys=["id"], strategy=EQUALITY)
    )
    assert delete(client, "db.t", where="land = 'x' or id = 31", mode="merge-on-read").attempts == 2
    assert not {7, 31} & read_writers(client).keys()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", mark_fast(MODES, 1))
def test_upsert_with_several_conflicts_gets_priority_over_a_stream_of_upserts(
    client: IndexClient, spec: str, mode: str
) -> None:
    """The stream changes rows of every file, but other keys than the tested upsert.

    With copy-on-write, each attempt of the upsert therefore fails with a conflict.
    """
    create_filled_table(client, 3, spec)
    with run_upsert_stream(client.url, list(range(0, 200, 2))) as stream_upsert_count:
        for number in range(3):
            own_rows = build_rows(*((key, f"ours{number}") for key in OWN_KEYS))
            report = upsert(client, "db.t", own_rows, keys=["id"], mode=mode)
            # An idle machine needs 2 to 4 attempts. On a busy machine, the upsert gets its priority later, so the limit
            # is half of the 50 attempts after which an upsert fails.
            assert report.attempts <= 25
    writer_by_key = read_writers(client)
    assert {writer_by_key[key] for key in OWN_KEYS} == {"ours2"}
    assert stream_upsert_count[0]
