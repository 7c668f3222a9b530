"""Operations on the registry of index files.

Each operation first increases the table's index version. The row of the version is a lock: if two transactions change
the index files of one table, the second waits at this row, and then sees the result of the first. Commits to the table
do not take this lock. A version is at least the time in milliseconds, so if a table is removed and registered again,
its version is greater than all its earlier versions.
"""

from __future__ import annotations

from seamark.formats.runtime.errors import CommitConflict, NotFound
from seamark.metaserver.store import operations
from seamark.metaserver.store.model import IndexFileState
from seamark.metaserver.store.sql.by_uuid import hold_table
from seamark.metaserver.store.sql.rows import INDEX_FILE, pack_json
from seamark.metaserver.store.sql.statement import Steps, StoreStatement, split_batches


def replace_index_files(op: operations.ReplaceIndexFiles, now_ms: int) -> Steps[int]:
    """Register new index files of one definition, and supersede others. See `ReplaceIndexFiles`.

    The index version rises first, because its row is a lock: concurrent requests for the table wait for it. `now_ms` is
    a parameter of all operations. The operation itself contains the time that is stored.

    Raises:
        CommitConflict: A new file is registered for another index, or a file to supersede is not live.
    """
    yield from hold_table(op.uuid)
    version = yield from _increase_version(op.uuid, op.now_ms)
    definitions = yield from _read_definitions(op.uuid, [file.location for file in op.add])
    for location, definition in definitions.items():
        if definition != op.definition:
            raise CommitConflict(f"The index file {location} is registered for another index: {definition}")
    if op.add and len(definitions) == len({file.location for file in op.add}):
        return version  # The request is a repeat. The files may be in any state.
    removed_rows = yield StoreStatement(
        "UPDATE index_files SET state = 'superseded', changed_ms = $2 WHERE location IN {each_of_1} AND uuid = $3 "
        "AND definition = $4 AND state = 'live' RETURNING location",
        (pack_json(op.remove), op.now_ms, op.uuid, op.definition),
    )
    if missing_files := sorted(set(op.remove) - {row[0] for row in removed_rows}):
        raise CommitConflict(f"The index file {missing_files[0]} is no longer live: another request replaced it first")
    for values, params in split_batches([INDEX_FILE.encode(file) for file in op.add]):
        yield StoreStatement(
            f"INSERT INTO index_files ({INDEX_FILE}) VALUES {values} ON CONFLICT (uuid, location) DO NOTHING",  # noqa: S608
            params,
        )
    return version


def record_quarantine(op: operations.QuarantineIndexFile, now_ms: int) -> Steps[int]:
    version = yield from _increase_version(op.uuid, op.now_ms)
    rows = yield StoreStatement(
        "UPDATE index_files SET state = 'quarantined', changed_ms = $1, reason = $2 "
        "WHERE uuid = $3 AND location = $4 AND state = 'live' RETURNING 1",
        (op.now_ms, op.reason, op.uuid, op.location),
    )
    if not rows and (yield from _read_state(op.uuid, op.location)) is None:
        raise NotFound(f"Index file is not registered: {op.location}")
    return version


def forget_index_file(op: operations.ForgetIndexFile, now_ms: int) -> Steps[int]:
    version = yield from _increase_version(op.uuid, op.now_ms)
    yield StoreStatement(
        "DELETE FROM index_files WHERE uuid = $1 AND location = $2 AND state <> 'live'", (op.uuid, op.location)
    )
    if (yield from _read_state(op.uuid, op.location)) is IndexFileState.LIVE:
        raise CommitConflict(f"The index file {op.location} is live and used by plans; replace or quarantine it first")
    return version


def _increase_version(uuid: str, now_ms: int) -> Steps[int]:
    """Increase the version of a table's list of index files, and return it.

    The new version is the time, or the last version plus 1 if the time is not greater. So the version also increases
    after its row was deleted with the table, and the table was registered again.
    """
    rows = yield StoreStatement(
        "INSERT INTO index_versions (uuid, version) VALUES ($1, $2) ON CONFLICT (uuid) DO UPDATE SET version = "
        "CASE WHEN index_versions.version < excluded.version THEN excluded.version "
        "ELSE index_versions.version + 1 END RETURNING version",
        (uuid, now_ms),
    )
    return int(rows[0][0])


def _read_definitions(uuid: str, locations: list[str]) -> Steps[dict[str, str]]:
    rows = yield StoreStatement(
        "SELECT location, definition FROM index_files WHERE location IN {each_of_1} AND uuid = $2",
        (pack_json(locations), uuid),
    )
    return {row[0]: row[1] for row in rows}


def _read_state(uuid: str, location: str) -> Steps[IndexFileState | None]:
    rows = yield StoreStatement("SELECT state FROM index_files WHERE uuid = $1 AND location = $2", (uuid, location))
    return IndexFileState(rows[0][0]) if rows else None
