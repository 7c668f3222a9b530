"""Quotes names and strings in SQL."""

from __future__ import annotations


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def backquote(name: str) -> str:
    """Return a name in backquotes, as in Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
