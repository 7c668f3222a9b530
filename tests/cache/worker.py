"""A worker process on a shared cache folder.

Usage: `python -m tests.cache.worker FOLDER SEED STEPS`. With 0 steps it never ends. It puts, gets and discards keys of
a small set. At its end it prints a summary as JSON, with the keys that had wrong values.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from seamark.cache.disk import DiskTier
from tests.cache.payloads import make_payload

KEYS = 24
BUDGET_BYTES = 6 << 20


def choose_size(key: str) -> int:
    return random.Random(f"size of {key}").choice([10, 3_000, 90_000, 400_000, 1_500_000])


def main(folder: Path, seed: int, steps: int) -> None:
    """Read, write and discard random values until the process is killed or `steps` are done. 0 steps mean no end."""
    rng = random.Random(seed)
    values = {key: make_payload(key, choose_size(key)) for key in (f"k{number}" for number in range(KEYS))}
    tier = DiskTier(folder, BUDGET_BYTES, mapped_max=4)
    wrong_values: list[str] = []
    step = 0
    print("ready", flush=True)
    while steps == 0 or step < steps:
        step += 1
        key = f"k{rng.randrange(KEYS)}"
        match rng.randrange(6):
            case 0 | 1 | 2:
                view = tier.get(key)
                if view is not None and view != values[key]:
                    wrong_values.append(key)
            case 3 | 4:
                tier.put(key, values[key])
            case _:
                tier.discard(key)
    stats = tier.read_stats()
    tier.close()
    print(json.dumps({"wrong": wrong_values, "hits": stats.hits, "damaged": stats.damaged, "error": stats.last_error}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
