"""Operations on recorded reads of queries: column reads by day, the query history by hour, and applied advice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.store import model, operations
from seamark.metaserver.store.model import NAMESPACES_MAX, NamespacePath
from seamark.metaserver.store.sql.by_uuid import hold_table
from seamark.metaserver.store.sql.rows import make_range_end, pack, unpack
from seamark.metaserver.store.sql.statement import Steps, StoreStatement, split_batches


def add_column_reads(op: operations.AddColumnReads, now_ms: int) -> Steps[None]:
    yield from hold_table(op.uuid)
    # Sort the columns, so that two replicas do not deadlock.
    rows = [(op.uuid, op.day, column_id, age_d, reads) for column_id, age_d, reads in sorted(op.reads)]
    for values, parameters in split_batches(rows):
        yield StoreStatement(
            f"INSERT INTO column_reads (uuid, day, column_id, oldest_age_d, reads) VALUES {values} "  # noqa: S608
            "ON CONFLICT (uuid, day, column_id) DO UPDATE SET reads = column_reads.reads + excluded.reads, "
            "oldest_age_d = CASE WHEN column_reads.oldest_age_d < excluded.oldest_age_d "
            "THEN excluded.oldest_age_d ELSE column_reads.oldest_age_d END",
            parameters,
        )


def list_reads_of_table(uuid: str, since_day: int, limit: int) -> Steps[list[model.ColumnReads]]:
    rows = yield StoreStatement(
        "SELECT column_id, oldest_age_d, sum(reads), min(day), max(day) FROM column_reads "
        "WHERE uuid = $1 AND day >= $2 GROUP BY column_id, oldest_age_d ORDER BY column_id, oldest_age_d LIMIT $3",
        (uuid, since_day, limit),
    )
    return [model.ColumnReads(*map(int, row)) for row in rows]


def delete_old_column_reads(before_day: int, limit: int) -> Steps[int]:
    rows = yield StoreStatement(
        "DELETE FROM column_reads WHERE (uuid, day, column_id) IN "
        "(SELECT uuid, day, column_id FROM column_reads WHERE day < $1 ORDER BY day LIMIT $2) RETURNING 1",
        (before_day, limit),
    )
    return len(rows)


def add_queries(op: operations.AddQueryRecords, now_ms: int) -> Steps[None]:
    """Add statements of one hour to the query history of a table, by their shape.

    Statements with the same shape differ only in the compared values. There are four cases for a record:

    - Its shape is stored: its samples and sums are added.
    - It has no shape, and its fingerprint is not stored: it is ignored.
    - The table, or the principal (`owner`), has too many shapes: its sums are added to the shape `OTHER_SHAPES`.
    - Otherwise its shape is stored.

    Raises:
        NoSuchTable: The table has no live name.
    """
    yield from hold_table(op.uuid)  # This locks the table, so that it is not dropped meanwhile.
    rows = yield StoreStatement(
        "SELECT owner, count(*) FROM query_shapes WHERE uuid = $1 AND fingerprint <> $2 GROUP BY owner",
        (op.uuid, model.OTHER_SHAPES),
    )
    counts_by_owner = {str(owner): int(count) for owner, count in rows}
    fingerprints = {model.OTHER_SHAPES, *(record.fingerprint for record in op.records)}
    stored_shapes = yield from _find_stored_shapes(op.uuid, sorted(fingerprints))
    sums_by_number: dict[int, list[int]] = {}
    # Sort the shapes, so that two replicas do not deadlock. Of one shape, the records that contain it come first: they
    # store the shape, and records with only a time need a stored shape.
    for record in sorted(op.records, key=lambda record: (record.fingerprint, not record.shape)):
        fingerprint = record.fingerprint
        if fingerprint in stored_shapes:
            if record.samples:
                yield StoreStatement(
                    "UPDATE query_shapes SET samples = $3 WHERE uuid = $1 AND fingerprint = $2",
                    (op.uuid, fingerprint, _append_samples(stored_shapes[fingerprint].samples, record.samples)),
                )
        elif not record.shape and fingerprint != model.OTHER_SHAPES:
            continue  # The record has only a time, and the history does not contain its shape.
        elif (
            fingerprint == model.OTHER_SHAPES
            or sum(counts_by_owner.values()) >= op.shapes_max
            or counts_by_owner.get(record.owner, 0) >= op.owner_shapes_max
        ):
            fingerprint = model.OTHER_SHAPES
            if fingerprint not in stored_shapes:
                stored_shapes[fingerprint] = yield from _store_shape(op.uuid, fingerprint, "", "", "")
        else:
            counts_by_owner[record.owner] = counts_by_owner.get(record.owner, 0) + 1
            stored_shapes[fingerprint] = yield from _store_shape(
                op.uuid, fingerprint, record.owner, record.shape, record.samples
            )
        totals = sums_by_number.setdefault(stored_shapes[fingerprint].number, [0] * len(_SUM_COLUMNS))
        for position, value in enumerate(msgspec.structs.astuple(record.sums)):
            totals[position] += value
    yield from _add_sums([(number, op.hour, totals) for number, totals in sorted(sums_by_number.items())])


class _StoredShape(NamedTuple):
    number: int
    samples: str


def _store_shape(uuid: str, fingerprint: str, owner: str, shape: str, samples: str) -> Steps[_StoredShape]:
    """Store a new shape, and return it. If another replica has stored the shape meanwhile, return the stored row."""
    attempt = 0
    while True:
        number = _number_shape(uuid, fingerprint, attempt)
        # If another replica stores the same shape concurrently, the insert conflicts in one of the two unique indexes.
        rows = yield StoreStatement(
            "INSERT INTO query_shapes (uuid, fingerprint, owner, shape, samples, number) "
            "VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING RETURNING 1",
            (uuid, fingerprint, owner, shape, samples, number),
        )
        if rows:
            return _StoredShape(number, samples)
        stored_shapes = yield from _find_stored_shapes(uuid, [fingerprint])
        if fingerprint in stored_shapes:
            return stored_shapes[fingerprint]
        attempt += 1  # A different shape has this number.


def _number_shape(uuid: str, fingerprint: str, attempt: int) -> int:
    """Return the number of a new shape: a digest of 63 bits.

    All replicas compute the same number for a shape. Two shapes almost never have the same number.

    Args:
        uuid: The table.
        fingerprint: The fingerprint of the shape.
        attempt: The number of earlier attempts. Their numbers belong to other shapes.
    """
    text = f"{uuid}\n{fingerprint}" + (f"\n{attempt}" if attempt else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


_SUM_COLUMNS = tuple(field.name for field in msgspec.structs.fields(model.QuerySums))
_SUM_MAX = 1 << 61
"""The maximum of a sum. Larger sums are limited to it, so that the addition of two sums fits into 64 bits."""
_ADD_SUMS = ", ".join(
    f"{name} = CASE WHEN query_sums.{name} > {_SUM_MAX} - excluded.{name} THEN {_SUM_MAX} "
    f"ELSE query_sums.{name} + excluded.{name} END"
    for name in _SUM_COLUMNS
)
# Add as doubles, because SQLite raises an error if a sum of integers exceeds 64 bits.
_SELECT_TOTALS = ", ".join(f"sum(CAST({name} AS DOUBLE PRECISION)) AS {name}" for name in _SUM_COLUMNS)
SAMPLES_MAX = 16
"""The maximum number of samples of one shape."""


def _limit_sums(sums: Iterable[Any]) -> list[int]:
    """Return the sums as integers of at most `_SUM_MAX`, so that later additions do not overflow the column."""
    return [min(int(value), _SUM_MAX) for value in sums]


def _add_sums(rows: Iterable[tuple[int, int, Sequence[int]]]) -> Steps[None]:
    """Add sums to the stored sums of the query history.

    Args:
        rows: Tuples (number, hour, sums). The number identifies a shape: statements that differ only in the compared
            values. The hour is in hours since the epoch.
    """
    limited_rows = [(number, hour, *_limit_sums(sums)) for number, hour, sums in rows]
    for values, parameters in split_batches(limited_rows):
        yield StoreStatement(
            f"INSERT INTO query_sums (number, hour, {', '.join(_SUM_COLUMNS)}) VALUES {values} "  # noqa: S608
            f"ON CONFLICT (number, hour) DO UPDATE SET {_ADD_SUMS}",
            parameters,
        )


def _find_stored_shapes(uuid: str, fingerprints: Sequence[str]) -> Steps[dict[str, _StoredShape]]:
    """Return the stored shapes of a table whose fingerprint is in `fingerprints`, by fingerprint.

    A shape describes statements that differ only in the compared values. Its fingerprint is its digest.
    """
    rows = yield StoreStatement(
        "SELECT fingerprint, number, samples FROM query_shapes WHERE fingerprint IN {each_of_1} AND uuid = $2",
        (msgspec.json.encode(fingerprints).decode(), uuid),
    )
    return {str(fingerprint): _StoredShape(int(number), str(samples)) for fingerprint, number, samples in rows}


def _append_samples(old: str, new: str) -> str:
    """Append samples to a JSON list, and keep the newest `SAMPLES_MAX`."""
    samples = [*(convert_json(old, list[msgspec.Raw]) if old else ()), *convert_json(new, list[msgspec.Raw])]
    return msgspec.json.encode(samples[-SAMPLES_MAX:]).decode()


def query_shapes(uuid: str, since_hour: int, limit: int) -> Steps[list[model.QueryShapeSums]]:
    rows = yield StoreStatement(
        f"SELECT fingerprint, shape, samples, first, last, {', '.join(_SUM_COLUMNS)} FROM "  # noqa: S608
        f"(SELECT number AS counted_number, min(hour) AS first, max(hour) AS last, {_SELECT_TOTALS} FROM query_sums "
        "WHERE hour >= $2 AND number IN (SELECT number FROM query_shapes WHERE uuid = $1) GROUP BY number "
        "HAVING sum(statements) > 0) AS counted "
        "JOIN query_shapes ON query_shapes.number = counted_number "
        "ORDER BY statements DESC, fingerprint LIMIT $3",
        (uuid, since_hour, limit),
    )
    return [
        model.QueryShapeSums(
            str(fingerprint), str(shape), str(samples), model.QuerySums(*_limit_sums(sums)), int(first), int(last)
        )
        for fingerprint, shape, samples, first, last, *sums in rows
    ]


def load_query_totals(
    since_hour: int, within: Sequence[NamespacePath] | None, limit: int
) -> Steps[list[model.QueryTotals]]:
    """Return the sums of the statements on each table, of at most `limit` tables with the most statements.

    Args:
        since_hour: The first hour that counts, in hours since the epoch.
        within: The namespaces whose tables are included, with their descendants. None for all namespaces.
        limit: The maximum number of tables.
    """
    if within is not None and not within:
        return []
    readable, parameters = _make_namespace_condition(within, 3)
    rows = yield StoreStatement(
        f"SELECT counted.uuid, namespace, name, shapes, {', '.join(_SUM_COLUMNS)} FROM "  # noqa: S608
        f"(SELECT uuid, count(DISTINCT query_sums.number) AS shapes, {_SELECT_TOTALS} FROM query_sums "
        "JOIN query_shapes ON query_shapes.number = query_sums.number WHERE hour >= $1 "
        f"AND uuid IN (SELECT uuid FROM entries WHERE kind = 'table' AND {readable}) "
        "GROUP BY uuid HAVING sum(statements) > 0 ORDER BY statements DESC, uuid LIMIT $2) AS counted "
        f"JOIN entries ON entries.uuid = counted.uuid AND kind = 'table' AND {readable} "
        "ORDER BY statements DESC, counted.uuid, namespace, name",
        (since_hour, limit, *parameters),
    )
    totals: dict[str, model.QueryTotals] = {}
    for uuid, namespace, name, shapes, *sums in rows:  # If a table has several names, use the first.
        sums_of_table = model.QuerySums(*_limit_sums(sums))
        totals.setdefault(
            str(uuid), model.QueryTotals(str(uuid), unpack(str(namespace)), str(name), int(shapes), sums_of_table)
        )
    return list(totals.values())


_NAMESPACE_COUNTS = (1, 8, NAMESPACES_MAX)
"""The numbers of namespaces for which there is a statement, so that the databases prepare only a few statements."""


def _make_namespace_condition(namespaces: Sequence[NamespacePath] | None, first_number: int) -> tuple[str, list[str]]:
    """Return the condition that an entry is in or below one of the namespaces, and its parameters.

    The parameters are numbered from `first_number`.
    """
    if namespaces is None:
        return "1 = 1", []
    paths = [pack(namespace) for namespace in namespaces]
    size = next(size for size in _NAMESPACE_COUNTS if size >= len(paths))
    paths += paths[-1:] * (size - len(paths))  # The last namespace fills the remaining places of the statement.
    # Each namespace has two parameters: the start and the end of its range.
    start_numbers = range(first_number, first_number + 2 * size, 2)
    ranges = " OR ".join(f"namespace BETWEEN ${number} AND ${number + 1}" for number in start_numbers)
    return f"({ranges})", [text for path in paths for text in (path, make_range_end(path))]


def merge_query_hours(before_hour: int, limit: int, period_hours: int) -> Steps[int]:
    """Delete the sums of hours, and add them to the sums of the first hour of their period.

    The sums of the first hour itself (`hour % $3` is 0) stay where they are.

    Args:
        before_hour: The hour before which sums are merged, in hours since the epoch.
        limit: The maximum number of sums to delete.
        period_hours: The length of a period, in hours.

    Returns:
        The number of deleted sums.
    """
    rows = yield StoreStatement(
        "DELETE FROM query_sums WHERE (number, hour) IN (SELECT number, hour FROM query_sums "  # noqa: S608
        f"WHERE hour < $1 AND hour % $3 <> 0 ORDER BY hour LIMIT $2) RETURNING number, hour, {', '.join(_SUM_COLUMNS)}",
        (before_hour, limit, period_hours),
    )
    periods: dict[tuple[int, int], list[int]] = {}
    for number, hour, *sums in rows:
        totals = periods.setdefault((number, hour - hour % period_hours), [0] * len(_SUM_COLUMNS))
        for position, value in enumerate(sums):
            totals[position] += value
    yield from _add_sums([(*key, totals) for key, totals in sorted(periods.items())])
    return len(rows)


def prune_queries(before_hour: int, limit: int) -> Steps[int]:
    rows = yield StoreStatement(
        "DELETE FROM query_sums WHERE (number, hour) IN "
        "(SELECT number, hour FROM query_sums WHERE hour < $1 ORDER BY hour LIMIT $2) RETURNING number",
        (before_hour, limit),
    )
    for number in sorted({number for (number,) in rows}):
        yield StoreStatement(
            "DELETE FROM query_shapes WHERE number = $1 AND NOT EXISTS "
            "(SELECT 1 FROM query_sums WHERE query_sums.number = $1)",
            (number,),
        )
    return len(rows)


def save_advice(op: operations.SaveAppliedAdvice, now_ms: int) -> Steps[None]:
    advice = op.advice
    yield from hold_table(advice.uuid)
    yield StoreStatement(
        "INSERT INTO applied_advice (uuid, id, applied_ms, advice) VALUES ($1, $2, $3, $4) "
        "ON CONFLICT (uuid, id) DO UPDATE SET advice = excluded.advice",
        (advice.uuid, advice.id, advice.applied_ms, advice.advice),
    )
    yield _delete_old_advice(advice.uuid, op.keep)


def change_advice(op: operations.ChangeAppliedAdvice, now_ms: int) -> Steps[None]:
    advice = op.advice
    yield from hold_table(advice.uuid)
    parameters = (advice.uuid, advice.id, advice.applied_ms, advice.advice)
    if op.expected is None:
        rows = yield StoreStatement(
            "INSERT INTO applied_advice (uuid, id, applied_ms, advice) VALUES ($1, $2, $3, $4) "
            "ON CONFLICT (uuid, id) DO NOTHING RETURNING 1",
            parameters,
        )
    else:
        rows = yield StoreStatement(
            "UPDATE applied_advice SET applied_ms = $3, advice = $4 "
            "WHERE uuid = $1 AND id = $2 AND advice = $5 RETURNING 1",
            (*parameters, op.expected),
        )
    if not rows:
        raise CommitConflict(f"Another request has changed the applied proposal {advice.id}; read it again")
    yield _delete_old_advice(advice.uuid, op.keep)


def _delete_old_advice(uuid: str, keep: int) -> StoreStatement:
    return StoreStatement(
        "DELETE FROM applied_advice WHERE uuid = $1 AND id NOT IN "
        "(SELECT id FROM applied_advice WHERE uuid = $1 ORDER BY applied_ms DESC, id DESC LIMIT $2)",
        (uuid, keep),
    )


def list_applied_advice(uuid: str, limit: int) -> Steps[list[model.AppliedAdvice]]:
    rows = yield StoreStatement(
        "SELECT uuid, id, applied_ms, advice FROM applied_advice WHERE uuid = $1 "
        "ORDER BY applied_ms DESC, id DESC LIMIT $2",
        (uuid, limit),
    )
    return [
        model.AppliedAdvice(str(uuid), str(id), int(applied_ms), str(advice)) for uuid, id, applied_ms, advice in rows
    ]
