"""A job that changes a table batch by batch. Tests kill it at any moment and restart it, as a scheduler would.

    python -m tests.faults.rigs.mortal_writer URL TABLE CHECKPOINT SEED BATCHES

Batch n is the producer's sequence n. After each batch, the job writes the number of committed batches to the file
CHECKPOINT. So after a kill it may send its last batch again. SEED and n alone determine the content of a batch.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from seamark.connector.client.client import SeamarkClient
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import delete, upsert

KEYS = 400
ARROW = pa.schema([("id", pa.int64()), ("batch", pa.int64())])
Model = dict[int, list[int]]
"""The batches of the expected rows, by id. Appended rows accumulate, and an upsert leaves one row."""


def build_batch(seed: int, number: int) -> tuple[str, str, list[int]]:
    """Return (operation, mode, ids) of the batch with this number. The seed determines all batches of a campaign."""
    rng = random.Random(f"{seed} {number}")
    (operation,) = rng.choices(("append", "upsert", "delete"), (2, 4, 1))
    mode = rng.choice(("merge-on-read", "copy-on-write"))
    return operation, mode, rng.sample(range(KEYS), rng.randrange(1, 40))


def apply_batch(model: Model, seed: int, number: int) -> None:
    operation, _, ids = build_batch(seed, number)
    for row_id in ids:
        if operation == "append":
            model.setdefault(row_id, []).append(number)
        else:
            model.pop(row_id, None)
        if operation == "upsert":
            model[row_id] = [number]


def commit_batch(client: SeamarkClient, table: str, seed: int, number: int) -> None:
    operation, mode, ids = build_batch(seed, number)
    producer = ("job", number)
    if operation == "delete":
        delete(client, table, keys=pa.table({"id": ids}), mode=mode, producer=producer)
        return
    rows = pa.table({"id": ids, "batch": [number] * len(ids)}, schema=ARROW)
    write: Callable[..., Any] = append if operation == "append" else upsert
    write(client, table, rows, producer=producer, **({} if operation == "append" else {"keys": ["id"], "mode": mode}))


def main(url: str, table: str, checkpoint: Path, seed: int, batches: int) -> None:
    """Commit the batches that follow the checkpoint, and replace the checkpoint after each of them."""
    client = SeamarkClient(url)
    for number in range(int(checkpoint.read_text()), batches):
        commit_batch(client, table, seed, number)
        new_checkpoint = checkpoint.with_suffix(".part")
        new_checkpoint.write_text(str(number + 1))
        os.replace(new_checkpoint, checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
