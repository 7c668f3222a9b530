"""Write tables in the layout of Iceberg's Hadoop catalog: `v1.metadata.json` and `version-hint.text`."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import fastavro

from seamark.connector.client.indexes import IndexClient


def write_hadoop_table(
    client: IndexClient, table: str, folder: Path, *, version: int = 1, has_scheme: bool = True
) -> None:
    """Write a copy of a server's table as a table of a Hadoop catalog.

    Args:
        table: The name of the server's table.
        folder: The folder of the new table.
        version: The number of the metadata file, to which the version hint refers.
        has_scheme: If True, the locations in its files begin with `file:`.
    """
    loaded_table = client.load_table(table, history=True)
    old_folder = Path(loaded_table.location.removeprefix("file://"))
    shutil.copytree(old_folder, folder, ignore=shutil.ignore_patterns("*.metadata.json"), dirs_exist_ok=True)
    location = f"file://{folder}" if has_scheme else str(folder)
    avro_paths = sorted((folder / "metadata").glob("*.avro"))
    # Manifests are rewritten first, because manifest lists contain their lengths.
    avro_paths.sort(key=lambda path: b'"manifest_path"' in path.read_bytes())
    for path in avro_paths:
        _replace_locations(path, loaded_table.location, location)
    metadata = json.loads(loaded_table.metadata.replace(loaded_table.location.encode(), location.encode()))
    metadata["metadata-log"] = []
    (folder / "metadata" / f"v{version}.metadata.json").write_text(json.dumps(metadata))
    (folder / "metadata" / "version-hint.text").write_text(str(version))


def _replace_locations(path: Path, old_location: str, new_location: str) -> None:
    with path.open("rb") as file:
        reader = fastavro.reader(file)
        records = [_replace_in_record(record, old_location, new_location) for record in reader]
        schema, header = reader.writer_schema, reader.metadata
    output = io.BytesIO()
    kept_header = {name: value for name, value in header.items() if not name.startswith("avro.")}
    fastavro.writer(output, schema, records, metadata=kept_header)
    path.write_bytes(output.getvalue())


def _replace_in_record(value: Any, old_location: str, new_location: str) -> Any:
    """Return a value of an Avro record with the new location instead of the old location in all its texts.

    In a record of a manifest list, the length is also read again, because the rewritten manifest has another size.
    """
    if isinstance(value, dict):
        replaced_record = {
            name: _replace_in_record(member, old_location, new_location) for name, member in value.items()
        }
        if "manifest_length" in replaced_record:
            manifest = Path(replaced_record["manifest_path"].removeprefix("file://"))
            replaced_record["manifest_length"] = manifest.stat().st_size
        return replaced_record
    return value.replace(old_location, new_location) if isinstance(value, str) else value
