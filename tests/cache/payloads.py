"""What the tests of the tiers keep under a key: keys are immutable, so it follows from the key."""

from __future__ import annotations

import random


def payload_of(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)
