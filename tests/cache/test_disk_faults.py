"""Tests of a broken folder: damaged files, a full or read-only disk, a busy SQLite, a deleted folder.

The tier returns the right value or a miss, and never raises. It counts each failure, and recovers.
"""

from __future__ import annotations

import errno
import random
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from seamark.cache.disk import DiskTier
from tests.cache.payloads import make_payload
from tests.cache.test_disk import get_path, measure_disk_bytes
from tests.faults.rigs.disk import mount_small_disk
from tests.seeds import mark_fast
from tests.support.damage import (
    Damage,
    append_bytes,
    clear_file,
    flip_bit,
    overwrite_part,
    truncate_at_random,
    write_zeros,
)

BUDGET_BYTES = 8 << 20
SIZES = {"small": 500, "read": 40_000, "mapped": 300_000, "large": 2_000_000}


def put_all_sizes(tier: DiskTier) -> None:
    for key, size in SIZES.items():
        assert tier.put(key, make_payload(key, size)), tier.read_stats().last_error


def check_no_wrong_values(tier: DiskTier) -> set[str]:
    """Check that no value in the tier is wrong, and return the keys with a value."""
    stored_keys = set()
    for key, size in SIZES.items():
        view = tier.get(key)
        if view is not None:
            assert view == make_payload(key, size), f"a wrong value for {key}"
            stored_keys.add(key)
    return stored_keys


DAMAGES: list[Damage] = [
    flip_bit,
    overwrite_part,
    write_zeros,
    truncate_at_random,
    clear_file,
    append_bytes,
]


@pytest.mark.each_value
@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_counted_miss_and_is_removed(tmp_path: Path, key: str, damage: Damage) -> None:
    with closing(DiskTier(tmp_path, BUDGET_BYTES)) as tier:
        put_all_sizes(tier)
        path = get_path(tmp_path, key)
        data = bytearray(path.read_bytes())
        damage(data, random.Random(f"{key} {damage.__name__}"))
        path.write_bytes(data)
        assert tier.get(key) is None
        assert not path.exists()
        stats = tier.read_stats()
        assert (stats.damaged, stats.entries, stats.errors) == (1, len(SIZES) - 1, 0), stats.last_error
        put_all_sizes(tier)
        assert check_no_wrong_values(tier) == set(SIZES)
        tier.check_invariants()


def test_two_swapped_files_are_two_misses(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path, BUDGET_BYTES)) as tier:
        put_all_sizes(tier)
        path, other_path = get_path(tmp_path, "mapped"), get_path(tmp_path, "large")
        path.rename(tmp_path / "aside")
        other_path.rename(path)
        (tmp_path / "aside").rename(other_path)
        assert tier.get("mapped") is None
        assert tier.get("large") is None
        assert tier.read_stats().damaged == 2


@pytest.mark.parametrize("is_open", [True, False], ids=["while it is open", "between two runs"])
@pytest.mark.parametrize("seed", mark_fast(range(300), 3))
def test_changed_or_deleted_cache_files_never_cause_a_wrong_value(tmp_path: Path, seed: int, is_open: bool) -> None:
    source = random.Random(f"{seed} {is_open}")
    tier = DiskTier(tmp_path, BUDGET_BYTES, mapped_max=0)
    put_all_sizes(tier)
    if not is_open:
        tier.close()
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size)
    database_path = tmp_path / "cache.db"
    # For every third seed, only cache.db is damaged, which stores the sizes of the cached files.
    for path in {database_path, *source.sample(files, source.randint(0, len(files)))} if seed % 3 else {database_path}:
        data = bytearray(path.read_bytes())
        for _ in range(source.choice([1, 1, 5, 50])):  # A single damage is the hardest to detect, so it is frequent.
            if data:
                source.choice(DAMAGES)(data, source)
        path.write_bytes(data)
    if not is_open:
        tier = DiskTier(tmp_path, BUDGET_BYTES, mapped_max=0)
    try:
        check_no_wrong_values(tier)
        for number in range(12):
            # A few puts correct any error in cache.db. Afterwards the files are within the budget.
            tier.put(f"more {number}", make_payload(f"more {number}", 900_000))
        assert tier.get("more 11") == make_payload("more 11", 900_000), f"seed {seed}: {tier.read_stats().last_error}"
        check_no_wrong_values(tier)
    finally:
        tier.close()
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    assert check_no_wrong_values(tier) <= set(SIZES)
    put_all_sizes(tier)
    assert check_no_wrong_values(tier) == set(SIZES)
    tier.check_invariants()
    assert measure_disk_bytes(tmp_path) <= BUDGET_BYTES, f"seed {seed}"
    tier.close()


def test_puts_fail_on_a_full_disk_until_space_is_freed(tmp_path: Path) -> None:
    with (
        mount_small_disk(tmp_path / "disk", "16m") as disk,
        closing(DiskTier(disk.root / "cache", BUDGET_BYTES)) as tier,
    ):
        put_all_sizes(tier)
        for _ in range(3):
            disk.fill()
            assert not tier.put("more", make_payload("more", 1 << 20))
            assert tier.read_stats().last_error
            assert check_no_wrong_values(tier) == set(SIZES)
            tier.discard("large")
            assert tier.get("large") is None
            disk.free_space()
            assert tier.put("more", make_payload("more", 1 << 20)), tier.read_stats().last_error
            tier.discard("more")
            put_all_sizes(tier)
            assert check_no_wrong_values(tier) == set(SIZES)
            tier.check_invariants()


def test_cache_misses_if_its_disk_is_full_from_the_start(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "16m") as disk:
        disk.fill()
        with closing(DiskTier(disk.root / "cache", BUDGET_BYTES)) as tier:
            assert tier.get("small") is None
            assert not tier.put("small", b"x")
            assert tier.read_stats().errors >= 1
            disk.free_space()
            put_all_sizes(tier)
            assert check_no_wrong_values(tier) == set(SIZES)


def test_read_only_folder_returns_its_values(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "16m") as disk, closing(DiskTier(disk.root, BUDGET_BYTES)) as tier:
        put_all_sizes(tier)
        disk.fill()
        # Open files of SQLite would prevent the remount. This failed put closes them.
        assert not tier.put("more", b"x")
        subprocess.run(["mount", "-o", "remount,ro", str(disk.root)], check=True)
        assert not tier.put("more", b"x")
        tier.discard("more")
        assert check_no_wrong_values(tier) == set(SIZES)
        with closing(DiskTier(disk.root, BUDGET_BYTES)) as late_tier:
            assert check_no_wrong_values(late_tier) == set(SIZES)
            assert "ead-only" in late_tier.read_stats().last_error
        subprocess.run(["mount", "-o", "remount,rw", str(disk.root)], check=True)
        disk.free_space()
        assert tier.put("more", b"x")
        tier.check_invariants()


def test_deleted_folder_is_created_again(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path / "cache", BUDGET_BYTES, mapped_max=0)) as tier:
        put_all_sizes(tier)
        shutil.rmtree(tmp_path / "cache")
        assert check_no_wrong_values(tier) == set()
        put_all_sizes(tier)
        assert check_no_wrong_values(tier) == set(SIZES)
        tier.check_invariants()
        (tmp_path / "cache" / "cache.db").unlink()
        assert check_no_wrong_values(tier) == set(SIZES), "the tier reads values without cache.db"
        assert tier.put("more", b"x")
        tier.check_invariants()


def test_key_may_be_cached_if_its_file_cannot_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with closing(DiskTier(tmp_path, BUDGET_BYTES)) as tier:
        put_all_sizes(tier)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fail)
            assert all(tier.may_have(key) for key in SIZES), (
                "an error does not hide the key, and `get` counts the error"
            )
        assert not tier.may_have("absent")


def test_cache_misses_if_its_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    with closing(DiskTier(tmp_path / "cache", BUDGET_BYTES)) as tier:
        assert tier.get("k") is None
        assert not tier.put("k", b"x")
        assert "exists" in tier.read_stats().last_error
    assert (tmp_path / "cache").read_text() == "not a folder"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("lock_statement", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_locked_cache_database_prevents_puts_but_not_hits(tmp_path: Path, lock_statement: str) -> None:
    with closing(DiskTier(tmp_path, BUDGET_BYTES)) as tier:
        put_all_sizes(tier)
        with closing(sqlite3.connect(tmp_path / "cache.db", isolation_level=None)) as other_connection:
            other_connection.execute(lock_statement)
            assert not tier.put("more", b"x")
            assert "locked" in tier.read_stats().last_error
            assert check_no_wrong_values(tier) == set(SIZES)
            with closing(DiskTier(tmp_path, BUDGET_BYTES)) as late_tier:
                assert check_no_wrong_values(late_tier) == set(SIZES)
            other_connection.execute("ROLLBACK")
        assert tier.put("more", b"x")
        tier.check_invariants()


def test_files_left_by_a_crash_are_removed_at_the_next_start(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path, BUDGET_BYTES)) as tier:
        put_all_sizes(tier)
    (tmp_path / "3").mkdir(exist_ok=True)
    unfinished_file = tmp_path / "3" / "tmpabcdef"
    unfinished_file.write_bytes(bytes(1 << 20))
    get_path(tmp_path, "small").unlink()
    with closing(DiskTier(tmp_path, BUDGET_BYTES)) as tier:
        assert not unfinished_file.exists()
        assert check_no_wrong_values(tier) == set(SIZES) - {"small"}
        tier.check_invariants()
