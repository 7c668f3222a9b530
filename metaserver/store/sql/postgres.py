"""The pointer store on PostgreSQL: a pool of asyncpg connections, for any number of replicas.

- Transactions use READ COMMITTED. Each statement contains the condition of its change (see `operations`), so no replica
  relies on earlier reads. After a deadlock or a serialization failure, PostgreSQL rolls the transaction back, and its
  generator runs again.
- If a connection is lost before COMMIT is sent, nothing has changed, and the transaction is repeated on another
  connection. If the connection is lost later, the result is CommitUnknown.
- Each wait for a connection or a statement is limited. PostgreSQL has its own limit of a statement, so that locks are
  released.
- Error messages never contain the URL, which may contain a password. Messages of a running store also contain no
  address, and no text of PostgreSQL that may contain values, because unauthenticated clients may receive the messages.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg
import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitUnknown,
    ConfigError,
    RetryLater,
    SeamarkError,
    StorageError,
    StorageFull,
)
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from seamark.metaserver.store.sql.migrations import apply_migrations, renew_epoch
from seamark.metaserver.store.sql.statement import APPLICATION_NAME, POSTGRES, Steps
from seamark.metaserver.store.stale_reads import StaleReads

T = TypeVar("T")

TRANSACTION_ATTEMPTS_MAX = 6
"""The maximum number of attempts of a transaction after deadlocks, or after connections lost before COMMIT."""
CONNECT_TIMEOUT_S = 10.0
"""The time limit for opening a connection, and for waiting until PostgreSQL has started."""
ROLLBACK_TIMEOUT_S = 5.0
"""The time limit for rolling a connection back. After it, the connection is closed."""
INDEX_ROW_BYTES = 2704
"""The maximum size of an index row: a third of a page of PostgreSQL's B-trees, after compression."""
_CLIENT_EXTRA_S = 5
"""The time by which the client's limit of a statement exceeds the limit of PostgreSQL."""
_CONNECT_RETRY_S = 0.2
_CACHED_STATEMENTS_MAX = 512
_VERSION_MIN = 13
MIGRATION_LOCK = 0x5EA_3A4C
"""The key of the advisory lock that serialises migrations of replicas."""

_translate = POSTGRES.make_translator()
_log = structlog.get_logger("seamark.store")

LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,
    # PostgreSQL may have closed an idle connection of the pool.
    asyncpg.InternalClientError,
    OSError,  # TimeoutError and ConnectionError are subclasses.
)
_REASONS: dict[type[Exception], str] = {
    ConnectionRefusedError: "connection refused",
    socket.gaierror: "the name of the host is not known",
    TimeoutError: "no answer in time",
}
_ROLLED_BACK = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)


@asynccontextmanager
async def open_postgres(
    dsn: str,
    *,
    clock: Clock,
    pool_min: int = 1,
    pool_max: int = 10,
    timeout_s: float = 30.0,
    stale_reads: StaleReads | None = None,
) -> AsyncIterator[PointerStore]:
    """Open the store, and migrate its schema.

    Args:
        timeout_s: The time limit of each statement, and of each wait for a connection.
        stale_reads: Keeps the results of reads for requests that allow stale answers, or None.

    Raises:
        ConfigError: The server refuses the credentials, or the database is unsuitable.
        RetryLater: The server does not answer.
    """
    database = describe_database(dsn)
    pool = await open_pool(dsn, database, pool_min, pool_max, timeout_s)
    try:
        await _prepare_database(pool, database, dsn)
        store = _PostgresStore(pool, clock, database, pool_max, timeout_s, stale_reads)
        try:
            yield store
        finally:
            await store.close_reads()
    finally:
        try:
            await asyncio.wait_for(pool.close(), CONNECT_TIMEOUT_S)
        except TimeoutError:
            pool.terminate()


def describe_database(dsn: str) -> str:
    """Return the host, the port and the database for messages.

    Raises:
        ConfigError: The URL is invalid.
    """
    try:
        parts = urlsplit(dsn)
        return f"PostgreSQL at {parts.hostname or 'localhost'}:{parts.port or 5432}{parts.path}"
    except ValueError:
        raise ConfigError("The PostgreSQL URL is invalid; write postgresql://user@host:port/database") from None


async def _skip_reset(connection: Any) -> None:
    """Do nothing. Sessions have no state, so a connection returns to the pool without a round trip."""


async def open_pool(dsn: str, database_text: str, pool_min: int, pool_max: int, timeout_s: float) -> Any:
    """Open a pool of connections. While PostgreSQL does not answer, try again for `CONNECT_TIMEOUT_S`.

    Raises:
        ConfigError: The URL is invalid, or PostgreSQL refuses the connection.
        RetryLater: PostgreSQL does not answer.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONNECT_TIMEOUT_S
    timeout_ms = str(max(1, int(timeout_s * 1000)))
    while True:
        try:
            return await asyncpg.create_pool(
                dsn,
                min_size=min(pool_min, pool_max),
                max_size=pool_max,
                # The limit of PostgreSQL is shorter than the client's, because only PostgreSQL releases locks.
                command_timeout=timeout_s + _CLIENT_EXTRA_S,
                timeout=CONNECT_TIMEOUT_S,
                reset=_skip_reset,
                statement_cache_size=_CACHED_STATEMENTS_MAX,
                server_settings={
                    "application_name": APPLICATION_NAME,
                    "default_transaction_isolation": "read committed",
                    "idle_in_transaction_session_timeout": timeout_ms,
                    "statement_timeout": timeout_ms,
                    "synchronous_commit": "on",
                },
            )
        except asyncpg.InvalidCatalogNameError as error:
            fix = "create it for the account of the URL: CREATE DATABASE … OWNER … ENCODING 'UTF8'"
            raise ConfigError(f"{database_text} refuses the connection: {error}; {fix}") from None
        except asyncpg.InvalidAuthorizationSpecificationError as error:
            raise ConfigError(f"{database_text} refuses the connection: {error}") from None
        except (ValueError, asyncpg.ClientConfigurationError):
            raise ConfigError("The PostgreSQL URL is invalid; write postgresql://user@host:port/database") from None
        except LOST as error:
            if loop.time() > deadline:
                raise RetryLater(f"{database_text} does not answer ({explain_lost_connection(error)})") from None
            await asyncio.sleep(_CONNECT_RETRY_S)
        except asyncpg.PostgresError as error:
            raise ConfigError(f"{database_text} cannot be used: {error}") from None


async def create_search_path_schema(connection: Any, dsn: str) -> None:
    """Create the schema in the parameter `search_path` of the URL, if the URL has this parameter."""
    for schema in parse_qs(urlsplit(dsn).query).get("search_path", []):
        quoted_name = schema.replace('"', '""')
        await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{quoted_name}"')


async def _prepare_database(pool: Any, database_text: str, dsn: str) -> None:
    try:
        async with pool.acquire() as connection:
            if connection.get_server_version().major < _VERSION_MIN:
                raise ConfigError(f"{database_text} is too old; version {_VERSION_MIN} or newer is required")
            if connection.get_settings().server_encoding != "UTF8":
                raise ConfigError(
                    f"{database_text}: the database's encoding is not UTF8; create it with ENCODING 'UTF8'"
                )
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
                await create_search_path_schema(connection, dsn)
                await run_steps_in_postgres(connection, apply_migrations(POSTGRES))
                # After a restore of another cluster's dump, new timeline positions must sort after its positions.
                await run_steps_in_postgres(connection, renew_epoch())
    except asyncpg.InsufficientPrivilegeError as error:
        fix = "make the account of the URL the owner: ALTER DATABASE … OWNER TO …"
        raise ConfigError(f"{database_text}: the server cannot create its tables: {error}; {fix}") from None
    except asyncpg.PostgresError as error:
        raise ConfigError(f"{database_text}: the migration of the schema failed: {error}") from None
    except LOST as error:
        raise RetryLater(f"{database_text} does not answer ({explain_lost_connection(error)})") from None


def explain_lost_connection(error: Exception) -> str:
    """Return a readable reason why a connection was lost.

    The text of the error may be empty, or may contain all addresses of the host.
    """
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return type(error).__name__


async def run_steps_in_postgres(connection: Any, steps: Steps[T]) -> T:
    """Execute the statements that a generator yields on this connection, and return the generator's result."""
    try:
        statement = next(steps)
        while True:
            rows = await connection.fetch(_translate(statement.sql, statement.lock), *statement.params)
            statement = steps.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


class _PostgresStore(GeneratorStore):
    def __init__(
        self,
        pool: Any,
        clock: Clock,
        database_text: str,
        pool_max: int,
        timeout_s: float,
        stale_reads: StaleReads | None,
    ) -> None:
        super().__init__(clock, stale_reads)
        self._pool = pool
        self._database_text = database_text
        self._pool_max = pool_max
        self._timeout_s = timeout_s

    async def _run_change(self, make_steps: Callable[[], Steps[T]]) -> T:
        return await self._run_with_retries(self._run_transaction, make_steps)

    async def _read_point(self, make_steps: Callable[[], Steps[T]]) -> T:
        return await self._run_with_retries(_run_without_transaction, make_steps)

    async def _read_list(self, make_steps: Callable[[], Steps[T]]) -> T:
        return await self._run_with_retries(_run_without_transaction, make_steps)

    async def _run_with_retries(
        self, run: Callable[[Any, Callable[[], Steps[T]]], Any], make_steps: Callable[[], Steps[T]]
    ) -> T:
        """Run the steps on a connection, and convert failures into errors for the caller.

        The steps run again only after failures that have certainly changed nothing.

        Raises:
            SeamarkError: PostgreSQL does not answer, has failed, or has rolled the steps back in each attempt.
        """
        for attempt in range(TRANSACTION_ATTEMPTS_MAX):
            connection = await self._acquire()
            try:
                result: T = await run(connection, make_steps)
                return result
            except _ROLLED_BACK:
                await asyncio.sleep(self._draw_jitter_s(attempt))
            except (asyncpg.PostgresError, *LOST) as error:
                if not _is_lost(error):
                    raise self._convert_error(error) from error
                # Close the connection, because the pool would reuse it, or wait for a server that does not answer.
                _terminate_connection(connection)
                if isinstance(error, TimeoutError):
                    raise RetryLater(f"PostgreSQL took longer than {self._timeout_s:g} s") from error
            finally:
                await self._release(connection)
        raise RetryLater(f"PostgreSQL: the transaction was rolled back {TRANSACTION_ATTEMPTS_MAX} times; retry")

    async def _acquire(self) -> Any:
        try:
            return await self._pool.acquire(timeout=self._timeout_s)
        except TimeoutError:
            raise RetryLater(f"All {self._pool_max} connections to PostgreSQL are busy; retry") from None
        except asyncpg.TooManyConnectionsError:
            raise RetryLater("PostgreSQL accepts no more connections; retry") from None
        except (*LOST, asyncpg.PostgresError) as error:
            raise RetryLater(f"PostgreSQL does not answer ({explain_lost_connection(error)})") from None

    async def _release(self, connection: Any) -> None:
        """Return a connection to the pool.

        The method never raises an error, because the outcome of the transaction is known and must be returned.
        """
        try:
            await self._pool.release(connection, timeout=ROLLBACK_TIMEOUT_S)
        except (asyncpg.PostgresError, *LOST):
            _terminate_connection(connection)

    async def _run_transaction(self, connection: Any, make_steps: Callable[[], Steps[T]]) -> T:
        await connection.execute("BEGIN")
        try:
            result = await run_steps_in_postgres(connection, make_steps())
        except BaseException:
            await _roll_back(connection)
            raise
        try:
            await connection.execute("COMMIT")
        except asyncio.CancelledError:
            # The outcome is unknown, because asyncpg has asked the server to cancel the statement.
            _terminate_connection(connection)
            raise
        except LOST as error:
            _terminate_connection(connection)
            raise CommitUnknown(f"PostgreSQL was lost while committing ({explain_lost_connection(error)})") from error
        return result

    def _draw_jitter_s(self, attempt: int) -> float:
        """Return a random wait that doubles with each attempt, between 5 and 10 ms for attempt 0."""
        return float(0.005 * 2**attempt * (1 + self._clock.draw_bytes(1)[0] / 255))

    def _convert_error(self, error: Exception) -> SeamarkError:
        """Return the error for the caller after a failure of PostgreSQL that changed nothing."""
        if isinstance(error, (asyncpg.DataError, ValueError)):
            return BadRequest("A value does not fit the database: integers have 64 bits, text contains no NUL")
        if isinstance(error, asyncpg.ProgramLimitExceededError):
            return BadRequest(
                "A name with its namespace, or a location, is too long for PostgreSQL, whose indexes hold about "
                f"{INDEX_ROW_BYTES:,} bytes"
            )
        if isinstance(error, (asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError)):
            return RetryLater(f"PostgreSQL took longer than {self._timeout_s:g} s")
        if isinstance(error, asyncpg.DiskFullError):
            _log.warning("PostgreSQL cannot write", database=self._database_text, error=str(error))
            return StorageFull("The disk of PostgreSQL is full; nothing was changed: free space")
        if isinstance(error, (asyncpg.InsufficientResourcesError, asyncpg.ReadOnlySQLTransactionError)):
            _log.warning("PostgreSQL cannot write", database=self._database_text, error=str(error))
            return RetryLater("PostgreSQL has no memory or no connections left, or is read-only", retry_after_s=10)
        _log.error("statement failed", database=self._database_text, error=str(error))
        return StorageError("PostgreSQL failed; the server's log has the details")


async def _run_without_transaction(connection: Any, make_steps: Callable[[], Steps[T]]) -> T:
    """Run a read. It is consistent without a transaction, because a single statement reads all rows."""
    return await run_steps_in_postgres(connection, make_steps())


def _is_lost(error: Exception) -> bool:
    """Return whether the error means that the connection was lost.

    An InterfaceError that is also a ValueError does not: asyncpg raises it for an invalid parameter.
    """
    return isinstance(error, LOST) and not isinstance(error, ValueError)


async def _roll_back(connection: Any) -> None:
    """Roll the transaction back. If this fails, close the connection, which also ends the transaction."""
    try:
        await connection.execute("ROLLBACK", timeout=ROLLBACK_TIMEOUT_S)
    except (asyncpg.PostgresError, *LOST):
        _terminate_connection(connection)


def _terminate_connection(connection: Any) -> None:
    """Close the connection. If the pool has already removed a broken connection, do nothing."""
    with suppress(asyncpg.InterfaceError):
        connection.terminate()
