"""Tests of commits that remove partition specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import CommitConflict, RetryLater
from tests.catalog.appends import append_files, commit_table, load_metadata
from tests.catalog.rig import BusyObjects, open_rig
from tests.support.wrapper_capture import WrapperCapture


def remove_specs(*spec_ids: int) -> dict[str, Any]:
    return {"action": "remove-partition-specs", "spec-ids": list(spec_ids)}


async def test_spec_of_files_in_any_snapshot_cannot_be_removed(tmp_path: Path) -> None:
    """No reader could read these files, and the spec would get another id if it was added again."""
    capture = WrapperCapture(BusyObjects)
    async with open_rig(tmp_path, wrap_objects=capture) as rig:
        await rig.create_table()
        await append_files(rig, {"a": 1})
        for buckets in (2, 4):
            field = {"source-id": 1, "transform": f"bucket[{buckets}]", "name": f"b{buckets}"}
            spec = {"action": "add-spec", "spec": {"fields": [field]}}
            await commit_table(rig, ([], [spec, {"action": "set-default-spec", "spec-id": -1}]))
        head = (await load_metadata(rig))["current-snapshot-id"]
        capture.wrapper.is_busy = True
        with pytest.raises(RetryLater):  # The files are unknown.
            await commit_table(rig, ([], [remove_specs(0)]))
        capture.wrapper.is_busy = False
        with pytest.raises(
            CommitConflict, match=f"Cannot remove partition spec 0: manifests of snapshot {head} have it"
        ):
            await commit_table(rig, ([], [remove_specs(0, 1)]))
        await commit_table(rig, ([], [remove_specs(1)]))
        await commit_table(rig, ([], [{"action": "remove-snapshots", "snapshot-ids": [head]}, remove_specs(0)]))
        assert [spec["spec-id"] for spec in (await load_metadata(rig))["partition-specs"]] == [2]
