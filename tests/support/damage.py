"""Random damage to the bytes of a file."""

from __future__ import annotations

import random
from collections.abc import Callable

Damage = Callable[[bytearray, random.Random], None]
_BYTES_MAX = 5_000
"""The maximum number of bytes that damage adds or overwrites."""


def flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite_part(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    size = len(data[start : start + rng.randint(1, _BYTES_MAX)])
    data[start : start + size] = rng.randbytes(size)


def write_zeros(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))


def truncate_at_random(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def clear_file(data: bytearray, rng: random.Random) -> None:
    data.clear()


def append_bytes(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randint(1, _BYTES_MAX))
