"""Tests of reused memory: two decoders never use it at once, and it is not reused while a reader still refers to it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from seamark.formats.iceberg.manifests._memory import Memory
from seamark.formats.iceberg.manifests.manifest import decode_manifest
from tests.iceberg.manifests import manifest_files as files
from tests.iceberg.manifests.test_manifest import SCHEMA, build_entry, build_manifest

SIZES = [0, 1, 100, 16_384, 16_385, 32_768, 32_769, 100_000, 1 << 20, (1 << 22) + 1]


@pytest.mark.parametrize("size", SIZES)
def test_memory_has_the_requested_size(size: int) -> None:
    memory = Memory(size)
    view = memoryview(memory)
    assert (len(memory), view.nbytes, view.readonly, view.format) == (size, size, False, "B")
    view[:] = b"x" * size
    del memory
    assert bytes(view) == b"x" * size


def test_threads_never_share_memory_in_use() -> None:
    def allocate_randomly(seed: int) -> None:
        rng = random.Random(seed)
        columns: list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]] = []
        for step in range(400):
            value = rng.randrange(256)
            array = np.frombuffer(memoryview(Memory(rng.choice(SIZES[2:8]))), np.uint8)
            array[:] = value
            columns.append((value, array))
            if len(columns) > 6:
                value, array = columns.pop(rng.randrange(len(columns)))
                assert (array == value).all(), f"seed {seed}, step {step}"

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(allocate_randomly, range(12)))


@pytest.mark.slow
def test_decoded_arrays_stay_unchanged_while_other_manifests_are_decoded() -> None:
    def build_manifest_of_rows(number: int) -> bytes:
        counts = [{"key": 1, "value": number}, {"key": 2, "value": 7}]
        bounds = [{"key": 1, "value": b"%d" % number}]
        encoded_entry = build_entry(
            SCHEMA, day=number, value_counts=counts, lower_bounds=bounds, file_path=f"{number}.parquet"
        )
        return build_manifest(SCHEMA, *[encoded_entry] * 3_000, codec="deflate")

    data = build_manifest_of_rows(1)
    decoded_manifest = decode_manifest(data, "m.avro")
    entries_before = files.to_plain_entries(decoded_manifest)
    _, counts = decoded_manifest.counts["value_counts"][1]
    heap = decoded_manifest.heap
    for number in range(2, 12):
        decode_manifest(build_manifest_of_rows(number), "m.avro")
    assert files.to_plain_entries(decoded_manifest) == entries_before
    del decoded_manifest
    for number in range(2, 12):
        decode_manifest(build_manifest_of_rows(number), "m.avro")
    assert (counts == 1).all()
    assert b"1.parquet" in heap[:400].tobytes()
