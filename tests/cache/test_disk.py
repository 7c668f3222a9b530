"""Tests of the disk tier alone: the contract, restarts, budget, mappings, file descriptors."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from seamark.cache.disk import DiskTier
from seamark.cache.envelope import HEADER_BYTES, compute_key_digest
from seamark.cache.ledger import make_file_name
from tests.cache.contract import TierContract
from tests.cache.payloads import make_payload
from tests.faults.rigs.disk import mount_small_disk


def measure_disk_bytes(folder: Path) -> int:
    """Return the disk usage of the folder, as `du` counts it."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in (".", *names):
            try:
                total += os.stat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def get_path(folder: Path, key: str) -> Path:
    return folder / make_file_name(compute_key_digest(key))


class TestDiskTier(TierContract):
    @pytest.fixture(autouse=True)
    def _set_root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def open(self, budget_bytes: int) -> DiskTier:
        return DiskTier(Path(tempfile.mkdtemp(dir=self.root)), budget_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(folder, 16 << 20)
    yield tier
    tier.close()


def test_restart_keeps_the_values_and_their_order_of_use(folder: Path) -> None:
    keys = [f"k{number}" for number in range(14)]
    tier = DiskTier(folder, 16 << 20)
    for key in keys:
        assert tier.put(key, make_payload(key, 1 << 20))
    tier.close()
    tier = DiskTier(folder, 16 << 20)
    assert tier.read_stats().entries == 14
    assert tier.get("k0") == make_payload("k0", 1 << 20)
    tier.close()
    tier = DiskTier(folder, 16 << 20)
    assert tier.put("new", make_payload("new", 4 << 20))
    for key in ("k0", "k13", "new"):
        assert tier.get(key) is not None, key
    assert tier.get("k1") is None, "used before k0"
    tier.check_invariants()
    tier.close()


def test_first_put_creates_the_folder(folder: Path, tier: DiskTier) -> None:
    assert tier.get("k") is None
    assert not folder.exists()
    assert tier.put("k", make_payload("k", 1000))
    assert tier.get("k") == make_payload("k", 1000)
    tier.check_invariants()


def test_smaller_budget_applies_from_the_start(folder: Path) -> None:
    tier = DiskTier(folder, 32 << 20)
    for number in range(40):
        tier.put(f"k{number}", make_payload(f"k{number}", 700_000))
    tier.close()
    tier = DiskTier(folder, 8 << 20)
    assert measure_disk_bytes(folder) <= 8 << 20
    assert tier.get("k39") is not None
    tier.check_invariants()
    tier.close()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("sizes", [(0, 3_000), (0, 200_000), (0, 2_000_000)])
def test_folder_never_exceeds_its_budget(folder: Path, sizes: tuple[int, int]) -> None:
    budget = 4 << 20
    tier = DiskTier(folder, budget)
    source = random.Random(f"budget {sizes}")
    peak = 0
    for number in range(1_000 if sizes[1] < 10_000 else 120):
        assert tier.put(f"k{number}", source.randbytes(source.randint(*sizes)))
        if number % 20 == 0:
            peak = max(peak, measure_disk_bytes(folder))
    assert tier.read_stats().evictions > 0
    assert budget // 2 < peak <= budget
    tier.check_invariants()
    tier.close()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("size_bytes_max", [30_000, 2_000_000])
def test_disk_as_large_as_the_budget_never_becomes_full(tmp_path: Path, size_bytes_max: int) -> None:
    with mount_small_disk(tmp_path / "disk", "6m") as disk:
        tier = DiskTier(disk.root, 6 << 20)
        source = random.Random(f"size {size_bytes_max}")
        for number in range(400):
            assert tier.put(f"k{number}", source.randbytes(source.randrange(size_bytes_max)))
        stats = tier.read_stats()
        assert stats.evictions > 0
        assert (stats.errors, stats.refused) == (0, 0), stats.last_error
        tier.close()


def test_payloads_are_aligned_for_arrays_in_a_mapped_file(tier: DiskTier) -> None:
    tier.put("k", bytes(1 << 20))
    view = tier.get("k")
    assert view is not None
    longs = view.cast("q")
    assert len(longs) == 1 << 17
    assert HEADER_BYTES % 64 == 0


def test_repeated_get_neither_reads_the_disk_nor_maps_again(folder: Path, tier: DiskTier) -> None:
    tier.put("k", make_payload("k", 1 << 20))
    first_view = tier.get("k")
    get_path(folder, "k").unlink()
    assert tier.get("k") is first_view


def test_get_from_a_mapping_counts_as_a_use(folder: Path) -> None:
    tier = DiskTier(folder, 16 << 20)
    for number in range(14):  # 14 values of 1 MiB fit into the tier of 16 MiB.
        tier.put(f"k{number}", make_payload(f"k{number}", 1 << 20))
    for number in range(14):
        assert tier.get(f"k{number}") is not None
    tier.put("small", b"value")  # This put also records the uses. The last use is that of k13.
    assert tier.get("k5") is not None
    tier.put("new", make_payload("new", 14 << 20))  # There is room for this value and one value of 1 MiB.
    tier.close()
    tier = DiskTier(folder, 16 << 20)
    assert [key for key in (f"k{number}" for number in range(14)) if tier.get(key) is not None] == ["k5"]
    tier.close()


@pytest.mark.parametrize("size", [1, 65_471, 65_472, 1_000_000])
def test_tier_reports_which_payloads_are_mapped_files(folder: Path, size: int) -> None:
    tier = DiskTier(folder, 4 << 20)
    tier.put("k", make_payload("k", size))
    payload = tier.get("k")
    assert payload is not None
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert tier.is_mapped(payload) == any(str(get_path(folder, "k")) in line for line in maps)
    tier.close()


def test_mappings_are_limited_and_hold_no_descriptors(folder: Path) -> None:
    tier = DiskTier(folder, 64 << 20, mapped_max=10)
    for number in range(50):
        tier.put(f"k{number}", make_payload(f"k{number}", 100_000))
    descriptors_before = len(os.listdir("/proc/self/fd"))
    views = [tier.get(f"k{number}") for number in range(50)]
    assert all(view is not None for view in views)
    assert len(os.listdir("/proc/self/fd")) < descriptors_before + 25
    tier.check_invariants()
    tier.close()


@pytest.mark.slow
def test_fifty_cycles_leak_no_descriptors_threads_or_mappings(folder: Path) -> None:
    def use_tier() -> None:
        tier = DiskTier(folder, 4 << 20)
        threads = [threading.Thread(target=tier.put, args=(f"k{number}", bytes(300_000))) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tier.get("k1") == bytes(300_000)
        tier.close()

    def count_resources() -> tuple[int, int, int]:
        mapping_count = sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mapping_count

    use_tier()  # The first cycle may open resources that the process keeps.
    resources_before = count_resources()
    for _ in range(50):
        use_tier()
    # A leak grows in each cycle. Resources of other parts of the process come and go.
    assert all(
        count_after < count_before + 25
        for count_after, count_before in zip(count_resources(), resources_before, strict=True)
    )


def test_concurrent_threads_see_only_complete_values(folder: Path) -> None:
    tier = DiskTier(folder, 4 << 20, mapped_max=3)
    wrong_values: list[str] = []

    def use_randomly(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(60):
            key = f"k{source.randrange(12)}"
            match source.randrange(5):
                case 0 | 1:
                    tier.put(key, make_payload(key, 400_000))
                case 2 | 3:
                    view = tier.get(key)
                    if view is not None and view != make_payload(key, 400_000):
                        wrong_values.append(f"seed {seed}: {key}")
                case _:
                    tier.discard(key)

    threads = [threading.Thread(target=use_randomly, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong_values == []
    stats = tier.read_stats()
    assert (stats.damaged, stats.errors) == (0, 0), stats.last_error
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize("bad_limits", [{"budget_bytes": 1000}, {"budget_bytes": 1 << 24, "mapped_max": -1}])
def test_impossible_limits_are_rejected(folder: Path, bad_limits: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        DiskTier(folder, **bad_limits)


def test_get_resident_returns_the_value_of_get_or_none_if_it_is_damaged(folder: Path) -> None:
    # No file has the minimum size of a mapped file, 2**62 bytes, so each value is read.
    with closing(DiskTier(folder, 16 << 20, mapped_max=0, map_bytes_min=1 << 62)) as tier:
        payload = os.urandom(300_000)
        tier.put("k", payload)
        for _ in range(2):
            cached_value = tier.get("k")
            assert cached_value is not None
            # The result is None on a file system that cannot report which pages are in memory.
            resident = tier.get_resident("k")
            assert resident is None or bytes(resident) == bytes(cached_value) == payload
        hits = tier.read_stats().hits
        assert tier.get_resident("other") is None
        path = get_path(folder, "k")
        data = bytearray(path.read_bytes())
        for position in (0, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1):
            data[position] ^= 1
            path.write_bytes(data)
            assert tier.get_resident("k") is None
            data[position] ^= 1
        path.write_bytes(data[:-1])
        assert tier.get_resident("k") is None
        assert tier.read_stats().hits == hits
        assert tier.read_stats().damaged == 0  # Only `get` counts and removes a damaged file.
        assert tier.get("k") is None
        assert not path.exists()
