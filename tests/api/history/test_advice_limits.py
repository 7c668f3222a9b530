"""Tests of the advisor's limits: it uses limited memory, and the server answers other requests meanwhile."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from seamark.metaserver.api.admin import advice
from seamark.metaserver.history.samples import FilterSample, compute_repeats
from seamark.metaserver.history.shapes import QueryShape, ShapeTerm
from seamark.metaserver.planner.advice import row_samples
from seamark.metaserver.planner.advice.current_layout import add_bounds
from seamark.metaserver.planner.advice.proposals import Proposal, ProposedChange, Reads
from seamark.metaserver.planner.advice.replay import DRAWN_STATEMENTS_PER_SHAPE_MAX, RecordedShape, draw_statements
from seamark.metaserver.planner.advice.row_samples import RowSample, SampledColumn
from seamark.metaserver.planner.advice.trials import AppliedProposal, compute_corrections
from seamark.metaserver.planner.lookup.lookup import FoundFiles
from tests.api.client import Api
from tests.api.plans.planned import EQ_5, T


def build_sampled_column(files: list[list[int | None]]) -> SampledColumn:
    """Return the sampled column of files. Each item of `files` has the values of one file."""
    column_id = 1
    arrays = [{column_id: pa.array(values, pa.int64())} for values in files]
    return row_samples._combine_files(arrays, {column_id: "long"}).columns[column_id]


def test_sample_keeps_only_values_of_the_picked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[list[int | None]] = [[None, 5, *range(1000)], [5, None, *range(1000, 2000)]]
    full_column = build_sampled_column(files)
    assert (len(full_column.values), full_column.file_counts[[0, 1, 6]].tolist()) == (2000, [2, 1, 2])
    monkeypatch.setattr(row_samples, "LAYOUT_ROWS_MAX", 100)
    column = build_sampled_column(files)
    assert len(column.codes) == 100
    assert 90 <= len(column.values) <= 100
    assert len(column.file_counts) == len(column.values) + 1
    assert sorted(set(column.codes.tolist()) - {0}) == list(range(1, len(column.values) + 1))
    ranks_in_union = np.searchsorted(full_column.values, column.values) + 1
    assert column.file_counts[1:].tolist() == full_column.file_counts[ranks_in_union].tolist()


def test_bounds_of_many_files_add_a_limited_number_of_values() -> None:
    lower = np.arange(100_000, dtype=np.int64)
    stats = SimpleNamespace(read_bounds=lambda side: lower if side == "lower" else lower + 7)
    files = cast("FoundFiles", SimpleNamespace(find_statistics=lambda column: stats))
    sample_with_bounds = add_bounds(
        RowSample({1: build_sampled_column([[50_000, 50_001]])}, files=1, rows=2), files
    ).columns[1]
    # The 100,000 files have 200,000 bounds. At most 20,000 of them are added to the two sampled values.
    assert len(sample_with_bounds.values) <= 20_000 + 2
    assert (sample_with_bounds.values[0], sample_with_bounds.values[-1]) == (0, 100_006)
    assert sample_with_bounds.values[sample_with_bounds.codes - 1].tolist() == [50_000, 50_001]


def test_shape_with_many_alternatives_gets_fewer_drawn_statements() -> None:
    sample = RowSample({1: build_sampled_column([list(range(50_000))])}, 1, 50_000)
    for alternatives, draws in ((1, DRAWN_STATEMENTS_PER_SHAPE_MAX), (100, 1)):
        shape = QueryShape("other", (), ((ShapeTerm(1, "eq"),) * alternatives,))
        statements = draw_statements([RecordedShape("a", shape, 48)], sample, seed=1)
        assert len(statements) == draws
        assert sum(statement.weight for statement in statements) == pytest.approx(48)


def test_frequent_values_are_drawn_more_often_if_recorded_statements_repeat_values() -> None:
    values = [1] * 900 + list(range(2, 102))  # The value 1 is frequent, and 100 other values occur once.
    sample = RowSample({1: build_sampled_column([list(values)])}, files=1, rows=len(values))
    shape = QueryShape("other", columns=(), conjuncts=((ShapeTerm(column_id=1, op="eq"),),))
    frequent_counts = {}  # The number of drawn statements that compare with the value 1, by the recorded repeats
    # The highest fraction is 0.9², the probability that two random rows both have the value 1.
    for repeats in (0.0, 0.3, 0.81):
        recorded_shape = RecordedShape("a", shape, statements=24, samples=[FilterSample(repeats=repeats)])
        drawn_statements = draw_statements([recorded_shape], sample, seed=1)
        matching_rows = [statement.conditions[0][0].matching for statement in drawn_statements]
        frequent_counts[repeats] = sum(bool(matches[1]) for matches in matching_rows)
    # Without repeats, each of the 101 values is equally likely. With 0.9², 1 has nine tenths of the statements.
    assert frequent_counts[0.0] <= 2
    assert frequent_counts[0.0] < frequent_counts[0.3] < frequent_counts[0.81]
    assert frequent_counts[0.81] >= 18
    assert compute_repeats([1, 1, 2, 3, 4, 5, 6, 7]) == pytest.approx(1 / 28, abs=1e-3)  # One of 28 pairs is equal.
    assert compute_repeats([1, 1]) == -1  # Two statements are too few to compute the fraction.


def test_measurements_correct_later_predictions_of_the_same_kind() -> None:
    def build_applied_proposal(
        kind: str, predicted_bytes: int, measured_bytes: int | None, correction: float = 1.0
    ) -> AppliedProposal:
        reads = Reads(files=1.0, bytes=predicted_bytes, seconds=0.1)
        proposal = Proposal(
            id="x",
            kind=kind,
            title="x",
            commands=[],
            change=ProposedChange(),
            before=reads,
            predicted=reads,
            cost_bytes=1,
            cost_seconds=0.1,
            saved_bytes_per_day=1,
            pays_after_days=None,
            correction=correction,
        )
        return AppliedProposal(
            proposal, 1, None if measured_bytes is None else Reads(files=1.0, bytes=measured_bytes, seconds=0.1)
        )

    corrections = compute_corrections(
        [build_applied_proposal("cluster", 100, 50)] * 3
        + [build_applied_proposal("index", 100, 10**9), build_applied_proposal("bucket", 1, None)]
    )
    # The exponent of n measurements is n / (n + 1): 3/4 for the three clusters, and 1/2 for the single index.
    # A ratio counts as at most 3. The bucket has no measurement.
    assert corrections == {
        "cluster": pytest.approx(0.5**0.75, abs=1e-3),
        "index": pytest.approx(3**0.5, abs=1e-3),
    }
    # The ratio uses the uncorrected prediction, so a correct factor does not change.
    assert compute_corrections([build_applied_proposal("cluster", 50, 50, 0.5)] * 99)["cluster"] == pytest.approx(
        0.5, abs=0.01
    )


async def test_simulations_run_one_at_a_time_outside_the_event_loop(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api_with_files("POST", f"{T}/plan", {"filter": EQ_5})
    threads: set[threading.Thread] = set()
    samples: list[int] = []

    async def sample_rows(*_: Any) -> RowSample:
        samples.append(1)
        assert len(samples) == 1, "two samples are in memory at once"
        await asyncio.sleep(0.01)
        return RowSample({1: build_sampled_column([[1, 2, 5]])}, 1, 3)

    def draw_in_thread(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        samples.pop()
        return draw_statements(*args, **options)

    monkeypatch.setattr(advice, "sample_rows", sample_rows)
    monkeypatch.setattr(advice, "draw_statements", draw_in_thread)
    path = "/api/v1/tables/db/t/advice"
    answers = await asyncio.gather(*(api_with_files("GET", path) for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4, answers[0].raw
    assert answers[0].json["before"] is not None
    assert threads
    assert threading.current_thread() not in threads


async def test_proposal_to_drop_an_index_omits_an_unknown_size(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sample_rows(*_: Any) -> RowSample:
        return RowSample({1: build_sampled_column([[1, 2, 5]])}, 1, 3)

    monkeypatch.setattr(advice, "sample_rows", sample_rows)
    monkeypatch.setattr(advice, "_find_unused_indexes", lambda *_: ["by_id"])
    await api_with_files("POST", f"{T}/plan", {"filter": EQ_5})
    proposals = (await api_with_files("GET", "/api/v1/tables/db/t/advice")).json["proposals"]
    (drop_proposal,) = [proposal for proposal in proposals if proposal["kind"] == "drop-index"]
    assert drop_proposal["title"] == "Drop the index by_id: plans probed it and it left out no file"
