"""Tests of row counts up to the largest that Iceberg can represent.

Larger counts are rejected, and the table stays writable.
"""

from __future__ import annotations

import pytest

from tests.api.client import Api
from tests.commits.claims import ClaimedTable

LONG_MAX = 2**63 - 1


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_files_with_more_rows_in_total_than_a_long_are_rejected(api: Api, version: int) -> None:
    table = await ClaimedTable.create(api, {"x": "long"}, version=version)
    response = await table.send(add=[table.build_data_file("a", rows=LONG_MAX), table.build_data_file("b", rows=1)])
    assert response.error[:2] == (400, "BadRequestException")
    assert "add: the data files have 9,223,372,036,854,775,808 rows together" in response.error[2]
    await table.commit(add=[table.build_data_file("a", rows=LONG_MAX - 1), table.build_data_file("b", rows=1)])
    assert await table.list_live_files() == ["a", "b"]


async def test_delete_files_with_more_deletes_than_a_long_are_rejected(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "long"})
    equality_deletes = {"content": "equality-deletes", "equality-ids": [1]}
    response = await table.send(
        add=[
            table.build_data_file("a", rows=LONG_MAX, **equality_deletes),
            table.build_data_file("b", rows=1, **equality_deletes),
        ]
    )
    assert response.error[:2] == (400, "BadRequestException")
    assert "add: the delete files" in response.error[2]


async def test_rows_beyond_the_last_row_id_are_rejected_and_the_table_stays_writable(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "long"}, version=3)
    await table.commit(add=[table.build_data_file("a", rows=LONG_MAX - 5)])
    response = await table.send(add=[table.build_data_file("b", rows=6)])
    assert response.error[:2] == (400, "BadRequestException")
    assert "row id" in response.error[2]
    await table.commit(add=[table.build_data_file("c", rows=5)])
    assert await table.list_live_files() == ["a", "c"]


async def test_manifests_with_too_many_rows_in_total_are_not_merged(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "long"}, **{"commit.manifest.min-count-to-merge": "2"})
    for name in ("a", "b", "c"):
        commit = await table.commit(add=[table.build_data_file(name, rows=LONG_MAX)])
    await table.commit(add=[table.build_data_file("d")])
    assert await table.list_live_files() == ["a", "b", "c", "d"]
    assert int(commit["summary"].get("total-records", 0)) <= LONG_MAX, "Java reads totals as longs"
