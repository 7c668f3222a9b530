"""Tests of stream tables and their log in a simulated world of crashes.

They run the server's classes without sockets and threads. Each invariant has a mutation: code that violates it on
purpose. The simulation must detect each mutation.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.log import recovery, segments
from seamark.metaserver.log.frames import encode_meta, list_payloads
from seamark.metaserver.log.kafka.journal import AppendRequest, TrimRequest
from seamark.metaserver.log.kafka.journal_state import JournalReader, JournalState
from seamark.metaserver.log.kafka.kafka_log import KafkaLog
from seamark.metaserver.log.port import Acknowledgement, Shard, parse_owner
from seamark.metaserver.log.segment import LogSegment
from seamark.metaserver.log.state import AppendEntry, Group
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.stream_table import StreamTable
from tests.log.disk import OpenSimulatedFile
from tests.seeds import first_seed
from tests.streams.simulation.loop import run_simulated
from tests.streams.simulation.ports import SimulatedCatalog
from tests.streams.simulation.world import InvariantBroken, SimulationWorld

QUICK_SEEDS = 40
SLOW_SEEDS = 10_000
MUTATION_SEEDS = 300
"""The number of seeds within which the simulation must detect a mutation."""


def run_world(seed: int, **options) -> SimulationWorld:
    """Run the simulation of servers, clients and faults that the seed determines, and return its final state."""
    world = SimulationWorld(seed, **options)
    try:
        run_simulated(world.clock, world.run())
    except Exception as error:
        error.add_note(f"seed {seed}; run_world({seed}) repeats it")
        raise
    return world


def test_simulated_table_has_each_row_once_in_order() -> None:
    worlds = [run_world(seed, appends=4) for seed in range(first_seed(), first_seed() + QUICK_SEEDS)]
    assert sum(world.reads for world in worlds) > 10 * QUICK_SEEDS
    assert sum(world.crashes for world in worlds) > QUICK_SEEDS / 2
    assert sum(world.flushed_rows for world in worlds) > 20 * QUICK_SEEDS
    assert sum(world.durable_checks for world in worlds) > 2 * QUICK_SEEDS
    assert {world.is_fleet for world in worlds} == {False, True}


@pytest.mark.parametrize("seed", [5302, 6083, 6762])
def test_retention_keeps_rows_in_worlds_that_once_failed(seed: int) -> None:
    run_world(seed, appends=20)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_simulated_tables_have_each_row_once_and_in_order() -> None:
    for seed in range(first_seed(), first_seed() + SLOW_SEEDS):
        run_world(seed, appends=20)


def test_the_same_seed_gives_the_same_run() -> None:
    first_run, second_run = run_world(3), run_world(3)
    assert first_run.trace == second_run.trace
    assert (first_run.reads, first_run.flushed_rows) == (second_run.reads, second_run.flushed_rows)
    assert first_run.storage.objects == second_run.storage.objects


# -- mutations -------------------------------------------------------------------------------------------------------


def acknowledge_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    """Acknowledge rows without a sync, so that a power cut loses them."""
    patch.setattr(OpenSimulatedFile, "sync", lambda file: None)


def forget_what_producers_sent(patch: pytest.MonkeyPatch) -> None:
    """Make the log store a repeated append again, as if it had forgotten the producer's earlier appends."""
    patch.setattr(Group, "_check_sequence", lambda group, producer: None)


def accept_appends_in_any_order(patch: pytest.MonkeyPatch) -> None:
    """Accept each sequence number that the log does not remember, in any order."""

    def accept(group: Group, producer):
        summary = group._find_producer(producer.name)
        appends = summary.appends if summary is not None else ()
        return next((append.make_acknowledgement() for append in appends if append.sequence == producer.sequence), None)

    patch.setattr(Group, "_check_sequence", accept)


def ignore_appends_that_are_stored_late(patch: pytest.MonkeyPatch) -> None:
    """Treat an append as a repetition if a later append of the producer was stored first."""
    check = Group._check_sequence
    patch.setattr(Group, "_check_sequence", lambda group, producer: check(group, replace(producer, sparse=True)))


def flush_without_comparing(patch: pytest.MonkeyPatch) -> None:
    """Make a flush add its rows although the offsets have moved."""
    commit = SimulatedCatalog.commit

    def commit_without_comparing(catalog: SimulatedCatalog, *args) -> None:
        catalog.checks_offsets = False
        commit(catalog, *args)

    patch.setattr(SimulatedCatalog, "commit", commit_without_comparing)


def recover_the_last_segment_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    """Omit the sync in the recovery after a crash, so that rows are served that are only in the kernel's memory."""
    recover_last_segment = recovery._recover_last_segment

    def recover(files, segment_files, state, segment_bytes):
        sync_patch = pytest.MonkeyPatch()
        sync_patch.setattr(OpenSimulatedFile, "sync", lambda file: None)
        try:
            return recover_last_segment(files, segment_files, state, segment_bytes)
        finally:
            sync_patch.undo()

    patch.setattr(recovery, "_recover_last_segment", recover)


def combine_old_files_with_new_offsets(patch: pytest.MonkeyPatch) -> None:
    """Let a reader combine the files from before a flush with the rows that are in the log after the flush.

    The reader then misses the flushed rows.
    """
    patch.setattr(
        StreamTable, "_advance_to_reader", lambda table, flushed_offsets: table._drop_flushed(flushed_offsets)
    )


def read_shards_at_different_moments(patch: pytest.MonkeyPatch) -> None:
    """Let readers use an earlier watermark for the last shard than for the others, so that they see half an append."""
    read_watermarks = StreamTable.read_watermarks
    last_watermarks: dict[int, dict[int, int]] = {}

    def mix_watermarks(table: StreamTable) -> dict[int, int]:
        watermarks = read_watermarks(table)
        earlier_watermarks = last_watermarks.get(id(table), watermarks)
        last_watermarks[id(table)] = watermarks
        last_shard = max(watermarks)
        return {**watermarks, last_shard: max(earlier_watermarks.get(last_shard, 0), table.flushed[last_shard])}

    patch.setattr(StreamTable, "read_watermarks", mix_watermarks)


def store_shards_apart(patch: pytest.MonkeyPatch) -> None:
    """Store each batch of an append as a separate record, so that a power cut leaves half of the append."""
    append = Group.append

    def append_each_batch(group: Group, batches, producer):
        answer = append(group, batches, producer)
        if not answer.duplicate:
            entry = group.entries.pop()
            assert isinstance(entry, AppendEntry)
            group.entries += [
                AppendEntry(entry.time_ms, (batch,), entry.producer, entry.epoch, entry.sequence)
                for batch in entry.batches
            ]
        return answer

    async def write_group(log: segments.SegmentLog) -> None:
        """Write a group like `SegmentLog`, but with several entries for one append."""
        group = Group(log._state, log._clock.now_ms())
        answers, frames = [], []
        while log._requests:
            request = log._requests.popleft()
            if request.future.done():
                continue
            entry_count = len(group.entries)
            try:
                answers.append((request.future, request.admit(group)))
            except SeamarkError as error:
                request.future.set_exception(error)
                continue
            for entry, batch in zip(group.entries[entry_count:], request.batches, strict=False):
                frames.append((encode_meta(entry), list_payloads([batch])))
        if not frames or await log._store(group, frames, size_bytes=0, answers=answers):
            for future, answer in answers:
                if not future.done():
                    future.set_result(answer)

    patch.setattr(Group, "append", append_each_batch)
    patch.setattr(segments.SegmentLog, "_write_group", write_group)


def treat_all_rows_as_released(patch: pytest.MonkeyPatch) -> None:
    """Treat all rows as flushed and no longer needed, so that retention removes rows that are in no data file."""
    patch.setattr(LogSegment, "is_released", lambda segment, state: True)


def let_servers_plan_with_an_old_journal(patch: pytest.MonkeyPatch) -> None:
    """Let servers plan before they have read the whole journal. The journal contains the offsets of appended rows."""

    async def skip_sync(log: KafkaLog) -> None:
        pass

    patch.setattr(KafkaLog, "catch_up", skip_sync)


def acknowledge_before_the_journal(patch: pytest.MonkeyPatch) -> None:
    """Acknowledge rows when they are in their partitions, before a record of the journal names them.

    Only rows that the journal names are appended. The acknowledgement is that of a repetition, so it has no positions.
    """
    write_rows = KafkaLog._write_rows

    async def write(log: KafkaLog, group):
        requests = await write_rows(log, group)
        for waiting_append in group:
            if isinstance(waiting_append.request, AppendRequest) and not waiting_append.future.done():
                waiting_append.future.set_result(Acknowledgement((), duplicate=True))
        return requests

    patch.setattr(KafkaLog, "_write_rows", write)


def decide_by_a_setting_of_the_server(patch: pytest.MonkeyPatch) -> None:
    """Make each server forget producers by its own limit, so that servers decide differently."""
    apply, limits = JournalState.apply, itertools.cycle((2, 1 << 62))  # The second limit is never reached.

    def forget_producers(state: JournalState, group):
        outcomes = apply(state, group)
        if "limit" not in state.__dict__:  # Servers with consecutive numbers get different limits.
            state.__dict__["limit"] = next(limits)
        while len(state.state.producers) > state.__dict__["limit"]:
            del state.state.producers[next(iter(state.state.producers))]
        state.state.producer_counts = Counter(map(parse_owner, state.state.producers))
        return outcomes

    patch.setattr(JournalState, "apply", forget_producers)


def delete_rows_that_came_late(patch: pytest.MonkeyPatch) -> None:
    """Delete Kafka's records up to the last released row, and with them rows that arrived late.

    Retention keeps the records from `start.record` on. One record more is removed here.
    """
    trim = JournalState._trim

    def trim_late_rows(state: JournalState, request: TrimRequest, now_ms: int) -> None:
        trim(state, request, now_ms)
        for start in request.starts:
            shard = Shard(start.stream, start.number)
            if shard in state._first_records:
                state._first_records[shard] = max(start.record + 1, state._first_records[shard])

    patch.setattr(JournalState, "_trim", trim_late_rows)


def begin_at_any_head(patch: pytest.MonkeyPatch) -> None:
    """Let a server start from any head of the journal, although records after it may be deleted.

    A head is a summary of the journal, which is written to the journal in pieces.
    """
    read_head = JournalReader._read_head

    def read(reader: JournalReader, piece) -> None:
        reader._first = 0
        read_head(reader, piece)

    patch.setattr(JournalReader, "_read_head", read)


def write_shards_apart(patch: pytest.MonkeyPatch) -> None:
    """Write a separate journal record for each shard of an append."""
    append = JournalState._append

    def append_first_batch(state: JournalState, request: AppendRequest, group):
        if len(request.batches) == 1:
            return append(state, request, group)
        first_batch, *later_batches = request.batches
        answer = append(state, structs.replace(request, batches=(first_batch,)), group)
        # The other batches are appended before the next group, each as a record of its own.
        state.__dict__.setdefault("late", []).extend(later_batches)
        return answer

    apply = JournalState.apply

    def apply_in_parts(state: JournalState, group):
        for batch in state.__dict__.pop("late", []):
            apply(state, structs.replace(group, requests=(AppendRequest((batch,)),)))
        return apply(state, group)

    patch.setattr(JournalState, "_append", append_first_batch)
    patch.setattr(JournalState, "apply", apply_in_parts)


def let_every_server_own_each_table(patch: pytest.MonkeyPatch) -> None:
    """Let a server that has lost its lease flush the rows of the owner again, without a comparison of offsets."""
    patch.setattr(StreamOwners, "is_owner", lambda owners, uuid: True)
    flush_without_comparing(patch)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, bool, int]] = [
    (acknowledge_before_the_sync, "rows are lost|rows are damaged|beyond the watermark", False, 5),
    (treat_all_rows_as_released, "acknowledged rows are lost", False, 9),
    (ignore_appends_that_are_stored_late, "acknowledged rows are lost", False, 1),
    (forget_what_producers_sent, "twice|out of order", False, 1),
    (flush_without_comparing, "twice", True, 5),
    (accept_appends_in_any_order, "out of order|invariant", True, 1),
    (combine_old_files_with_new_offsets, "acknowledged rows are lost|went back", True, 3),
    (recover_the_last_segment_without_a_sync, "beyond the watermark|went back|rows are damaged", False, 233),
    (read_shards_at_different_moments, "only a part of an append|acknowledged rows are lost", False, 1),
    (store_shards_apart, "only a part of an append", False, 351),
    (let_servers_plan_with_an_old_journal, "acknowledged rows are lost|went back", True, 17),
    (acknowledge_before_the_journal, "acknowledged rows are lost", True, 1),
    (
        decide_by_a_setting_of_the_server,
        "different states|twice|out of order|a part of an append|rows are lost",
        True,
        1,
    ),
    (delete_rows_that_came_late, "acknowledged rows are lost|has been deleted", True, 1),
    (begin_at_any_head, "different states|acknowledged rows are lost|twice", True, 31),
    (write_shards_apart, "only a part of an append|different states", True, 1),
    (let_every_server_own_each_table, "twice", True, 1),
]
"""(function, message of the simulation, True if it needs a fleet, first seed to try) for each mutation."""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("mutate", "message", "fleet", "start_seed"), MUTATIONS, ids=[mutation[0].__name__ for mutation in MUTATIONS]
)
def test_the_simulation_detects_each_mutation(
    mutate: Callable[[pytest.MonkeyPatch], None],
    message: str,
    fleet: bool,
    start_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    for seed in range(start_seed, start_seed + MUTATION_SEEDS):
        try:
            run_world(seed, fleet=fleet)
        except InvariantBroken as error:
            assert re.search(message, str(error)), error  # noqa: PT017
            return
    pytest.fail("the simulation does not detect the mutation")
