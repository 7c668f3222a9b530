"""Parses the statements that maintain the files of a table, for all engines whose statements Seamark receives.

    ALTER TABLE db.t [PARTITION (predicate)] MERGE FILES [TARGET SIZE '512MB']
    ALTER TABLE db.t PARTITION (predicate) DROP COLUMNS (a, b.c)

DROP COLUMNS requires PARTITION, because Spark has a statement `ALTER TABLE t DROP COLUMNS (a)`, which changes the
schema. `PARTITION (TRUE)` selects all partitions. A name may be quoted as in Trino, `"a"`, or as in Spark, `` `a` ``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import msgspec

from seamark.connector.client.errors import InvalidRequest

TEXT_MAX = 100_000
_TOKEN = re.compile(
    r"""
      (?P<space>\s+|--[^\r\n]*|/\*.*?\*/)
    | (?P<string>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")+"|`(?:[^`]|``)+`)
    | (?P<word>\w+)
    | (?P<mark>/\*.*|.)  # a comment without an end is searched once
    """,
    re.VERBOSE | re.DOTALL,
)
_BEGINS = re.compile(r"(?:\s++|--[^\r\n]*+|/\*.*?\*/)*+alter\b", re.IGNORECASE | re.DOTALL)
"""Matches the beginning of a statement.

The quantifiers are possessive, because backtracking on a line of 40 dashes would take seconds.
"""
_SIZE = re.compile(r"([1-9]\d{0,11})\s*(B|[KMGT]I?B)", re.IGNORECASE)


class MergeFiles(msgspec.Struct, frozen=True, tag="merge-files"):
    """A statement that merges the data files of the partitions that `where` selects. None selects all partitions."""

    table: tuple[str, ...]
    where: str | None = None
    target_bytes: int | None = None


class DropColumns(msgspec.Struct, frozen=True, tag="drop-columns"):
    """A statement that removes columns from the data files of the partitions that `where` selects."""

    table: tuple[str, ...]
    where: str
    columns: tuple[str, ...]


TableStatement = MergeFiles | DropColumns


class StatementResult(msgspec.Struct, frozen=True):
    """The row that a statement returns."""

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    row_groups_copied: int
    row_groups_encoded: int
    commits: int
    conflicts: int


class StatementJob(msgspec.Struct, frozen=True):
    """A statement to run, with the server, the token and the time zone of its session.

    Attributes:
        utc: Whether the session's time zone is UTC.
    """

    url: str
    token: str | None
    statement: TableStatement
    utc: bool

    def __repr__(self) -> str:
        return f"<StatementJob {self.statement!r}>"


class StatementAnswer(msgspec.Struct, frozen=True):
    """The answer to a statement: its result or its error.

    Attributes:
        error: The reason why the statement has failed. If it is set, `result` is None.
    """

    result: StatementResult | None = None
    error: str = ""


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def word(self) -> str:
        return self.text.upper() if self.kind == "word" else ""

    @property
    def name(self) -> str:
        """The name without quotes. For a token that is not quoted, it is the text of the token."""
        quote = self.text[0]
        return self.text[1:-1].replace(quote * 2, quote) if self.kind == "quoted" else self.text


def parse_statement(text: str) -> TableStatement | None:
    """Parse a statement that merges files or drops columns. Return None for other statements, and for very long texts.

    Raises:
        InvalidRequest: The statement is invalid. The message contains the position of the error.
    """
    if len(text) > TEXT_MAX or not _BEGINS.match(text):
        return None
    return _Parser(text).parse()


def parse_bytes(text: str) -> int | None:
    """Return the number of bytes in a size such as `512MB`, or None if the text is not a size.

    Units are powers of 1024.
    """
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(match[1]) << 10 * "BKMGT".index(match[2][0].upper())


class _Parser:
    """Parses one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*_tokenize(text), _Token("end", "", len(text))]
        self._position = 0

    def parse(self) -> TableStatement | None:
        if not self._accept_words("ALTER", "TABLE"):
            return None
        table = self._parse_name()
        if table is None:
            return None
        predicate = self._parse_predicate() if self._accept_words("PARTITION") else None
        if self._accept_words("MERGE", "FILES"):
            return self._require_end(MergeFiles(table, predicate, self._parse_target_bytes()))
        if predicate is not None and self._accept_words("DROP", "COLUMNS"):
            return self._require_end(DropColumns(table, predicate, self._parse_columns()))
        return None

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position]

    def _accept_words(self, *words: str) -> bool:
        """Consume these words if they are the next tokens, and return whether they were."""
        next_words = tuple(token.word for token in self._tokens[self._position : self._position + len(words)])
        if next_words != words:
            return False
        self._position += len(words)
        return True

    def _accept_mark(self, mark: str) -> bool:
        if self._next.kind != "mark" or self._next.text != mark:
            return False
        self._position += 1
        return True

    def _parse_name(self) -> tuple[str, ...] | None:
        """Parse a name, and return its levels, or None if the next tokens are not a complete name."""
        levels = []
        while self._next.kind in ("word", "quoted"):
            levels.append(self._next.name)
            self._position += 1
            if not self._accept_mark("."):
                return tuple(levels)
        return None

    def _parse_predicate(self) -> str | None:
        """Consume a condition in parentheses, and return its text.

        Return None if the text is empty or the parentheses are not balanced.
        """
        if not self._accept_mark("("):
            return None
        begin, depth = self._next.start, 1
        while depth and self._next.kind != "end":
            depth += {"(": 1, ")": -1}.get(self._next.text, 0) if self._next.kind == "mark" else 0
            self._position += 1
        if depth:
            return None
        return self._text[begin : self._tokens[self._position - 1].start].strip() or None

    def _parse_target_bytes(self) -> int | None:
        if not self._accept_words("TARGET"):
            return None
        if not self._accept_words("SIZE") or self._next.kind != "string":
            self._fail("TARGET SIZE and a size in quotes, such as TARGET SIZE '512MB'")
        size_bytes = parse_bytes(self._next.text[1:-1])
        if size_bytes is None:
            self._fail("a size: a number and KB, MB, GB or TB")
        self._position += 1
        return size_bytes

    def _parse_columns(self) -> tuple[str, ...]:
        if not self._accept_mark("("):
            self._fail("the columns in parentheses")
        columns = []
        while (levels := self._parse_name()) is not None:
            columns.append(".".join(levels))
            if not self._accept_mark(","):
                break
        if levels is None or not self._accept_mark(")"):
            self._fail("the names of columns, separated by commas, and a closing parenthesis")
        return tuple(columns)

    def _require_end(self, statement: TableStatement) -> TableStatement:
        while self._accept_mark(";"):
            pass
        if self._next.kind != "end":
            self._fail("the end of the statement")
        return statement

    def _fail(self, expected: str) -> NoReturn:
        token = self._next
        line = self._text.count("\n", 0, token.start) + 1
        column = token.start - self._text.rfind("\n", 0, token.start)
        token_text = repr(token.text[:40]) if token.kind != "end" else "the end"
        raise InvalidRequest(
            f"The statement is not valid at line {line}, column {column}, near {token_text}: expected {expected}"
        )


def _tokenize(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], match.start())
