"""Transactions without I/O: generators that yield statements and receive rows.

The rule: SQL is written once, in the dialect that SQLite and PostgreSQL share (`$1` placeholders, `ON CONFLICT`,
`RETURNING`). Where they differ, a `SqlDialect` replaces tokens in braces. One set of generators, tested on both
databases, defines what a transaction does; the drivers only run them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

APPLICATION_NAME = "seamark"
"""The application name of PostgreSQL sessions: the timeline waits only for transactions of these sessions."""

Row = Sequence[Any]
Rows = Sequence[Row]


class StoreStatement(NamedTuple):
    """A statement with its parameters.

    `lock` is a PostgreSQL row lock (the words after FOR). SQLite needs none: its writers are serialised.
    """

    sql: str
    params: tuple[Any, ...] = ()
    lock: str = ""


Steps = Generator[StoreStatement, Rows, T]
"""A transaction or a read.

It yields statements, receives the rows of each statement, and returns its result or raises.
"""


def format_placeholders(count: int, first: int = 1) -> str:
    return ", ".join(f"${number}" for number in range(first, first + count))


def split_batches(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Split rows to insert into batches: the text after VALUES, and the parameters.

    There are few batch sizes, so that the databases' caches of prepared statements contain them all.
    """
    at = 0
    while at < len(rows):
        size = next(size for size in (64, 8, 1) if size <= len(rows) - at)
        batch = rows[at : at + size]
        width = len(batch[0])
        values = ", ".join(f"({format_placeholders(width, 1 + number * width)})" for number in range(size))
        yield values, tuple(value for row in batch for value in row)
        at += size


@dataclass(frozen=True)
class SqlDialect:
    """The tokens in braces for one database.

    `tokens` maps each token to its SQL. `placeholder` is the prefix of a parameter's number.

    Attributes:
        locks: Whether the database supports row locks.
    """

    name: str
    tokens: dict[str, str]
    placeholder: str
    locks: bool

    def make_translator(self) -> Callable[[str, str], str]:
        """Return a cached function from (sql, lock) to the driver's SQL.

        The cache is small: there are few texts, and each is sent many times.
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
        # There is one writer at a time, so the position is the highest position so far, plus one. Rows never leave
        # these two tables.
        "next_position": (
            "(SELECT printf('%020d', coalesce(max(CAST(last AS INTEGER)), 0) + 1) FROM ("
            "SELECT max(position) AS last FROM instants UNION ALL SELECT max(position) FROM instants_archive))"
        ),
        # There is one writer at a time, so the result is above any position, and no later position is below an
        # existing position.
        "watermark": "':'",
        "each_of_1": "(SELECT value FROM json_each($1))",
        "join_offsets": "group_concat(shard || ':' || flushed)",
        "clock_ms": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    },
    placeholder="?",
    locks=False,
)

POSTGRES = SqlDialect(
    name="PostgreSQL",
    tokens={
        # "C" compares bytes, and bytes of UTF-8 sort like code points.
        "text": 'TEXT COLLATE "C"',
        "int": "BIGINT",
        "bytes": "BYTEA",
        "table": "",
        # Commits become visible out of sequence order. A position with the transaction's id can be held back until
        # every older transaction of these sessions has ended. So a reader that continues from it misses nothing.
        # The epoch before the id rises when a dump is restored into a cluster with smaller transaction ids.
        "next_position": (
            "((SELECT lpad(to_hex(epoch), 4, '0') FROM timeline_epoch) "
            "|| lpad(to_hex(pg_current_xact_id()::text::bigint), 16, '0') "
            "|| lpad(to_hex(nextval('instant_sequence')), 16, '0'))"
        ),
        # The oldest transaction id in progress in these sessions, otherwise the next id. The snapshot's xmin is not
        # used, because it does not advance while any transaction in the cluster, such as a vacuum, is running. The
        # session list has ids of 32 bits, so they are compared with the snapshot's xmax. Ids that the snapshot has
        # not seen are above it.
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
