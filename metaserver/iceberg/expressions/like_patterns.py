"""LIKE patterns of SQL."""

from __future__ import annotations


def split_pattern(pattern: str, escape: str | None) -> tuple[str, str]:
    """The prefix of a LIKE pattern, and the pattern from its first wildcard on.

    Without ESCAPE, a backslash escapes in Spark and is a literal in Trino: the text after it is not used.
    """
    prefix = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == escape and at + 1 < len(pattern):
            prefix.append(pattern[at + 1])
            at += 2
            continue
        if character in "%_" or (character == "\\" and escape is None):
            return "".join(prefix), pattern[at:]
        prefix.append(character)
        at += 1
    return "".join(prefix), ""
