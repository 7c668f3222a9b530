"""Find similar names, to suggest them in messages about names that may be misspelled."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

CHARACTERS_MAX = 100
COMPARED_MAX, _SEEN_MAX = 200, 5_000
"""The maximum number of names that are compared with the name, and that are read to choose them."""
_STEPS_MAX = 250_000
"""The maximum number of pairs of characters that are compared in a call. `difflib` needs up to 0.1 µs for each pair."""


def find_near_names(name: str, names: Iterable[str], *, maximum: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the `names` of which `name` may be a misspelling. Case is ignored.

    If names are long or many, only some of them are compared: with 50,000 similar names, a full comparison would take
    seconds.

    Args:
        name: The name that was not found.
        names: The existing names.
        maximum: The maximum number of results.
        cutoff: The minimum similarity from 0 to 1, as in `difflib.get_close_matches`.
    """
    if len(name) > CHARACTERS_MAX:
        return []
    names_by_lower_name: dict[str, str] = {}
    steps = 0
    for other in islice(names, _SEEN_MAX):
        # Names of very different lengths are not similar.
        if abs(len(other) - len(name)) <= 2 + len(name) // 2 or other.startswith(name):
            steps += len(name) * len(other)
            if steps > _STEPS_MAX:
                break
            names_by_lower_name.setdefault(other.lower(), other)
            if len(names_by_lower_name) == COMPARED_MAX:
                break
    matches = get_close_matches(name.lower(), names_by_lower_name, n=maximum, cutoff=cutoff)
    return [names_by_lower_name[lower_name] for lower_name in matches]
