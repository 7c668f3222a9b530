"""Tests which index files of earlier definitions the start of a build names."""

from __future__ import annotations

import pytest

from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import IndexDefinition, define_index
from seamark.formats.index.keys.lookups import remove_snapshots
from seamark.metaserver.api.indexes import builds
from seamark.metaserver.index.files.registry import IndexFiles
from seamark.metaserver.store.model import RegisteredIndexFile

SCHEMA = Schema((Field(1, "shop", required=False, type="long"),))
MAPPING = '[{"names":["lookup[x@1:"],"field-id":1}]'


def build_definition(snapshot_id: int, attribute_id: int = 4) -> IndexDefinition:
    """Return the definition of an index on an attribute of the dimension table a.shops.

    The attribute is the field `attribute_id` of the row whose field 1 equals `shop`, at the snapshot `snapshot_id`.
    """
    return define_index("city", "bitmap", [f"lookup[a.shops@{snapshot_id}:1:{attribute_id}:string](shop)"], SCHEMA)


def build_registration(definition_id: str, number: int) -> RegisteredIndexFile:
    return RegisteredIndexFile(
        uuid="u",
        location=f"file{number}",
        definition=definition_id,
        kind="bitmap",
        level=0,
        files=1,
        rows=1,
        size_bytes=1,
        snapshot_id=None,
        created_ms=number,
    )


def test_definitions_without_snapshots_are_equal_only_if_all_other_parts_are() -> None:
    assert remove_snapshots(build_definition(1).id) == remove_snapshots(build_definition(2).id)
    assert remove_snapshots(build_definition(1).id) != remove_snapshots(build_definition(1, attribute_id=5).id)
    mapped_id = build_definition(1).id[:-1] + f',"name-mapping":{MAPPING}}}'
    assert remove_snapshots(mapped_id) != remove_snapshots(mapped_id.replace("x@1:", "x@2:"))


def test_each_earlier_definition_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared_ids: list[str] = []

    def record_and_remove_snapshots(definition_id: str) -> str:
        compared_ids.append(definition_id)
        return remove_snapshots(definition_id)

    monkeypatch.setattr(builds, "remove_snapshots", record_and_remove_snapshots)
    # The 400 files have these four definitions in turn, so every fourth file has the first definition.
    ids = [
        build_definition(1).id,
        build_definition(2).id,
        build_definition(1, attribute_id=5).id,
        define_index("k", "bitmap", ["shop"], SCHEMA).id,
    ]
    files = IndexFiles(1, [build_registration(ids[number % 4], number) for number in range(400)])
    earlier_files = builds.list_earlier_files(files, build_definition(2))
    # Only the first definition equals the new one except for the snapshot.
    assert [file["location"] for file in earlier_files] == [f"file{number}" for number in range(396, -1, -4)]
    assert len(compared_ids) == len(set(compared_ids))
