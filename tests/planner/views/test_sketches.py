"""Tests that a plan with sketches keeps the same files as without; other tests compare plans with brute force."""

from __future__ import annotations

import random
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Op
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.packing import Form
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_stats
from seamark.metaserver.planner.view import view as view_module
from seamark.metaserver.planner.view.selection import FileSelection, never_expires
from seamark.metaserver.planner.view.view import TableView
from tests.planner.views.test_view_base import READ_KINDS, build_manifest, draw_value, make_block
from tests.seeds import first_seed

SPREAD = 2_000_000_000
"""Values whose codes take four bytes and are rarely equal."""
ROWS = 2000
"""The number of files in a block. A sketch has at least one byte for each."""
OPS = [Op.LT, Op.LT_EQ, Op.GT, Op.GT_EQ, Op.EQ, Op.NOT_EQ, Op.IN, Op.STARTS_WITH]


def draw_bound(rng: random.Random) -> Bound:
    column = rng.randrange(len(READ_KINDS))
    kind = READ_KINDS[column]
    op = rng.choice(OPS[:-1] if kind != "string" else OPS)
    values: list[Any] = sorted({draw_value(kind, rng, SPREAD) for _ in range(4 if op is Op.IN else 1)})
    return Bound(op, column + 1, f"c{column + 1}", kind, IDENTITY, kind, tuple(values))


@pytest.mark.parametrize(
    "round_number", [0, *(pytest.param(round_number, marks=pytest.mark.slow) for round_number in range(1, 20))]
)
def test_plans_keep_the_same_files_with_and_without_sketches(
    round_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sketch of a column has one byte for each row, which decides most comparisons without the value itself."""
    seed = first_seed() * 1000 + round_number
    rng = random.Random(seed)
    absent_shares = (0.0, 0.01, 0.3)
    blocks = [make_block(f"m{n}", rng, rows=ROWS, spread=SPREAD, absent=share) for n, share in enumerate(absent_shares)]
    plain_view = TableView([build_manifest() for _ in blocks], blocks)
    bounds = [draw_bound(rng) for _ in range(30)]  # These are predicates on one column.
    expected = [find_remaining_rows(plain_view, bound) for bound in bounds]
    conjunctions = [rng.sample(range(len(bounds)), rng.randrange(2, 5)) for _ in range(20)]
    sizes_before = [block.size_bytes for block in blocks]
    # With these limits, views make sketches for columns of any length.
    monkeypatch.setattr(view_module, "_SKETCHED_ROWS_MIN", 1)
    monkeypatch.setattr(view_module, "ROWS_MIN", 1)
    monkeypatch.setattr(view_module, "STRING_ROWS_MIN", 1)
    sketched_view = TableView([build_manifest() for _ in blocks], blocks)
    assert [find_remaining_rows(sketched_view, bound) for bound in bounds] == expected, f"seed {seed}"
    for numbers in conjunctions:  # Sketches of the predicates in a conjunction are computed together.
        conjunction = And(tuple(bounds[number] for number in numbers))
        common_rows = set.intersection(*(set(expected[number]) for number in numbers))
        assert find_remaining_rows(sketched_view, conjunction) == sorted(common_rows), f"seed {seed}"
    # The view of the next snapshot reuses the sketches.
    sides = [side for column in sketched_view._stats.values() for side in (*column.lower, *column.upper)]
    addresses = {address for side in sides for address in side.layout[:, view_module._SKETCH].tolist()} - {0}
    assert any(side.layout[:, view_module._SKETCH].any() for side in sides if side.form == Form.STRINGS)
    # There are no sketches if a value is often absent, because then many codes are equal.
    assert addresses
    assert blocks[0].size_bytes - sizes_before[0] > ROWS
    assert blocks[2].size_bytes - sizes_before[2] < ROWS
    other_blocks = [make_block("n", rng, rows=ROWS, spread=SPREAD, absent=0.0), *blocks[1:]]
    next_view = TableView([build_manifest() for _ in other_blocks], other_blocks, base=sketched_view)
    monkeypatch.setattr(view_module, "_SKETCHED_ROWS_MIN", 1 << 40)  # The next view has no sketches.
    fresh_view = TableView([build_manifest() for _ in other_blocks], other_blocks)
    assert [find_remaining_rows(next_view, bound) for bound in bounds] == [
        find_remaining_rows(fresh_view, bound) for bound in bounds
    ], f"seed {seed}"


def find_remaining_rows(view: TableView, expression: Expression) -> list[int]:
    selection = FileSelection.select_all(view)
    narrow_by_stats(selection, expression, never_expires)
    selection.check_invariants()
    return selection.list_entry_ids().tolist()
