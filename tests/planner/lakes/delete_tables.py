"""Columns, specs and blocks of tables with delete files, for `test_delete_rules.py` and `test_deletes.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from seamark.formats.iceberg.manifests.manifest import ManifestFile, decode_manifest
from seamark.formats.iceberg.metadata.partition import PartitionField as SpecField
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.planner.view.view import TableView
from tests.planner.lakes.manifests import PartitionField

A, B, STRUCT, NESTED, LATE, F = 1, 2, 3, 4, 5, 6
SPECS = {
    0: (),
    1: (PartitionField(1000, "a", A, "identity"),),
    2: (PartitionField(1000, "a", A, "identity"), PartitionField(1001, "f", F, "identity")),
    3: (PartitionField(1002, "a", A, "void"),),
    4: (PartitionField(1003, "b", B, "identity"), PartitionField(1002, "a", A, "void")),
}


def build_column(column_id: int, name: str, kind: Any, *, required: bool = False) -> dict[str, Any]:
    return {"id": column_id, "name": name, "required": required, "type": kind}


def build_schema(schema_id: int, kinds: dict[int, str], required_ids: set[int], *, late: bool) -> dict[str, Any]:
    nested_field = {"type": "struct", "fields": [build_column(NESTED, "n", kinds[NESTED], required=True)]}
    fields = [
        build_column(A, "a", kinds[A], required=A in required_ids),
        build_column(B, "b", kinds[B]),
        build_column(STRUCT, "s", nested_field),
        build_column(F, "f", kinds[F], required=F in required_ids),
    ]
    fields += [build_column(LATE, "late", kinds[LATE])] if late else []
    return {"type": "struct", "schema-id": schema_id, "fields": fields}


def encode_as_block(location: str, data: bytes) -> Block:
    return Block(b"".join(encode_block(decode_manifest(data, location))))


def build_manifest_file(content: int, spec_id: int, sequence: int, path: str = "m.avro") -> ManifestFile:
    return ManifestFile(
        manifest_path=path,
        manifest_length=0,
        partition_spec_id=spec_id,
        content=content,
        sequence_number=sequence,
        min_sequence_number=0,
        added_snapshot_id=1,
        added_files_count=None,
        existing_files_count=None,
        deleted_files_count=None,
        added_rows_count=None,
        existing_rows_count=None,
        deleted_rows_count=None,
        partitions=None,
        key_metadata=None,
        first_row_id=None,
    )


def build_specs() -> list[PartitionSpec]:
    return [
        PartitionSpec(key, tuple(SpecField(part.name, part.transform, part.source, (), part.id) for part in fields))
        for key, fields in SPECS.items()
    ]


def read_positions(view: TableView) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the entry ids of all data files of a planner's view, in the order of its manifests."""
    return np.concatenate([np.empty(0, dtype=np.int64), *map(view.list_block_entry_ids, range(len(view.blocks)))])
