"""The policy for rewriting manifests."""

from __future__ import annotations

MIN_COUNT, MIN_COUNT_DEFAULT = "seamark.manifests.min-count", 20
"""Manifests of one partition spec and content from which on they are rewritten."""
REWRITTEN_BY_MARK = ("manifests-rewritten-by", "seamark")
"""A key of the summary of a snapshot that differs from its parent only by its manifests."""
