"""The two lock files: the same pins, and a hash for each in the one that pip checks downloads by."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_the_hashed_lock_has_the_pins_of_the_lock() -> None:
    """`make hashes` writes it."""
    pins = (REPO / "requirements.lock").read_text().split("\n")
    entries = re.sub(r"\\\n\s+", "", (REPO / "requirements.hashed.lock").read_text()).splitlines()
    hashed = [entry.partition("--hash=")[0].strip() for entry in entries]
    assert sorted(hashed) == sorted(pin.strip() for pin in pins if pin.strip())
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}(?=\s|-|$)", entry), entry
