"""Tests that manifests that cannot be merged do not block appends, and that other manifests are still merged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import Api
from tests.commits.claims import ClaimedTable, build_struct
from tests.commits.reader import find_snapshot, read_manifests
from tests.server.rig import run_server


async def _count_manifests(table: ClaimedTable) -> dict[int, int]:
    """Return the number of manifests in the current snapshot, by partition spec."""
    answer = await table.api("GET", f"/v1/namespaces/db/tables/{table.name}")
    head = find_snapshot(answer.json["metadata"])
    assert head is not None
    return Counter(manifest["partition_spec_id"] for manifest in read_manifests(head))


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_appends_continue_after_the_schema_of_a_partition_column_was_removed(
    tmp_path: Path, version: int
) -> None:
    async with run_server(tmp_path) as server:
        columns = {"x": "long", "y": "long"}
        table = await ClaimedTable.create(Api(server), columns, [("x", "identity")], version=version)
        for number in range(2):
            await table.commit(add=[table.build_data_file(f"old{number}", number)])
        void = {"name": "p0", "transform": "void", "source-id": 1, "field-id": 1000}
        fields: list[dict[str, Any]] = [void] if version == 1 else []
        await table.update(
            {"action": "add-spec", "spec": {"fields": fields}}, {"action": "set-default-spec", "spec-id": -1}
        )
        await table.update(
            {"action": "add-schema", "schema": build_struct({2: ("y", "long")}, 1)},
            {"action": "set-current-schema", "schema-id": -1},
        )
        await table.update({"action": "remove-schemas", "schema-ids": [0]})
        merge_properties = {"commit.manifest.min-count-to-merge": "2"}
        await table.update({"action": "set-properties", "updates": merge_properties})
        for number in range(6):
            await table.commit(add=[table.build_data_file(f"new{number}", *([None] * len(fields)), spec_id=1)])
        assert await table.list_live_files() == [*(f"new{number}" for number in range(6)), "old0", "old1"]
        manifest_counts = await _count_manifests(table)
        # The two manifests of the old spec are not merged. Those of the new spec are, so six appends leave at most 3.
        assert manifest_counts[0] == 2
        assert manifest_counts[1] < 4
