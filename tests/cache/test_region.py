"""Tests of memory that a mapped file replaces in place. Neither the bytes nor their addresses change."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from seamark.cache.disk import DiskTier
from seamark.cache.envelope import HEADER_BYTES
from seamark.cache.region import Region

SIZE_BYTES = 300_001


def build_region(data: bytes) -> Region:
    return Region([memoryview(data[:1000]), memoryview(data[1000:])])


def find_mapped_path(payload: memoryview) -> str:
    """Return the path of the file that is mapped at the address of a payload, or an empty text for private memory."""
    address = np.frombuffer(payload, dtype=np.uint8).__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        address_range, _, _, _, _, *name = line.split()
        start_address, end_address = (int(text, 16) for text in address_range.split("-"))
        if start_address <= address < end_address:
            return name[0] if name else ""
    raise AssertionError("the address of the payload is not mapped")


def test_memory_of_a_region_is_replaced_by_its_mapped_file(tmp_path: Path) -> None:
    data = os.urandom(SIZE_BYTES)
    region = build_region(data)
    array = np.frombuffer(region.payload, dtype=np.uint8)
    address_before = array.__array_interface__["data"][0]
    assert find_mapped_path(region.payload) == ""
    tier = DiskTier(tmp_path, 8 << 20)
    assert tier.put("k", region.payload)
    assert tier.map_over("k", region)
    assert find_mapped_path(region.payload).endswith(".block")
    assert array.__array_interface__["data"][0] == address_before
    assert address_before % 64 == 0
    tier.discard("k")
    tier.close()
    del region
    assert array.tobytes() == data, "an array keeps the mapping, which keeps the file"


def test_file_with_different_bytes_does_not_replace_the_memory(tmp_path: Path) -> None:
    data = os.urandom(SIZE_BYTES)
    tier = DiskTier(tmp_path, 8 << 20)
    for content in (None, os.urandom(SIZE_BYTES), data[:-1]):
        region = build_region(data)
        if content is not None:
            tier.discard("k")
            assert tier.put("k", content)
        assert not tier.map_over("k", region)
        assert find_mapped_path(region.payload) == ""
        assert region.payload == data
    assert tier.put("k", data)
    (path,) = tmp_path.rglob("*.block")
    damaged_bytes = bytearray(path.read_bytes())
    damaged_bytes[HEADER_BYTES + 7] ^= 1
    path.write_bytes(damaged_bytes)
    region = build_region(data)
    assert not tier.map_over("k", region)
    assert region.payload == data
    tier.close()


def test_small_value_stays_in_memory(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 8 << 20)
    region = Region([memoryview(b"small")])
    assert tier.put("k", region.payload)
    assert not tier.map_over("k", region)
    assert region.payload == b"small"
    tier.close()


def test_value_of_another_size_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    region = build_region(bytes(SIZE_BYTES))
    with path.open("rb") as file, pytest.raises(OSError, match="but the region has"):
        region.map_over(file.fileno())


def test_readers_see_the_same_bytes_while_memory_is_replaced(tmp_path: Path) -> None:
    data = os.urandom(SIZE_BYTES)
    expected = int(np.frombuffer(data, dtype=np.uint8).sum())
    tier = DiskTier(tmp_path, 8 << 20)
    assert tier.put("k", data)
    arrays: list[np.ndarray] = []
    wrong_values: list[int] = []
    stop_event = threading.Event()

    def sum_arrays() -> None:
        while not stop_event.is_set():
            wrong_values.extend(number for array in arrays[-3:] if (number := int(array.sum())) != expected)

    threads = [threading.Thread(target=sum_arrays) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            region = build_region(data)
            arrays.append(np.frombuffer(region.payload, dtype=np.uint8))
            assert tier.map_over("k", region)
    finally:
        stop_event.set()
        for thread in threads:
            thread.join()
    assert not wrong_values
    tier.close()


def read_mapping_flags(payload: memoryview) -> list[str]:
    """Return the kernel's flags of the mapping that has the address of a payload."""
    address = np.frombuffer(payload, dtype=np.uint8).__array_interface__["data"][0]
    is_in_mapping = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            start_address, end_address = (int(text, 16) for text in name.split("-"))
            is_in_mapping = start_address <= address < end_address
        elif is_in_mapping and name == "VmFlags:":
            return values
    raise AssertionError("the address of the payload is not mapped")


def test_mapped_file_has_no_huge_pages_and_no_descriptor(tmp_path: Path) -> None:
    """A column is a small part of 2 MiB. With huge pages, the first read of a page would make all 2 MiB resident."""
    data = os.urandom(SIZE_BYTES)
    region = build_region(data)
    with closing(DiskTier(tmp_path, 8 << 20, mapped_max=0)) as tier:
        assert tier.put("k", region.payload)
        opened_region = tier.get("k")
        assert opened_region is not None
        (path,) = tmp_path.rglob("*.block")
        assert find_mapped_path(opened_region) == str(path)
        assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())
        assert tier.map_over("k", region)
        for payload in (opened_region, region.payload):
            # The flag `nh` means no huge pages, and `wr` means writable.
            assert "nh" in read_mapping_flags(payload) or not Path("/sys/kernel/mm/transparent_hugepage").exists()
            assert "wr" not in read_mapping_flags(payload)
    del tier
    assert opened_region == data, "the view keeps the mapping"
