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


class ClockedServer:
    """A server with a clock that the test moves, and the table `db.t` with automatic advice.

    Automatic advice works in steps. A step applies a proposal, such as an index, as a trial: the server measures
    whether the statements of the next hours become faster, and keeps or undoes the change.
    """

    def __init__(self, home: Path) -> None:
        self.clock = OffsetClock()
        self.server = ServerThread(home, warehouse=home.as_uri(), services_workers=0, clock=self.clock)
        self.server.start()
        self.client = IndexClient(self.server.url)
        make_table(self.client, np.random.default_rng(first_seed()), files=12)

    def run_day(self, wheres: Sequence[str], steps: int = 3) -> None:
        """Take steps of automatic advice, run the statements two hours later, and move the clock to the next day."""
        for _ in range(steps):
            run_auto_advice(self.client, ("db", "t"))
        self.clock.ahead_ms += 2 * HOUR_MS
        run_statements(self.client, wheres)
        self.clock.ahead_ms += DAY_MS - 2 * HOUR_MS

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The trials, the oldest first: proposals that a job applies, measures, and then keeps or undoes."""
        applied_advice = load_advice(self.client, TABLE)["applied"]
        return [proposal for proposal in reversed(applied_advice) if proposal["trial"] is not None]

    def list_states(self) -> list[tuple[str, str]]:
        return [(trial["proposal"]["change"]["columns"][0], trial["trial"]["state"]) for trial in self.trials]

    @property
    def properties(self) -> dict[str, str]:
        return dict(json.loads(self.client.load_table(TABLE).metadata)["properties"])


def rename_code(clocked_server: ClockedServer, name: str) -> None:
    """Rename the column `code` of the table."""
    with open_catalog(clocked_server.server.url) as catalog, catalog.load_table(TABLE).update_schema() as update:
        update.rename_column("code", name)


@pytest.fixture
def clocked_server(tmp_path: Path) -> Iterator[ClockedServer]:
    clocked_server = ClockedServer(tmp_path)
    yield clocked_server
    clocked_server.client.close()
    clocked_server.server.stop()


def test_auto_follows_a_workload_that_changes_on_day_3(clocked_server: ClockedServer) -> None:
    for _ in range(2):
        clocked_server.run_day(BY_DAY)
    assert clocked_server.list_states() == [("day", "measuring")]
    run_auto_advice(clocked_server.client, ("db", "t"))
    assert clocked_server.list_states()[0] == ("day", "kept")
    bytes_before = measure_planned_bytes(clocked_server.client, BY_CODE)
    for _ in range(4):
        clocked_server.run_day(BY_CODE)
    run_auto_advice(clocked_server.client, ("db", "t"))
    assert ("day", "undone") in clocked_server.list_states()
    assert ("code", "kept") in clocked_server.list_states()
    # The clustering by code must save more than half of the bytes.
    assert measure_planned_bytes(clocked_server.client, BY_CODE) < 0.5 * bytes_before
    # The properties of the undone change are removed, and prediction and measurement are stored.
    assert clocked_server.properties.get(COLUMNS) in (None, "code")
    kept_trial = next(trial for trial in clocked_server.trials if trial["trial"]["state"] == "kept")
    assert kept_trial["trial"]["saved-fraction"] > 0.5
    assert kept_trial["recorded"]["bytes"] < kept_trial["proposal"]["before"]["bytes"]
    assert "fewer bytes" in kept_trial["trial"]["reason"]


def test_auto_advice_never_replaces_settings_of_a_user(clocked_server: ClockedServer) -> None:
    table = ("db", "t")
    change_table_properties(clocked_server.client, TABLE, {COLUMNS: "region"}, ())
    clocked_server.client.put_index(TABLE, "by_code", kind="bloom", columns=["id"])
    clocked_server.run_day(BY_DAY)
    own_index = clocked_server.properties["seamark.index.by_code"]
    run_auto_advice(clocked_server.client, table)
    assert clocked_server.trials == []
    reason = take_advice_step(clocked_server.client, TABLE)["reason"]
    assert f"a user has defined the property {COLUMNS}" in reason
    # A change that a user reverts is not applied again, and the user's next value stays.
    change_table_properties(clocked_server.client, TABLE, {}, [COLUMNS])
    run_auto_advice(clocked_server.client, table)
    assert clocked_server.properties[COLUMNS] != "region"
    change_table_properties(clocked_server.client, TABLE, {COLUMNS: "amount"}, ())
    clocked_server.clock.ahead_ms += 2 * DAY_MS
    run_auto_advice(clocked_server.client, table)
    assert [state for _, state in clocked_server.list_states()] == ["withdrawn"]
    assert clocked_server.properties[COLUMNS] == "amount"
    # The proposed index on `code` gets a different name than the user's index.
    run_statements(clocked_server.client, BY_CODE)
    run_auto_advice(clocked_server.client, table)
    assert clocked_server.properties["seamark.index.by_code"] == own_index
    assert "seamark.index.by_code_2" in clocked_server.properties
    assert clocked_server.properties[COLUMNS] == "amount"
    # An index that a user removes is not created again, even after its column is renamed.
    change_table_properties(clocked_server.client, TABLE, {}, ["seamark.index.by_code_2"])
    rename_code(clocked_server, "label")
    run_statements(clocked_server.client, [where.replace("code", "label") for where in BY_CODE])
    assert (
        "Add a bitmap index on label: a user has removed it" in take_advice_step(clocked_server.client, TABLE)["reason"]
    )


@pytest.mark.slow
def test_auto_skips_a_column_whose_name_no_index_can_have(clocked_server: ClockedServer) -> None:
    rename_code(clocked_server, "größe")
    run_statements(clocked_server.client, [where.replace("code", '"größe"') for where in BY_CODE])
    proposals = load_advice(clocked_server.client, TABLE)["proposals"]
    assert "größe" in {column for proposal in proposals for column in proposal["change"]["columns"]}
    assert "add-index" not in {proposal["change"]["kind"] for proposal in proposals}
    assert take_advice_step(clocked_server.client, TABLE)["action"] == "apply"


@pytest.mark.slow
def test_clustering_is_set_again_when_its_replacement_fails(clocked_server: ClockedServer) -> None:
    for _ in range(2):
        clocked_server.run_day(BY_DAY)
    run_auto_advice(clocked_server.client, ("db", "t"))
    assert clocked_server.list_states() == [("day", "kept")]
    # 15 statements are too few to judge the clustering by day, and enough to propose another clustering.
    clocked_server.clock.ahead_ms += DAY_MS
    run_statements(clocked_server.client, [f"region = {number % 8}" for number in range(15)])
    step = take_advice_step(clocked_server.client, TABLE)
    assert step["action"] == "apply", step
    assert clocked_server.properties[COLUMNS] != "day"
    assert clocked_server.list_states()[0] == ("day", "replaced")
    finish_advice_step(clocked_server.client, TABLE, step, "failed")
    assert clocked_server.properties[COLUMNS] == "day"
    assert [trial["trial"]["state"] for trial in clocked_server.trials] == ["kept", "failed"]


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
def test_auto_applies_once_within_its_budget_although_two_replicas_take_steps(clocked_server: ClockedServer) -> None:
    """A step of automatic advice applies a proposal as a trial, which is kept only if statements become faster."""
    clocked_server.run_day(BY_DAY)
    change_table_properties(clocked_server.client, TABLE, {BYTES_PER_DAY: "1000"}, ())
    step = take_advice_step(clocked_server.client, TABLE)
    assert (step["action"], "of the 1,000 bytes of a day are spent" in step["reason"]) == ("none", True)
    change_table_properties(clocked_server.client, TABLE, {}, [BYTES_PER_DAY])

    def take_step(_: int) -> str:
        try:
            return str(take_advice_step(clocked_server.client, TABLE)["action"])
        except Conflict:
            return "conflict"

    with ThreadPoolExecutor(4) as pool:
        actions = list(pool.map(take_step, range(4)))
    assert actions.count("apply") == 1, actions
    assert len(clocked_server.trials) == 1
    # The trial waits for a job that rewrites the table. Then the report of an overtaken job is refused.
    (trial,) = clocked_server.trials
    step = {"number": 1, "since-ms": trial["trial"]["since-ms"]}
    finish_advice_step(clocked_server.client, TABLE, step, "busy")
    clocked_server.clock.ahead_ms += 60_000
    next_step = take_advice_step(clocked_server.client, TABLE)
    assert (next_step["action"], next_step["number"]) == ("apply", 1)
    assert COLUMNS in clocked_server.properties
    with pytest.raises(Conflict, match="Another job has taken the trial 1"):
        finish_advice_step(clocked_server.client, TABLE, step, "failed")
    with pytest.raises(InvalidRequest, match="applied, failed or busy"):
        finish_advice_step(clocked_server.client, TABLE, next_step, "done")
    # The job of this step was killed. The trial fails after an hour, and the proposal is not applied again.
    assert take_advice_step(clocked_server.client, TABLE)["action"] == "none"
    clocked_server.clock.ahead_ms += HOUR_MS
    change_table_properties(clocked_server.client, TABLE, {BYTES_PER_DAY: "1000"}, ())
    run_statements(clocked_server.client, BY_DAY)
    reason = take_advice_step(clocked_server.client, TABLE)["reason"]
    (trial,) = clocked_server.trials
    assert (trial["trial"]["state"], trial["trial"]["spent-bytes"] > 0) == ("failed", True)
    assert COLUMNS not in clocked_server.properties
    with pytest.raises(NoSuchResource, match="no trial 1"):
        finish_advice_step(clocked_server.client, TABLE, next_step, "applied")
    assert "the proposal was applied before, and its state is failed" in reason


@pytest.mark.slow
def test_report_of_a_job_reads_the_stored_trials_once(
    clocked_server: ClockedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_statements(clocked_server.client, BY_DAY)
    step = take_advice_step(clocked_server.client, TABLE)
    read_trials, reads = QueryHistory.list_applied, []

    async def count_read(history: QueryHistory, uuid: str) -> list[AppliedAdvice]:
        reads.append(uuid)
        return await read_trials(history, uuid)

    monkeypatch.setattr(QueryHistory, "list_applied", count_read)
    # The failed trial is changed twice: its properties are removed between the two changes.
    answer = finish_advice_step(clocked_server.client, TABLE, step, "failed")
    assert (answer["trial"]["state"], len(reads)) == ("failed", 1)
    assert answer == clocked_server.trials[0]


@pytest.mark.slow
def test_job_that_fails_ends_its_trial(clocked_server: ClockedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run_statements(clocked_server.client, BY_DAY)

    def fail(*_: object, **options: object) -> None:
        raise ArithmeticError("no memory")

    monkeypatch.setattr(auto_advice, "cluster_incrementally", fail)
    with pytest.raises(ArithmeticError, match="no memory"):
        run_auto_advice(clocked_server.client, ("db", "t"))
    (trial,) = clocked_server.trials
    assert (trial["trial"]["state"], trial["trial"]["reason"]) == ("failed", "no memory")
    assert COLUMNS not in clocked_server.properties


@pytest.mark.slow
def test_server_sets_the_properties_of_a_chosen_proposal(
    clocked_server: ClockedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_statements(clocked_server.client, BY_DAY)
    best = load_advice(clocked_server.client, TABLE)["proposals"][0]
    path = f"{make_table_path(TABLE)}/advice/apply"
    with pytest.raises(InvalidRequest, match="seamark run cluster db"):
        clocked_server.client._request_json("POST", path, {}, {"id": best["id"]})
    with pytest.raises(NoSuchResource, match="'other' now"):
        clocked_server.client._request_json("POST", path, {}, {"id": "other"})
    state = ServicesState(running=True, enabled=True)
    monkeypatch.setattr(advice_application, "compute_services_state", lambda *_: state)
    answer = clocked_server.client._request_json("POST", path, {}, {"id": best["id"]})
    assert (answer["proposal"], answer["measured"]) == (best, None)
    run_clustering(clocked_server.client, ("db", "t"))
    advice = load_advice(clocked_server.client, TABLE)
    assert advice["before"]["bytes"] < 0.5 * best["before"]["bytes"]
    assert [proposal["proposal"]["id"] for proposal in advice["applied"]] == [best["id"]]


@pytest.mark.slow
def test_chosen_index_replaces_no_index_that_was_created_meanwhile(
    clocked_server: ClockedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_statements(clocked_server.client, BY_CODE)
    best = next(
        proposal
        for proposal in load_advice(clocked_server.client, TABLE)["proposals"]
        if proposal["change"]["kind"] == "add-index"
    )
    index_name = best["change"]["index-name"]
    find_proposal = advice_application._find_proposal

    async def find_late(call: Any, chosen_proposal: Any) -> Any:
        proposal = await find_proposal(call, chosen_proposal)
        await asyncio.to_thread(clocked_server.client.put_index, TABLE, index_name, kind="bloom", columns=["id"])
        return proposal

    monkeypatch.setattr(advice_application, "_find_proposal", find_late)
    monkeypatch.setattr(
        advice_application, "compute_services_state", lambda *_: ServicesState(running=True, enabled=True)
    )
    with pytest.raises(Conflict, match="Another request has set the property"):
        clocked_server.client._request_json("POST", f"{make_table_path(TABLE)}/advice/apply", {}, {"id": best["id"]})
    assert '"id"' in clocked_server.properties[f"seamark.index.{index_name}"]
