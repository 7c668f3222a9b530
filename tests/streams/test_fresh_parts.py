"""Tests of the choice of fresh files: a plan names few files, and a reader waits for few rows."""

from __future__ import annotations

import random

import pytest

from seamark.metaserver.streams.fresh_parts import MERGED_ROWS_MAX, FreshPart, FreshParts
from seamark.metaserver.streams.row_files import EncodedFile
from tests.seeds import examples, first_seed


def write_parts(parts: FreshParts, end: int, cut: int | None = None) -> list[int]:
    """Write the parts up to an offset; return the number of rows of each."""
    ranges = parts.choose_ranges(0, end, cut)
    written = [
        FreshPart(
            0, each.start, each.end, (EncodedFile(f"{each.start}-{each.end}", b"", b"{}", each.end - each.start),)
        )
        for each in ranges
    ]
    parts.replace(written)
    parts.check_invariants()
    return [part.end - part.start for part in written]


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(20, judged_number=5)))
def test_many_reads_of_a_growing_table_write_small_parts_and_leave_few(seed: int) -> None:
    rng, parts, end, written_rows = random.Random(seed), FreshParts(), 0, 0
    for _ in range(1_000):
        added = rng.choice((1, 100, 1_000, 3_000))
        end += added
        (rows,) = write_parts(parts, end)
        written_rows += rows
        assert rows <= max(MERGED_ROWS_MAX, end // 16, added)
        assert len(parts.parts) <= 50
        assert parts.get_covered_offset(0) == end
    assert written_rows <= 10 * end


def test_no_part_crosses_the_end_of_a_running_flush() -> None:
    parts = FreshParts()
    write_parts(parts, 100)
    assert write_parts(parts, 200, cut=160) == [160, 40]
    assert write_parts(parts, 230, cut=160) == [70]
    assert [(part.start, part.end) for part in parts.parts] == [(0, 160), (160, 230)]
