"""Random texts of characters whose case differs between engines."""

from __future__ import annotations

import random
import unicodedata
from functools import cache

COMMON_CHARACTERS = "aAkKiIsSjJtT@. 1"
UNUSUAL_LETTERS = "İıßẞſKÅΣσςǰŉΐᾳᾼﬁﬅևŸÿµΜǅǆÌÍĨĮΆᾍἇϴθꭰᎠႠⴀꟜƛÄäẚ𐐀𐐨"
MARKS = "\u0307\u0301\u0300\u0303\u0345\u0308\u030c"
UNASSIGNED_LETTERS = "\u0378\U0010ffff\ua7dd"
"""Characters that some version of Unicode lacks"""


@cache
def list_cased_characters() -> str:
    """Return all characters that Python's `lower` or `upper` changes."""
    # Surrogates, from U+D800 to U+DFFF, are not characters.
    characters = (chr(point) for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF)
    return "".join(
        character for character in characters if character != character.lower() or character != character.upper()
    )


def draw_texts(rng: random.Random, count: int) -> list[str]:
    return [draw_text(rng) for _ in range(count)]


def draw_text(rng: random.Random) -> str:
    alphabets = [
        rng.choice(
            [
                COMMON_CHARACTERS,
                UNUSUAL_LETTERS,
                UNUSUAL_LETTERS,
                MARKS,
                list_cased_characters(),
                UNASSIGNED_LETTERS if rng.random() < 0.1 else "x",
            ]
        )
    ]
    alphabets += [
        rng.choice([COMMON_CHARACTERS, UNUSUAL_LETTERS, MARKS, list_cased_characters()])
        for _ in range(rng.randrange(7))
    ]
    return "".join(rng.choice(alphabet) for alphabet in alphabets)


def change_case(rng: random.Random, text: str) -> str:
    """Return `text` with the case of its letters changed at random, as an engine's functions may change it."""
    changes = [str.lower, str.upper, str.casefold, str.swapcase, str.title]
    changed_text = rng.choice(changes)(text)
    if rng.random() < 0.3:
        changed_text = "".join(rng.choice([str.lower, str.upper])(item) for item in text)
    return unicodedata.normalize("NFC", changed_text) if rng.random() < 0.2 else changed_text
