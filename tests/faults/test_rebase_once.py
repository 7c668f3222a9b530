"""Tests of rebased appends with a killed server or lost replies: each is applied once, with all its files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.catalog.appender import Commit, EngineAppender, Row, read_list, read_snapshot, to_local_path
from tests.catalog.rig import SCHEMA
from tests.faults.rigs.dying_server import STEPS
from tests.faults.rigs.http import HttpClient, OutcomeUnknown, create_key
from tests.faults.rigs.lossy_proxy import FAULTS, LossyProxy, make_fault_chooser, run_lossy_proxy
from tests.faults.rigs.mortal import KillableServer
from tests.services.seamark import Seamark

REBASE = {"seamark.commit.rebase": "append"}
STEPS_AFTER_COMMIT = ("after-swap", "before-reply")


def create_table(client: HttpClient, name: str, version: int) -> None:
    client.call("POST", "/v1/namespaces", {"namespace": ["db"]})
    properties = {"format-version": str(version), **REBASE}
    body = {"name": name, "schema": SCHEMA, "properties": properties}
    assert client.call("POST", "/v1/namespaces/db/tables", body)[0] == 200


def load_metadata(client: HttpClient, name: str) -> Row:
    status, body = client.call("GET", f"/v1/namespaces/db/tables/{name}")
    assert status == 200, body
    metadata: Row = body["metadata"]
    if metadata.get("current-snapshot-id") == -1:
        metadata["current-snapshot-id"] = None
    return metadata


def send_commit(client: HttpClient, name: str, commit: Commit, key: str | None = None) -> tuple[int, Any]:
    headers = {"Idempotency-Key": key} if key else None
    body = {"requirements": commit[0], "updates": commit[1]}
    return client.call("POST", f"/v1/namespaces/db/tables/{name}", body, headers)


def _list_files(metadata: Row) -> set[str]:
    """Return the data files of the newest snapshot. A missing file of any snapshot is an error."""
    files: set[str] = set()
    for snapshot in sorted(metadata.get("snapshots", []), key=lambda snapshot: snapshot["sequence-number"]):
        files = set(read_snapshot(snapshot))
    return files


def _prepare_outdated_append(client: HttpClient, name: str, version: int, merge: int) -> tuple[EngineAppender, Commit]:
    """Commit the first two of three appends on the same parent, and return the third, which is not committed.

    Each append also writes the entries of `merge` old manifests into its own manifest.
    """
    create_table(client, name, version)
    for file in ("a", "b"):
        assert send_commit(client, name, EngineAppender(load_metadata(client, name)).commit({file: 1}))[0] == 200
    metadata = load_metadata(client, name)
    appenders = [EngineAppender(metadata, merge=merge) for _ in range(3)]
    requests = [appender.commit({f"late-{number}": 3}) for number, appender in enumerate(appenders)]
    for request in requests[:-1]:
        status, body = send_commit(client, name, request)
        assert status == 200, body
    return appenders[-1], requests[-1]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("step", "nth"),
    [
        *((step, 1) for step in ("before-swap", "after-swap")),
        *(pytest.param(step, 1, marks=pytest.mark.slow) for step in STEPS if "-swap" not in step),
        ("after-metadata-write", 2),
    ],
)
def test_killed_rebase_is_applied_completely_or_not_at_all_and_only_once(tmp_path: Path, step: str, nth: int) -> None:
    """Other appends are committed before this one, so the server must base it on the newest snapshot (a rebase).

    The rebase writes a manifest, a manifest list and metadata, in this order. With merge=2, the append has written the
    entries of two old manifests, which the rebase must write again. A swap is the transaction that makes it visible.
    """
    with KillableServer(tmp_path / "home") as server:
        client = server.start()
        for number, (version, key) in enumerate(((2, None), (3, create_key()))):
            name = f"t{number}"
            late_appender, request = _prepare_outdated_append(client, name, version, merge=2)
            files_before = _list_files(load_metadata(client, name))
            server.run_until_death(step, nth, partial(send_commit, client, name, request, key))
            client = server.start()
            has_committed = step in STEPS_AFTER_COMMIT
            assert _list_files(load_metadata(client, name)) == files_before | ({"late-2"} if has_committed else set())
            for _ in range(2):
                status, body = send_commit(client, name, request, key)
                assert status == 200, body
                assert body["metadata"]["current-snapshot-id"] == late_appender.snapshot_id
            metadata = load_metadata(client, name)
            assert _list_files(metadata) == {"a", "b", "late-0", "late-1", "late-2"}
            assert len(metadata["snapshots"]) == 5
            assert send_commit(client, name, EngineAppender(metadata).commit({"after": 1}))[0] == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("rebase") / "home") as server:
        yield server


@pytest.fixture
def proxy(server: Seamark) -> Iterator[LossyProxy]:
    with run_lossy_proxy(server.base_url) as proxy:
        yield proxy


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("has_key", [True, False], ids=["with a key", "without a key"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_overtaken_appends_with_lost_replies_are_applied_once(proxy: LossyProxy, seed: int, has_key: bool) -> None:
    client, direct_client, name = (
        HttpClient(proxy.base_url),
        HttpClient(f"http://{proxy.upstream}"),
        f"lossy-{seed}-{has_key}",
    )
    rng = random.Random(seed)
    create_table(direct_client, name, 2 + seed % 2)
    proxy.choose_fault = make_fault_chooser(seed, rate=0.6, applies=lambda method, path: method == "POST")
    expected: set[str] = set()
    for round_number in range(8):  # Of the four appends in a round, three are overtaken.
        metadata = load_metadata(direct_client, name)
        appenders = [EngineAppender(metadata, merge=rng.choice([0, 0, 2])) for _ in range(4)]
        for appender_number, appender in enumerate(appenders):
            request, key = (
                appender.commit({f"{round_number}-{appender_number}": appender_number + 1}),
                create_key() if has_key else None,
            )
            for _ in range(50):  # With six of ten requests faulty, 50 attempts practically always suffice.
                try:
                    status, body = send_commit(client, name, request, key)
                except (OutcomeUnknown, ValueError):  # ValueError: the load balancer's answer is not JSON.
                    continue
                break
            assert status == 200, f"seed {seed}: {body}"
            assert body["metadata"]["current-snapshot-id"] == appender.snapshot_id
            expected.add(f"{round_number}-{appender_number}")
        assert _list_files(load_metadata(direct_client, name)) == expected, f"seed {seed}, round {round_number}"
        # Engines delete the files that the snapshot does not name once they know the outcome.
        for appender in appenders:
            _delete_unused_files(appender, load_metadata(direct_client, name))
    assert _list_files(load_metadata(direct_client, name)) == expected, f"seed {seed}"
    assert {fault for fault, *_ in proxy.requests} >= {*FAULTS}, f"seed {seed} did not test all faults"


def _delete_unused_files(appender: EngineAppender, metadata: Row) -> None:
    saved_snapshot = next(
        snapshot for snapshot in metadata["snapshots"] if snapshot["snapshot-id"] == appender.snapshot_id
    )
    manifest_paths = {row["manifest_path"] for row in read_list(saved_snapshot)} | {saved_snapshot["manifest-list"]}
    for location in {*appender.manifests, appender.manifest_list} - manifest_paths:
        to_local_path(location).unlink()
