"""Values of the tests of the tiers: keys are immutable, so the value follows from the key."""

from __future__ import annotations

import random


def make_payload(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)
