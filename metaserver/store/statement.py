"""What a transaction is made of, without any I/O: generators that yield statements and receive rows.

The rule: SQL is written once, in the dialect that SQLite and PostgreSQL share (`$1` placeholders, `ON CONFLICT`,
`RETURNING`); the few words in which they differ are tokens in braces that a `SqlDialect` fills in. So one set of
generators, tested on both, says what a transaction means, and the drivers know only how to run one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

APPLICATION_NAME = "seamark"
"""How PostgreSQL knows our sessions: the timeline waits for the transactions of these only."""

Row = Sequence[Any]
Rows = Sequence[Row]


class Statement(NamedTuple):
    """`lock` is a PostgreSQL row lock (the words after FOR); SQLite needs none, its writers stand in a queue."""

    sql: str
    params: tuple[Any, ...] = ()
    lock: str = ""


Steps = Generator[Statement, Rows, T]
"""A transaction or a read: yields statements, is sent the rows of each, returns its result or raises."""


def marks(count: int, first: int = 1) -> str:
    return ", ".join(f"${number}" for number in range(first, first + count))


def batches(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Rows to insert, some at a time: what stands after VALUES, and the parameters. Few sizes, so that the databases'
    caches of prepared statements hold them all."""
    at = 0
    while at < len(rows):
        size = next(size for size in (64, 8, 1) if size <= len(rows) - at)
        batch = rows[at : at + size]
        width = len(batch[0])
        values = ", ".join(f"({marks(width, 1 + number * width)})" for number in range(size))
        yield values, tuple(value for row in batch for value in row)
        at += size


@dataclass(frozen=True)
class SqlDialect:
    """How one database says the words in braces.

    `tokens` maps each to its SQL. `placeholder` stands before a parameter's number. `locks`: has row locks.
    """

    name: str
    tokens: dict[str, str]
    placeholder: str
    locks: bool

    def translator(self) -> Callable[[str, str], str]:
        """(sql, lock) → what the driver sends, remembered: the texts are few and each is sent many times."""

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
        # One writer at a time: the highest position so far, plus one. Rows never leave these two tables.
        "next_position": (
            "(SELECT printf('%020d', coalesce(max(CAST(last AS INTEGER)), 0) + 1) FROM ("
            "SELECT max(position) AS last FROM instants UNION ALL SELECT max(position) FROM instants_archive))"
        ),
        # Beyond any position: one writer at a time, so whatever is there is all there will be below it.
        "watermark": "':'",
        "each_of_1": "(SELECT value FROM json_each($1))",
    },
    placeholder="?",
    locks=False,
)

POSTGRES = SqlDialect(
    name="PostgreSQL",
    tokens={
        # "C" compares bytes, and bytes of UTF-8 sort as code points.
        "text": 'TEXT COLLATE "C"',
        "int": "BIGINT",
        "bytes": "BYTEA",
        "table": "",
        # Commits become visible out of sequence order. A position that holds the transaction's id can be held back
        # until every older transaction of ours has ended, so that a reader who continues from it misses nothing.
        # The epoch in front of it rises when a dump is restored into a cluster that counts transactions from anew.
        "next_position": (
            "((SELECT lpad(to_hex(epoch), 4, '0') FROM timeline_epoch) "
            "|| lpad(to_hex(pg_current_xact_id()::text::bigint), 16, '0') "
            "|| lpad(to_hex(nextval('instant_sequence')), 16, '0'))"
        ),
        # The oldest transaction id in progress in a session of ours, or else the next one. Not the snapshot's xmin:
        # that stands still while anything in the whole cluster, a vacuum even, is at work. The session list has ids of
        # 32 bits, so they are set against the snapshot's xmax; those it has not seen yet are above it.
        "watermark": (
            "(SELECT lpad(to_hex(epoch), 4, '0') FROM timeline_epoch) || (SELECT lpad(to_hex(top - greatest(0, max("  # noqa: S608
            "((top - coalesce(backend_xid::text::bigint, top) + 2147483648) & 4294967295) - 2147483648))), 16, '0') "
            "FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS top) AS snapshot LEFT JOIN "
            f"pg_stat_activity ON datname = current_database() AND application_name = '{APPLICATION_NAME}' "
            "GROUP BY top)"
        ),
        "each_of_1": "(SELECT jsonb_array_elements_text($1::text::jsonb))",
    },
    placeholder="$",
    locks=True,
)
