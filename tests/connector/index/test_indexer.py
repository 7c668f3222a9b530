"""The indexer against a server, on files that PyIceberg wrote: builds, merges, conflicts, backoff, and exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.errors import Unreachable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index import indexer as module
from seamark.connector.index.builds import GroupLimits, InProcessWorkers, Workers
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex
from seamark.connector.index.indexer import AuditLimits, Indexer, MaintenanceCounts
from seamark.formats.index.index_file import open_index_file
from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER, INDEX_FOLDER
from tests.connector.lake import append_parts, create_lake_table, open_catalog, spread_ids
from tests.connector.server_thread import ServerThread
from tests.support.index_versions import replace_by_later_version


def open_in_process_workers() -> AbstractContextManager[Workers]:
    return closing(InProcessWorkers())


def create_table(client: IndexClient, name: str, files: int = 3, **indexes: tuple[str, str]) -> None:
    """Create a table with `files` files, and with indexes that cover none of the files.

    Args:
        indexes: (kind, column) by the name of the index.
    """
    create_lake_table(client.url, name)
    append_parts(client.url, name, spread_ids(files))
    for index, (kind, column) in indexes.items():
        client.put_index(name, index, kind=kind, columns=[column])


def read_health(client: IndexClient, *tables: str) -> dict[str, str]:
    return {f"{name} {index.name}": index.health for name in tables for index in client.indexes(name)}


def test_round_builds_every_enabled_index_and_the_next_round_has_nothing_to_do(client: IndexClient) -> None:
    create_table(client, "a.one", i=("bloom", "id"), j=("bitmap", "country"))
    create_table(client, "a.two", i=("record", "id"), off=("bloom", "id"))
    client.put_index("a.two", "off", state="paused")
    with open_catalog(client.url) as catalog:
        catalog.create_namespace("b")
        catalog.create_namespace("b.c")
        catalog.create_namespace("empty")
    create_table(client, "b.c.deep", i=("bloom", "discount"))
    create_table(client, "b.none")
    indexer = Indexer(client, open_in_process_workers)
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=4, indexes=4, builds=4, files=12)
    assert read_health(client, "a.one", "a.two", "b.c.deep") == {
        "a.one i": "ok",
        "a.one j": "ok",
        "a.two i": "ok",
        "a.two off": "paused",
        "b.c.deep i": "ok",
    }
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=4, indexes=4)
    assert len(list(client.timeline(action="indexing"))) == 4
    append_parts(client.url, "a.one", [[1000]])
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=4, indexes=4, builds=2, files=2)


@pytest.mark.slow
def test_indexer_moves_index_files_from_the_former_folder(client: IndexClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patches:
        patches.setattr("seamark.metaserver.api.indexes.builds.INDEX_FOLDER", FORMER_INDEX_FOLDER)
        create_table(client, "db.t", files=3, i=("bitmap", "country"), j=("record", "id"))
        Indexer(client, open_in_process_workers, limits=GroupLimits(files=1)).maintain_all_tables()
    files_before = [client.explain("db.t", f"country = 'c{n}'").files for n in range(8)]
    assert [client.index("db.t", name).json["misplaced"] for name in "ij"] == [1, 1]
    indexer = Indexer(client, open_in_process_workers)
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=1, indexes=2, merges=2)
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=1, indexes=2)
    for name in "ij":
        index = client.index("db.t", name)
        live_locations = [file["location"] for file in index.json["index-files"] if file["state"] == "live"]
        assert (index.json["misplaced"], index.health, len(live_locations)) == (0, "ok", 1)
        assert f"/{INDEX_FOLDER}/" in live_locations[0]
    assert [client.explain("db.t", f"country = 'c{n}'").files for n in range(8)] == files_before


def test_merged_index_files_give_the_same_plans(client: IndexClient) -> None:
    create_table(client, "db.t", files=9, i=("bitmap", "country"))
    files_before = [client.explain("db.t", f"country = 'c{n}'").files for n in range(8)]
    # One data file per index file gives nine index files, which are enough for a merge.
    report = Indexer(client, open_in_process_workers, limits=GroupLimits(files=1)).maintain_all_tables()
    assert (report.builds, report.merges, report.failed) == (1, 1, 0)
    index = client.index("db.t", "i")
    assert index.json["levels"] == {"1": 1}
    assert (index.health, index.files) == ("ok", 9)
    files_after = [client.explain("db.t", f"country = 'c{n}'").files for n in range(8)]
    assert (files_before[7], files_after[7]) == (0, 0)  # Bounds alone leave these files out.
    assert files_after == files_before
    assert client.explain("db.t", "country = 'c15'").files == 0
    assert [instant.state for instant in client.timeline(action="indexing")] == ["completed", "completed"]


def test_merge_leaves_out_index_files_of_an_unknown_version(client: IndexClient, server: ServerThread) -> None:
    create_table(client, "db.t", files=7, i=("bitmap", "country"))
    files_before = [client.explain("db.t", f"country = 'c{n}'").files for n in range(8)]
    one_file_groups = GroupLimits(files=1)
    assert Indexer(client, open_in_process_workers, limits=one_file_groups).maintain_all_tables().builds == 1
    location = client.index("db.t", "i").json["index-files"][3]["location"]
    later_version_location = server.run(replace_by_later_version(server.components, "db", "t", location))
    # The data file is indexed again. Then eight index files exist, but only seven can be merged.
    report = Indexer(client, open_in_process_workers, limits=one_file_groups).maintain(("db", "t"))
    assert (report.builds, report.files, report.merges, report.failed) == (1, 1, 0, 0)
    builds = len(list(client.timeline(action="indexing")))
    for _ in range(2):  # Each job is a new process.
        report = Indexer(client, open_in_process_workers, limits=one_file_groups).maintain(("db", "t"))
        assert report == MaintenanceCounts(tables=1, indexes=1)
    assert len(list(client.timeline(action="indexing"))) == builds, "a job without a due merge starts no build"
    append_parts(client.url, "db.t", spread_ids(7)[:1])
    indexer = Indexer(client, open_in_process_workers, limits=one_file_groups)
    report = indexer.maintain_all_tables()
    assert (report.builds, report.files, report.merges, report.failed) == (1, 1, 1, 0)
    index = client.index("db.t", "i")
    live_levels = {file["location"]: file["level"] for file in index.json["index-files"] if file["state"] == "live"}
    assert live_levels.pop(later_version_location) == 0, "another program may still use the file"
    assert list(live_levels.values()) == [1]
    assert (index.health, index.files) == ("ok", 8)
    assert [client.explain("db.t", f"country = 'c{n}'").files for n in range(8)] == [
        files_before[0] + 1,
        *files_before[1:],
    ]
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=1, indexes=1)


@pytest.mark.slow
def test_merge_drops_entries_of_files_that_no_snapshot_has(client: IndexClient) -> None:
    create_table(client, "db.t", files=5, i=("record", "id"))
    one_file_groups = GroupLimits(files=1)
    assert Indexer(client, open_in_process_workers, limits=one_file_groups).maintain_all_tables().builds == 1
    with open_catalog(client.url) as catalog:
        loaded_table = catalog.load_table("db.t")
        old_snapshots = [snapshot.snapshot_id for snapshot in loaded_table.snapshots()]
        loaded_table.delete()  # This removes whole files.
        for part in spread_ids(4):
            append_parts(client.url, "db.t", [part])
        catalog.load_table("db.t").maintenance.expire_snapshots().by_ids(old_snapshots).commit()
    report = Indexer(client, open_in_process_workers, limits=one_file_groups).maintain_all_tables()
    assert (report.builds, report.merges, report.failed) == (1, 1, 0)
    live_index_files = [
        index_file for index_file in client.index("db.t", "i").json["index-files"] if index_file["state"] == "live"
    ]
    # Without the merge, the index files would describe the five old and the four new files.
    assert sum(index_file["files"] for index_file in live_index_files) < 5 + 4, (
        "entries of the first five files remain in the merged file"
    )
    assert client.index("db.t", "i").health == "ok"


@pytest.mark.slow
def test_concurrent_indexers_index_each_file_once(client: IndexClient, server: ServerThread) -> None:
    for number in range(3):
        create_table(client, f"db.t{number}", files=4, i=("bloom", "id"))
    all_ready = threading.Barrier(4)

    def run_indexer() -> None:
        own_client = IndexClient(server.url)
        all_ready.wait()
        rounds.extend(
            Indexer(own_client, open_in_process_workers, limits=GroupLimits(files=1)).maintain_all_tables()
            for _ in range(5)
        )
        own_client.close()

    rounds: list[MaintenanceCounts] = []
    threads = [threading.Thread(target=run_indexer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(rounds) == 4 * 5, "each of the four indexers runs five rounds"
    # Concurrent indexers may each have left work to the others, so a last round builds the rest.
    Indexer(client, open_in_process_workers).maintain_all_tables()
    assert (
        sum(round_report.failed for round_report in rounds),
        set(read_health(client, "db.t0", "db.t1", "db.t2").values()),
    ) == (
        0,
        {"ok"},
    )
    for number in range(3):
        files = client.index(f"db.t{number}", "i").json["index-files"]
        assert sum(file["files"] for file in files) == 4


class IndexerClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def flip_bit(client: IndexClient, name: str, index: str, number: int = 0) -> str:
    """Flip a bit in the middle of the blob of live index file `number`, and return the file's location."""
    live_index_files = [
        index_file for index_file in client.index(name, index).json["index-files"] if index_file["state"] == "live"
    ]
    location: str = live_index_files[number]["location"]
    path = Path(location.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    header = open_index_file(bytes(data), location).header
    data[header.offset + header.length // 2] ^= 1
    path.write_bytes(data)
    return location


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", ["bloom", "bitmap", "record"])
def test_indexer_finds_a_damaged_index_file_and_builds_it_again(client: IndexClient, kind: str) -> None:
    create_table(client, "db.t", files=3, i=(kind, "id"))
    daily_audit = AuditLimits(every_s=86_400)
    current_ms = [1_800_000_000_000]
    indexer = Indexer(
        client,
        open_in_process_workers,
        limits=GroupLimits(files=1),
        audit_limits=daily_audit,
        now_ms=lambda: current_ms[0],
    )
    first_round = indexer.maintain_all_tables()
    assert (first_round.builds, first_round.verified, first_round.damaged) == (1, 0, 0), (
        "a new index file is audited in the next round"
    )
    second_round = indexer.maintain_all_tables()
    assert (second_round.verified, second_round.damaged, second_round.failed) == (3, 0, 0)
    audited_ms = client.index("db.t", "i").audited_ms
    assert audited_ms is not None
    assert client.indexes("db.t")[0].audited_ms == audited_ms
    flip_bit(client, "db.t", "i")
    current_ms[0] = audited_ms + 1000
    assert indexer.maintain_all_tables().verified == 0
    current_ms[0] = audited_ms + 86_400_001
    third_round = indexer.maintain_all_tables()
    assert (third_round.verified, third_round.damaged, third_round.failed) == (3, 1, 0)
    assert client.index("db.t", "i").health == "damaged"
    fourth_round = indexer.maintain_all_tables()
    assert (fourth_round.builds, fourth_round.files) == (1, 1)
    assert client.index("db.t", "i").health == "ok"
    summaries = [instant.summary for instant in client.timeline(action="auditing")]
    assert [(summary["index-files"], summary["damaged"]) for summary in summaries] == [(3, 0), (3, 1)]


@pytest.mark.slow
def test_audits_respect_their_limits_and_reach_every_index_file(client: IndexClient) -> None:
    for name in ("db.a", "db.b"):
        create_table(client, name, files=3, i=("bitmap", "id"))
    clock = IndexerClock()
    one_file_groups = GroupLimits(files=1)
    assert Indexer(client, open_in_process_workers, limits=one_file_groups).maintain_all_tables().builds == 2
    indexer = Indexer(
        client, open_in_process_workers, limits=one_file_groups, now=clock, audit_limits=AuditLimits(size_bytes=1)
    )
    flip_bit(client, "db.b", "i", 2)
    rounds = [indexer.maintain_all_tables() for _ in range(7)]
    assert [round_report.verified for round_report in rounds] == [1, 1, 1, 1, 1, 1, 0]
    assert sum(round_report.damaged for round_report in rounds) == 1
    assert len(list(client.timeline(action="auditing"))) == 2

    def advance_clock() -> float:
        clock.now_s += 1.0
        return clock.now_s

    later_limits = AuditLimits(seconds=2.5, every_s=0)
    indexer = Indexer(
        client, open_in_process_workers, limits=one_file_groups, now=advance_clock, audit_limits=later_limits
    )
    assert 0 < indexer.maintain_all_tables().verified < 6


class FailingWorkers(InProcessWorkers):
    """Workers that fail for indexes of one kind, and count their calls."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
        if task.definition.kind == self.kind:
            self.calls += 1
            raise RuntimeError("executor lost")
        return super().run(task, groups)


@pytest.mark.slow
def test_failing_index_is_retried_with_growing_pauses_and_delays_no_other_index(client: IndexClient) -> None:
    create_table(client, "db.a", i=("bloom", "id"))
    create_table(client, "db.b", i=("bitmap", "country"))
    workers, clock = FailingWorkers("bloom"), IndexerClock()
    indexer = Indexer(client, lambda: closing(workers), now=clock)
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=2, indexes=2, builds=1, files=3, failed=1)
    assert read_health(client, "db.a", "db.b") == {"db.a i": "behind", "db.b i": "ok"}
    (instant,) = client.timeline("db.a", action="indexing")
    assert (instant.state, instant.summary["reason"]) == ("rolled_back", "RuntimeError: executor lost")
    retry_times_s = []
    for second in range(0, 400, 10):
        clock.now_s = second
        calls_before = workers.calls
        indexer.maintain_all_tables()
        if workers.calls > calls_before:
            retry_times_s.append(second)
    assert retry_times_s == [30, 90, 210], "the pauses are 30, 60 and 120 seconds"
    workers.kind = "none"
    clock.now_s = 1000
    assert indexer.maintain_all_tables().builds == 1
    assert read_health(client, "db.a") == {"db.a i": "ok"}


@pytest.mark.slow
def test_files_that_cannot_be_indexed_are_tried_again_after_a_change_or_a_pause(client: IndexClient) -> None:
    create_table(client, "db.t", i=("bloom", "id"))
    build = client.start_build("db.t", "i")
    path = next(client.list_files_to_index("db.t", "i", build["build-id"]))["files"][0]["file-path"]
    client.finish_build("db.t", "i", build["build-id"])
    Path(path.removeprefix("file://")).write_bytes(b"no Parquet")
    clock = IndexerClock()
    indexer = Indexer(client, open_in_process_workers, now=clock)
    assert indexer.maintain_all_tables() == MaintenanceCounts(
        tables=1, indexes=1, builds=1, files=2, files_not_indexed=1
    )
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=1, indexes=1)
    append_parts(client.url, "db.t", [[1000]])
    assert indexer.maintain_all_tables() == MaintenanceCounts(
        tables=1, indexes=1, builds=1, files=1, files_not_indexed=1
    )
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=1, indexes=1)
    clock.now_s = 61
    assert indexer.maintain_all_tables() == MaintenanceCounts(tables=1, indexes=1, builds=1, files_not_indexed=1)


def test_damaged_index_file_stops_merges_but_not_builds(client: IndexClient) -> None:
    create_table(client, "db.t", files=8, i=("bloom", "id"))
    Indexer(client, open_in_process_workers, limits=GroupLimits(files=8)).maintain_all_tables()
    first_location = client.index("db.t", "i").json["index-files"][0]["location"]
    for number in range(7):  # With the first file these are eight index files, which are enough for a merge.
        append_parts(client.url, "db.t", [[2000 + number]])
        if number == 6:
            damaged_path = Path(first_location.removeprefix("file://"))
            data = bytearray(damaged_path.read_bytes())
            data[40] ^= 1  # Byte 40 is in the first blob.
            damaged_path.write_bytes(data)
        report = Indexer(client, open_in_process_workers).maintain_all_tables()
        assert report.builds == 1
    assert (report.merges, report.failed) == (0, 1)
    assert client.explain("db.t", "id = 2006").files == 1


def test_indexer_remembers_a_bounded_number_of_backoffs(client: IndexClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed build, the indexer waits before it builds the index again. It remembers two such waits here."""
    monkeypatch.setattr(module, "BACKOFFS_MAX", 2)
    for name in "abc":
        create_table(client, f"db.{name}", files=1, i=("bloom", "id"))
    workers = FailingWorkers("bloom")
    indexer = Indexer(client, lambda: closing(workers), now=IndexerClock())
    for _ in range(2):
        assert indexer.maintain_all_tables().failed == 3  # The third backoff replaces the first.
        assert len(indexer._backoffs) == 2


def test_failed_round_is_logged_and_repeated_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.connector.client.connections._BACKOFF_S", 0)
    pauses_s: list[float] = []

    def sleep(seconds: float) -> None:
        pauses_s.append(seconds)
        if len(pauses_s) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    indexer = Indexer(IndexClient("http://127.0.0.1:9", retries=0), open_in_process_workers)
    with pytest.raises(Unreachable):
        indexer.maintain_all_tables()
    with pytest.raises(KeyboardInterrupt):
        indexer.run(5)
    assert pauses_s == [10, 20, 40], "twice the interval, which doubles after each failure"


def start_seamark(url: str, *arguments: str) -> subprocess.Popen[str]:
    argv = [str(Path(sys.executable).parent / "seamark"), "indexer", "--engine", "process", "--log-format", "json"]
    environment = {**os.environ, "SEAMARK_URL": url}
    return subprocess.Popen([*argv, *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_indexer_process_keeps_indexes_built_and_ends_at_sigterm(client: IndexClient) -> None:
    create_table(client, "db.t", i=("bloom", "id"))
    with start_seamark(client.url, "--interval", "1") as process:
        assert process.stderr is not None
        wait_until(lambda: client.index("db.t", "i").health == "ok")
        append_parts(client.url, "db.t", [[1000]])
        reports = []
        while [report["event"] for report in reports].count("index built") < 2:
            reports.append(json.loads(process.stderr.readline()))
        process.send_signal(signal.SIGTERM)
        _, remaining_output = process.communicate(timeout=60)
    assert process.returncode == 0, remaining_output
    assert [
        (report["table"], report["index"], report["files"]) for report in reports if report["event"] == "index built"
    ] == [
        ("db.t", "i", 3),
        ("db.t", "i", 1),
    ]
    assert (reports[0]["event"], json.loads(remaining_output.splitlines()[-1])["reason"]) == (
        "indexer started",
        "SIGTERM",
    )


@pytest.mark.slow
def test_exit_code_of_a_round_states_whether_the_round_succeeded(client: IndexClient) -> None:
    create_table(client, "db.t", i=("bloom", "id"))
    with start_seamark(client.url, "--once") as process:
        assert process.wait(60) == 0
    assert read_health(client, "db.t") == {"db.t i": "ok"}
    with start_seamark("http://127.0.0.1:9", "--once") as process:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, "No answer" in errors, "Traceback" in errors) == (1, True, False)
