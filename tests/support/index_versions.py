"""Index files of another version of the program."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from seamark.formats.index.kinds.kinds import KINDS
from seamark.metaserver.api.http.components import ServerComponents


def change_version(data: bytes, kind: str) -> bytes:
    """Return an index file as a later version of the program might write it."""
    name = f"seamark-{kind}-v".encode()
    changed_data = data.replace(b"%s%d" % (name, KINDS[kind].version), name + b"9")
    assert changed_data != data
    return changed_data


async def replace_by_later_version(components: ServerComponents, namespace: str, table: str, location: str) -> str:
    """Replace a live index file by a copy with an unknown version, and return the location of the copy.

    The copy has a new location, so the server has not cached it.
    """
    entry = (await components.catalog.tables.load((namespace,), table)).entry
    assert entry is not None
    (file,) = (file for file in (await components.registry.load_files(entry)).files if file.location == location)
    path = Path(urlsplit(location).path)
    later_path = path.with_name(f"later-{path.name}")
    later_path.write_bytes(change_version(path.read_bytes(), file.kind))
    later_version = msgspec.structs.replace(file, location=later_path.as_uri())
    await components.registry.replace(file.uuid, file.definition, add=[later_version], remove=[location])
    return later_version.location
