"""Tests of index builds on files that PyIceberg wrote.

A build includes concurrent commits, can be interrupted and continued, and has a command.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from seamark.commands import build as build_command
from seamark.commands.build import handle_sigterm
from seamark.commands.main import cli
from seamark.connector.client.errors import Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import (
    SMALL_BYTES,
    SMALL_FILES,
    AdaptiveWorkers,
    BuildProgress,
    GroupLimits,
    InProcessWorkers,
    build,
    group_files,
)
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex
from seamark.connector.write.appends import append
from tests.connector.lake import SCHEMA, append_parts, build_columns, create_lake_table, open_catalog, spread_ids
from tests.connector.server_thread import ServerThread
from tests.support.commands import invoke_seamark

SMALL_GROUPS = GroupLimits(files=2)


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    """Yield a client of a server that has `db.t` with 6 files and an index `b` on id, which covers no file."""
    create_lake_table(server.url)
    append_parts(server.url, "db.t", spread_ids(6))
    with closing(IndexClient(server.url)) as client:
        client.put_index("db.t", "b", kind="bloom", columns=["id"])
        yield client


class BuildInterrupted(Exception):
    pass


class RecordingWorkers(InProcessWorkers):
    """Workers that record the groups, and call the next of the functions `actions` before each group.

    For an action None, and after the last action, they call nothing.
    """

    def __init__(self, *actions: object) -> None:
        self.groups: list[Sequence[DataFile]] = []
        self._remaining_actions = list(actions)

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
        for group in groups:
            if self._remaining_actions and (act := self._remaining_actions.pop(0)) is not None:
                act()  # type: ignore[operator]
            self.groups.append(group)
            yield from super().run(task, [group])


def interrupt_build() -> None:
    raise BuildInterrupted


def test_build_reports_its_progress_and_builds_only_missing_entries(client: IndexClient) -> None:
    progress: list[BuildProgress] = []
    workers = RecordingWorkers()
    report = build(client, "db.t", "b", workers, limits=SMALL_GROUPS, on_progress=progress.append)
    assert [len(group) for group in workers.groups] == [2, 2, 2]
    assert [report.files_done for report in progress] == [2, 4, 6]
    assert progress[0].eta_ms is not None
    assert (report.json["state"], report.progress.rows_done, report.files_not_indexed) == ("completed", 120, 0)
    index = client.index("db.t", "b")
    assert (index.health, index.files, len(index.json["index-files"])) == ("ok", 6, 3)
    second_report = build(client, "db.t", "b", RecordingWorkers(interrupt_build))
    assert (second_report.json["state"], second_report.progress.files_done) == ("completed", 0)


def test_built_index_leaves_files_out_of_a_plan(client: IndexClient) -> None:
    where = "id = 13"  # The second file contains the value, and the bounds of every file include it.
    assert client.explain("db.t", where).files == 6
    build(client, "db.t", "b", InProcessWorkers())
    explanation = client.explain("db.t", where)
    assert (explanation.files, explanation.indexes[0]["name"]) == (1, "b")


@pytest.mark.slow
def test_build_includes_files_of_concurrent_commits(client: IndexClient) -> None:
    def append_rows() -> None:
        append_parts(client.url, "db.t", [[1000, 1001]])

    workers = RecordingWorkers(None, append_rows, None, append_rows)
    report = build(client, "db.t", "b", workers, limits=SMALL_GROUPS)
    assert [len(group) for group in workers.groups] == [2, 2, 2, 1, 1]
    assert (report.progress.files_done, report.progress.files_total) == (8, 8)
    assert client.index("db.t", "b").health == "ok"


@pytest.mark.slow
def test_build_reads_a_partition_spec_that_is_added_during_the_build(client: IndexClient) -> None:
    def append_to_partitions() -> None:
        with open_catalog(client.url) as catalog, catalog.load_table("db.t").update_spec() as update:
            update.add_identity("discount")
        append_parts(client.url, "db.t", [[11, 22], [33]])

    class RepartitioningClient(IndexClient):
        """A client that changes the table's partition spec before its second listing."""

        listing_count = 0

        def list_files_to_index(self, *arguments: Any, **options: Any) -> Iterator[dict[str, Any]]:
            self.listing_count += 1
            if self.listing_count == 2:
                append_to_partitions()
            return super().list_files_to_index(*arguments, **options)

    repartitioning_client = RepartitioningClient(client.url)
    report = build(repartitioning_client, "db.t", "b", InProcessWorkers(), limits=SMALL_GROUPS)
    repartitioning_client.close()
    assert (report.json["state"], report.progress.files_done, report.files_not_indexed) == ("completed", 8, 0)


@pytest.mark.slow
def test_build_includes_files_that_only_a_branch_has(client: IndexClient) -> None:
    with open_catalog(client.url) as catalog:
        table = catalog.load_table("db.t")
        table.manage_snapshots().create_branch(table.current_snapshot().snapshot_id, "work").commit()
        table.append(pa.table(build_columns([1000, 1001]), schema=SCHEMA), branch="work")
    index = client.index("db.t", "b")
    assert (index.lag_files, index.lag_files_of_refs) == (6, 1)
    report = build(client, "db.t", "b", InProcessWorkers())
    assert (report.progress.files_done, report.files_not_indexed) == (7, 0)
    index = client.index("db.t", "b")
    assert (index.health, index.lag_files_of_refs) == ("ok", 0)


@pytest.mark.slow
def test_build_ends_while_writers_keep_committing(client: IndexClient) -> None:
    new_ids = iter(range(1000, 2000))
    commits = [lambda: append_parts(client.url, "db.t", [[next(new_ids)]]) for _ in range(10)]
    report = build(client, "db.t", "b", RecordingWorkers(*commits), passes_max=3)
    # The first pass builds 6 files. Each of the other two builds the file that was added during the pass before.
    assert (report.json["state"], report.progress.files_done) == ("completed", 8)
    assert client.index("db.t", "b").lag_files == 1


def test_interrupted_build_is_rolled_back_and_the_next_build_continues_it(client: IndexClient) -> None:
    with pytest.raises(BuildInterrupted):
        build(client, "db.t", "b", RecordingWorkers(None, interrupt_build), limits=SMALL_GROUPS)
    (instant,) = [instant for instant in client.timeline("db.t", action="indexing") if instant.state == "rolled_back"]
    assert instant.summary["reason"] == "BuildInterrupted"
    assert client.index("db.t", "b").files == 2
    workers = RecordingWorkers()
    build(client, "db.t", "b", workers, limits=SMALL_GROUPS)
    assert [len(group) for group in workers.groups] == [2, 2]
    assert client.index("db.t", "b").health == "ok"


def test_build_of_a_killed_process_is_continued(client: IndexClient) -> None:
    script = f"""
import time
from seamark.connector.index.builds import InProcessWorkers, GroupLimits, build
from seamark.connector.client.indexes import IndexClient
def print_and_wait(progress):
    print(progress.files_done, flush=True)
    time.sleep(600)
client, limits = IndexClient({client.url!r}), GroupLimits(files=2)
build(client, "db.t", "b", InProcessWorkers(), limits=limits, on_progress=print_and_wait)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2\n"
        process.kill()
    (failed_build,) = client.timeline("db.t", action="indexing")
    assert failed_build.state == "inflight"
    with pytest.raises(Refused, match="is in progress"):
        build(client, "db.t", "b", InProcessWorkers(), exclusive=True)
    workers = RecordingWorkers()
    assert build(client, "db.t", "b", workers).progress.files_done == 4
    assert sum(map(len, workers.groups)) == 4
    assert client.index("db.t", "b").health == "ok"


@pytest.mark.slow
def test_sigterm_rolls_a_build_back_and_is_recorded_as_the_reason(client: IndexClient) -> None:
    with handle_sigterm(), pytest.raises(KeyboardInterrupt):
        build(
            client,
            "db.t",
            "b",
            RecordingWorkers(None, lambda: os.kill(os.getpid(), signal.SIGTERM)),
            limits=SMALL_GROUPS,
        )
    (instant,) = [instant for instant in client.timeline("db.t", action="indexing") if instant.state == "rolled_back"]
    assert instant.summary["reason"] == "KeyboardInterrupt: SIGTERM"
    assert client.index("db.t", "b").files == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_build_tries_and_reports_each_file_that_cannot_be_indexed_once(client: IndexClient) -> None:
    pages = client.list_files_to_index("db.t", "b", client.start_build("db.t", "b")["build-id"])
    damaged_path = Path(next(pages)["files"][3]["file-path"].removeprefix("file://"))
    damaged_path.write_bytes(b"x" * damaged_path.stat().st_size)
    workers = RecordingWorkers()
    report = build(client, "db.t", "b", workers)
    assert sum(map(len, workers.groups)) == 6
    assert (report.files_not_indexed, report.progress.files_done, report.progress.files_skipped) == (1, 5, 1)
    ((path, reason),) = report.skipped
    assert (path.endswith(damaged_path.name), "cannot be read" in reason) == (True, True)
    second_report = build(client, "db.t", "b", InProcessWorkers())
    assert (second_report.json["state"], second_report.files_not_indexed) == ("rolled_back", 1)
    assert damaged_path.name in second_report.json["reason"]


def test_rows_are_written_after_the_column_of_an_index_was_dropped(client: IndexClient) -> None:
    with open_catalog(client.url) as catalog:
        with catalog.load_table("db.t").update_schema() as update:
            update.delete_column("id")
        columns = catalog.load_table("db.t").schema().as_arrow()
    append(client, "db.t", pa.Table.from_pylist([{}], columns))
    index = client.index("db.t", "b")
    assert (index.health, index.json["problem"]) == ("broken", "The column was dropped from the table")


@pytest.mark.slow
def test_recreated_table_receives_no_index_files_of_the_old_table(client: IndexClient) -> None:
    class WorkersOfAnotherTable(InProcessWorkers):
        def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
            return super().run(replace(task, table_uuid="another"), groups)

    with pytest.raises(Refused, match="another"):
        build(client, "db.t", "b", WorkersOfAnotherTable())
    assert client.index("db.t", "b").files == 0


def test_cluster_is_started_once_and_only_for_many_or_large_files() -> None:
    events: list[str] = []

    class Cluster(InProcessWorkers):
        def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
            return (WrittenIndex(None, files=len(group), rows=0, size_bytes=0, skipped=()) for group in groups)

        def close(self) -> None:
            events.append("closed")

    def start() -> Cluster:
        events.append("started")
        return Cluster()

    def run_files(count: int, size_bytes: int = 1) -> Iterable[WrittenIndex]:
        group = [DataFile(f"nowhere:{n}", size_bytes, 1, format="orc") for n in range(count)]
        return workers.run(None, [group])  # type: ignore[arg-type]

    workers = AdaptiveWorkers(start)
    assert workers.parallelism >= 1
    run_files(SMALL_FILES - 1)
    assert events == []
    assert [file.files for file in run_files(SMALL_FILES)] == [SMALL_FILES]
    assert [file.files for file in run_files(1, SMALL_BYTES)] == [1]
    assert events == ["started"]
    assert workers.parallelism == 1
    workers.close()
    workers.close()
    assert events == ["started", "closed"]


def test_groups_respect_the_limits_and_contain_every_file() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        files = [DataFile(str(n), rng.randint(1, 100), rng.randint(0, 100)) for n in range(rng.randint(0, 60))]
        limits = GroupLimits(rng.randint(1, 10), rng.randint(50, 300), rng.randint(50, 300))
        groups = list(group_files(files, limits))
        assert [file for group in groups for file in group] == files, seed
        for group in groups:
            assert 0 < len(group) <= limits.files, seed
            if len(group) > 1:
                assert sum(file.size_bytes for file in group) <= limits.size_bytes, seed
                assert sum(file.records for file in group) <= limits.rows, seed


def run_seamark(url: str, *arguments: str) -> tuple[int, str]:
    return invoke_seamark("index", *arguments, url=url)


def test_build_command_builds_one_index_or_all_indexes(client: IndexClient) -> None:
    client.put_index("db.t", "m", kind="bitmap", columns=["country"])
    client.put_index("db.t", "off", kind="bitmap", columns=["discount"])
    client.put_index("db.t", "off", state="paused")
    code, text = run_seamark(client.url, "build", "db.t", "b", "--engine", "process")
    assert (code, "Index b: 6 data files, 120 rows in 1 index file" in text) == (0, True), text
    code, text = run_seamark(client.url, "build", "db.t")
    assert (code, "Index b: 0 data files" in text, "Index m: 6 data files" in text) == (0, True, True), text
    assert [index.health for index in client.indexes("db.t")] == ["ok", "ok", "paused"]


def test_build_command_reports_invalid_definitions_and_fails(client: IndexClient) -> None:
    with open_catalog(client.url) as catalog, catalog.load_table("db.t").transaction() as change:
        change.set_properties({"seamark.index.odd": "bitmap(nope)"})
    result = CliRunner().invoke(cli, ["index", "build", "db.t"], env={"SEAMARK_URL": client.url})
    assert result.exit_code == 1
    assert "Index b: 6 data files" in result.output
    assert "1 index is broken and was not built: odd: " in result.output
    client.drop_index("db.t", "b")
    result = CliRunner().invoke(cli, ["index", "build", "db.t"], env={"SEAMARK_URL": client.url})
    assert (result.exit_code, "no such column" in result.output) == (1, True)
    result = CliRunner().invoke(cli, ["index", "show", "db.t", "b"], env={"SEAMARK_URL": client.url})
    assert "seamark index list" in result.output


def test_command_waits_for_the_build_of_a_different_builder(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_build = client.start_build("db.t", "b", exclusive=True)
    messages = []

    def end_other_build(text: str, **_: Any) -> None:
        messages.append(text)
        if len(messages) == 1:
            client.finish_build("db.t", "b", other_build["build-id"], outcome="rolled-back")

    monkeypatch.setattr(build_command, "say", end_other_build)
    result = CliRunner().invoke(cli, ["index", "build", "db.t", "--engine", "process"], env={"SEAMARK_URL": client.url})
    assert result.exit_code == 0, result.output
    assert f"The build {other_build['build-id']}" in messages[0]
    assert "Waiting for its end." in messages[0]
    assert client.index("db.t", "b").lag_files == 0


@pytest.mark.slow
def test_build_command_reports_why_it_cannot_build(client: IndexClient) -> None:
    client.put_index("db.t", "b", state="paused")
    for arguments, code, expected in (
        (("db.t", "b"), 2, "paused"),
        (("db.t",), 2, "no index to build"),
        (("db.t", "nope"), 1, "no index 'nope'"),
        (("db.t", "b", "--engine", "hand"), 2, "hand"),
    ):
        actual, text = run_seamark(client.url, "build", *arguments)
        assert (actual, expected in text) == (code, True), text


@pytest.mark.slow
def test_build_command_reports_in_one_line_that_spark_does_not_start(client: IndexClient) -> None:
    argv = [str(Path(sys.executable).parent / "seamark"), "index", "build", "db.t", "b", "--engine", "spark"]
    environment = {**os.environ, "SEAMARK_URL": client.url, "JAVA_HOME": "/nowhere"}
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1, result.stderr
    assert "Error: Spark does not start: JAVA_HOME is /nowhere, which has no bin/java: set it to" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(client.timeline("db.t", action="indexing")) == []


@pytest.mark.slow
def test_build_command_fails_if_no_file_can_be_read(client: IndexClient) -> None:
    pages = client.list_files_to_index("db.t", "b", client.start_build("db.t", "b")["build-id"])
    for file in next(pages)["files"]:
        Path(file["file-path"].removeprefix("file://")).unlink()
    code, text = run_seamark(client.url, "build", "db.t", "b")
    assert (code, "Plans always keep 6 data files that cannot be indexed" in text, "was not built" in text) == (
        1,
        True,
        True,
    ), text
