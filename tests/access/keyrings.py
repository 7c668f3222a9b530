"""Keyrings with fixed keys, for code that signs and verifies."""

from __future__ import annotations

from seamark.formats.runtime.clock import Clock, SimulatedClock
from seamark.metaserver.access.keyring import Keyring, SigningKey


def make_fixed_keyring(letter: bytes = b"s", clock: Clock | None = None) -> Keyring:
    """Return a keyring with one key, which is made of `letter`. The same letter gives the same key."""
    return Keyring([SigningKey(letter * 8, from_ms=0, root=letter * 32)], clock or SimulatedClock(1))
