"""The contract on SQLite, and tests of its own behaviour: one writer, group commit, files that survive kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError, Corrupt, RetryLater, StorageError
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, RecordInstant
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.store.sql import migrations, sqlite
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from seamark.metaserver.store.sql.sqlite import open_sqlite
from seamark.metaserver.store.sql.statement import SQLITE
from tests.seeds import first_seed
from tests.store.contract import PointerStoreContract
from tests.store.samples import NS, TABLE, get_outcome, make_entry, make_instant
from tests.support.migrated_database import create_empty_databases


class TestSqlite(PointerStoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'seamark.db'}"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with create_empty_databases():
        yield tmp_path / "seamark.db"


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(seed=1)


async def _list_names(store: PointerStore) -> list[str]:
    return [entry.name for entry in await store.list_entries(TABLE, NS, None, 999)]


async def test_full_queue_rejects_new_transactions_at_once_but_executes_accepted_transactions(
    path: Path, clock: SimulatedClock
) -> None:
    async with open_sqlite(path, clock=clock, queue_limit=4) as store:
        await store.transact([CreateNamespace(NS, {})])
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        waiting_tasks = [asyncio.create_task(store.transact([CreateEntry(make_entry(f"t{n}"))])) for n in range(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(RetryLater, match="4 transactions already wait"):
            await store.transact([CreateEntry(make_entry("refused"))])
        blocker.execute("COMMIT")
        blocker.close()
        await asyncio.gather(*waiting_tasks)
        await store.transact([CreateEntry(make_entry("later"))])
        assert await _list_names(store) == ["later", "t0", "t1", "t2", "t3"]


async def test_failed_transaction_does_not_affect_other_transactions_of_its_group(
    path: Path, clock: SimulatedClock
) -> None:
    async with open_sqlite(path, clock=clock) as store:
        await store.transact([CreateNamespace(NS, {})])
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        # Transactions that wait for the blocker form groups. Every third transaction fails after it has written.
        tasks = [
            asyncio.create_task(
                get_outcome(
                    store.transact(
                        [
                            CreateEntry(make_entry(f"t{n:02}")),
                            CreateEntry(make_entry(f"u{n:02}", namespace=NS if n % 3 else ("missing",))),
                        ]
                    )
                )
            )
            for n in range(50)
        ]
        await asyncio.sleep(0.05)  # Meanwhile, many of the transactions arrive in the queue.
        blocker.execute("COMMIT")
        blocker.close()
        outcomes = await asyncio.gather(*tasks)
        assert outcomes == ["won" if n % 3 else "no_such_namespace" for n in range(50)]
        assert await _list_names(store) == sorted(f"{x}{n:02}" for x in "tu" for n in range(50) if n % 3)


async def test_writer_that_never_gets_the_lock_raises_an_error(
    path: Path, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    async with open_sqlite(path, clock=clock) as store:
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(RetryLater, match="busy"):
            await store.transact([CreateNamespace(NS, {})])
        assert await store.load_namespace(NS) is None
        blocker.execute("ROLLBACK")
        blocker.close()
        await store.transact([CreateNamespace(NS, {})])


async def test_database_that_cannot_roll_back_fails_each_transaction_and_keeps_the_writer_alive() -> None:
    class BrokenConnection:
        in_transaction = True

        def execute(self, sql: str, *params: object) -> None:
            raise sqlite3.OperationalError("injected: disk I/O error")

    transaction = sqlite._QueuedTransaction(lambda: iter(()), asyncio.get_running_loop().create_future())  # type: ignore[arg-type, return-value]
    sqlite._commit_group(BrokenConnection(), [transaction])  # type: ignore[arg-type]
    assert isinstance(transaction.error, StorageError)


async def test_closing_finishes_accepted_transactions_and_rejects_the_rest(path: Path, clock: SimulatedClock) -> None:
    async with open_sqlite(path, clock=clock) as store:
        await store.transact([CreateNamespace(NS, {})])
        tasks = [asyncio.create_task(store.transact([CreateEntry(make_entry(f"t{n:03}"))])) for n in range(200)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    with pytest.raises(RetryLater, match="shutting down"):
        await store.transact([])
    async with open_sqlite(path, clock=clock) as store:
        assert len(await _list_names(store)) == 200


async def test_cancelled_task_does_not_affect_other_transactions(path: Path, clock: SimulatedClock) -> None:
    async with open_sqlite(path, clock=clock, queue_limit=20) as store:
        await store.transact([CreateNamespace(NS, {})])
        for step in range(5):  # Each step fills the queue with 20 transactions, and cancels half of them.
            tasks = [
                asyncio.create_task(store.transact([CreateEntry(make_entry(f"t{step}-{n:02}"))])) for n in range(20)
            ]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [result for result in results if isinstance(result, Exception)] == []
            assert {f"t{step}-{n:02}" for n in range(1, 20, 2)} <= set(await _list_names(store))
            # The cancelled tasks keep their places until the thread has processed them.
            await store.transact([])


async def test_fifty_openings_leak_no_file_and_no_thread(path: Path, clock: SimulatedClock) -> None:
    async def open_and_close() -> None:
        async with open_sqlite(path, clock=clock) as store:
            await store.ping()
            await store.list_entries(TABLE, NS, None, limit=1)
            await store.load_secret("s")

    def count_resources() -> tuple[int, set[str]]:
        return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}

    for _ in range(5):
        await open_and_close()
    resources_before = count_resources()
    for _ in range(50):
        await open_and_close()
    files, threads = count_resources()
    # A leak in each of the 50 openings would add at least 50. Other code may open a few files.
    assert files < resources_before[0] + 25
    # The executor of the event loop may still start threads up to its limit.
    assert {name for name in threads if "seamark" in name} == set()


async def test_concurrent_openings_create_one_schema(path: Path, clock: SimulatedClock) -> None:
    async def open_and_create(number: int) -> None:
        async with open_sqlite(path, clock=clock) as store:
            await store.transact([CreateNamespace((f"n{number}",), {})])

    await asyncio.gather(*(open_and_create(number) for number in range(8)))
    async with open_sqlite(path, clock=clock) as store:
        assert len(await store.list_namespaces((), None, 99)) == 8


async def test_database_of_an_older_version_is_upgraded(
    path: Path, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old_version:
        old_version.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        async with open_sqlite(path, clock=clock):
            pass
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("INSERT INTO namespaces VALUES ('ns', '', '{}', 1)")
    connection.execute(
        "INSERT INTO entries VALUES ('relation', 'table', 'ns', 't', 'uuid-of-t', 'file:///w/t/0.json', NULL, 1, 5, 0)"
    )
    for grant in (("ann", "", "admin"), ("bob", "shop\x1feu", "writer")):
        connection.execute("INSERT INTO grants (principal, namespace, role) VALUES (?, ?, ?)", grant)
    connection.close()
    for _ in range(2):
        async with open_sqlite(path, clock=clock) as store:
            assert await store.grants(None) == [Grant("ann", "admin"), Grant("bob", "writer", ("shop", "eu"))]
            assert await store.load_entry(TABLE, NS, "t") == make_entry("t")
            assert await store.index_files("uuid-of-t") == []
            assert await store.load_producer("uuid-of-t", "p") is None


def test_migration_of_the_query_history_reads_each_shape_only_a_few_times() -> None:
    """A shape is a statement without the values that it compares.

    The test counts SQLite's instructions, because this number does not depend on the speed of the machine.
    """
    shape_count, instructions_per_tick, ticks = 2000, 1000, 0

    def count_tick() -> int:
        nonlocal ticks
        ticks += 1
        return 0

    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        # In version 15, shapes have no numbers. A migration assigns them.
        sqlite.run_steps_in_sqlite(connection, migrations.create_schema(15, SQLITE))
        keys = [(f"uuid {number % 7}", f"fingerprint {number:05}") for number in range(shape_count)]
        connection.executemany("INSERT INTO query_shapes VALUES (?, ?, '', '', '')", reversed(keys))
        connection.executemany("INSERT INTO query_counts VALUES (?, ?, 1, 1, 0, 0, 0, 0, 0, 0)", keys)
        connection.set_progress_handler(count_tick, instructions_per_tick)
        sqlite.run_steps_in_sqlite(connection, migrations.apply_migrations(SQLITE))
        numbered_shapes = connection.execute("SELECT uuid, fingerprint FROM query_shapes ORDER BY number").fetchall()
        numbers = connection.execute("SELECT min(number), max(number) FROM query_shapes").fetchone()
        assert connection.execute("SELECT count(*) FROM query_sums").fetchone() == (shape_count,)
    assert (numbered_shapes, numbers) == (sorted(keys), (1, shape_count))
    # If the migration read all shapes for each shape, it would need thousands of instructions for each.
    assert ticks * instructions_per_tick / shape_count < 500


async def _catch_open_error(path: Path, clock: SimulatedClock) -> str:
    with pytest.raises(ConfigError) as error:
        async with open_sqlite(path, clock=clock):
            pass
    return error.value.message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("UPDATE schema_version SET version = 99", "schema version 99"),
        ("UPDATE schema_version SET version = -1", "invalid schema version"),
        ("INSERT INTO schema_version VALUES (1)", "several rows"),
        ("DELETE FROM schema_version", "already exists"),
        ("DROP TABLE schema_version", "another application"),
    ],
)
async def test_foreign_schema_is_rejected(path: Path, clock: SimulatedClock, change: str, complaint: str) -> None:
    async with open_sqlite(path, clock=clock):
        pass
    connection = sqlite3.connect(path)
    connection.execute(change)
    connection.commit()
    connection.close()
    assert complaint in await _catch_open_error(path, clock)


async def test_file_that_is_not_a_database_is_rejected_and_unchanged(path: Path, clock: SimulatedClock) -> None:
    content = Random(3).randbytes(20_000)
    path.write_bytes(content)
    assert "not a database" in await _catch_open_error(path, clock)
    assert path.read_bytes() == content
    assert str(path.parent) in await _catch_open_error(path.parent, clock)


async def test_damaged_pages_are_reported_as_corrupt(path: Path, clock: SimulatedClock) -> None:
    async with open_sqlite(path, clock=clock) as store:
        await store.transact([CreateNamespace(NS, {}), *(CreateEntry(make_entry(f"t{n:03}")) for n in range(500))])
    content = bytearray(path.read_bytes())
    connection = sqlite3.connect(path)
    (root_page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'entries'").fetchone()
    connection.close()
    page_bytes = 4096  # SQLite's default.
    content[(root_page - 1) * page_bytes : root_page * page_bytes] = b"\xff" * page_bytes
    path.write_bytes(content)
    async with open_sqlite(path, clock=clock) as store:
        assert await store.load_namespace(NS) is not None
        with pytest.raises(Corrupt, match="damaged"):
            await store.load_entry(TABLE, NS, "t001")
        with pytest.raises(Corrupt, match="damaged"):
            await store.transact([CreateEntry(make_entry("new"))])


async def test_unreadable_row_is_reported_as_corrupt(path: Path, clock: SimulatedClock) -> None:
    async with open_sqlite(path, clock=clock) as store:
        await store.transact([CreateNamespace(NS, {}), RecordInstant(make_instant("i"))])
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("UPDATE namespaces SET properties = '{'")
        connection.execute("UPDATE instants SET state = 'lost'")
        connection.close()
        with pytest.raises(Corrupt, match="namespace properties"):
            await store.load_namespace(NS)
        with pytest.raises(Corrupt, match="unknown state 'lost'"):
            await store.list_instants(InstantFilter(), 9)


async def test_violated_invariants_are_reported(path: Path, clock: SimulatedClock) -> None:
    async with open_sqlite(path, clock=clock) as store:
        assert isinstance(store, GeneratorStore)
        await store.transact([CreateNamespace(NS, {}), CreateEntry(make_entry("t"))])
        await store.check_invariants()
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("DELETE FROM namespaces")
        connection.close()
        with pytest.raises(Corrupt, match="entry without its namespace: 'uuid-of-t'"):
            await store.check_invariants()


async def test_value_out_of_range_fails_only_its_own_transaction(path: Path, clock: SimulatedClock) -> None:
    async with open_sqlite(path, clock=clock) as store:
        await store.transact([CreateNamespace(NS, {})])
        good_entry, bad_entry = make_entry("good"), make_entry("bad", version=2**64)
        results = await asyncio.gather(
            *(store.transact([CreateEntry(entry)]) for entry in (bad_entry, good_entry)), return_exceptions=True
        )
        assert isinstance(results[0], BadRequest)
        assert await _list_names(store) == ["good"]


_WRITER_SCRIPT = """
    import asyncio, sys
    from seamark.formats.runtime.clock import SystemClock
    from seamark.metaserver.store.open import open_store
    from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, RecordInstant
    from tests.store.samples import NS, TABLE, make_entry, make_instant, make_swap

    async def write(store, name):
        entry = await store.load_entry(TABLE, NS, name)
        location, version = entry.metadata_location, entry.version
        while True:
            swap = make_swap(name, location, f"file:///{name}/{version}")
            instant = make_instant(f"{name}-{version:06}", uuid=entry.uuid, name=name)
            await store.transact([swap, RecordInstant(instant)])
            print(instant.id, flush=True)
            location, version = swap.new_location, version + 1

    async def main():
        async with open_store(sys.argv[1], clock=SystemClock()) as store:
            if await store.load_namespace(NS) is None:
                await store.transact([CreateNamespace(NS, {})])
                for n in range(8):
                    await store.transact([CreateEntry(make_entry(f"t{n}"))])
            await asyncio.gather(*(write(store, f"t{n}") for n in range(8)))

    asyncio.run(main())
"""


async def test_acknowledged_transactions_survive_kill_9_and_none_is_partial(path: Path) -> None:
    seed = first_seed()
    print(f"seed {seed}")
    rng = Random(seed)
    acknowledged_ids: set[str] = set()
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER_SCRIPT), f"sqlite:///{path}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(1, 600)):
                acknowledged_ids.add(process.stdout.readline().strip())
            await asyncio.sleep(rng.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            # A line that the kill has truncated was never a complete answer.
            output = process.stdout.read()
            acknowledged_ids.update(output[: output.rfind("\n") + 1].split())
        async with open_sqlite(path, clock=SystemClock()) as store:
            assert isinstance(store, GeneratorStore)
            await store.check_invariants()
            recorded_ids = {instant.id for instant in await store.list_instants(InstantFilter(), limit=1_000_000)}
            assert acknowledged_ids <= recorded_ids
            for n in range(8):
                entry = await store.load_entry(TABLE, NS, f"t{n}")
                assert entry is not None
                assert entry.version - 1 == sum(1 for item in recorded_ids if item.startswith(f"t{n}-"))
    assert len(acknowledged_ids) > 5, "on average, a writer must acknowledge more than one transaction before its kill"


_FULL_DISK_SCRIPT = """
    import asyncio, os, resource, sys
    from seamark.formats.runtime.clock import SystemClock
    from seamark.formats.runtime.errors import CommitUnknown, RetryLater
    from seamark.metaserver.store.open import open_store
    from seamark.metaserver.store.operations import CreateEntry, CreateNamespace
    from tests.store.samples import NS, TABLE, make_entry

    def limit_file_size(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    async def main():
        path = sys.argv[1]
        async with open_store("sqlite:///" + path, clock=SystemClock()) as store:
            await store.transact([CreateNamespace(NS, {})])
            limit_file_size(os.path.getsize(path + "-wal") + 20_000)
            entries = [make_entry(f"t{n:03}", metadata_location="file:///" + "x" * 2000) for n in range(100)]
            results = await asyncio.gather(
                *(store.transact([CreateEntry(entry)]) for entry in entries), return_exceptions=True
            )
            limit_file_size(resource.RLIM_INFINITY)
            failed = [e.name for e, r in zip(entries, results) if isinstance(r, (RetryLater, CommitUnknown))]
            won = [e.name for e, r in zip(entries, results) if r == [None]]
            assert failed and len(failed) + len(won) == 100, results
            stored = [e.name for e in await store.list_entries(TABLE, NS, None, 999)]
            assert stored == won, (stored, won)
            for entry in entries:
                if entry.name in failed:
                    await store.transact([CreateEntry(entry)])
            await store.check_invariants()
        async with open_store("sqlite:///" + path, clock=SystemClock()) as store:
            assert len(await store.list_entries(TABLE, NS, None, 999)) == 100
        print("survived", len(failed))

    asyncio.run(main())
"""


def test_full_disk_fails_commits_clearly_and_the_store_continues(path: Path) -> None:
    # A limit on the file size simulates a full disk. In both cases, the same system call fails.
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FULL_DISK_SCRIPT), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.startswith("survived"), result.stderr
