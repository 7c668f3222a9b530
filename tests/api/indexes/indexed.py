"""Index files for tests of registration and listing.

They are valid, except that the kind's blob has arbitrary bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seamark.formats.index.index_file import FilesTable, assemble_index_file
from seamark.formats.index.keys.hashing import compute_file_ids
from tests.api.client import Answer, Api
from tests.planner.lakes.lake import DataFile

INDEXES = "/api/v1/tables/db/t/indexes"


def build_index_file(build: dict[str, Any], files: Sequence[DataFile], **other: Any) -> bytes:
    """Return an index file of these data files that matches the build, without readable entries.

    Args:
        build: The server's answer to the request that starts the build.
        files: The indexed data files.
        other: Arguments of `assemble_index_file` that replace those of the build.
    """
    paths = [file.path for file in files]
    sizes, records = [file.size for file in files], [file.record_count for file in files]
    table = FilesTable.from_columns(compute_file_ids(paths, sizes, records), records, sizes, paths)  # type: ignore[arg-type]
    arguments = {"definition": build["definition-id"], "kind": build["kind"], "table_uuid": build["table-uuid"]} | other
    definition, kind = arguments.pop("definition"), arguments.pop("kind")
    return b"".join(assemble_index_file(definition, kind, table, [b"any"], field_ids=[1], **arguments))


def write_index_file(build: dict[str, Any], name: str, data: bytes) -> dict[str, Any]:
    """Write an index file into the build's folder, and return the body to register it."""
    path = Path(build["folder"].removeprefix("file://")) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"location": f"{build['folder']}/{name}", "size-in-bytes": len(data)}


async def define_index(api: Api, name: str = "i", **body: Any) -> dict[str, Any]:
    answer = await api("PUT", f"{INDEXES}/{name}", body or {"kind": "bloom", "columns": ["id"]})
    assert answer.status == 200, answer.raw
    definition: dict[str, Any] = answer.json
    return definition


async def begin_build(api: Api, name: str = "i") -> dict[str, Any]:
    answer = await api("POST", f"{INDEXES}/{name}/builds")
    assert answer.status == 200, answer.raw
    body: dict[str, Any] = answer.json
    return body


async def register_files(api: Api, build: dict[str, Any], *files: dict[str, Any], **options: Any) -> Answer:
    return await api(
        "POST",
        f"{INDEXES}/{build['index']}/builds/{build['build-id']}/index-files",
        {"index-files": list(files), **options},
    )


async def list_missing_files(api: Api, build: dict[str, Any], **query: Any) -> list[str]:
    """Return the paths of the files that the build still has to index, from all pages."""
    paths: list[str] = []
    token = None
    while True:
        request = {**query, **({} if token is None else {"page-token": token})}
        text = "&".join(f"{name}={value}" for name, value in request.items())
        answer = await api("GET", f"{INDEXES}/{build['index']}/builds/{build['build-id']}/files?{text}")
        assert answer.status == 200, answer.raw
        paths += [file["file-path"] for file in answer.json["files"]]
        token = answer.json["next-page-token"]
        if token is None:
            return paths


async def load_index(api: Api, name: str = "i") -> dict[str, Any]:
    answer = await api("GET", f"{INDEXES}/{name}")
    assert answer.status == 200, answer.raw
    body: dict[str, Any] = answer.json
    return body
