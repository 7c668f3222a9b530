"""Quoted names and texts of SQL."""

from __future__ import annotations


def quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def backquoted(name: str) -> str:
    """In Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def quoted_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
