"""Tests of the layout of blocks: they stay on local disks after upgrades, under keys that contain the layout's
version.
"""

from __future__ import annotations

import hashlib

from seamark.formats.iceberg.manifests.manifest import decode_manifest
from seamark.metaserver.index.blocks.block import VERSION
from seamark.metaserver.index.blocks.encoding import encode_block
from tests.api.plans.planned import KINDS, STYLE, build_data_file
from tests.planner.lakes.manifests import ADDED, Entry, build_manifest_bytes

LAYOUT = {4: "6d4c85ad44853eff45fc9c2dbef46f01c19aeea7c6677beacf1078ee4fd1938f"}
"""SHA-256 of the block of the manifest below, by version"""
SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        {"id": 1, "name": "id", "type": "long", "required": False},
        {"id": 2, "name": "data", "type": "string", "required": False},
    ],
}


def test_changed_layout_has_a_new_version() -> None:
    """A newer program would misread blocks of an older program. If this test fails, increase VERSION."""
    files = [
        build_data_file(f"file:///t/data/{n:06d}.parquet", 1000 * n, 1000 * n + 9, text=("a" * n, "b" * n))
        for n in range(20)
    ]
    data = build_manifest_bytes(
        [Entry(ADDED, snapshot_id=1, sequence=None, file_sequence=None, file=file) for file in files],
        version=2,
        content=0,
        style=STYLE,
        spec_id=0,
        fields=(),
        kinds=KINDS,
        schema=SCHEMA,
    )
    block = b"".join(encode_block(decode_manifest(data, "file:///t/m.avro")))
    assert {VERSION: hashlib.sha256(block).hexdigest()} == LAYOUT
