"""Tests of reused buffers: their memory is not reused while a view can still read it."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import numpy as np

from seamark.cache.buffers import Buffers
from seamark.cache.disk import DiskTier
from tests.seeds import first_seed

SIZE_BYTES = 4096


def get_address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def test_memory_is_reused_once_no_view_is_left() -> None:
    buffers = Buffers(SIZE_BYTES, 4 * SIZE_BYTES)
    view = buffers.take(SIZE_BYTES)
    first_address = get_address(view)
    part = view[10:20].toreadonly()
    del view
    assert get_address(buffers.take(SIZE_BYTES)) != first_address, "a view of a part of the memory still exists"
    del part
    taken_buffers = [buffers.take(SIZE_BYTES) for _ in range(2)]
    assert first_address in map(get_address, taken_buffers)


def test_free_buffers_are_limited_and_have_one_size() -> None:
    buffers = Buffers(SIZE_BYTES, 3 * SIZE_BYTES)
    held_buffers = [buffers.take(SIZE_BYTES) for _ in range(9)] + [buffers.take(SIZE_BYTES - 1), buffers.take(0)]
    assert [len(view) for view in held_buffers] == [SIZE_BYTES] * 9 + [SIZE_BYTES - 1, 0]
    held_buffers.clear()
    assert len(buffers._free_buffers) == 3
    empty_buffers = Buffers(SIZE_BYTES, 0)
    assert len(empty_buffers.take(SIZE_BYTES)) == SIZE_BYTES
    assert not empty_buffers._free_buffers


def test_values_in_use_do_not_change_while_other_values_are_read(tmp_path: Path) -> None:
    rng = random.Random(first_seed())
    values = {f"k{n}": os.urandom(SIZE_BYTES if n % 4 else SIZE_BYTES - n) for n in range(24)}
    # No file has the minimum size of a mapped file, 2**62 bytes, so values are read into buffers.
    with closing(DiskTier(tmp_path, 8 << 20, mapped_max=0, map_bytes_min=1 << 62, reused_bytes=SIZE_BYTES)) as tier:
        for key, value in values.items():
            assert tier.put(key, value)
        buffers: list[tuple[str, memoryview]] = []
        for _ in range(400):
            key = rng.choice(list(values))
            # The result is None if the kernel's page cache does not have the file.
            cached_value = tier.get_resident(key)
            if cached_value is not None:
                buffers.append(
                    (key, cached_value[: rng.randrange(1, SIZE_BYTES)] if rng.random() < 0.3 else cached_value)
                )
            while len(buffers) > 12 or (buffers and rng.random() < 0.4):
                buffers.pop(rng.randrange(len(buffers)))
            for name, view in buffers:
                assert values[name].startswith(view)
                assert view.readonly
