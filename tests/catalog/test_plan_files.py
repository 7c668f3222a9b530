"""Tests that files in the plan folders of this version and of earlier versions are recognised as plan files."""

from __future__ import annotations

import pytest

from seamark.metaserver.catalog.plans import plan_tables


@pytest.mark.parametrize("folder", ["_seamark/plans", "metadata/plans"])
def test_plan_file_is_recognised_by_its_location(folder: str) -> None:
    digest = "0123456789abcdef" * 2
    for end in (f"{digest}-x-snap.avro", f"{digest}/x.metadata.json"):
        assert plan_tables._PLAN_FILE.search(f"s3://lake/t/{folder}/{end}")
    assert not plan_tables._PLAN_FILE.search(f"s3://lake/t/{folder}/other.avro")
