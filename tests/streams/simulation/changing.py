"""A simulated fleet whose table changes the way in which its rows are written.

Such a change stands for a commit that promotes a column or removes a schema. Each change has a number, the generation
of the table. Each batch states the generation for which its rows were checked. A flush or a fresh file must never meet
a batch with another generation than that of the table, because its rows may not fit the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, NoSuchTable, RetryLater, SeamarkError
from seamark.metaserver.log.kafka.kafka_log import KafkaLog
from seamark.metaserver.log.port import Batch, StreamProducer
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import CheckFence
from seamark.metaserver.streams.row_files import EncodedFile, RowSlice
from seamark.metaserver.streams.stream_table import StreamTable
from tests.streams.simulation.ports import LineFiles, NoAnswer, SimulatedCatalog, SimulatedTable
from tests.streams.simulation.world import SHARDS, Append, InvariantBroken, Process, SimulationWorld

_GENERATION = b"\n@"
"""The marker between the rows of a batch and their generation."""


@dataclass
class ChangingTable(SimulatedTable):
    """A table with its generation: how often a commit has changed how its rows are written, for example its schema."""

    generation: int = 0


class TableFiles(tuple[str, ...]):
    """The names of the files of a table, and its generation. They replace the metadata of a table in the simulation."""

    generation = 0


class ChangingCatalog(SimulatedCatalog):
    """Tables with generations. A generation counts the changes of how the rows of a table are written."""

    def entry(self, uuid: str) -> tuple[Entry, Any]:
        entry, files = super().entry(uuid)
        metadata = TableFiles(files)
        metadata.generation = self.get_table(uuid).generation
        return entry, metadata

    def get_table(self, uuid: str) -> ChangingTable:
        table = self.tables[uuid]
        assert isinstance(table, ChangingTable)
        return table

    def change(self, uuid: str, generation: int) -> None:
        """Change a table if its generation is `generation`.

        Raises:
            CommitConflict: The table has another generation.
            NoSuchTable: The table was dropped.
        """
        table = self.get_table(uuid)
        if table.is_dropped:
            raise NoSuchTable(f"no table {uuid}")
        if table.generation != generation:
            raise CommitConflict("the table has changed")
        table.generation += 1
        table.version += 1  # It counts all commits to the table.


class ChangingFiles(LineFiles):
    """Encodes rows, and checks that they were appended in the current generation of the table."""

    def encode(self, rows: Sequence[RowSlice], metadata: Any, folder: str | None) -> list[EncodedFile]:
        for row_slice in rows:
            generation = int(row_slice.payload.rsplit(_GENERATION, 1)[1])
            if generation != metadata.generation:
                raise InvariantBroken(
                    f"rows checked for generation {generation} were written to a table of generation "
                    f"{metadata.generation}"
                )
        return super().encode(rows, metadata, folder)


class ChangingWorld(SimulationWorld):
    """A fleet whose servers change the table while they append to it."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options, fleet=True)
        self.catalog: ChangingCatalog = ChangingCatalog()
        self.files = ChangingFiles()
        self.changes = 0

    def create_or_replace_table(self) -> None:
        super().create_or_replace_table()
        self.catalog.tables[self.uuid] = ChangingTable(self.uuid, dict.fromkeys(range(SHARDS), 0))

    async def _append(self, process: Process, table: StreamTable, append: Append) -> None:
        """Append rows that contain the generation of the table.

        A gate in the log stops appends to the table during a commit that changes it. The number of the gate is read
        before the generation. If a commit closes the gate afterwards, its number changes, and the log refuses the rows.
        """
        assert process.gates is not None
        async with process.gates.hold_commits(self._get_log(process), [table.uuid]) as numbers:
            _, metadata = await self.make_tables().load(table.uuid)
            await self.wait_while_paused(process)
            batches = {
                shard: Batch(len(rows), b"\n".join(rows) + _GENERATION + b"%d" % metadata.generation)
                for shard, rows in append.rows.items()
            }
            await table.append(batches, StreamProducer(append.producer, append.sequence), numbers)

    def _get_log(self, process: Process) -> KafkaLog:
        if not isinstance(process.log, KafkaLog):
            raise RetryLater("the server is starting")
        return process.log

    def create_change_actors(self) -> Sequence[Coroutine[None, None, None]]:
        return [self._run_changer(), self._run_changer()]

    async def _run_changer(self) -> None:
        """Change the table at random times, through random servers."""
        while True:
            await asyncio.sleep(self.rng.choice((0.05, 0.3, 1)))
            if live_processes := self.list_live_processes():
                process = self.rng.choice(live_processes)
                with suppress(SeamarkError, NoAnswer):
                    await self.call(process, partial(self._change, process, self.uuid))

    async def _change(self, process: Process, uuid: str) -> None:
        """Change a table as a server does.

        Close the gate of the table, so that the log accepts no rows for it. Then flush the table, and commit.

        `fences` are the checks that the process still has the lease of the table.
        """
        await self.wait_while_paused(process)
        table = await self.table(process, uuid)
        assert process.gates is not None
        async with process.gates.hold_appends(self._get_log(process), [uuid]) as fences:
            await table.flush()
            _, metadata = await self.make_tables().load(uuid)
            await self.wait_while_paused(process)
            await self._commit_change(uuid, metadata.generation, fences)

    async def _commit_change(self, uuid: str, generation: int, fences: Sequence[CheckFence]) -> None:
        """Send a change to the catalog. Sometimes its transaction runs long after its connection was lost."""
        delay_s = self.rng.choice((0, 0, 0, 1.5)) if self.faults.lost_reply else 0

        async def receive() -> None:
            await asyncio.sleep(delay_s)
            for fence in fences:
                self.leases.check_fence(fence)
            self.catalog.change(uuid, generation)
            self.changes += 1

        try:
            await self.network.send(receive)
        except NoAnswer:
            raise CommitUnknown("no answer to the commit") from None
