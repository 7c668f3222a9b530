"""Tests of kill -9 at every step of a change: no change is partial, and a retry gets the first answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.catalog.rig import SCHEMA, build_append
from tests.faults.rigs.dying_server import STEPS
from tests.faults.rigs.http import HttpClient, create_key
from tests.faults.rigs.mortal import KillableServer
from tests.services.s3 import S3

RETRIES = ("with its idempotency key", "without a key", "as another commit on the same base")
STEPS_AFTER_COMMIT = ("after-swap", "before-reply")


def _kill_and_retry(server: KillableServer, client: HttpClient, step: str, retry: str, name: str) -> HttpClient:
    """Commit twice, kill the server at `step` of the third commit, and send a commit to a restarted server.

    Args:
        server: The server.
        client: A client of the server before the kill.
        step: The step of the third commit.
        retry: What is sent after the restart. If the text begins with "with", the third commit is sent with its
            idempotency key. If it begins with "as another", another commit on the same parent is sent. With any other
            text, the third commit is sent without a key.
        name: The name of the table.

    Returns:
        A client of the restarted server.
    """
    assert client.create_table(name)[0] == 200
    for snapshot_id in (1, 2):
        parent_id = 1 if snapshot_id == 2 else None
        status, body = client.append(snapshot_id, parent_id, sequence=snapshot_id, name=name)
        assert status == 200, body
    key = create_key() if retry.startswith("with") else None
    server.run_until_death(step, nth=1, send_request=lambda: client.append(3, 2, sequence=3, name=name, key=key))

    client = server.start()
    has_committed = step in STEPS_AFTER_COMMIT
    assert client.read_chain(name) == ([1, 2, 3] if has_committed else [1, 2]), (step, retry)
    if retry.startswith("as another"):
        # Another append on the same parent conflicts only if the third commit was made.
        status, _ = client.append(900, 2, sequence=3, name=name)
        assert status == (409 if has_committed else 200), (step, retry)
        assert client.read_chain(name) == [1, 2, 3 if has_committed else 900]
        return client
    for _ in range(2):
        status, body = client.append(3, 2, 3, name, key)
        assert status == 200, (step, retry, body)
        assert body["metadata"]["current-snapshot-id"] == 3
    assert client.read_chain(name) == [1, 2, 3], (step, retry)
    assert client.append(4, 3, 4, name)[0] == 200
    return client


# Each test uses one server, which dies several times, because a start takes the most time.


QUICK_STEPS = ("before-swap", "after-swap")
"""The steps directly before and after the commit. Tests of the other steps are slow, except for the test with
PostgreSQL, which covers all steps.
"""


def _list_steps(*steps: str) -> list[ParameterSet]:
    return [pytest.param(step, marks=[] if step in QUICK_STEPS else pytest.mark.slow) for step in steps]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("step", _list_steps(*STEPS))
def test_killed_server_leaves_a_complete_commit_or_no_commit(tmp_path: Path, step: str) -> None:
    with KillableServer(tmp_path / "home") as server:
        client = server.start()
        for number, retry in enumerate(RETRIES):
            client = _kill_and_retry(server, client, step, retry, f"t{number}")


def test_killed_server_on_postgresql_and_s3_leaves_a_complete_commit_or_no_commit(
    tmp_path: Path, postgres_url: str, s3: S3, s3_bucket: str
) -> None:
    env = {**s3.build_seamark_env(), "SEAMARK_DATABASE": postgres_url, "SEAMARK_WAREHOUSE": f"s3://{s3_bucket}/lake"}
    with KillableServer(tmp_path / "home", env) as server:
        client = server.start()
        for number, step in enumerate(STEPS):
            client = _kill_and_retry(server, client, step, RETRIES[number % 2], f"t{number}")
        for name in client.list_tables():
            for location in client.list_metadata_files(name):
                assert (s3.root / location.removeprefix("s3://")).is_file()


def test_killed_transaction_changed_all_its_tables_or_none(tmp_path: Path) -> None:
    with KillableServer(tmp_path / "home") as server:
        client = server.start()
        # At "after-metadata-write" one of three files exists.
        for step in ("after-metadata-write", "before-swap", "after-swap"):
            names = [f"{table}-{step}" for table in "abc"]
            changes = []
            for name in names:
                assert client.create_table(name)[0] == 200
                requirements, updates = build_append(7, parent=None, sequence=1)
                identifier = {"namespace": ["db"], "name": name}
                changes.append({"identifier": identifier, "requirements": requirements, "updates": updates})
            request = ("POST", "/v1/transactions/commit", {"table-changes": changes}, {"Idempotency-Key": create_key()})
            server.run_until_death(
                step, nth=1, send_request=lambda call=client.call, sent_request=request: call(*sent_request)
            )
            client = server.start()
            expected = [7] if step in STEPS_AFTER_COMMIT else []
            assert [client.read_chain(name) for name in names] == [expected] * 3, step
            for _ in range(2):
                assert client.call(*request)[0] == 204
            assert [client.read_chain(name) for name in names] == [[7]] * 3


def _list_changes(client: HttpClient) -> dict[str, tuple[tuple[Any, ...], int, Any]]:
    """Return changes by name: (request, expected status, function that returns True if the change was made).

    The function reads the tables through the client that it is given.
    """
    location = client.list_metadata_files("source")[0]
    rename_request = {
        "source": {"namespace": ["db"], "name": "old"},
        "destination": {"namespace": ["db"], "name": "new"},
    }
    return {
        "create": (
            ("POST", "/v1/namespaces/db/tables", {"name": "made", "schema": SCHEMA}),
            200,
            lambda client: "made" in client.list_tables(),
        ),
        "rename": (
            ("POST", "/v1/tables/rename", rename_request),
            204,
            lambda client: _find_only_name(client.list_tables(), "new", "old") == "new",
        ),
        "register": (
            ("POST", "/v1/namespaces/db/register", {"name": "twin", "metadata-location": location}),
            200,
            lambda client: "twin" in client.list_tables(),
        ),
        "drop": (
            ("DELETE", "/v1/namespaces/db/tables/doomed", None),
            204,
            lambda client: (
                _find_only_name([*client.list_tables(), *_list_dropped(client)], "dropped:doomed", "doomed")
                == "dropped:doomed"
            ),
        ),
    }


def _find_only_name(existing_names: list[str], *names: str) -> str:
    found_names = [name for name in names if name in existing_names]
    assert len(found_names) == 1, f"of {names}, {found_names} exist, but exactly one must"
    return found_names[0]


def _list_dropped(client: HttpClient) -> list[str]:
    _, body = client.call("GET", "/api/v1/dropped")
    return [f"dropped:{row['name']}" for row in body["dropped"]]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("step", _list_steps("after-metadata-write", "before-swap", "after-swap"))
def test_killed_create_rename_register_or_drop_is_executed_completely_or_not_at_all(tmp_path: Path, step: str) -> None:
    """The swap is the database transaction that makes the change visible."""
    with KillableServer(tmp_path / "home") as server:
        client = server.start()
        for name in ("source", "old", "doomed"):
            assert client.create_table(name)[0] == 200
        for operation, (request, status, has_happened) in _list_changes(client).items():
            if step == "after-metadata-write" and operation != "create":
                continue  # The other operations write no file.
            key = {"Idempotency-Key": create_key()}
            server.run_until_death(
                step, 1, lambda call=client.call, sent_request=request, key=key: call(*sent_request, key)
            )
            client = server.start()
            assert has_happened(client) == (step == "after-swap"), operation
            for _ in range(2):
                actual_status, body = client.call(*request, key)  # type: ignore[call-arg]
                assert actual_status == status, (operation, body)
                assert has_happened(client), operation
        for name in client.list_tables():
            assert client.read_chain(name) == []
