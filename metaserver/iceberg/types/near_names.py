"""Names that another may be a misspelling of, for messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

CHARACTERS_MAX = 100
COMPARED_MAX, _SEEN_MAX = 200, 5_000


def near_names(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Those of `known` that `name` may be a misspelling of, in any case. Of long names and of many names only
    some are compared: with 50,000 columns of similar names it would take seconds."""
    if len(name) > CHARACTERS_MAX:
        return []
    similar: dict[str, str] = {}
    for other in islice(known, _SEEN_MAX):
        if abs(len(other) - len(name)) <= 2 + len(name) // 2:
            similar.setdefault(other.lower(), other)
            if len(similar) == COMPARED_MAX:
                break
    return [similar[other] for other in get_close_matches(name.lower(), similar, n=most)]
