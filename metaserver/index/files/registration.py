"""Checks of an index file before plans may use it.

The server does not trust the programs that build indexes, so it reads the header of the file itself.
"""

from __future__ import annotations

from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.runtime.errors import BadRequest, Corrupt, ObjectMissing
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.index.files.headers import IndexReader
from seamark.metaserver.store.model import RegisteredIndexFile

_SHOWN_MAX = 200


async def read_index_file(
    reader: IndexReader,
    location: str,
    size_bytes: int,
    *,
    folder: str,
    table_uuid: str,
    snapshot_id: int | None,
    now_ms: int,
) -> RegisteredIndexFile:
    """Read the header of an index file, and return the file as an entry of the registry that plans may use.

    The entry is not stored yet. `snapshot_id` is the snapshot from which the file was built.

    Raises:
        BadRequest: The object is not a valid index file of the table, or is not in `folder`.
    """
    root = parse_location(folder)
    parsed_location = parse_location(location, "The location of an index file")
    if not location.startswith(folder + "/") or parsed_location == root or not root.holds(parsed_location):
        raise BadRequest(f"{location[:_SHOWN_MAX]!r} is not in the folder {folder}")
    try:
        header = (await reader.describe(location, size_bytes)).header
    except (Corrupt, ObjectMissing) as error:
        raise BadRequest(f"Cannot register {location}: {error.message}") from None
    except UnknownVersion as error:
        raise BadRequest(f"Cannot register {location}: {error}") from None
    if header.table_uuid != table_uuid:
        raise BadRequest(f"Cannot register {location}: it belongs to the table {header.table_uuid}")
    return RegisteredIndexFile(
        uuid=table_uuid,
        location=location,
        definition=header.definition,
        kind=header.kind,
        level=header.level,
        files=header.files,
        rows=header.rows,
        size_bytes=header.size_bytes,
        snapshot_id=snapshot_id,
        created_ms=now_ms,
        changed_ms=now_ms,
    )
