"""The policy for rewriting manifests."""

from __future__ import annotations

MIN_COUNT, MIN_COUNT_DEFAULT = "seamark.manifests.min-count", 20
"""The minimum number of manifests of a partition spec and content type that are rewritten."""
REWRITTEN_BY_MARK = ("manifests-rewritten-by", "seamark")
"""The key and value in the summary of a snapshot that differs from its parent only in its manifests."""
