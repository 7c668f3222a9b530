"""Values of the tests of the tiers: keys are immutable, so the value follows from the key."""

from __future__ import annotations

import random


def payload_of(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)
