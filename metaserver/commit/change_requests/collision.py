"""The refusal of a change that conflicts with snapshots committed since it was computed."""

from __future__ import annotations


class Collision(Exception):
    """The change cannot be applied to the current snapshot; the client receives CommitConflict.

    `reason` is one of a fixed set of words; the metrics count collisions by it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
