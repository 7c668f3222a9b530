"""Payloads for the tests of the tiers. Keys are immutable, so the key determines the payload."""

from __future__ import annotations

import random


def make_payload(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)
