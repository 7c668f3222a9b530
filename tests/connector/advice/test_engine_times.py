"""Tests of the estimates of seconds from the times that engines have reported."""

from __future__ import annotations

import numpy as np
import pytest

from seamark.metaserver.history.shapes import QueryShape
from seamark.metaserver.planner.advice.engine_times import OPEN_S, SCAN_BYTES_PER_S, EngineTimes
from seamark.metaserver.planner.advice.proposals import Proposal, ProposedChange, Reads
from seamark.metaserver.planner.advice.trials import AppliedProposal, compute_time_corrections
from seamark.metaserver.store.model import QueryShapeSums, QuerySums
from tests.seeds import first_seed

RUNS = 50


def make_timed_shape(number: int, seconds: float, files: int, size_bytes: int, engine: str = "spark") -> QueryShapeSums:
    """Return the recorded sums of statements of one form, which an engine has run `RUNS` times.

    Args:
        number: Distinguishes the form from others.
        seconds: The time of each run.
        files: The number of files that each run read.
        size_bytes: The bytes that each run read.
        engine: The engine that ran the statements.
    """
    shape = QueryShape(engine, (number,))
    sums = QuerySums(
        statements=RUNS, files_in=0, files_left=0, sized=0, bytes_in=0, bytes_left=0, plan_us=0,
        timed=RUNS, run_us=int(RUNS * seconds * 1e6), timed_files=RUNS * files, timed_bytes=RUNS * size_bytes,
    )  # fmt: skip
    return QueryShapeSums(shape.fingerprint, shape.text, samples="", sums=sums, first_hour=0, last_hour=0)


@pytest.mark.parametrize("fixed_s", [0.05, 2.0])
@pytest.mark.parametrize("bytes_per_s", [2e7, 2e9])
def test_estimates_of_other_sizes_are_within_a_factor_of_2(fixed_s: float, bytes_per_s: float) -> None:
    rng = np.random.default_rng(first_seed())

    def compute_seconds(files: int, size_bytes: int) -> float:
        return float(rng.uniform(0.8, 1.25)) * (fixed_s + size_bytes / bytes_per_s + 0.002 * files)

    sizes = [(int(files), int(files) * 30_000_000) for files in rng.integers(1, 100, 12)]
    shapes = [make_timed_shape(number, compute_seconds(*size), *size) for number, size in enumerate(sizes)]
    times = EngineTimes.from_shapes(shapes)
    for shape, size in zip(shapes, sizes, strict=True):
        assert times.estimate(shape.fingerprint, *size) == pytest.approx(shape.sums.run_us / 1e6 / RUNS, rel=1e-6)
        smaller_size = max(1, size[0] // 10), max(1, size[0] // 10) * 30_000_000
        assert 0.5 <= times.estimate(shape.fingerprint, *smaller_size) / compute_seconds(*smaller_size) <= 2


def test_time_that_does_not_depend_on_the_bytes_is_not_saved_by_fewer_bytes() -> None:
    shapes = [make_timed_shape(number, 3.0, 10 * number, 10**8 * number) for number in range(1, 9)]
    times = EngineTimes.from_shapes(shapes)
    assert times.estimate(shapes[7].fingerprint, 1, 10**7) == pytest.approx(3.0, rel=0.1)


def test_shape_without_a_time_is_estimated_from_the_costs_of_its_engine() -> None:
    slow_shapes = [make_timed_shape(number, 10.0 * number, 0, 10**9 * number, "trino") for number in range(1, 5)]
    no_sums = QuerySums(*(0,) * 7)
    untimed_shapes = [
        QueryShapeSums(engine, QueryShape(engine).text, "", no_sums, 0, 0) for engine in ("trino", "duckdb")
    ]
    times = EngineTimes.from_shapes([*slow_shapes, *untimed_shapes])
    assert times.estimate("trino", 0, 2 * 10**9) == pytest.approx(20, rel=0.2)
    assert times.estimate("duckdb", 4, SCAN_BYTES_PER_S) == pytest.approx(1 + 4 * OPEN_S)
    assert times.estimate("unknown", 0, SCAN_BYTES_PER_S) == pytest.approx(1)


def test_recorded_times_correct_later_predictions_of_seconds() -> None:
    def build_applied_proposal(
        predicted_s: float, recorded_s: float, timed_count: int, correction: float = 1.0
    ) -> AppliedProposal:
        reads = Reads(files=1, bytes=100, seconds=predicted_s)
        change = ProposedChange("cluster")
        proposal = Proposal(
            id="x", kind="cluster", title="x", commands=[], change=change, before=reads, predicted=reads, cost_bytes=1,
            cost_seconds=0.1, saved_bytes_per_day=1, pays_after_days=None, time_correction=correction,
        )  # fmt: skip
        recorded_reads = Reads(files=1, bytes=100, seconds=recorded_s)
        return AppliedProposal(proposal, applied_ms=0, measured=None, recorded=recorded_reads, timed=timed_count)

    # A proposal counts from 20 timed statements on. One proposal corrects by the square root of the
    # error, and many proposals by all of it.
    assert compute_time_corrections([build_applied_proposal(1.0, 2.0, timed_count=19)]) == {}
    assert compute_time_corrections([build_applied_proposal(1.0, 2.0, timed_count=20)])["cluster"] == pytest.approx(
        2**0.5, abs=0.01
    )
    assert compute_time_corrections([build_applied_proposal(1.0, 2.0, timed_count=20)] * 50)[
        "cluster"
    ] == pytest.approx(2, abs=0.05)
    # The earlier prediction was corrected already, and was right.
    assert (
        compute_time_corrections([build_applied_proposal(2.0, 2.0, timed_count=20, correction=2.0)] * 50)["cluster"]
        > 1.9
    )
