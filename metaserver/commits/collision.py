"""The refusal of a change for what was committed before it."""

from __future__ import annotations


class Collision(Exception):
    """Applied to what stands now, the change would be wrong; its client hears CommitConflict. `reason` is one of a few
    words, for who counts."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
