"""Opens the stream tables of a server, with the configured log and its input topics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.commit.changes.group_commit import Commits
from seamark.metaserver.log.kafka.topics import InputTopic
from seamark.metaserver.log.port import Acknowledgement, StreamLog
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.runtime.background import run_in_background
from seamark.metaserver.settings.fleet import READ
from seamark.metaserver.streams.appends import TableRows, TopicProducer
from seamark.metaserver.streams.incoming.dead_letters import DeadLetters, find_dead_letters
from seamark.metaserver.streams.log_opening import LogSource, open_log_source
from seamark.metaserver.streams.owners import StreamOwners, open_owners
from seamark.metaserver.streams.row_files import RowFiles
from seamark.metaserver.streams.stored_rows import RowSearch
from seamark.metaserver.streams.streams import Streams
from seamark.metaserver.streams.topics.intake import TopicIntake
from seamark.metaserver.streams.topics.intakes import TopicIntakes

_log = structlog.get_logger("seamark.streams")


@asynccontextmanager
async def open_streams(
    catalog: Catalog,
    commits: Commits,
    objects: ObjectStore,
    row_files: RowFiles,
    search: RowSearch,
    keyring: Keyring,
) -> AsyncIterator[Streams]:
    """Open the stream tables with the configured log, and flush them in the background.

    Args:
        catalog: The tables, the settings and the database.
        commits: Commits the files of flushes.
        objects: The storage for the files.
        row_files: Converts rows to files.
        search: Finds stored rows by key.
        keyring: The keys that sign the records of fresh snapshots, by which other processes verify them. A fresh
            snapshot has rows that no commit has added to its table yet.

    Raises:
        ConfigError: The settings of the log are invalid.
    """
    settings, store, clock = catalog.context.settings, catalog.context.store, catalog.context.clock
    async with (
        open_log_source(settings, clock) as logs,
        open_owners(settings, store, clock, is_shared=logs.is_shared) as owners,
    ):
        streams = Streams(catalog, commits, objects, logs, row_files, search, owners, keyring)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(run_in_background("streams", streams.run))
                # This task opens tables whose rows wait in the log, so that they are flushed.
                await stack.enter_async_context(run_in_background("openings of streams", streams.openings.run))
                if logs.is_shared and settings.role != READ:
                    read_topics = partial(_read_topics, catalog, streams, logs, owners)
                    await stack.enter_async_context(run_in_background("input topics", read_topics))
                yield streams
        finally:
            await streams.close()


async def _read_topics(catalog: Catalog, streams: Streams, logs: LogSource, owners: StreamOwners) -> None:
    """Append the rows of input topics until the task is cancelled.

    Other programs write the rows to these topics of Kafka. Each table has at most one.
    """
    clock, rows_max = catalog.context.clock, catalog.context.settings.stream_rows_limit

    def make_intake(log: StreamLog, uuid: str, topic: InputTopic) -> TopicIntake:
        tables = AppendingTables(catalog, streams)
        return TopicIntake(uuid, topic, log, tables, streams.row_files, clock, streams.topic_counts, rows_max=rows_max)

    async with logs.open_topics() as source:
        await TopicIntakes(source, owners, clock, streams.topic_counts, partial(make_intake, await logs.open())).run()


class AppendingTables:
    """The stream tables of this server, to which the messages of input topics are appended (`TopicTables`)."""

    def __init__(self, catalog: Catalog, streams: Streams) -> None:
        self._catalog = catalog
        self._streams = streams

    async def load(self, uuid: str) -> tuple[LoadedTable, DeadLetters | None]:
        """Return a tuple of a table and its dead-letter table, which is None if it does not exist or is unusable."""
        entry, metadata = await self._streams.stream_tables.load(uuid)
        loaded_table = LoadedTable(entry, metadata)
        try:
            return loaded_table, await find_dead_letters(self._catalog, loaded_table)
        except BadRequest as error:
            _log.warning("a dead-letter table is not used", table=uuid, error=error.message)
            return loaded_table, None

    async def append(self, appends: Sequence[TableRows], producer: TopicProducer) -> Acknowledgement:
        """Append all rows or no rows to the tables."""
        return await self._streams.append(appends, producer)
