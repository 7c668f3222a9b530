"""Splits a statement into Trino's tokens, and extracts the query in the statement with the positions of its characters.

sqlglot accepts texts that Trino refuses: nested comments, hints, templates, and numbers that end in names. Therefore
the text is first split by Trino's lexical rules (SqlBase.g4). A text that does not follow these rules is not supported.
Comments are replaced by blanks of the same length, so positions do not change.

A query may be inside a statement: after EXPLAIN, or as a string in EXECUTE IMMEDIATE, in which each quote is doubled.
`QueryText.offsets` maps each character of the query to its position in the statement.
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
_TYPED_LITERALS = frozenset(
    {"BIGINT", "BOOLEAN", "DATE", "DECIMAL", "DOUBLE", "INTEGER", "TIME", "TIMESTAMP", "UUID", "VARCHAR"}
)
_BEGINNINGS = frozenset({"SELECT", "WITH", "(", "TABLE", "VALUES"})
_EXPLAIN_OPTIONS = frozenset({"FORMAT", "TYPE"})


class UnsupportedStatement(Exception):
    """Raised if a statement is not fully supported. The caller sends such a statement unchanged."""


class TrinoToken(NamedTuple):
    """A token of a statement. Comments and spaces are no tokens."""

    kind: str
    """One of string, quoted (an identifier in double quotes), number, word, and mark (an operator or punctuation)."""
    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        """The word, operator or punctuation in upper case, or "" for other tokens."""
        return self.text.upper() if self.kind in ("word", "mark") else ""


@dataclass(frozen=True)
class QueryText:
    """The text of a query, and its position in the statement."""

    text: str
    tokens: tuple[TrinoToken, ...]
    offsets: Sequence[int]
    """The positions in the statement of each character of the query and of the query's end."""
    quoted: bool = False
    """Whether the query is inside a string literal of the statement, in which each quote is doubled."""


@dataclass(frozen=True)
class ExecuteStatement:
    """A statement `EXECUTE name USING …`.

    Attributes:
        parameters: The texts of the parameters in order, without comments.
    """

    name: str
    parameters: tuple[str, ...]


def tokenize_trino(text: str) -> tuple[TrinoToken, ...]:
    """Split a text into Trino's tokens, without spaces and comments.

    Raises:
        UnsupportedStatement: The text does not follow Trino's lexical rules.
    """
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnsupportedStatement
        kind = str(match.lastgroup)
        if kind not in ("comment", "space"):
            tokens.append(TrinoToken(kind, match[0], position, match.end()))
        position = match.end()
    return tuple(tokens)


def normalize_numerals(text: str) -> str:
    """Replace numerals such as `1_000`, `0xFF`, `0o17` and `0b101` by plain decimal numbers.

    Without this, sqlglot would read `1_000` as `1 AS _000`.

    Raises:
        UnsupportedStatement: A number is invalid in Trino. The message is the text of the number.
    """
    parts: list[str] = []
    position = 0
    while position < len(text):
        match = _NUMERAL.match(text, position)
        if match is None and text[position] in "'\"/":  # A string or a comment has no end.
            return "".join([*parts, text[position:]])
        if match is None:
            raise UnsupportedStatement(text[position : position + _QUOTED_CHARACTERS_MAX].split()[0])
        kind = str(match.lastgroup)
        digits = match[0] if kind == "other" else match[kind].replace("_", "")
        parts.append(str(int(digits, _BASES[kind])) if kind in _BASES else digits)
        position = match.end()
    return "".join(parts)


def extract_query(statement: str, parameters: Sequence[str] = ()) -> QueryText:
    """Return the query in a statement: the statement itself, or the query in EXPLAIN or EXECUTE IMMEDIATE.

    Args:
        statement: The statement.
        parameters: The values that replace the question marks of a prepared statement.

    Raises:
        UnsupportedStatement: The statement has no supported query.
    """
    text, offsets = statement, range(len(statement) + 1)
    tokens = tokenize_trino(text)
    if _take_words(tokens, 2) == ("EXPLAIN", "ANALYZE"):
        tokens = tokens[3:] if _take_words(tokens[2:], 1) == ("VERBOSE",) else tokens[2:]
    elif _take_words(tokens, 1) == ("EXPLAIN",):
        tokens = tokens[1:]
        if tokens and tokens[0].word == "(" and _take_words(tokens[1:], 1)[0] in _EXPLAIN_OPTIONS:
            tokens = tokens[_find_closing(tokens, 0) + 1 :]
    if _take_words(tokens, 2) == ("EXECUTE", "IMMEDIATE"):
        if len(tokens) < 3 or tokens[2].kind != "string" or parameters:
            raise UnsupportedStatement
        parameters = _parse_using(tokens[3:])
        text, character_offsets = _unquote(tokens[2])
        return replace(_fill_parameters(text, tokenize_trino(text), character_offsets, parameters), quoted=True)
    return _fill_parameters(text, tokens, offsets, parameters)


def find_with_position(query: QueryText) -> tuple[int, bool]:
    """Return the position at which a query can be added to WITH, and whether the query already has WITH.

    Returns:
        The position in the statement before the first query in WITH, or before a query without WITH. Then whether the
        query has WITH.
    """
    tokens = query.tokens
    has_with = tokens[0].word == "WITH"
    if not has_with:
        return query.offsets[tokens[0].start], False
    token_after_with = tokens[2] if tokens[1].word == "RECURSIVE" else tokens[1]
    return query.offsets[token_after_with.start], True


def parse_execute(statement: str) -> ExecuteStatement | None:
    """Return the name and the parameters of the prepared statement that a statement executes.

    EXECUTE may be inside EXPLAIN. Return None for any other statement.
    """
    try:
        tokens = tokenize_trino(statement)
        start = 0
        while start < len(tokens) and tokens[start].word in ("EXPLAIN", "ANALYZE", "VERBOSE"):
            start += 1
        tokens = tokens[start:]
        if _take_words(tokens, 1) != ("EXECUTE",) or len(tokens) < 2 or _take_words(tokens, 2)[1] == "IMMEDIATE":
            return None
        return ExecuteStatement(unquote_name(tokens[1]), _parse_using(tokens[2:]))
    except UnsupportedStatement:
        return None


def unquote_name(token: TrinoToken) -> str:
    """Return the name of an identifier, without quotes.

    Raises:
        UnsupportedStatement: The token is not an identifier.
    """
    if token.kind == "word":
        return token.text
    if token.kind == "quoted":
        return token.text[1:-1].replace('""', '"')
    raise UnsupportedStatement


def _take_words(tokens: Sequence[TrinoToken], count: int) -> tuple[str, ...]:
    return tuple(token.word for token in tokens[:count]) or ("",)


def _find_closing(tokens: Sequence[TrinoToken], opening_index: int) -> int:
    """Return the index of the token that closes the bracket at `opening_index`.

    Raises:
        UnsupportedStatement: The bracket is not closed.
    """
    depth = 0
    for number in range(opening_index, len(tokens)):
        depth += tokens[number].word in ("(", "[")
        depth -= tokens[number].word in (")", "]")
        if depth == 0:
            return number
    raise UnsupportedStatement


def _parse_using(tokens: Sequence[TrinoToken]) -> tuple[str, ...]:
    """Return the texts of the parameters after USING. A comma in brackets does not separate parameters.

    Raises:
        UnsupportedStatement: The tokens are not a USING clause.
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
        last_number = _find_closing(tokens, number) if token.word in ("(", "[") else number
        parameters[-1] += [argument.text for argument in tokens[number : last_number + 1]]
        number = last_number + 1
    return tuple(" ".join(parameter) for parameter in parameters)


def _unquote(token: TrinoToken) -> tuple[str, list[int]]:
    """Return the value of a string literal, and the position of each of its characters and of its end.

    A quote in the value is written as two quotes, so two characters of the literal become one character.
    """
    text, offsets = [], []
    position = token.start + 1
    while position < token.end - 1:
        offsets.append(position)
        text.append(token.text[position - token.start])
        position += 2 if token.text[position - token.start] == "'" else 1
    return "".join(text), [*offsets, token.end - 1]


def _fill_parameters(
    text: str, tokens: Sequence[TrinoToken], offsets: Sequence[int], parameters: Sequence[str]
) -> QueryText:
    """Return the query from its first token on, with its question marks replaced by parameters.

    A question mark is replaced only if its parameter is a literal. Comparisons with the remaining question marks give
    no condition.

    Args:
        text: The text of the query.
        tokens: The tokens of the text.
        offsets: The position of each character of the text in the statement.
        parameters: The texts of the parameters.

    Raises:
        UnsupportedStatement: The text is not a query, or the number of parameters is not that of the question marks.
    """
    if not tokens or tokens[0].word not in _BEGINNINGS:
        raise UnsupportedStatement
    question_marks = [token for token in tokens if token.word == "?"]
    if len(question_marks) != len(parameters):
        raise UnsupportedStatement
    parameters_by_mark = dict(zip(question_marks, parameters, strict=True))
    # Comments are replaced by blanks.
    characters = [character if character in "\r\n" else " " for character in text]
    for token in tokens:
        characters[token.start : token.end] = token.text
    pieces, query_offsets, copied_to = [], [], tokens[0].start
    for token, parameter in parameters_by_mark.items():
        if not is_plain(parameter):
            continue
        pieces += [*characters[copied_to : token.start], *f" {parameter} "]
        # All characters of the parameter, and the two spaces around it, have the position of the question mark.
        query_offsets += [*offsets[copied_to : token.start], *[offsets[token.start]] * (len(parameter) + 2)]
        copied_to = token.end
    if not pieces:
        shift = tokens[0].start
        shifted_tokens = tuple(
            TrinoToken(token.kind, token.text, token.start - shift, token.end - shift) for token in tokens
        )
        return QueryText("".join(characters[shift:]), shifted_tokens, offsets[shift:])
    query = "".join([*pieces, *characters[copied_to:]])
    return QueryText(query, tokenize_trino(query), [*query_offsets, *offsets[copied_to:]])


def is_plain(parameter: str) -> bool:
    """Return whether a parameter is a single literal, so that it can replace a question mark without brackets.

    Raises:
        UnsupportedStatement: The parameter is invalid SQL.
    """
    tokens = tokenize_trino(parameter)
    if tokens and tokens[0].word in ("-", "+"):
        return len(tokens) == 2 and tokens[1].kind == "number"
    if len(tokens) == 2:
        return tokens[0].word in _TYPED_LITERALS and tokens[1].kind == "string"
    return len(tokens) == 1 and (tokens[0].kind in ("string", "number") or tokens[0].word in ("TRUE", "FALSE", "NULL"))
