"""LIKE patterns of SQL."""

from __future__ import annotations

_JAVA_CHARACTER_MAX = 0xFFFF


def split_pattern(pattern: str, escape: str | None) -> tuple[str, str]:
    """Split a LIKE pattern before its first wildcard, into a prefix and the rest. Escapes in the prefix are resolved.

    Without ESCAPE, a backslash is an escape in Spark and a literal in Trino. Therefore the prefix also ends before a
    backslash.
    """
    prefix = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == escape and position + 1 < len(pattern):
            prefix.append(pattern[position + 1])
            position += 2
            continue
        if character in "%_" or (character == "\\" and escape is None):
            return "".join(prefix), pattern[position:]
        prefix.append(character)
        position += 1
    return "".join(prefix), ""


def is_valid_pattern(pattern: str, escape: str | None) -> bool:
    """Return whether engines accept the pattern.

    The escape must be one character, and each of its occurrences must precede %, _ or the escape itself. An empty
    escape means no escape, as in Trino. Java counts a character beyond U+FFFF as two characters.
    """
    if not escape:
        return True
    if len(escape) > 1 or ord(escape) > _JAVA_CHARACTER_MAX:
        return False
    position = 0
    while (position := pattern.find(escape, position)) >= 0:
        if pattern[position + 1 : position + 2] not in ("%", "_", escape):
            return False
        position += 2
    return True
