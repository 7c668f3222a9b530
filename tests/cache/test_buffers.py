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

SIZE = 4096


def get_address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def test_memory_is_reused_once_no_view_is_left() -> None:
    buffers = Buffers(SIZE, 4 * SIZE)
    view = buffers.take(SIZE)
    first_address = get_address(view)
    part = view[10:20].toreadonly()
    del view
    assert get_address(buffers.take(SIZE)) != first_address, "a view of a part of the memory still exists"
    del part
    takes = [buffers.take(SIZE) for _ in range(2)]
    assert first_address in map(get_address, takes)


def test_free_buffers_are_limited_and_have_one_size() -> None:
    buffers = Buffers(SIZE, 3 * SIZE)
    held_buffers = [buffers.take(SIZE) for _ in range(9)] + [buffers.take(SIZE - 1), buffers.take(0)]
    assert [len(view) for view in held_buffers] == [SIZE] * 9 + [SIZE - 1, 0]
    held_buffers.clear()
    assert len(buffers._free_buffers) == 3
    empty_buffers = Buffers(SIZE, 0)
    assert len(empty_buffers.take(SIZE)) == SIZE
    assert not empty_buffers._free_buffers


def test_values_in_use_do_not_change_while_other_values_are_read(tmp_path: Path) -> None:
    rng = random.Random(first_seed())
    values = {f"k{n}": os.urandom(SIZE if n % 4 else SIZE - n) for n in range(24)}
    with closing(DiskTier(tmp_path, 8 << 20, mapped_max=0, map_bytes_min=1 << 62, reused_bytes=SIZE)) as tier:
        for key, value in values.items():
            assert tier.put(key, value)
        buffers: list[tuple[str, memoryview]] = []
        for _ in range(400):
            key = rng.choice(list(values))
            # None if the pages are not in the kernel's page cache. Then the value is read in another way.
            cached_value = tier.get_resident(key)
            if cached_value is not None:
                buffers.append((key, cached_value[: rng.randrange(1, SIZE)] if rng.random() < 0.3 else cached_value))
            while len(buffers) > 12 or (buffers and rng.random() < 0.4):
                buffers.pop(rng.randrange(len(buffers)))
            for name, view in buffers:
                assert values[name].startswith(view)
                assert view.readonly
