"""Overwrites: of what is replaced nothing stays, and nothing goes that another wrote meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.client import Api
from tests.commits.claims import Claims
from tests.server.rig import running


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running(tmp_path) as server:
        yield Api(server)


async def test_the_partitions_of_both_zeros_are_replaced_where_both_are_written(api: Api) -> None:
    table = await Claims.create(api, {"x": "double"}, [("x", "identity")])
    await table.commit(add=[table.data("old+", 0.0), table.data("old-", -0.0)])
    await table.commit(add=[table.data("new+", 0.0), table.data("new-", -0.0)], replace={"partitions": "written"})
    assert await table.live() == ["new+", "new-"]
    await table.commit(add=[table.data("newer-", -0.0)], replace={"partitions": "written"})
    assert await table.live() == ["new+", "newer-"]


async def test_equality_deletes_of_both_zeros_are_held_against_what_another_spec_wrote_there(api: Api) -> None:
    table = await Claims.create(api, {"x": "double"}, [("x", "identity")])
    read = (await table.commit(add=[table.data("a", 1.0)]))["snapshot-id"]
    fields = [{"name": "p", "transform": "identity", "source-id": 1, "field-id": 1000}]
    fields.append({"name": "q", "transform": "void", "source-id": 1, "field-id": 1001})
    await table.update(
        {"action": "add-spec", "spec": {"fields": fields}}, {"action": "set-default-spec", "spec-id": -1}
    )
    await table.commit(add=[table.data("theirs", -0.0, None, spec_id=1)])
    equality = {"content": "equality-deletes", "equality-ids": [1]}
    for zeros in ([-0.0], [0.0, -0.0]):
        deletes = [table.data(f"deletes{zero}", zero, **equality) for zero in zeros]
        refused = await table.send(read_snapshot_id=read, add=deletes)
        assert refused.error[:2] == (409, "CommitFailedException"), zeros
