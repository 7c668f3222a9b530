"""Parses and classifies SQL statements. A text must contain one statement, which is parsed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from sqlglot import Dialect, TokenType, exp
from sqlglot.errors import SqlglotError

from seamark.connector.analysis.lexer import TrinoToken, UnsupportedStatement, normalize_numerals, tokenize_trino
from seamark.connector.client.errors import InvalidRequest
from seamark.formats.iceberg.expressions.sql_parser import parse_statements, tokenize_sql

CHARACTERS_MAX = 100_000
TOKENS_MAX = 20_000
NUMBER_CHARACTERS_MAX = 400
"""The maximum number of characters of a numeric literal.

The largest double has 309 digits. Python cannot convert a text of more than 4,300 digits to an integer.
"""
_TRINO = Dialect.get_or_raise("trino")
_SHOWN_CHARACTERS_MAX = 300
"""The maximum length of an error message of the parser."""


class Kind(Enum):
    """The kind of a statement."""

    QUERY = "a query"
    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    MERGE = "MERGE"
    DEFINITION = "CREATE, ALTER or DROP"
    OTHER = "another statement"


_KINDS: dict[type[exp.Expr], Kind] = {
    exp.Insert: Kind.INSERT,
    exp.Update: Kind.UPDATE,
    exp.Delete: Kind.DELETE,
    exp.Merge: Kind.MERGE,
    exp.Create: Kind.DEFINITION,
    exp.Alter: Kind.DEFINITION,
    exp.Drop: Kind.DEFINITION,
}


@dataclass(frozen=True)
class SqlStatement:
    """One parsed statement."""

    text: str
    tree: exp.Expr
    words: Sequence[Any]
    """The tokens into which sqlglot has split the text."""

    @cached_property
    def kind(self) -> Kind:
        if isinstance(self.tree, exp.Select | exp.SetOperation | exp.Subquery | exp.Values):
            return Kind.QUERY
        return _KINDS.get(type(self.tree), Kind.OTHER)

    @cached_property
    def query(self) -> SqlStatement:
        """The query of the statement, at its position in the text.

        In the text of an INSERT, blanks replace the words before the query. If the INSERT has an unsupported form, the
        result is the whole statement.
        """
        if self.kind is not Kind.INSERT:
            return self
        try:
            start = _find_source_start(tokenize_trino(self.text), has_columns=isinstance(self.tree.this, exp.Schema))
        except UnsupportedStatement:
            return self
        words = [word for word in self.words if word.start >= start]
        return SqlStatement(" " * start + self.text[start:], self.tree.expression, words)


def parse(text: str) -> SqlStatement:
    """Parse one statement.

    Raises:
        InvalidRequest: The text is not one statement, is nested too deeply, or exceeds a limit of its length.
    """
    if len(text) > CHARACTERS_MAX:
        raise InvalidRequest(f"The statement has {len(text):,} characters; the limit is {CHARACTERS_MAX:,}")
    try:
        text = normalize_numerals(text)
    except UnsupportedStatement as error:
        raise InvalidRequest(f"{str(error)!r} is not a number, and a name must not begin with a digit") from None
    try:
        words = tokenize_sql(_TRINO, text)
        if len(words) > TOKENS_MAX:
            raise InvalidRequest(f"The statement has {len(words):,} words; the limit is {TOKENS_MAX:,}")
        longest = max((len(word.text) for word in words if word.token_type is TokenType.NUMBER), default=0)
        if longest > NUMBER_CHARACTERS_MAX:
            raise InvalidRequest(
                f"The statement has a number of {longest:,} characters; the limit is {NUMBER_CHARACTERS_MAX}"
            )
        trees = [tree for tree in parse_statements(_TRINO, text, words) if tree is not None]
    except SqlglotError as error:
        raise InvalidRequest(f"The statement cannot be parsed: {_clean_first_line(str(error))}") from None
    except RecursionError:
        raise InvalidRequest("The statement is nested too deeply") from None
    if len(trees) != 1:
        raise InvalidRequest(f"The text has {len(trees)} statements; it must have exactly one")
    return SqlStatement(text, trees[0], words)


def _find_source_start(tokens: Sequence[TrinoToken], *, has_columns: bool) -> int:
    """Return the position of the source in `INSERT INTO table [(columns)] source`.

    Args:
        tokens: The tokens of the statement.
        has_columns: Whether the statement has a list of columns, which is skipped up to its closing parenthesis.

    Raises:
        UnsupportedStatement: The statement does not have this form.
    """
    if [token.word for token in tokens[:2]] != ["INSERT", "INTO"]:
        raise UnsupportedStatement
    number = 3  # The tokens before are INSERT, INTO and the first part of the table's name.
    while number < len(tokens) and tokens[number].word == ".":
        number += 2
    if has_columns:
        while number < len(tokens) and tokens[number].word != ")":
            number += 1
        number += 1
    if number >= len(tokens):
        raise UnsupportedStatement
    return tokens[number].start


def _clean_first_line(text: str) -> str:
    line = text.partition("\n")[0].replace("\x1b[4m", "").replace("\x1b[0m", "")
    return line[:_SHOWN_CHARACTERS_MAX]
