"""Tests of the policy `auto`, which applies proposals within a budget, measures them, and undoes unsuccessful ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seamark.connector.client.errors import Conflict, InvalidRequest, NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import make_table_path
from seamark.connector.client.policies import (
    change_table_properties,
    finish_advice_step,
    load_advice,
    take_advice_step,
)
from seamark.connector.jobs import auto_advice
from seamark.connector.jobs.jobs import run_auto_advice, run_clustering
from seamark.formats.iceberg.metadata.auto_advice import BYTES_PER_DAY
from seamark.formats.iceberg.metadata.clustering import COLUMNS
from seamark.metaserver.api.admin import advice_application
from seamark.metaserver.history.history import QueryHistory
from seamark.metaserver.planner.advice.trials import ShapeReads, Trial, judge_trial
from seamark.metaserver.services.running import ServicesState
from seamark.metaserver.store.model import AppliedAdvice, QueryShapeSums, QuerySums
from tests.connector.advice.workloads import TABLE, make_table, measure_planned_bytes, run_statements
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed
from tests.server.rig import OffsetClock

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
BY_DAY = [f"day >= {day} AND day < {day + 20}" for day in range(0, 340, 10)]
BY_CODE = [f"code = 'c{code:04d}'" for code in range(0, 400, 12)]


class Week:
    """A server with a clock that the test moves, and the table `db.t`."""

    def __init__(self, home: Path) -> None:
        self.clock = OffsetClock()
        self.server = ServerThread(home, warehouse=home.as_uri(), services_workers=0, clock=self.clock)
        self.server.start()
        self.client = IndexClient(self.server.url)
        make_table(self.client, np.random.default_rng(first_seed()), files=12)

    def run_day(self, wheres: Sequence[str], steps: int = 3) -> None:
        """Take `steps` steps of the policy, run the statements two hours later, and move the clock to the next day."""
        for _ in range(steps):
            run_auto_advice(self.client, ("db", "t"))
        self.clock.ahead_ms += 2 * HOUR_MS
        run_statements(self.client, wheres)
        self.clock.ahead_ms += DAY_MS - 2 * HOUR_MS

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The trials, the oldest first."""
        applied_advice = load_advice(self.client, TABLE)["applied"]
        return [proposal for proposal in reversed(applied_advice) if proposal["trial"] is not None]

    def list_states(self) -> list[tuple[str, str]]:
        return [(trial["proposal"]["change"]["columns"][0], trial["trial"]["state"]) for trial in self.trials]

    @property
    def properties(self) -> dict[str, str]:
        return dict(json.loads(self.client.load_table(TABLE).metadata)["properties"])


def rename_code(week: Week, name: str) -> None:
    """Rename the column `code` of the table."""
    with open_catalog(week.server.url) as catalog, catalog.load_table(TABLE).update_schema() as update:
        update.rename_column("code", name)


@pytest.fixture
def week(tmp_path: Path) -> Iterator[Week]:
    week = Week(tmp_path)
    yield week
    week.client.close()
    week.server.stop()


def test_auto_follows_a_workload_that_changes_on_day_3(week: Week) -> None:
    for _ in range(2):
        week.run_day(BY_DAY)
    assert week.list_states() == [("day", "measuring")]
    run_auto_advice(week.client, ("db", "t"))
    assert week.list_states()[0] == ("day", "kept")
    bytes_before = measure_planned_bytes(week.client, BY_CODE)
    for _ in range(4):
        week.run_day(BY_CODE)
    run_auto_advice(week.client, ("db", "t"))
    assert ("day", "undone") in week.list_states()
    assert ("code", "kept") in week.list_states()
    assert measure_planned_bytes(week.client, BY_CODE) < 0.5 * bytes_before
    # The properties of the undone change are removed, and prediction and measurement are stored.
    assert week.properties.get(COLUMNS) in (None, "code")
    kept_trial = next(trial for trial in week.trials if trial["trial"]["state"] == "kept")
    assert kept_trial["trial"]["saved-fraction"] > 0.5
    assert kept_trial["recorded"]["bytes"] < kept_trial["proposal"]["before"]["bytes"]
    assert "fewer bytes" in kept_trial["trial"]["reason"]


def test_auto_advice_never_replaces_settings_of_a_user(week: Week) -> None:
    table = ("db", "t")
    change_table_properties(week.client, TABLE, {COLUMNS: "region"}, ())
    week.client.put_index(TABLE, "by_code", kind="bloom", columns=["id"])
    week.run_day(BY_DAY)
    own_index = week.properties["seamark.index.by_code"]
    run_auto_advice(week.client, table)
    assert week.trials == []
    reason = take_advice_step(week.client, TABLE)["reason"]
    assert f"a user has defined the property {COLUMNS}" in reason
    # A change that a user reverts is not applied again, and the user's next value stays.
    change_table_properties(week.client, TABLE, {}, [COLUMNS])
    run_auto_advice(week.client, table)
    assert week.properties[COLUMNS] != "region"
    change_table_properties(week.client, TABLE, {COLUMNS: "amount"}, ())
    week.clock.ahead_ms += 2 * DAY_MS
    run_auto_advice(week.client, table)
    assert [state for _, state in week.list_states()] == ["withdrawn"]
    assert week.properties[COLUMNS] == "amount"
    # The proposed index on `code` gets a different name than the user's index.
    run_statements(week.client, BY_CODE)
    run_auto_advice(week.client, table)
    assert week.properties["seamark.index.by_code"] == own_index
    assert "seamark.index.by_code_2" in week.properties
    assert week.properties[COLUMNS] == "amount"
    # An index that a user removes is not created again, even after its column is renamed.
    change_table_properties(week.client, TABLE, {}, ["seamark.index.by_code_2"])
    rename_code(week, "label")
    run_statements(week.client, [where.replace("code", "label") for where in BY_CODE])
    assert "Add a bitmap index on label: a user has removed it" in take_advice_step(week.client, TABLE)["reason"]


@pytest.mark.slow
def test_auto_skips_a_column_whose_name_no_index_can_have(week: Week) -> None:
    rename_code(week, "größe")
    run_statements(week.client, [where.replace("code", '"größe"') for where in BY_CODE])
    proposals = load_advice(week.client, TABLE)["proposals"]
    assert "größe" in {column for proposal in proposals for column in proposal["change"]["columns"]}
    assert "add-index" not in {proposal["change"]["kind"] for proposal in proposals}
    assert take_advice_step(week.client, TABLE)["action"] == "apply"


@pytest.mark.slow
def test_clustering_is_set_again_when_its_replacement_fails(week: Week) -> None:
    for _ in range(2):
        week.run_day(BY_DAY)
    run_auto_advice(week.client, ("db", "t"))
    assert week.list_states() == [("day", "kept")]
    # These statements are too few to judge the clustering by day, and enough to propose another clustering.
    week.clock.ahead_ms += DAY_MS
    run_statements(week.client, [f"region = {number % 8}" for number in range(15)])
    step = take_advice_step(week.client, TABLE)
    assert step["action"] == "apply", step
    assert week.properties[COLUMNS] != "day"
    assert week.list_states()[0] == ("day", "replaced")
    finish_advice_step(week.client, TABLE, step, "failed")
    assert week.properties[COLUMNS] == "day"
    assert [trial["trial"]["state"] for trial in week.trials] == ["kept", "failed"]


def test_verdict_weights_statements_of_unknown_size_by_their_files() -> None:
    trial = Trial(1, "measuring", "", 0, {}, [1], 0, 0.0, [ShapeReads("a", 1.0), ShapeReads("b", 1.0)])

    def build_sums(fingerprint: str, statements: int, file_count: int, files_left: int) -> QueryShapeSums:
        return QueryShapeSums(fingerprint, "", "", QuerySums(statements, file_count, files_left, 0, 0, 0, 0), 0, 0)

    verdict = judge_trial(trial, [build_sums("a", 10, 100, 100), build_sums("b", 30, 300, 0)])
    assert (verdict.pays, verdict.saved_fraction) == (True, 0.75)
    verdict = judge_trial(trial, [build_sums("a", 40, 1000, 990)])
    assert (verdict.pays, verdict.saved_fraction) == (False, 0.01)
    assert verdict.reason == "40 statements since the change saved 1.0% of the bytes; the minimum is 2%"


@pytest.mark.slow
def test_auto_applies_once_within_its_budget_although_two_replicas_take_steps(week: Week) -> None:
    week.run_day(BY_DAY)
    change_table_properties(week.client, TABLE, {BYTES_PER_DAY: "1000"}, ())
    step = take_advice_step(week.client, TABLE)
    assert (step["action"], "of the 1,000 bytes of a day are spent" in step["reason"]) == ("none", True)
    change_table_properties(week.client, TABLE, {}, [BYTES_PER_DAY])

    def take_step(_: int) -> str:
        try:
            return str(take_advice_step(week.client, TABLE)["action"])
        except Conflict:
            return "conflict"

    with ThreadPoolExecutor(4) as pool:
        actions = list(pool.map(take_step, range(4)))
    assert actions.count("apply") == 1, actions
    assert len(week.trials) == 1
    # The trial waits for a job that rewrites the table. Then the report of an overtaken job is refused.
    (trial,) = week.trials
    step = {"number": 1, "since-ms": trial["trial"]["since-ms"]}
    finish_advice_step(week.client, TABLE, step, "busy")
    week.clock.ahead_ms += 60_000
    next_step = take_advice_step(week.client, TABLE)
    assert (next_step["action"], next_step["number"]) == ("apply", 1)
    assert COLUMNS in week.properties
    with pytest.raises(Conflict, match="Another job has taken the trial 1"):
        finish_advice_step(week.client, TABLE, step, "failed")
    with pytest.raises(InvalidRequest, match="applied, failed or busy"):
        finish_advice_step(week.client, TABLE, next_step, "done")
    # The job of this step was killed. The trial fails after an hour, and the proposal is not applied again.
    assert take_advice_step(week.client, TABLE)["action"] == "none"
    week.clock.ahead_ms += HOUR_MS
    change_table_properties(week.client, TABLE, {BYTES_PER_DAY: "1000"}, ())
    run_statements(week.client, BY_DAY)
    reason = take_advice_step(week.client, TABLE)["reason"]
    (trial,) = week.trials
    assert (trial["trial"]["state"], trial["trial"]["spent-bytes"] > 0) == ("failed", True)
    assert COLUMNS not in week.properties
    with pytest.raises(NoSuchResource, match="no trial 1"):
        finish_advice_step(week.client, TABLE, next_step, "applied")
    assert "the proposal was applied before, and its state is failed" in reason


@pytest.mark.slow
def test_report_of_a_job_reads_the_stored_trials_once(week: Week, monkeypatch: pytest.MonkeyPatch) -> None:
    run_statements(week.client, BY_DAY)
    step = take_advice_step(week.client, TABLE)
    read_trials, reads = QueryHistory.list_applied, []

    async def count_read(history: QueryHistory, uuid: str) -> list[AppliedAdvice]:
        reads.append(uuid)
        return await read_trials(history, uuid)

    monkeypatch.setattr(QueryHistory, "list_applied", count_read)
    # The failed trial is changed twice: its properties are removed between the two changes.
    answer = finish_advice_step(week.client, TABLE, step, "failed")
    assert (answer["trial"]["state"], len(reads)) == ("failed", 1)
    assert answer == week.trials[0]


@pytest.mark.slow
def test_job_that_fails_ends_its_trial(week: Week, monkeypatch: pytest.MonkeyPatch) -> None:
    run_statements(week.client, BY_DAY)

    def fail(*_: object, **options: object) -> None:
        raise ArithmeticError("no memory")

    monkeypatch.setattr(auto_advice, "cluster_incrementally", fail)
    with pytest.raises(ArithmeticError, match="no memory"):
        run_auto_advice(week.client, ("db", "t"))
    (trial,) = week.trials
    assert (trial["trial"]["state"], trial["trial"]["reason"]) == ("failed", "no memory")
    assert COLUMNS not in week.properties


@pytest.mark.slow
def test_server_sets_the_properties_of_a_chosen_proposal(week: Week, monkeypatch: pytest.MonkeyPatch) -> None:
    run_statements(week.client, BY_DAY)
    best = load_advice(week.client, TABLE)["proposals"][0]
    path = f"{make_table_path(TABLE)}/advice/apply"
    with pytest.raises(InvalidRequest, match="seamark run cluster db"):
        week.client._request_json("POST", path, {}, {"id": best["id"]})
    with pytest.raises(NoSuchResource, match="'other' now"):
        week.client._request_json("POST", path, {}, {"id": "other"})
    state = ServicesState(running=True, enabled=True)
    monkeypatch.setattr(advice_application, "compute_services_state", lambda *_: state)
    answer = week.client._request_json("POST", path, {}, {"id": best["id"]})
    assert (answer["proposal"], answer["measured"]) == (best, None)
    run_clustering(week.client, ("db", "t"))
    advice = load_advice(week.client, TABLE)
    assert advice["before"]["bytes"] < 0.5 * best["before"]["bytes"]
    assert [proposal["proposal"]["id"] for proposal in advice["applied"]] == [best["id"]]


@pytest.mark.slow
def test_chosen_index_replaces_no_index_that_was_created_meanwhile(week: Week, monkeypatch: pytest.MonkeyPatch) -> None:
    run_statements(week.client, BY_CODE)
    best = next(
        proposal
        for proposal in load_advice(week.client, TABLE)["proposals"]
        if proposal["change"]["kind"] == "add-index"
    )
    index_name = best["change"]["index-name"]
    find_proposal = advice_application._find_proposal

    async def find_late(call: Any, chosen_proposal: Any) -> Any:
        proposal = await find_proposal(call, chosen_proposal)
        await asyncio.to_thread(week.client.put_index, TABLE, index_name, kind="bloom", columns=["id"])
        return proposal

    monkeypatch.setattr(advice_application, "_find_proposal", find_late)
    monkeypatch.setattr(
        advice_application, "compute_services_state", lambda *_: ServicesState(running=True, enabled=True)
    )
    with pytest.raises(Conflict, match="Another request has set the property"):
        week.client._request_json("POST", f"{make_table_path(TABLE)}/advice/apply", {}, {"id": best["id"]})
    assert '"id"' in week.properties[f"seamark.index.{index_name}"]
