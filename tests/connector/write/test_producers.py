"""Tests of producers and their sequence numbers: a writer checks them before a write, and a commit records them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import encode_producer
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append, overwrite_partitions
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.upserts import delete, upsert
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import build_rows, create_upsert_table, read_rows


@pytest.mark.parametrize(
    "producer", ["ab", ("job",), ("job", "1"), ("job", 1.0), ("job", True), ("job", -1), (1, 2), 7]
)
def test_invalid_producer_is_refused_with_the_reason(producer: Any) -> None:
    with pytest.raises(ValueError, match="it must be a name and a whole number from 0"):
        encode_producer(producer)


def test_producer_json_has_the_form_that_commits_use() -> None:
    assert encode_producer(("job", 0)) == {"id": "job", "sequence": 0}
    assert encode_producer(None) is None


def test_invalid_producer_or_key_list_is_refused_without_a_request() -> None:
    unreachable_client, rows, invalid_producer = (
        SeamarkClient("http://127.0.0.1:1"),
        pa.table({"id": [1]}),
        ("job", "1"),
    )
    for change in (
        lambda: upsert(unreachable_client, "db.t", rows, keys=["id"], producer=invalid_producer),  # type: ignore[arg-type]
        lambda: delete(unreachable_client, "db.t", keys=rows, producer=invalid_producer),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="producer is"):
            change()
    with pytest.raises(ValueError, match="lists of names"):
        upsert(unreachable_client, "db.t", rows, keys="id")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_append_of_no_rows_is_recorded_and_its_repeat_appends_nothing(client: IndexClient, version: int) -> None:
    create_upsert_table(client, version=version)
    first_report = append(client, "db.t", build_rows(), producer=("job", 4))
    assert first_report is not None
    second_report = append(client, "db.t", build_rows((1, "a")), producer=("job", 4))
    assert second_report is not None
    assert (second_report["duplicate"], second_report["snapshot-id"]) == (True, first_report["snapshot-id"])
    assert append(client, "db.t", build_rows()) is None, "without a producer there is nothing to record"
    assert read_rows(client) == []


CHANGES: dict[str, Callable[..., Any]] = {
    "delete": lambda client, **options: delete(client, "db.t", keys=pa.table({"id": [5]}), **options),
    "delete by predicate": lambda client, **options: delete(client, "db.t", where="id = 5", **options),
    "delete of no keys": lambda client, **options: delete(client, "db.t", keys=build_rows().select(["id"]), **options),
    "delete of no batches": lambda client, **options: delete(client, "db.t", keys=[], **options),
    "upsert": lambda client, **options: upsert(client, "db.t", build_rows(), keys=["id"], **options),
    "stale upsert": lambda client, **options: upsert(
        client, "db.t", build_rows((9, "b", 1)), keys=["id"], precombine="ts", **options
    ),
    "unlocated": lambda client, **options: upsert(
        client, "db.t", build_rows(), keys=["id"], strategy=EQUALITY, **options
    ),
    "overwrite": lambda client, **options: overwrite_partitions(client, "db.t", build_rows(), **options),
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_repeat_of_a_change_without_effect_changes_no_later_rows(client: IndexClient, name: str, version: int) -> None:
    create_upsert_table(client, version=version)
    append(client, "db.t", build_rows((9, "a", 7)))
    if name == "upsert":  # Without a producer, an upsert of no rows commits nothing.
        assert upsert(client, "db.t", build_rows(), keys=["id"]).snapshot_id is None
    CHANGES[name](client, producer=("job", 1))
    append(client, "db.t", build_rows((5, "new", 7)))
    second_report = CHANGES[name](client, producer=("job", 1))
    assert second_report["duplicate"] if isinstance(second_report, dict) else second_report.duplicate
    assert delete(client, "db.t", where="id = 5 or id = 9", producer=("job", 1)).duplicate, (
        "the number decides, not the kind of the repeated change"
    )
    assert [row[0] for row in read_rows(client)] == [5, 9]


def test_change_without_effect_is_found_in_the_snapshots_after_the_database_is_lost(
    client: IndexClient, server: ServerThread
) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((9, "a", 7)))
    delete(client, "db.t", keys=pa.table({"id": [5]}), producer=("job", 1))
    location = json.loads(client._request("GET", "/v1/namespaces/db/tables/t", {}))["metadata-location"]
    client._request("DELETE", "/v1/namespaces/db/tables/t", {})
    body = json.dumps({"name": "t2", "metadata-location": location}).encode()
    client._request("POST", "/v1/namespaces/db/register", {}, body)
    append(client, "db.t2", build_rows((5, "new", 7)))
    assert delete(client, "db.t2", keys=pa.table({"id": [5]}), producer=("job", 1)).duplicate
    assert [row[0] for row in read_rows(client, "db.t2")] == [5, 9]
