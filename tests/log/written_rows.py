"""A writer whose rows identify their append, and a check that compares the rows of a log with the acknowledgements.

`python -m tests.log.written_rows FOLDER` appends to the log in a folder until it is killed, and prints each
acknowledgement.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.log.port import Batch, Record, Shard, StreamLog, StreamProducer
from seamark.metaserver.log.segments import SegmentLimits, open_segment_log

LIMITS = SegmentLimits(segment_bytes=64 << 10, trim_interval_s=0.02)
SHARDS = [Shard("s1", 0), Shard("s1", 1), Shard("s2", 0)]
WRITERS = 8


class AcknowledgedAppend(msgspec.Struct, frozen=True):
    """An acknowledged append. `offsets` has the offset of each batch, by the index of its shard."""

    producer: str
    sequence: int
    offsets: dict[int, int]


def build_rows(producer: str, sequence: int) -> dict[Shard, Batch]:
    """Return random batches for an append. Equal producers and sequence numbers have equal batches.

    Tests can thus compute the rows of an append again.
    """
    rng = random.Random(f"{producer}/{sequence}")
    written_shards = rng.sample(SHARDS, rng.choice((1, 1, 2, 3)))
    text = f"{producer}/{sequence}/".encode()
    return {
        shard: Batch(rng.randrange(1, 5), text + rng.randbytes(rng.choice((0, 10, 3000)))) for shard in written_shards
    }


async def append_until_cancelled(
    log: StreamLog, name: str, report_append: Callable[[AcknowledgedAppend], None]
) -> None:
    """Append as the producer `name` until the task is cancelled.

    Repeat a tenth of the appends, and check that the repetition gets the positions of the first append. Report each
    append to `report_append`.
    """
    state = await log.fence(name)
    rng = random.Random(f"{name} {state.epoch}")
    sequence = state.sequence + 1
    while True:
        producer = StreamProducer(name, sequence, state.epoch)
        answer = await log.append(build_rows(name, sequence), producer)
        if rng.random() < 0.1:
            repeated_answer = await log.append(build_rows(name, sequence), producer)
            assert (repeated_answer.duplicate, repeated_answer.positions) == (True, answer.positions)
        report_append(
            AcknowledgedAppend(
                name, sequence, {SHARDS.index(position.shard): position.offset for position in answer.positions}
            )
        )
        sequence += 1


def check_rows(
    records: dict[Shard, list[Record]], acknowledged_appends: list[AcknowledgedAppend], starts: dict[Shard, int]
) -> None:
    """Check the rows of a log: no row is lost or occurs twice, and appends are complete and in order.

    `starts` has the first offset of each shard that the log still has.
    """
    offsets_by_append: dict[tuple[str, int], dict[Shard, int]] = defaultdict(dict)
    for shard, shard_records in records.items():
        end = starts[shard]
        last_sequences: dict[str, int] = {}
        for record in shard_records:
            assert record.offset == end, "offsets must have no gap"
            end = record.end
            assert record.sequence > last_sequences.get(record.producer, -1), (
                "the rows of a producer must be in order, and no row may occur twice"
            )
            last_sequences[record.producer] = record.sequence
            assert record.batch == build_rows(record.producer, record.sequence)[shard], "rows are unchanged"
            offsets_by_append[record.producer, record.sequence][shard] = record.offset
    if not any(starts.values()):
        for (producer, sequence), offsets in offsets_by_append.items():
            assert set(offsets) == set(build_rows(producer, sequence)), "an append must be complete"
    for acknowledged_append in acknowledged_appends:
        for index, offset in acknowledged_append.offsets.items():
            shard = SHARDS[index]
            actual_offset = offsets_by_append[acknowledged_append.producer, acknowledged_append.sequence].get(shard)
            assert actual_offset == offset or offset < starts[shard], (
                f"an acknowledged row is lost: {acknowledged_append}"
            )


async def main(folder: str) -> None:
    """Append until the process is killed."""

    def print_acknowledgement(acknowledged_append: AcknowledgedAppend) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(acknowledged_append) + b"\n")
        sys.stdout.buffer.flush()

    async with open_segment_log(Path(folder), SystemClock(), LIMITS) as log:
        await asyncio.gather(
            *(append_until_cancelled(log, f"p{number}", print_acknowledgement) for number in range(WRITERS))
        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
