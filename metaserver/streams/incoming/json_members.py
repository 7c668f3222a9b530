"""Finds JSON objects with a repeated key, of which the decoder would silently use the last value. The module is pure.

The number of colons outside of strings is the number of members in the text. If a key is repeated, the decoded values
have fewer members. So most texts can be checked without a second parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_QUOTE, _COLON, _SPACE = b'": '


def has_repeated_key(text: bytes, values: Sequence[Any]) -> bool:
    """Return whether an object in valid JSON has the same key twice.

    The decoded objects have only one member for a repeated key. So the text has more colons between keys and values
    than the objects have members. Two fast checks precede the exact count.

    Args:
        text: One or several JSON values.
        values: The decoded values.
    """
    members = _count_members(values, text.count(b"{"))
    if text.count(b":") == members:
        return False
    characters = np.frombuffer(text, dtype=np.uint8)
    before_colons = characters[np.flatnonzero(characters == _COLON) - 1]
    if (before_colons > _SPACE).all() and np.count_nonzero(before_colons == _QUOTE) == members:
        return False  # Without spaces, a quote and a colon occur together only between the key and value of a member.
    return _count_colons(text) != members


def _count_colons(text: bytes) -> int:
    """Return the number of colons outside of strings."""
    characters = np.frombuffer(_ESCAPE.sub(b"", text) if b"\\" in text else text, dtype=np.uint8)
    # A string begins after an odd number of quotes, and ends with an even number.
    is_in_string = np.logical_xor.accumulate(characters == _QUOTE)
    return int(np.count_nonzero((characters == _COLON) & ~is_in_string))


def find_repeated_key(text: bytes) -> str:
    """Return the first key that occurs twice in an object of valid JSON, or an empty string.

    The function is slow, so it only serves messages about texts for which `has_repeated_key` is true.
    """
    repeated_keys: list[str] = []

    def record_repeated_keys(members: list[tuple[str, Any]]) -> None:
        keys: set[str] = set()
        for key, _ in members:
            if key in keys:
                repeated_keys.append(key)
            keys.add(key)

    # Do not convert numbers, which may have very many digits, because only the keys matter.
    json.loads(text, object_pairs_hook=record_repeated_keys, parse_int=str, parse_float=str)
    return repeated_keys[0] if repeated_keys else ""


def _count_members(values: Sequence[Any], objects_max: int) -> int:
    """Return the number of members of all objects, including nested objects.

    Args:
        values: The decoded values.
        objects_max: The maximum number of objects in the values, such as the number of opening braces in the text.
    """
    rows = values[0] if len(values) == 1 and type(values[0]) is list else values
    if objects_max == len(rows) and set(map(type, rows)) == {dict}:
        return sum(map(len, rows))  # No object is nested.
    count = 0
    pending = list(values)
    while pending:
        value = pending.pop()
        if type(value) is dict:
            count += len(value)
            pending += [child for child in value.values() if type(child) in _CONTAINERS]
        elif type(value) is list:
            pending += [child for child in value if type(child) in _CONTAINERS]
    return count


_CONTAINERS = (dict, list)
