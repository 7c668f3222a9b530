"""Tests of a cache below the server that returns wrong bytes.

If the server detects the damage, it reads the storage again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import Corrupt, Forbidden
from seamark.metaserver.catalog.documents import Documents, choose_file_suffix
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.plan.planner import open_planner
from seamark.metaserver.settings.settings import Settings
from tests.peers.rig import WatchedObjects
from tests.planner.lakes.tables import Table, plan_file_numbers


class HalfObjects(WatchedObjects):
    """A damaged cache, which returns only the first half of each file."""

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        content = await super().read(location, limit_bytes=limit_bytes)
        return content[: len(content) // 2]


@pytest.mark.parametrize("has_storage", [True, False])
async def test_damaged_manifests_and_manifest_lists_are_read_again(tmp_path: Path, has_storage: bool) -> None:
    """The cache returns only half of each file. The planner can read the storage itself only with `has_storage`."""
    table = Table(tmp_path / "t")
    table.commit(1, [table.write_manifest(f"m{day}", range(day * 10, day * 10 + 10), day=day) for day in range(3)])
    settings = Settings(home=tmp_path / "home", warehouse=tmp_path.as_uri(), plan_disk_bytes=0)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects:
        halves = HalfObjects(objects)
        async with open_planner(settings, halves, clock, stored_objects=objects if has_storage else None) as planner:
            if has_storage:
                assert sorted(await plan_file_numbers(planner, table.metadata)) == list(range(30))
                assert halves.reads.total() == 4  # The manifest list and its three manifests.
            else:
                with pytest.raises(Corrupt):
                    await plan_file_numbers(planner, table.metadata)


@pytest.mark.parametrize("has_storage", [True, False])
async def test_damaged_metadata_files_named_by_their_content_are_read_again(tmp_path: Path, has_storage: bool) -> None:
    """The cache returns only half of each file. The name of a metadata file contains a hash of its content.

    The catalog can read the storage itself only with `has_storage`.
    """
    settings = Settings(home=tmp_path / "home", warehouse=tmp_path.as_uri())
    clock = SystemClock()
    content = b'{"some": "document"}'
    location = f"{tmp_path.as_uri()}/t/metadata/00001-x{choose_file_suffix(content)}"
    async with open_objects(settings, clock) as objects:
        await objects.create(location, content)
        documents = Documents(
            HalfObjects(objects), clock, budget_bytes=1 << 20, stored_objects=objects if has_storage else None
        )
        if has_storage:
            assert await documents.read_raw(location) == content
        else:
            with pytest.raises(Forbidden, match="overwritten"):
                await documents.read_raw(location)
