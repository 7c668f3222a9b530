"""Weighted rendezvous hashing, which decides which of several nodes owns a key, without a table of assignments.

Each node has a score for a key: a weighted hash of both. The node with the highest score owns the key, and the next
node is its substitute. If a node joins, it takes keys only from their former owners, in proportion to its weight. If a
node leaves, its keys go to their substitutes. No other key moves.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998). With h uniform in (0, 1), the
score -weight / ln(h) gives each node a share in proportion to its weight. This module has no side effects.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from heapq import nlargest

_HASH_BYTES = 8
_HASHES = 1 << 8 * _HASH_BYTES


class Rendezvous:
    """Chooses the owners of keys among weighted nodes by rendezvous hashing.

    In rendezvous hashing, each node has a score for each key, and the node with the highest score owns the key. A node
    whose weight is 0 or less owns nothing.

    Args:
        weights: The weight of each node, by its name.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._nodes = [
            (name, float(weight), hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES))
            for name, weight in sorted(weights.items())
            if weight > 0
        ]

    def rank(self, key: str, count: int = 2) -> list[str]:
        """Return the `count` nodes with the highest scores for the key. The owner is first.

        The score is -weight / log(u), where u is a hash of the node and the key as a number between 0 and 1. Each node
        then owns a share of the keys that is proportional to its weight.
        """
        # The zero byte separates the name of the node from the key.
        data = b"\x00" + key.encode("utf-8", "surrogatepass")
        scores = []
        for name, weight, state in self._nodes:
            key_hash = state.copy()
            key_hash.update(data)
            uniform = (int.from_bytes(key_hash.digest(), "big") + 0.5) / _HASHES
            # The division above can return 1.0, whose logarithm is zero.
            scores.append((math.inf if uniform >= 1.0 else -weight / math.log(uniform), name))
        return [name for _, name in nlargest(count, scores)]
