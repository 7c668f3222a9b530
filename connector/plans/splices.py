"""Replaces parts of a text by their positions. All other characters, such as comments and spaces, are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Replacement(NamedTuple):
    """A replacement: `text` replaces the characters [start, end)."""

    start: int
    end: int
    text: str


def splice(text: str, replacements: Iterable[Replacement]) -> str:
    """Return the text after the replacements.

    Raises:
        ValueError: Two replacements overlap, or one is not within the text.
    """
    pieces = []
    position = 0
    for start, end, new in sorted(replacements):
        if not position <= start <= end <= len(text):
            raise ValueError(
                f"the replacement of [{start}, {end}) overlaps another replacement, or is not within the text"
            )
        pieces += [text[position:start], new]
        position = end
    return "".join([*pieces, text[position:]])
