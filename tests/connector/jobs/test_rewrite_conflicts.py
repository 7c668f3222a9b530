"""Tests that rewrites waste little work.

Only one job at a time rewrites files of a table. It leaves out files that writers will soon replace. A conflict in one
part of a rewrite does not discard the other parts.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionSpec

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.rewrite_lease import RewriteRunning, rewrite_lease
from seamark.connector.client.values import At
from seamark.connector.jobs.jobs import JOBS
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import parse_statement
from seamark.connector.read.settled_files import select_settled
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write import replacements
from seamark.connector.write.appends import append, commit
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.protocol.wire import RECHECK_AFTER
from tests.connector.jobs.test_expiration import list_needed_files, list_stored_files
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import (
    BY_PART,
    build_rows,
    count_pyiceberg_rows,
    count_scanned_rows,
    create_test_table,
)
from tests.seeds import first_seed, mark_fast

SMALL_FILES_POLICY = CompactionPolicy(target_bytes=1 << 20, min_files=2)


def test_second_rewrite_job_of_a_table_is_refused_and_stays_due(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
    with rewrite_lease(client, "db.t", job="a merge"):
        for service in ("compaction", "bucket-splitting"):
            assert JOBS[service](client, ("db", "t")).keys() == {RECHECK_AFTER}
        message = r"Another job rewrites files of the table t now \(a merge, since 20\d\d-.*\+00:00\); try again"
        with pytest.raises(RewriteRunning, match=message), rewrite_lease(client, "db.t", job="another"):
            pass
    with rewrite_lease(client, "db.t", job="a merge"):
        pass
    assert JOBS["compaction"](client, ("db", "t")) == {}


@pytest.mark.slow
def test_statement_waits_for_a_running_rewrite_until_its_timeout(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
    for number in range(3):
        append(client, "db.t", build_rows([number]))
    statement = parse_statement("ALTER TABLE db.t MERGE FILES")
    assert statement is not None
    with (
        rewrite_lease(client, "db.t", job="a merge"),
        pytest.raises(RewriteRunning, match=r"rewrites files .* waited 0\.1 s"),
    ):
        run_statement(client, statement, utc=True, wait_s=0.1)
    is_locked, may_end = threading.Event(), threading.Event()

    def hold_lease() -> None:
        with rewrite_lease(client, "db.t", job="a merge"):
            is_locked.set()
            may_end.wait(60)

    with ThreadPoolExecutor(2) as threads:
        holder = threads.submit(hold_lease)
        assert is_locked.wait(60)
        waiter = threads.submit(run_statement, client, statement, utc=True)
        assert not waiter.done()
        may_end.set()
        assert waiter.result(120).files_after == 1
        holder.result(60)


@pytest.mark.slow
def test_files_with_recently_changed_rows_are_left_out_of_rewrites(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
    for number in range(3):
        append(client, "db.t", build_rows(range(10 * number, 10 * number + 10)))
    opened_table = open_table(client, "db.t", At(), history=True)
    tasks = list(plan(client, opened_table, sequence_numbers=True))
    newest_ms = max(snapshot.timestamp_ms for snapshot in opened_table.history)
    # The age is far longer than the history of the table, in which no row was changed yet.
    assert select_settled(opened_table, tasks, age_ms=1 << 40, at_ms=newest_ms) == tasks
    upsert(client, "db.t", build_rows([1], "new"), keys=["id"], mode="copy-on-write")
    opened_table = open_table(client, "db.t", At(), history=True)
    times_ms = {snapshot.sequence_number: 1000 * snapshot.sequence_number for snapshot in opened_table.history}
    history = tuple(
        msgspec.structs.replace(snapshot, timestamp_ms=times_ms[snapshot.sequence_number])
        for snapshot in opened_table.history
    )
    opened_table = dataclasses.replace(opened_table, history=history)
    tasks = list(plan(client, opened_table, sequence_numbers=True))
    # Snapshot n is committed at n seconds, and now is 4.4 seconds. Snapshot 4 changed a row of the first file.
    for age_ms, expected_numbers in ((500, [2, 3]), (1500, [2]), (2500, []), (0, [2, 3, 4])):
        settled_tasks = select_settled(opened_table, tasks, age_ms, at_ms=4400)
        assert sorted(int(task.file["data-sequence-number"]) for task in settled_tasks) == expected_numbers, age_ms
    # The change is older than the time for which files are left out.
    assert select_settled(opened_table, tasks, age_ms=500, at_ms=10_000) == tasks


@pytest.mark.parametrize("version", mark_fast([3, 2], 1))
def test_rewrite_commits_the_partitions_without_a_conflict(
    client: IndexClient, server: ServerThread, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers change random rows of random partitions during a compaction.

    The compaction commits the partitions with enough unchanged files, and deletes its new files of other partitions.
    The writers' rows are kept.
    """
    rng = random.Random(f"{first_seed()} {version}")
    partial_commit_count = 0
    with open_catalog(server.url) as catalog:
        for number in range(6):
            create_test_table(catalog, version, rng.choice([BY_PART, BY_PART, PartitionSpec()]))
            model = {key: f"{number}{key}" for key in range(60)}
            for first_id in range(0, 60, 15):
                append(client, "db.t", build_rows(range(first_id, first_id + 15), f"{number}"))
            change_probabilities = {part: rng.choice([0.1, 0.9]) for part in rng.sample(range(3), 2)}
            changed_keys = [key for key in range(60) if rng.random() < change_probabilities.get(key % 3, 0)]

            def write(keys: list[int] = changed_keys, model: dict[int, str] = model) -> None:
                upserted_count = rng.randint(0, len(keys))
                upsert(client, "db.t", build_rows(keys[:upserted_count], "new"), keys=["id"], mode=rng.choice(MODES))
                model.update({key: f"new{key}" for key in keys[:upserted_count]})
                delete(client, "db.t", keys=pa.table({"id": keys[upserted_count:]}), mode=rng.choice(MODES))
                for key in keys[upserted_count:]:
                    del model[key]

            pending_writes = [write]

            def write_and_commit(*arguments: Any, pending_writes: list[Any] = pending_writes, **options: Any) -> Any:
                if pending_writes:
                    pending_writes.pop()()
                return commit(*arguments, **options)

            with monkeypatch.context() as context:
                context.setattr(replacements, "commit", write_and_commit)
                report = compact(client, "db.t", policy=SMALL_FILES_POLICY)
            actual = {row[0]: row[2] for row in count_scanned_rows(client)}
            assert actual == model, f"seed {first_seed()}, round {number}"
            assert report.bytes_wasted == sum(report.wasted_by.values()) <= report.bytes_read
            assert report.commits + report.conflicts == 1
            partial_commit_count += bool(report.commits and report.bytes_before < report.bytes_read - 1)
            table = catalog.load_table("db.t")
            assert {path for path in list_stored_files(table) if "_seamark" not in path.parts} <= list_needed_files(
                table
            )
            catalog.drop_table("db.t")
    assert partial_commit_count


@pytest.mark.slow
def test_engine_commit_after_a_concurrent_compaction_succeeds(client: IndexClient, server: ServerThread) -> None:
    """PyIceberg loads the table, a job replaces its files, and then PyIceberg commits deletes or overwrites.

    The server undoes the job's replacement for a commit that names the old files. So PyIceberg does not have to repeat
    its commit, no row is lost, and no deleted row returns.
    """
    rng = random.Random(first_seed())
    undone_count = 0
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        model: dict[int, str] = {}
        for number in range(8):
            for first_id in range(0, 20, 10):
                added_ids = range(100 * number + first_id, 100 * number + first_id + 10)
                append(client, "db.t", build_rows(added_ids))
                model.update({key: str(key) for key in added_ids})
            loaded_table = catalog.load_table("db.t")
            if rng.random() < 0.3:
                upsert(client, "db.t", build_rows([100 * number], "new"), keys=["id"], mode="copy-on-write")
                model[100 * number] = f"new{100 * number}"
                loaded_table = catalog.load_table("db.t")
            was_compacted = bool(compact(client, "db.t", policy=SMALL_FILES_POLICY).commits)
            deleted_ids = rng.sample(range(100 * number + 1, 100 * number + 20), 3)
            if rng.random() < 0.5:
                loaded_table.delete(f"id in ({', '.join(map(str, deleted_ids))})")
                for key in deleted_ids:
                    del model[key]
            else:
                loaded_table.append(build_rows(range(100 * number + 50, 100 * number + 53), "late"))
                model.update({key: f"late{key}" for key in range(100 * number + 50, 100 * number + 53)})
            summary = catalog.load_table("db.t").current_snapshot().summary  # type: ignore[union-attr]
            assert summary is not None
            undone_count += was_compacted and "seamark.replacements-undone" in summary.additional_properties
            assert {row[0]: row[2] for row in count_scanned_rows(client)} == model, (
                f"seed {first_seed()}, round {number}"
            )
            assert {row[0]: row[2] for row in count_pyiceberg_rows(catalog)} == model
    assert undone_count > 1, "too few commits came after a compaction of their files"
