"""Tests that both logs store each acknowledged row once while processes are killed, paused, cut off or without disk
space.

`python -m tests.streams.chaos.run` runs longer campaigns, optionally with engines.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.seeds import first_seed
from tests.services.postgres import Postgres
from tests.streams.chaos.campaign import CampaignOutcome, open_files_rig, open_kafka_rig, run_campaign

SECONDS = float(os.environ.get("CHAOS_SECONDS", "90"))
READS_MIN = 20


def check_outcome(outcome: CampaignOutcome) -> None:
    """Check that the campaign had enough load and reads to find errors. On a slow machine, it may have too few."""
    assert outcome.reads.total() >= READS_MIN, outcome.describe()
    assert outcome.rows > 1_000, outcome.describe()
    assert outcome.changes > 100, outcome.describe()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_log_in_files_keeps_rows_of_killed_and_paused_processes_and_a_full_disk(tmp_path: Path) -> None:
    with open_files_rig(tmp_path) as rig:
        check_outcome(run_campaign(rig, first_seed(), SECONDS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_log_in_kafka_keeps_rows_of_killed_and_disconnected_servers_and_a_killed_broker(
    tmp_path: Path, postgres: Postgres
) -> None:
    with open_kafka_rig(tmp_path, postgres) as rig:
        check_outcome(run_campaign(rig, first_seed(), SECONDS))
