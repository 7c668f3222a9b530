"""Transactions without I/O: generators that yield statements and receive rows.

All SQL is written once, in the dialect that SQLite and PostgreSQL share (`$1` placeholders, `ON CONFLICT`,
`RETURNING`). Where the databases differ, the SQL contains tokens in braces, which a `SqlDialect` replaces. The
generators define what a transaction does, and the drivers only run them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

APPLICATION_NAME = "seamark"
"""The application name of PostgreSQL sessions. The timeline waits only for transactions of sessions with this name."""

Row = Sequence[Any]
Rows = Sequence[Row]

_BATCH_SIZES = (64, 8, 1)


class StoreStatement(NamedTuple):
    """A statement with its parameters.

    Attributes:
        lock: The row lock to take in PostgreSQL (the words after FOR). SQLite ignores it, because its writers are
            serialised.
        only_locks: Whether the statement is sent only for its lock. SQLite does not run it.
    """

    sql: str
    params: tuple[Any, ...] = ()
    lock: str = ""
    only_locks: bool = False


Steps = Generator[StoreStatement, Rows, T]
"""A transaction or a read: a generator that yields statements, receives the rows of each, and returns the result."""


def format_placeholders(count: int, first: int = 1) -> str:
    return ", ".join(f"${number}" for number in range(first, first + count))


def split_batches(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Split rows to insert into batches. Yield the text after VALUES and the parameters of each batch.

    There are only a few batch sizes, so that the databases can cache a prepared statement for each.
    """
    position = 0
    while position < len(rows):
        size = next(size for size in _BATCH_SIZES if size <= len(rows) - position)
        batch = rows[position : position + size]
        width = len(batch[0])
        values = ", ".join(f"({format_placeholders(width, 1 + number * width)})" for number in range(size))
        yield values, tuple(value for row in batch for value in row)
        position += size


@dataclass(frozen=True)
class SqlDialect:
    """The differences of one database's SQL.

    Attributes:
        tokens: The SQL that replaces each token in braces.
        placeholder: The prefix of a parameter's number.
        locks: Whether the database supports row locks.
    """

    name: str
    tokens: dict[str, str]
    placeholder: str
    locks: bool

    def make_translator(self) -> Callable[[str, str], str]:
        """Return a function that translates a statement and its lock to the driver's SQL.

        The function caches its results, because few different statements are sent many times.
        """

        @lru_cache(maxsize=2048)
        def translate(sql: str, lock: str) -> str:
            text = re.sub(r"\{(\w+)\}", lambda match: self.tokens[match.group(1)], sql)
            if self.placeholder != "$":
                text = re.sub(r"\$(\d+)", self.placeholder + r"\1", text)
            return f"{text} FOR {lock}" if lock and self.locks else text

        return translate


SQLITE = SqlDialect(
    name="SQLite",
    tokens={
        "text": "TEXT",
        "int": "INTEGER",
        "bytes": "BLOB",
        "table": "STRICT, WITHOUT ROWID",
        # There is one writer at a time, so the next position is the highest position plus one. Instants are never
        # deleted from these two tables.
        "next_position": (
            "(SELECT printf('%020d', coalesce(max(CAST(last AS INTEGER)), 0) + 1) FROM ("
            "SELECT max(position) AS last FROM instants UNION ALL SELECT max(position) FROM instants_archive))"
        ),
        # There is one writer at a time, so positions become visible in their order, and the watermark is above all
        # positions.
        "watermark": "':'",
        "each_of_1": "(SELECT value FROM json_each($1))",
        "join_offsets": "group_concat(shard || ':' || flushed)",
        # 2440587.5 is the Julian day of the start of 1970.
        "clock_ms": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    },
    placeholder="?",
    locks=False,
)

POSTGRES = SqlDialect(
    name="PostgreSQL",
    tokens={
        # The collation "C" compares bytes. The bytes of UTF-8 sort like code points.
        "text": 'TEXT COLLATE "C"',
        "int": "BIGINT",
        "bytes": "BYTEA",
        "table": "",
        # Commits do not become visible in the order of a sequence. Therefore a position begins with the transaction id,
        # and readers see it only when every older transaction of these sessions has ended. So a reader that continues
        # from a position misses nothing. The epoch before the id rises when a dump is restored into a cluster with
        # smaller transaction ids.
        "next_position": (
            "((SELECT lpad(to_hex(epoch), 4, '0') FROM timeline_epoch) "
            "|| lpad(to_hex(pg_current_xact_id()::text::bigint), 16, '0') "
            "|| lpad(to_hex(nextval('instant_sequence')), 16, '0'))"
        ),
        # The watermark is the oldest transaction id in progress in these sessions, or the next id. The snapshot's xmin
        # is not suitable, because it does not advance while any transaction in the cluster, such as a vacuum, is
        # running. The list of sessions has ids of 32 bits, so they are extended by comparison with the snapshot's xmax.
        "watermark": (
            "(SELECT lpad(to_hex(epoch), 4, '0') FROM timeline_epoch) || (SELECT lpad(to_hex(top - greatest(0, max("  # noqa: S608
            "((top - coalesce(backend_xid::text::bigint, top) + 2147483648) & 4294967295) - 2147483648))), 16, '0') "
            "FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS top) AS snapshot LEFT JOIN "
            f"pg_stat_activity ON datname = current_database() AND application_name = '{APPLICATION_NAME}' "
            "GROUP BY top)"
        ),
        "each_of_1": "(SELECT jsonb_array_elements_text($1::text::jsonb))",
        "join_offsets": "string_agg(shard || ':' || flushed, ',')",
        "clock_ms": "(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    },
    placeholder="$",
    locks=True,
)
