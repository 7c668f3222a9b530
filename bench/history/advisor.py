"""How close are the bytes that the advisor predicts to the bytes that plans read after its first proposal is applied?

Each case is a random table without a layout, and a skewed workload from a seed. The history has no literals. The first
proposal that needs no engine is applied, and the planner plans the recorded statements again.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.report import OURS, Report, Row
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import load_advice
from seamark.connector.jobs.advice import apply_proposal
from tests.connector.advice.workloads import (
    TABLE,
    draw_workload,
    make_table,
    measure_planned_bytes,
    run_statements,
)
from tests.connector.server_thread import ServerThread

CASES, QUICK_CASES, STATEMENTS, SEED = 30, 3, 80, 17
NEAR_FRACTION, NEAR_GOAL_PERCENT = 0.2, 90.0
"""The largest relative error of a close prediction, and the goal for the percentage of close predictions."""
_KINDS_WITHOUT_ENGINE = ("cluster", "compact", "add-index", "add-cube", "drop-index")
"""The kinds of changes that Seamark makes itself. A sort order and a partition spec are changed in an engine."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_advisor", "How near are the predictions of the advisor?", peer="no peer")
    ratios = []
    for case in range(QUICK_CASES if quick else CASES):
        title, predicted_ratio, measured_ratio = await asyncio.to_thread(_apply_first, folder / str(case), SEED + case)
        ratios.append(predicted_ratio / measured_ratio)
        report.notes.append(
            f"seed {SEED + case}: {title}: predicted / result is {predicted_ratio / measured_ratio:.2f}"
        )
    near_count = sum(abs(ratio - 1) <= NEAR_FRACTION for ratio in ratios)
    report.rows.append(
        Row(
            f"{len(ratios)} skewed workloads",
            "predictions within 20 % of the result",
            "%",
            {OURS: 100 * near_count / len(ratios)},
            lower_is_better=False,
            goal=NEAR_GOAL_PERCENT,
        )
    )
    return report


def _apply_first(home: Path, seed: int) -> tuple[str, float, float]:
    """Apply the first proposal of the advisor that needs no engine.

    Returns:
        The title of the proposal, and the bytes that an average statement reads: as predicted, and as planned after the
        change.
    """
    home.mkdir(parents=True)
    server = ServerThread(home, warehouse=home.as_uri(), services_workers=0)
    server.start()
    try:
        with closing(IndexClient(server.url)) as client:
            rng = np.random.default_rng(seed)
            make_table(client, rng)
            wheres = draw_workload(rng).draw(rng, STATEMENTS)
            run_statements(client, wheres)
            proposals = load_advice(client, TABLE)["proposals"]
            best = next(proposal for proposal in proposals if proposal["change"]["kind"] in _KINDS_WITHOUT_ENGINE)
            apply_proposal(client, TABLE, best, wait_s=10)
            return best["title"], best["predicted"]["bytes"], measure_planned_bytes(client, wheres)
    finally:
        server.stop()
