"""Trino's tokens of a statement, and the query inside it, with the position of each character.

sqlglot accepts more than Trino: nested comments, hints, templates, numbers that end in names. So the text is first
split by Trino's lexical rules (SqlBase.g4), and a text that does not follow them is not supported. Comments become
blanks of the same length, so positions stay the same.

A query may be inside a statement: after EXPLAIN, or as a text in EXECUTE IMMEDIATE, in which each quote is doubled.
`QueryText.offsets` has the position of each of its characters in the statement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
      (?P<comment>--[^\r\n]*|/\*.*?\*/)
    | (?P<string>'[^']*(?:''[^']*)*')
    | (?P<quoted>"[^"]*(?:""[^"]*)*")
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_.]))
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<space>[\ \t\r\n]+)
    | (?P<mark><>|!=|<=|>=|->|=>|\|\||/(?!\*)|[-+*%<>=().,;?\[\]:])  # a comment without an end is searched once
    """,
    re.VERBOSE | re.DOTALL,
)
_NUMERAL = re.compile(
    r"""
      (?P<other>--[^\r\n]*|/\*.*?\*/|'[^']*'|"[^"]*"|[^\W0-9]\w*|/(?!\*)|[^\w'"/])  # as in _TOKEN
    | 0(?:[xX](?P<hex>(?:_?[0-9A-Fa-f]){1,64})|[oO](?P<octal>(?:_?[0-7]){1,64})|[bB](?P<binary>(?:_?[01]){1,64}))(?!\w)
    | (?P<decimal>[0-9](?:_?[0-9])*(?:\.(?:[0-9](?:_?[0-9])*)?)?(?:[eE][+-]?[0-9]+)?)(?!\w)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED_CHARACTERS_MAX = 40
_BASES = {"hex": 16, "octal": 8, "binary": 2}
_TYPED = frozenset(
    {"BIGINT", "BOOLEAN", "DATE", "DECIMAL", "DOUBLE", "INTEGER", "TIME", "TIMESTAMP", "UUID", "VARCHAR"}
)
_BEGINNINGS = frozenset({"SELECT", "WITH", "(", "TABLE", "VALUES"})
_OPTIONS = frozenset({"FORMAT", "TYPE"})


class UnsupportedStatement(Exception):
    """The statement is not fully supported, so it is sent unchanged."""


class TrinoToken(NamedTuple):
    kind: str
    """string, quoted, number, word or mark"""
    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        """A keyword in upper case; "" for other tokens."""
        return self.text.upper() if self.kind in ("word", "mark") else ""


@dataclass(frozen=True)
class QueryText:
    """A query's text, and its position in the statement."""

    text: str
    tokens: tuple[TrinoToken, ...]
    offsets: Sequence[int]
    """The position in the statement of each character and of the end."""
    quoted: bool = False
    """The query is in a text of the statement, in which each quote is doubled."""


@dataclass(frozen=True)
class ExecuteStatement:
    """`EXECUTE name USING …`.

    `parameters` are unchanged texts in their order, without comments.
    """

    name: str
    parameters: tuple[str, ...]


def tokens_of(text: str) -> tuple[TrinoToken, ...]:
    """Split a text into Trino's tokens, without spaces and comments.

    Raises:
        UnsupportedStatement: If the text does not follow Trino's lexical rules.
    """
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise UnsupportedStatement
        kind = str(match.lastgroup)
        if kind not in ("comment", "space"):
            tokens.append(TrinoToken(kind, match[0], at, match.end()))
        at = match.end()
    return tuple(tokens)


def normalize_numerals(text: str) -> str:
    """Return the text with `1_000`, `0xFF`, `0o17` and `0b101` as plain decimal numbers; sqlglot reads them as `1 AS
    _000`.

    Raises:
        UnsupportedStatement: With the text, for digits that are no number of Trino.
    """
    parts: list[str] = []
    at = 0
    while at < len(text):
        match = _NUMERAL.match(text, at)
        if match is None and text[at] in "'\"/":  # a text or a comment without an end
            return "".join([*parts, text[at:]])
        if match is None:
            raise UnsupportedStatement(text[at : at + _QUOTED_CHARACTERS_MAX].split()[0])
        kind = str(match.lastgroup)
        digits = match[0] if kind == "other" else match[kind].replace("_", "")
        parts.append(str(int(digits, _BASES[kind])) if kind in _BASES else digits)
        at = match.end()
    return "".join(parts)


def extract_query(statement: str, parameters: Sequence[str] = ()) -> QueryText:
    """Return the query in a statement.

    Args:
        parameters: The values that replace the question marks of a prepared statement.

    Raises:
        UnsupportedStatement: If the statement has no query that can be read.
    """
    text, offsets = statement, range(len(statement) + 1)
    tokens = tokens_of(text)
    if _words(tokens, 2) == ("EXPLAIN", "ANALYZE"):
        tokens = tokens[3:] if _words(tokens[2:], 1) == ("VERBOSE",) else tokens[2:]
    elif _words(tokens, 1) == ("EXPLAIN",):
        tokens = tokens[1:]
        if tokens and tokens[0].word == "(" and _words(tokens[1:], 1)[0] in _OPTIONS:
            tokens = tokens[_find_closing(tokens, 0) + 1 :]
    if _words(tokens, 2) == ("EXECUTE", "IMMEDIATE"):
        if len(tokens) < 3 or tokens[2].kind != "string" or parameters:
            raise UnsupportedStatement
        parameters = _parse_using(tokens[3:])
        text, unquoted = _unquote(tokens[2])
        return replace(_fill_parameters(text, tokens_of(text), unquoted, parameters), quoted=True)
    return _fill_parameters(text, tokens, offsets, parameters)


def find_with_position(query: QueryText) -> tuple[int, bool]:
    """Return the position in the statement for a first named subquery, and whether the query has WITH before it."""
    tokens = query.tokens
    has_with = tokens[0].word == "WITH"
    first = tokens[0] if not has_with else tokens[2] if tokens[1].word == "RECURSIVE" else tokens[1]
    return query.offsets[first.start], has_with


def parse_execute(statement: str) -> ExecuteStatement | None:
    """Return the prepared statement that is executed, also below EXPLAIN; None for any other statement."""
    try:
        tokens = tokens_of(statement)
        start = 0
        while start < len(tokens) and tokens[start].word in ("EXPLAIN", "ANALYZE", "VERBOSE"):
            start += 1
        tokens = tokens[start:]
        if _words(tokens, 1) != ("EXECUTE",) or len(tokens) < 2 or _words(tokens, 2)[1] == "IMMEDIATE":
            return None
        return ExecuteStatement(name_of(tokens[1]), _parse_using(tokens[2:]))
    except UnsupportedStatement:
        return None


def name_of(token: TrinoToken) -> str:
    """Return an identifier's name.

    Raises:
        UnsupportedStatement: If the token is no identifier.
    """
    if token.kind == "word":
        return token.text
    if token.kind == "quoted":
        return token.text[1:-1].replace('""', '"')
    raise UnsupportedStatement


def _words(tokens: Sequence[TrinoToken], count: int) -> tuple[str, ...]:
    return tuple(token.word for token in tokens[:count]) or ("",)


def _find_closing(tokens: Sequence[TrinoToken], opening: int) -> int:
    """Return the position of the bracket that closes the bracket at `opening`.

    Raises:
        UnsupportedStatement: If no bracket closes it.
    """
    depth = 0
    for number in range(opening, len(tokens)):
        depth += tokens[number].word in ("(", "[")
        depth -= tokens[number].word in (")", "]")
        if depth == 0:
            return number
    raise UnsupportedStatement


def _parse_using(tokens: Sequence[TrinoToken]) -> tuple[str, ...]:
    """Return the parameters after USING.

    Raises:
        UnsupportedStatement: If the tokens are no USING clause.
    """
    if not tokens:
        return ()
    if tokens[0].word != "USING" or len(tokens) < 2:
        raise UnsupportedStatement
    parameters: list[list[str]] = [[]]
    number = 1
    while number < len(tokens):
        token = tokens[number]
        if token.word == ",":
            parameters.append([])
            number += 1
            continue
        last = _find_closing(tokens, number) if token.word in ("(", "[") else number
        parameters[-1] += [one.text for one in tokens[number : last + 1]]
        number = last + 1
    return tuple(" ".join(one) for one in parameters)


def _unquote(token: TrinoToken) -> tuple[str, list[int]]:
    """Return the value of a text literal, and the position of each of its characters and of the end."""
    text, offsets = [], []
    at = token.start + 1
    while at < token.end - 1:
        offsets.append(at)
        text.append(token.text[at - token.start])
        at += 2 if token.text[at - token.start] == "'" else 1
    return "".join(text), [*offsets, token.end - 1]


def _fill_parameters(
    text: str, tokens: Sequence[TrinoToken], offsets: Sequence[int], parameters: Sequence[str]
) -> QueryText:
    """Return the query from its first token on, with parameters in the place of question marks.

    Only a parameter that is a literal replaces its question mark. Other question marks stay, and give no condition.
    """
    if not tokens or tokens[0].word not in _BEGINNINGS:
        raise UnsupportedStatement
    marks = [token for token in tokens if token.word == "?"]
    if len(marks) != len(parameters):
        raise UnsupportedStatement
    parameters_by_mark = dict(zip(marks, parameters, strict=True))
    blank = [character if character in "\r\n" else " " for character in text]
    for token in tokens:
        blank[token.start : token.end] = token.text
    cut, origin, copied_to = [], [], tokens[0].start
    for token, parameter in parameters_by_mark.items():
        if not is_plain(parameter):
            continue
        cut += [*blank[copied_to : token.start], *f" {parameter} "]
        origin += [*offsets[copied_to : token.start], *[offsets[token.start]] * (len(parameter) + 2)]
        copied_to = token.end
    if not cut:
        shift = tokens[0].start
        moved = tuple(TrinoToken(one.kind, one.text, one.start - shift, one.end - shift) for one in tokens)
        return QueryText("".join(blank[shift:]), moved, offsets[shift:])
    query = "".join([*cut, *blank[copied_to:]])
    return QueryText(query, tokens_of(query), [*origin, *offsets[copied_to:]])


def is_plain(parameter: str) -> bool:
    """Return whether a parameter is a single literal, which can replace a question mark without brackets.

    Raises:
        UnsupportedStatement: For invalid SQL.
    """
    tokens = tokens_of(parameter)
    if tokens and tokens[0].word in ("-", "+"):
        return len(tokens) == 2 and tokens[1].kind == "number"
    if len(tokens) == 2:
        return tokens[0].word in _TYPED and tokens[1].kind == "string"
    return len(tokens) == 1 and (tokens[0].kind in ("string", "number") or tokens[0].word in ("TRUE", "FALSE", "NULL"))
