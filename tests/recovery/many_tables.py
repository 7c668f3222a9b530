"""Write a warehouse with many tables without a server."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.metaserver.catalog.documents import choose_file_suffix

COLUMNS = 20
TABLES_PER_NAMESPACE = 1000


def write_tables(warehouse: Path, count: int, *, first: int = 0, files: int = 3) -> dict[str, str]:
    """Write the metadata files of `count` tables as the server writes them.

    Return the newest file of each table name.

    Args:
        warehouse: The folder of the warehouse.
        count: The number of tables.
        first: The number of the first table.
        files: The number of metadata files of each table.
    """
    fields = [
        {"id": number, "name": f"c{number}", "required": False, "type": "long"} for number in range(1, COLUMNS + 1)
    ]
    schema = {"type": "struct", "fields": fields}
    newest_locations: dict[str, str] = {}
    for number in range(first, first + count):
        name, table_uuid = f"t{number}", str(uuid.UUID(int=number + 1))
        namespace = f"n{number // TABLES_PER_NAMESPACE}"
        location = f"file://{warehouse}/{namespace}/{name}-{number + 1:032x}"
        folder = warehouse / namespace / f"{name}-{number + 1:032x}" / "metadata"
        folder.mkdir(parents=True)
        metadata = build_table_metadata(
            uuid=table_uuid, location=location, schema=schema, properties={"owner": name}, now_ms=1
        )
        document = json.loads(encode_table(metadata))
        for version in range(files):
            document["last-updated-ms"] = version + 1
            data = json.dumps(document).encode()
            path = folder / f"{version:05d}-{uuid.UUID(int=version + 1)}{choose_file_suffix(data)}"
            path.write_bytes(data)
            document["metadata-log"] = [
                *document.get("metadata-log", []),
                {"timestamp-ms": version + 1, "metadata-file": f"file://{path}"},
            ]
            newest_locations[f"{namespace}.{name}"] = f"file://{path}"
    return newest_locations
