"""The refusal of a change that conflicts with snapshots committed since it was computed."""

from __future__ import annotations


class Collision(Exception):
    """Raised if a change cannot be applied to the current snapshot. The client receives CommitConflict.

    Attributes:
        reason: One of a fixed set of words. The metrics count collisions by reason.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
