"""The contract on a real PostgreSQL server, and tests of its own behaviour: watermarks, lost connections, limits."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest, CommitUnknown, ConfigError, RetryLater, StorageError
from seamark.metaserver.store.model import ClaimedLocation
from seamark.metaserver.store.operations import ClaimLocations, CreateEntry, CreateNamespace, Operation, RecordInstant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.store.sql import dispatch as operations
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from seamark.metaserver.store.sql.postgres import open_postgres
from seamark.metaserver.store.sql.statement import APPLICATION_NAME, POSTGRES
from tests.services.postgres import Postgres, postgres_server
from tests.services.process import is_port_open
from tests.store.contract import PointerStoreContract
from tests.store.samples import NS, TABLE, get_outcome, list_ids, make_entry, make_instant, make_swap

CLOCK = SimulatedClock(seed=1)
_translate = POSTGRES.make_translator()


SINGLE_ROWS = ("schema_version", "timeline_epoch", "claim_turns", "catalog_state")
"""Tables with one row, which the creation of the schema inserts."""


@pytest.fixture(scope="module")
def contract_database(postgres: Postgres) -> Iterator[str]:
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


class TestPostgres(PointerStoreContract):
    @pytest.fixture
    def url(self, postgres: Postgres, contract_database: str) -> Iterator[str]:
        """Yield a database whose tables are empty.

        All tests use the same database, because each creation of the schema takes 0.1 s.
        """
        yield contract_database
        postgres.delete_rows(
            contract_database, SINGLE_ROWS, replacement_sql="UPDATE catalog_state SET id = '', closed = 0"
        )


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[GeneratorStore]:
    async with open_postgres(postgres_url, clock=CLOCK) as store:
        assert isinstance(store, GeneratorStore)
        await store.transact([CreateNamespace(NS, {})])
        yield store
        await store.check_invariants()


@asynccontextmanager
async def _connect(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url, server_settings={"application_name": APPLICATION_NAME})
    try:
        yield connection
    finally:
        await connection.close()


async def test_value_too_long_for_postgres_indexes_is_a_client_error(store: GeneratorStore, postgres_url: str) -> None:
    """The value is a claimed location, a namespace or a name of random characters, which PostgreSQL cannot compress."""
    rng = random.Random(7)
    # Each of these letters takes four bytes. An entry of a PostgreSQL index has at most 2,704 bytes.
    letters = [chr(code) for code in range(0x20000, 0x2A000)]
    long_name = "".join(rng.choices(letters, k=255))
    deep_namespace = tuple("".join(rng.choices(letters, k=250)) for _ in range(3))
    create = CreateEntry(make_entry(long_name, uuid="u"))
    claim = ClaimLocations("u", (ClaimedLocation(f"file:///w/{'/'.join(deep_namespace)}"),))
    await store.transact([CreateNamespace((*NS, deep_namespace[0]), {})])
    for changes in ([CreateNamespace((*NS, *deep_namespace[:2]), {})], [create, claim]):
        with pytest.raises(BadRequest, match="too long for PostgreSQL"):
            await store.transact(changes)
    await store.transact([create])


async def test_errors_for_clients_contain_no_address_and_no_values_of_the_database(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_postgres(postgres_url, clock=CLOCK, timeout_s=5) as store, _connect(postgres_url) as connection:
        await store.transact([CreateNamespace(NS, {})])
        messages = []
        await connection.execute("ALTER TABLE namespaces ADD CONSTRAINT odd CHECK (path <> 'odd')")
        try:
            with pytest.raises(StorageError) as error:
                await store.transact([CreateNamespace(("odd",), {})])
        finally:
            await connection.execute("ALTER TABLE namespaces DROP CONSTRAINT odd")
        messages.append(str(error.value))
        async with connection.transaction():
            await connection.execute("LOCK TABLE namespaces IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(RetryLater) as retry_error:
                await store.load_namespace(NS)
        messages.append(str(retry_error.value))
        for message in messages:
            assert "PostgreSQL" in message
            assert str(urlsplit(postgres_url).port) not in message
            assert "odd" not in message
    log_output = capsys.readouterr()
    assert "odd" in log_output.out + log_output.err


async def execute_operations(connection: Any, *changes: Operation) -> None:
    """Execute a replica's operations without BEGIN and COMMIT, so that a test can hold the transaction open."""
    steps = operations.apply_operations(changes, CLOCK.now_ms())
    try:
        statement = next(steps)
        while True:
            rows = await connection.fetch(_translate(statement.sql, statement.lock), *statement.params)
            statement = steps.send(rows)
    except StopIteration:
        return


# Tests of the timeline's watermark


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("recorded_first", [True, False])
async def test_reader_never_misses_a_slow_transaction(
    store: GeneratorStore, postgres_url: str, recorded_first: bool
) -> None:
    async with _connect(postgres_url) as slow_connection:
        await slow_connection.execute("BEGIN")
        # Before the quick transaction begins, the slow transaction has an id, because it has written.
        first_operation = RecordInstant(make_instant("slow")) if recorded_first else CreateNamespace(("slow",), {})
        await execute_operations(slow_connection, first_operation)
        await store.transact([RecordInstant(make_instant("quick"))])
        instants = await store.list_instants(InstantFilter(), limit=9)
        assert await store.list_instants(InstantFilter(newest_first=True), limit=9) == instants[::-1]
        if not recorded_first:
            await execute_operations(slow_connection, RecordInstant(make_instant("slow")))
        await slow_connection.execute("COMMIT")
        since = instants[-1].position if instants else None
        instants += await store.list_instants(InstantFilter(since=since), limit=9)
        assert sorted(list_ids(instants)) == ["quick", "slow"]
        assert (await store.load_instant("quick")) in instants


async def test_timeline_does_not_wait_for_transactions_of_other_programs(
    store: GeneratorStore, postgres_url: str
) -> None:
    async with _connect(postgres_url) as foreign_connection:
        await foreign_connection.execute("SET application_name = 'vacuum of somebody'")
        await foreign_connection.execute("CREATE TABLE unrelated (x int)")
        await foreign_connection.execute("BEGIN")
        await foreign_connection.execute("INSERT INTO unrelated VALUES (1)")
        await store.transact([RecordInstant(make_instant("i"))])
        assert list_ids(await store.list_instants(InstantFilter(), 9)) == ["i"]
        await foreign_connection.execute("ROLLBACK")


async def test_watermark_includes_sessions_of_another_role(store: GeneratorStore, postgres_url: str) -> None:
    role = f"replica_{os.getpid()}"
    async with _connect(postgres_url) as admin:
        await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        await admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        await admin.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
        try:
            url_parts = urlsplit(postgres_url)
            unprivileged_url = url_parts._replace(netloc=f"{role}:x@{url_parts.hostname}:{url_parts.port}").geturl()
            await admin.execute("BEGIN")
            await execute_operations(admin, RecordInstant(make_instant("slow")))
            async with _connect(unprivileged_url) as connection:
                await execute_operations(connection, RecordInstant(make_instant("quick")))
                watermark = await connection.fetchval(_translate("SELECT {watermark}", ""))
                quick_position = await connection.fetchval("SELECT position FROM instants WHERE id = 'quick'")
                assert watermark <= quick_position
            await admin.execute("COMMIT")
            assert list_ids(await store.list_instants(InstantFilter(), 9)) == ["slow", "quick"]
        finally:
            await admin.execute(f"DROP OWNED BY {role}")
            await admin.execute(f"DROP ROLE {role}")


@pytest.mark.slow
async def test_positions_increase_after_a_dump_is_restored_to_a_cluster_with_lower_transaction_ids(
    postgres_url: str,
) -> None:
    async with open_postgres(postgres_url, clock=CLOCK) as store:
        await store.transact([RecordInstant(make_instant("before"))])
    async with _connect(postgres_url) as connection:
        # A position contains a transaction id. After this change, the instants seem to be written by a cluster with
        # much higher transaction ids.
        await connection.execute("UPDATE instants SET position = overlay(position placing '00000fff' from 5 for 8)")
    async with open_postgres(postgres_url, clock=CLOCK) as store:
        (instant_before,) = await store.list_instants(InstantFilter(), limit=9)
        await store.transact([RecordInstant(make_instant("after"))])
        assert list_ids(await store.list_instants(InstantFilter(since=instant_before.position), limit=9)) == ["after"]
    async with open_postgres(postgres_url, clock=CLOCK) as store, _connect(postgres_url) as connection:
        await store.ping()
        assert await connection.fetchval("SELECT epoch FROM timeline_epoch") == 1


# Tests of lost connections


@asynccontextmanager
async def _open_cutting_proxy(
    url: str, trigger: bytes, forward: bool, times: int
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Open a proxy to the server that cuts the connection `times` times, each time at a message with `trigger`.

    With `forward`, the server receives the message before the cut. Yield the URL of the proxy, and the list of messages
    that caused cuts.
    """
    url_parts = urlsplit(url)
    cut_messages: list[bytes] = []
    tasks: set[asyncio.Task[None]] = set()

    async def forward_data(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_upstream: bool, cut_event: asyncio.Event
    ) -> None:
        """Forward data until the stream ends or is cut."""
        while data := await reader.read(65536):
            if is_upstream and trigger in data and len(cut_messages) < times:
                cut_messages.append(data)
                cut_event.set()
                if forward:
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.2)
                return
            if not is_upstream and cut_event.is_set():
                return
            writer.write(data)
            await writer.drain()

    async def serve(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server_reader, server_writer = await asyncio.open_connection(url_parts.hostname, url_parts.port)
        event = asyncio.Event()
        upstream_task = asyncio.create_task(
            forward_data(client_reader, server_writer, is_upstream=True, cut_event=event)
        )
        downstream_task = asyncio.create_task(
            forward_data(server_reader, client_writer, is_upstream=False, cut_event=event)
        )
        await asyncio.wait({upstream_task, downstream_task}, return_when=asyncio.FIRST_COMPLETED)
        for forwarding in (upstream_task, downstream_task):
            forwarding.cancel()
        await asyncio.gather(upstream_task, downstream_task, return_exceptions=True)
        for writer in (client_writer, server_writer):
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield (
            url_parts._replace(netloc=f"{url_parts.username}:{url_parts.password}@127.0.0.1:{port}").geturl(),
            cut_messages,
        )
    finally:
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@pytest.mark.parametrize("arrived", [True, False])
async def test_connection_lost_during_a_commit_leaves_the_outcome_unknown_until_it_is_read(
    store: GeneratorStore, postgres_url: str, arrived: bool
) -> None:
    # Opening the store does not cause the cut, because asyncpg's own transactions end with "COMMIT;", not "COMMIT".
    async with (
        _open_cutting_proxy(postgres_url, b"COMMIT\x00", forward=arrived, times=1) as (url, cuts),
        open_postgres(url, clock=CLOCK, pool_max=2) as cut_store,
    ):
        with pytest.raises(CommitUnknown, match="lost while committing"):
            await cut_store.transact([CreateEntry(make_entry("t")), RecordInstant(make_instant("i"))])
        assert len(cuts) == 1
        async with asyncio.timeout(60):
            # PostgreSQL has received the message and is executing it.
            while arrived and await store.load_instant("i") is None:
                await asyncio.sleep(0.02)
        assert (await store.load_instant("i") is not None) is arrived
        assert (await store.load_entry(TABLE, NS, "t") is not None) is arrived
        # The pool continues with another connection.
        await cut_store.transact([RecordInstant(make_instant("later"))])


async def test_connection_lost_before_the_commit_is_replaced_without_an_error(
    store: GeneratorStore, postgres_url: str
) -> None:
    async with (
        _open_cutting_proxy(postgres_url, b"INTO instants ", forward=True, times=2) as (url, cuts),
        open_postgres(url, clock=CLOCK, pool_max=2) as cut_store,
    ):
        await cut_store.transact([CreateEntry(make_entry("t")), RecordInstant(make_instant("i"))])
        assert len(cuts) == 2
    assert list_ids(await store.list_instants(InstantFilter(), 9)) == ["i"]


async def test_read_whose_connection_is_lost_is_repeated(store: GeneratorStore, postgres_url: str) -> None:
    await store.transact([CreateEntry(make_entry("t"))])
    async with (
        _open_cutting_proxy(postgres_url, b"FROM entries", forward=False, times=1) as (url, cuts),
        open_postgres(url, clock=CLOCK, pool_max=2) as cut_store,
    ):
        assert await cut_store.load_entry(TABLE, NS, "t") == make_entry("t")
        assert len(cuts) == 1


async def test_store_reconnects_to_a_restarted_database_server() -> None:
    with postgres_server() as server:
        async with open_postgres(server.make_url(), clock=CLOCK, timeout_s=5) as store:
            await store.transact([CreateNamespace(NS, {})])
            await asyncio.to_thread(server.process.stop, first=signal.SIGINT)
            with pytest.raises(RetryLater):
                await store.transact([CreateEntry(make_entry("t"))])
            with pytest.raises(RetryLater):
                await store.ping()
            await asyncio.to_thread(server.process.start, lambda: is_port_open(server.port), timeout_s=60)
            while await get_outcome(store.transact([CreateEntry(make_entry("t"))])) == "retry_later":
                await asyncio.sleep(0.05)  # PostgreSQL answers "starting up" for a moment.
            assert await store.load_entry(TABLE, NS, "t") == make_entry("t")


# Tests of limits


@pytest.mark.slow
async def test_wait_for_a_lock_of_another_session_is_limited(store: GeneratorStore, postgres_url: str) -> None:
    await store.transact([CreateEntry(make_entry("t"))])
    location = make_entry("t").metadata_location
    async with (
        _connect(postgres_url) as lock_holder,
        open_postgres(postgres_url, clock=CLOCK, timeout_s=5) as hurried_store,
    ):
        await lock_holder.execute("BEGIN; UPDATE entries SET version = version")
        with pytest.raises(RetryLater, match=r"longer than 5"):
            await hurried_store.transact([make_swap("t", location, "file:///1")])
        await lock_holder.execute("ROLLBACK")
        await hurried_store.transact([make_swap("t", location, "file:///1")])


async def test_requests_get_a_retry_error_when_all_connections_are_busy(
    store: GeneratorStore, postgres_url: str
) -> None:
    await store.transact([CreateEntry(make_entry("t"))])
    swap = make_swap("t", make_entry("t").metadata_location, "file:///1")
    async with (
        _connect(postgres_url) as lock_holder,
        open_postgres(postgres_url, clock=CLOCK, pool_min=1, pool_max=1, timeout_s=8) as small_store,
    ):
        await lock_holder.execute("BEGIN; UPDATE entries SET version = version")
        blocked_task = asyncio.create_task(get_outcome(small_store.transact([swap])))
        await asyncio.sleep(0.1)  # The task takes the only connection.
        waiting_calls = asyncio.gather(*(get_outcome(small_store.ping()) for _ in range(3)))
        await asyncio.sleep(0.1)
        assert not waiting_calls.done()
        await lock_holder.execute("ROLLBACK")
        assert await blocked_task == "won"
        assert await waiting_calls == ["won"] * 3
        await lock_holder.execute("BEGIN; UPDATE entries SET version = version")
        # The lock is held until all swaps have failed: those that wait for the lock, and those without a connection.
        swap = make_swap("t", "file:///1", "file:///2")
        swaps = [asyncio.create_task(small_store.transact([swap])) for _ in range(8)]
        results = await asyncio.gather(*swaps, return_exceptions=True)
        assert {type(result) for result in results} == {RetryLater}
        assert any("All 1 connections" in str(result) for result in results)
        await lock_holder.execute("ROLLBACK")


async def test_cancelled_transaction_leaves_no_trace_and_a_clean_connection(
    store: GeneratorStore, postgres_url: str
) -> None:
    await store.transact([CreateEntry(make_entry("t"))])
    location = make_entry("t").metadata_location
    async with (
        _connect(postgres_url) as lock_holder,
        open_postgres(postgres_url, clock=CLOCK, pool_min=1, pool_max=1) as small_store,
    ):
        await lock_holder.execute("BEGIN; UPDATE entries SET version = version")
        task = asyncio.create_task(
            small_store.transact([CreateNamespace(("b",), {}), make_swap("t", location, "file:///1")])
        )
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await lock_holder.execute("ROLLBACK")
        assert await small_store.load_namespace(("b",)) is None
        await small_store.transact([make_swap("t", location, "file:///2")])


@pytest.mark.slow
async def test_fifty_openings_leak_no_connection_and_no_task(store: GeneratorStore, postgres_url: str) -> None:
    async def open_and_close() -> None:
        async with open_postgres(postgres_url, clock=CLOCK, pool_min=2) as postgres:
            await postgres.ping()

    await open_and_close()
    counts_before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for _ in range(50):
        await open_and_close()
    counts_after = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    # A leak in each of the 50 openings would add at least 50. Other code may open a few descriptors and tasks.
    assert counts_after[0] < counts_before[0] + 25
    assert counts_after[1] < counts_before[1] + 25


# Tests of the schema


async def test_concurrent_openings_create_one_schema(postgres_url: str) -> None:
    async def open_and_create(number: int) -> None:
        async with open_postgres(postgres_url, clock=CLOCK) as postgres:
            await postgres.transact([CreateNamespace((f"n{number}",), {})])

    await asyncio.gather(*(open_and_create(number) for number in range(8)))
    async with open_postgres(postgres_url, clock=CLOCK) as postgres:
        assert len(await postgres.list_namespaces((), None, 99)) == 8


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("UPDATE schema_version SET version = 99", "schema version 99"),
        ("INSERT INTO schema_version VALUES (1)", "several rows"),
        ("DELETE FROM schema_version", "already exists"),
    ],
)
async def test_foreign_schema_is_rejected(postgres_url: str, change: str, complaint: str) -> None:
    async with open_postgres(postgres_url, clock=CLOCK):
        pass
    async with _connect(postgres_url) as connection:
        await connection.execute(change)
    with pytest.raises(ConfigError, match=complaint):
        async with open_postgres(postgres_url, clock=CLOCK):
            pass


async def test_missing_or_foreign_database_is_rejected_with_the_statement_that_helps(
    postgres_url: str,
) -> None:
    name, account = f"foreign_{os.getpid()}", f"guest_{os.getpid()}"
    url_parts = urlsplit(postgres_url)
    with pytest.raises(ConfigError, match=r"does not exist; create it.*CREATE DATABASE"):
        async with open_postgres(f"{postgres_url.rpartition('/')[0]}/no_such_database", clock=CLOCK):
            pass
    async with _connect(postgres_url) as connection:
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.execute(f"CREATE ROLE {account} LOGIN PASSWORD 'guest'")
        try:
            guest_url = f"postgresql://{account}:guest@{url_parts.hostname}:{url_parts.port}/{name}"
            async with _connect(f"{postgres_url.rpartition('/')[0]}/{name}") as foreign_database:
                # PostgreSQL 15 and later revoke this right by default.
                await foreign_database.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            with pytest.raises(ConfigError, match=r"permission denied.*ALTER DATABASE"):
                async with open_postgres(guest_url, clock=CLOCK):
                    pass
        finally:
            await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
            await connection.execute(f"DROP ROLE {account}")


@pytest.mark.slow
async def test_database_of_another_encoding_is_rejected(postgres_url: str) -> None:
    name = f"latin_{os.getpid()}"
    async with _connect(postgres_url) as connection:
        await connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            with pytest.raises(ConfigError, match="encoding is not UTF8"):
                async with open_postgres(f"{postgres_url.rpartition('/')[0]}/{name}", clock=CLOCK):
                    pass
        finally:
            await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
