"""Names and texts as SQL has them in quotes: Trino's, Spark's, and the one that the catalog takes."""

from __future__ import annotations


def quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def backquoted(name: str) -> str:
    """As Spark has names."""
    return "`" + name.replace("`", "``") + "`"


def quoted_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
