"""Tests of the progress that jobs report: the files and bytes read so far, and finally all that a job expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyiceberg.partitioning import PartitionSpec

from seamark.connector.client import progress
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_table_properties
from seamark.connector.client.progress import WorkProgress, add_expected_work, advance, count_part, report_progress
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import build_rows, create_test_table


@pytest.fixture(autouse=True)
def _report_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause between two reports, so that a job reports each change of its progress."""
    monkeypatch.setattr(progress, "_PAUSE_S", 0.0)


def list_jobs() -> dict[str, Callable[[IndexClient], object]]:
    return {
        "indexing": lambda client: run_indexing(client, ("db", "t")),
        "statistics": lambda client: compute_statistics(client, "db.t"),
        "compaction": lambda client: compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2)),
        "clustering": lambda client: cluster_incrementally(client, "db.t", full=True),
    }


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", list(list_jobs()))
def test_job_reports_all_the_files_and_bytes_that_it_expected(
    client: IndexClient, server: ServerThread, name: str
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, PartitionSpec())
        file_count = 6
        for number in range(file_count):
            append(client, "db.t", build_rows(range(9 * number, 9 * number + 9)))
        client.put_index("db.t", "by_id", kind="bloom", columns=["id"])
        change_table_properties(client, "db.t", {"seamark.clustering.columns": "id"}, ())
        size_bytes = sum(client.files("db.t")["file_size_in_bytes"].to_pylist())
    seen_progress: list[WorkProgress] = []
    with report_progress(seen_progress.append):
        list_jobs()[name](client)
    assert seen_progress[0] == WorkProgress(0, file_count, 0, size_bytes)
    assert seen_progress[-1] == WorkProgress(file_count, file_count, size_bytes, size_bytes)
    bytes_done = [work.bytes_done for work in seen_progress]
    assert bytes_done == sorted(bytes_done)
    if name != "compaction":  # Compaction copies the files of a partition together.
        assert len(set(bytes_done)) > 3, "the job reports its progress between its start and its end"


def test_each_batch_is_counted_once_whether_it_reports_files_or_not() -> None:
    seen_progress: list[WorkProgress] = []
    with report_progress(seen_progress.append):
        add_expected_work(files=4, size_bytes=40)
        with count_part(files=2, size_bytes=20):
            advance(files=1, size_bytes=10)
            advance(files=1, size_bytes=10)
        with count_part(files=2, size_bytes=20):  # A task on a cluster does not report its files.
            pass
    assert seen_progress[-1] == WorkProgress(4, 4, 40, 40)
    advance(files=1, size_bytes=1)  # No listener is active, so this has no effect.
