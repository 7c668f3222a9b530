"""Tests that concurrent commits, drops, purges, undrops, renames and registers never delete a live file.

Afterwards every live table can be loaded, and every file that it refers to exists.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastavro
import pytest

from tests.catalog.rig import SCHEMA, build_append
from tests.faults.rigs.http import HttpClient
from tests.seeds import first_seed
from tests.services.seamark import Seamark

KEEP_LITTLE = {"write.metadata.previous-versions-max": "2", "write.metadata.delete-after-commit.enabled": "true"}
TABLES = "/v1/namespaces/db/tables"
NAMES = [f"t{number}" for number in range(6)]
EXPECTED_STATUSES = {200, 204, 404, 409}
"""The expected statuses of clients that interfere with each other.

Besides them, 400 is expected for the register of a table during its purge.
"""


class RandomClient:
    """A client that sends random requests for a random table. It counts every answer by its status."""

    def __init__(self, base_url: str, seed: int, number: int) -> None:
        self._client = HttpClient(base_url)
        self._random = random.Random(seed * 1000 + number)
        self._next_snapshot = number * 1_000_000
        self.answers: Counter[tuple[str, int]] = Counter()
        self.unexplained_answers: list[str] = []
        self.registered_uuids: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Send random operations until `stop` is set, and record each answer that the state cannot explain.

        About half of the operations are commits.
        """
        weighted_actions: list[tuple[Callable[[str], tuple[int, Any] | None], int]] = [
            (self._commit, 12), (self._drop, 2), (self._undrop, 3), (self._rename, 2), (self._create, 2),
            (self._register, 2), (self._purge, 1),
        ]  # fmt: skip
        while not stop.is_set():
            action = self._random.choices(
                [act for act, _ in weighted_actions], [weight for _, weight in weighted_actions]
            )[0]
            response = action(self._random.choice(NAMES))
            if response is None:
                continue
            status, body = response
            self.answers[action.__name__.lstrip("_"), status] += 1
            if status not in EXPECTED_STATUSES and not (status == 400 and action == self._register):
                self.unexplained_answers.append(f"{action.__name__}: {status} {body}")

    def _commit(self, name: str) -> tuple[int, Any]:
        status, body = self._client.call("GET", f"{TABLES}/{name}")
        if status != 200:
            return status, body
        metadata = body["metadata"]
        head = metadata.get("current-snapshot-id")
        self._next_snapshot += 1
        requirements, updates = build_append(
            self._next_snapshot, None if head in (None, -1) else head, metadata["last-sequence-number"] + 1
        )
        updates[0]["snapshot"]["manifest-list"] = _write_snapshot(metadata["location"], self._next_snapshot)
        requirements.append({"type": "assert-table-uuid", "uuid": metadata["table-uuid"]})
        return self._client.call("POST", f"{TABLES}/{name}", {"requirements": requirements, "updates": updates})

    def _drop(self, name: str) -> tuple[int, Any]:
        purge = self._random.random() < 0.5
        return self._client.call("DELETE", f"{TABLES}/{name}?purgeRequested={str(purge).lower()}")

    def _choose_dropped(self) -> dict[str, Any] | None:
        status, body = self._client.call("GET", "/api/v1/dropped")
        assert status == 200, body
        return self._random.choice(body["dropped"]) if body["dropped"] else None

    def _undrop(self, name: str) -> tuple[int, Any] | None:
        row = self._choose_dropped()
        return row and self._client.call("POST", f"/api/v1/dropped/{row['id']}/undrop", {"name": name})

    def _purge(self, _: str) -> tuple[int, Any] | None:
        row = self._choose_dropped()
        return row and self._client.call("DELETE", f"/api/v1/dropped/{row['id']}")

    def _rename(self, name: str) -> tuple[int, Any]:
        new_name = self._random.choice(NAMES)
        identifiers = {
            "source": {"namespace": ["db"], "name": name},
            "destination": {"namespace": ["db"], "name": new_name},
        }
        return self._client.call("POST", "/v1/tables/rename", identifiers)

    def _create(self, name: str) -> tuple[int, Any]:
        return self._client.call("POST", TABLES, {"name": name, "schema": SCHEMA, "properties": KEEP_LITTLE})

    def _register(self, name: str) -> tuple[int, Any]:
        """Register a second name for a live table, or a new name for a dropped table.

        The new name and the old name then share the files of the table.
        """
        row = self._choose_dropped() if self._random.random() < 0.5 else None
        if row is None:
            status, body = self._client.call("GET", f"{TABLES}/{self._random.choice(NAMES)}")
            if status != 200:
                return status, body
        location = (row or body)["metadata-location"]
        body = {"name": name, "metadata-location": location, "overwrite": self._random.random() < 0.3}
        status, answer = self._client.call("POST", "/v1/namespaces/db/register", body)
        if status == 200:
            self.registered_uuids.add(answer["metadata"]["table-uuid"])
        return status, answer


def _to_path(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def _list_snapshot_files(location: str, snapshot_id: int) -> list[str]:
    """Return the files of a snapshot that this test writes: data file, manifest, manifest list."""
    return [
        f"{location}/data/{snapshot_id}.parquet",
        f"{location}/metadata/m-{snapshot_id}.avro",
        f"{location}/metadata/l-{snapshot_id}.avro",
    ]


def _write_snapshot(location: str, snapshot_id: int) -> str:
    """Write a data file, a manifest and a manifest list, with only the fields that refer to other files.

    Return the manifest list's location.
    """
    data, manifest, manifest_list = _list_snapshot_files(location, snapshot_id)
    for path in (data, manifest):
        _to_path(path).parent.mkdir(parents=True, exist_ok=True)
    _to_path(data).write_bytes(b"PAR1")
    data_file_type = {"type": "record", "name": "file", "fields": [{"name": "file_path", "type": "string"}]}
    contents = [
        (manifest, {"name": "data_file", "type": data_file_type}, {"data_file": {"file_path": data}}),
        (manifest_list, {"name": "manifest_path", "type": "string"}, {"manifest_path": manifest}),
    ]
    for path, field, row in contents:
        with _to_path(path).open("wb") as file:
            fastavro.writer(file, {"type": "record", "name": "row", "fields": [field]}, [row])
    return manifest_list


def _find_missing_files(server: Seamark, registered_uuids: set[str]) -> list[str]:
    """Return descriptions of missing files to which live tables refer, and of tables that cannot be loaded.

    The log of a registered table is not checked. If an older file was registered, later commits may have correctly
    deleted the files of its older log.
    """
    client = HttpClient(server.base_url)
    problems = []
    for name in client.list_tables():
        status, body = client.call("GET", f"{TABLES}/{name}")
        if status != 200:
            problems.append(f"{name}: {status} {body}")
            continue
        metadata = body["metadata"]
        needed_files = [body["metadata-location"]]
        if metadata["table-uuid"] not in registered_uuids:
            needed_files += [entry["metadata-file"] for entry in metadata["metadata-log"]]
        for snapshot in metadata.get("snapshots", []):
            needed_files += _list_snapshot_files(metadata["location"], snapshot["snapshot-id"])
        problems += [f"{name}: {location}" for location in needed_files if not _to_path(location).is_file()]
    return problems


def _run_campaign(server: Seamark, seed: int, rounds: int, seconds: float) -> None:
    """Run random clients for some rounds, and check after each round that no live file is missing."""
    print(f"live files: FAULT_SEED={seed}")
    clients = [RandomClient(server.base_url, seed, number) for number in range(1, 5)]
    HttpClient(server.base_url).call("POST", "/v1/namespaces", {"namespace": ["db"]})
    operations = ("commit", "drop", "undrop", "rename", "create", "register")
    for round_number in itertools.count():
        counts: Counter[tuple[str, int]] = sum((client.answers for client in clients), Counter())
        # On a busy machine, some operations do not succeed in the first rounds. Then up to ten times as many follow.
        if round_number >= rounds and (
            all(counts[operation, 200] + counts[operation, 204] for operation in operations)
            or round_number >= 10 * rounds
        ):
            break
        stop = threading.Event()
        with ThreadPoolExecutor(len(clients)) as pool:
            futures = [pool.submit(client.run, stop) for client in clients]
            stop.wait(seconds)
            stop.set()
            for future in futures:
                future.result(timeout=60)
        assert [line for client in clients for line in client.unexplained_answers] == [], f"FAULT_SEED={seed}"
        registered_uuids = {uuid for client in clients for uuid in client.registered_uuids}
        assert _find_missing_files(server, registered_uuids) == [], f"FAULT_SEED={seed}"
    answers: Counter[tuple[str, int]] = sum((client.answers for client in clients), Counter())
    print(f"live files: {sorted(answers.items())}")
    for operation in operations:
        assert answers[operation, 200] + answers[operation, 204] > 0, (
            f"FAULT_SEED={seed}: no {operation} succeeded, {answers}"
        )
    server.restart()
    assert _find_missing_files(server, registered_uuids) == [], f"FAULT_SEED={seed}, after a restart"


ENV = {"SEAMARK_HOUSEKEEPING_INTERVAL_S": "0.3", "SEAMARK_DROP_RETENTION_S": "1"}


def test_no_live_file_is_deleted_by_concurrent_clients(start_seamark: Callable[..., Seamark]) -> None:
    _run_campaign(start_seamark(env=ENV), seed=51, rounds=2, seconds=0.6)


@pytest.mark.slow
def test_no_live_file_is_deleted_by_concurrent_clients_from_a_random_seed(
    start_seamark: Callable[..., Seamark],
) -> None:
    seed = first_seed("FAULT_SEED")
    _run_campaign(start_seamark(env=ENV), seed=seed, rounds=10, seconds=6)
