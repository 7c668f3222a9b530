"""What a transaction is made of, without any I/O: generators that yield statements and receive rows.

The rule: SQL is written once, in the dialect that SQLite and PostgreSQL share (`$1` placeholders, `ON CONFLICT`,
`RETURNING`); the few words in which they differ are tokens in braces that a `Dialect` fills in. So one set of
generators, tested on both, says what a transaction means, and the drivers know only how to run one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

Row = Sequence[Any]
Rows = Sequence[Row]


class Statement(NamedTuple):
    """`lock` is a PostgreSQL row lock (the words after FOR); SQLite needs none, its writers stand in a queue."""

    sql: str
    params: tuple[Any, ...] = ()
    lock: str = ""


Steps = Generator[Statement, Rows, T]
"""A transaction or a read: yields statements, is sent the rows of each, returns its result or raises."""


@dataclass(frozen=True)
class Dialect:
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


SQLITE = Dialect(
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
        "visible": "1",
        "each_of_1": "(SELECT value FROM json_each($1))",
    },
    placeholder="?",
    locks=False,
)

POSTGRES = Dialect(
    name="PostgreSQL",
    tokens={
        # "C" compares bytes, and bytes of UTF-8 sort as code points.
        "text": 'TEXT COLLATE "C"',
        "int": "BIGINT",
        "bytes": "BYTEA",
        "table": "",
        # Commits become visible out of sequence order. A position that starts with the transaction's id can be held
        # back until every older transaction has ended, so that a reader who continues from it misses nothing.
        "next_position": (
            "(lpad(to_hex(pg_current_xact_id()::text::bigint), 16, '0') "
            "|| lpad(to_hex(nextval('instant_sequence')), 16, '0'))"
        ),
        "visible": "position < lpad(to_hex(pg_snapshot_xmin(pg_current_snapshot())::text::bigint), 16, '0')",
        "each_of_1": "(SELECT jsonb_array_elements_text($1::text::jsonb))",
    },
    placeholder="$",
    locks=True,
)
