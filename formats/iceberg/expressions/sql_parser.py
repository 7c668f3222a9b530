"""sqlglot's parsers with a limited number of steps.

sqlglot tries several readings of some words, one after the other, and each reading parses the text inside again. For
`ROW(ROW(ROW(…`, the time doubles with each level: 150 characters would take hours. Therefore the parser counts its
steps from token to token. Statements of people and engines take 2 to 10 steps per token.

sqlglot's compiled parser needs only a third of the time. It is not used, because a text nested 10,000 levels deep
crashes the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlglot import Dialect, exp
from sqlglot.errors import ParseError, SqlglotError

STEPS_PER_TOKEN, STEPS_MIN = 20, 5_000
STEPS_PER_INDEXED_NODE = 10
"""The steps allowed for each node of `x` in `x[1]`. For each pair of brackets, sqlglot infers the types of the whole
`x`.
"""
_SHOWN_MAX = 200
_FAULTS = (ValueError, TypeError, AttributeError, LookupError)
"""The exceptions that sqlglot raises because of its bugs, for texts that it does not expect."""


class TooManyReadings(SqlglotError):
    """The parser tries too many readings of a text, so it exceeds its limit of steps."""


def tokenize_sql(dialect: Dialect, text: str) -> list[Any]:
    """Split a text into sqlglot's tokens.

    Raises:
        SqlglotError: The text cannot be split into tokens of the dialect.
    """
    try:
        return list(dialect.tokenize(text))
    except _FAULTS:
        raise SqlglotError("A part of the text cannot be split into tokens") from None


def parse_statements(
    dialect: Dialect, text: str, tokens: Sequence[Any] | None = None, node_type: type[exp.Expr] | None = None
) -> list[exp.Expr | None]:
    """Parse the statements in `text`.

    Args:
        dialect: The SQL dialect.
        text: The text.
        tokens: The tokens of the text, if the caller already has them.
        node_type: The type of the trees, if the text is not a list of statements.

    Raises:
        SqlglotError: The text is not valid in the dialect, or takes too many steps.
        RecursionError: The text is nested too deeply.
    """
    tokens = tokenize_sql(dialect, text) if tokens is None else list(tokens)
    try:
        parser = _limit_steps(dialect.parser_class)(dialect=dialect)
        parser.steps_left = STEPS_MIN + STEPS_PER_TOKEN * len(tokens)
        statements: list[exp.Expr | None] = (
            parser.parse(tokens, text) if node_type is None else parser.parse_into(node_type, tokens, text)
        )
    except _FAULTS:
        raise SqlglotError("A part of the text cannot be parsed") from None
    return statements


def parse_into(dialect: Dialect, text: str, node_type: type[exp.Expr]) -> exp.Expr:
    """Parse `text` as a tree of the type `node_type`. The errors are the same as those of `parse_statements`."""
    statements = parse_statements(dialect, text, node_type=node_type)
    if not statements or statements[0] is None:
        raise ParseError(f"No expression was parsed from '{text[:_SHOWN_MAX]}'")
    return statements[0]


@cache
def _limit_steps(parser: type) -> type:
    """Return a subclass of one of sqlglot's parsers that counts its steps, and raises an error at its limit.

    A step is a move to another token. For `x[1]`, each node of `x` counts too, because sqlglot infers the types of the
    whole `x` for each pair of brackets.
    """

    class Limited(parser):  # type: ignore[misc]
        steps_left = 0

        def _advance(self, times: Any = 1) -> None:
            self._spend(1)
            super()._advance(times)

        def _parse_bracket(self, this: exp.Expr | None = None) -> exp.Expr | None:
            if this is not None and self._curr and self._curr.token_type in self.BRACKETS:
                self._spend(STEPS_PER_INDEXED_NODE * sum(1 for _ in this.walk()))
            bracket: exp.Expr | None = super()._parse_bracket(this)
            return bracket

        def _spend(self, steps: int) -> None:
            self.steps_left -= steps
            if self.steps_left < 0:
                # Do not raise a ParseError, because sqlglot would then try the next reading.
                raise TooManyReadings("The text has nested parts that can be read in too many ways; nest fewer parts")

    return Limited
