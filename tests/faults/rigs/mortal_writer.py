"""A job that changes a table batch by batch. Tests kill it at any moment and restart it, as a scheduler would.

    python -m tests.faults.rigs.mortal_writer URL TABLE NOTES SEED BATCHES

Batch n is the producer's sequence n. NOTES is its checkpoint, written after each batch: the number of batches known to
be committed. So after a kill it may send its last batch again. SEED and n alone determine the content of a batch.
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
    """Return (operation, mode, ids) of a batch."""
    source = random.Random(seed * 100_003 + number)
    choice = source.choices(("append", "upsert", "delete"), (2, 4, 1))[0]
    return (
        choice,
        source.choice(("merge-on-read", "copy-on-write")),
        source.sample(range(KEYS), source.randrange(1, 40)),
    )


def apply_batch(model: Model, seed: int, number: int) -> None:
    operation, _, ids = build_batch(seed, number)
    for item in ids:
        if operation == "append":
            model.setdefault(item, []).append(number)
        else:
            model.pop(item, None)
        if operation == "upsert":
            model[item] = [number]


def commit_batch(client: SeamarkClient, table: str, seed: int, number: int) -> None:
    operation, mode, ids = build_batch(seed, number)
    producer = ("job", number)
    if operation == "delete":
        delete(client, table, keys=pa.table({"id": ids}), mode=mode, producer=producer)
        return
    rows = pa.table({"id": ids, "batch": [number] * len(ids)}, schema=ARROW)
    write: Callable[..., Any] = append if operation == "append" else upsert
    write(client, table, rows, producer=producer, **({} if operation == "append" else {"keys": ["id"], "mode": mode}))


def main(url: str, table: str, notes: Path, seed: int, batches: int) -> None:
    client = SeamarkClient(url)
    for number in range(int(notes.read_text()), batches):
        commit_batch(client, table, seed, number)
        part = notes.with_suffix(".part")
        part.write_text(str(number + 1))
        os.replace(part, notes)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
