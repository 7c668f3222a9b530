"""Tests of admission by frequency: the sketch's counts, the kept entries, and scans that evict no frequently used
entries.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from seamark.cache.admission import AdmittingCache
from seamark.cache.disk import DiskTier, make_database_key
from seamark.cache.frequency import COUNT_MAX, FrequencySketch
from seamark.cache.memory import ENTRY_OVERHEAD_BYTES
from tests.seeds import first_seed

VALUE_BYTES = 1000 - ENTRY_OVERHEAD_BYTES
"""The size of a value that counts as 1000 bytes."""


def _build_cache(entries: int, **options: object) -> AdmittingCache[object, int]:
    return AdmittingCache(entries * 1000, FrequencySketch(entries), **options)  # type: ignore[arg-type]


def test_estimate_is_never_below_the_count_and_rarely_above_it() -> None:
    rng, sketch, exact_counts = random.Random(first_seed()), FrequencySketch(4096), Counter[int]()
    for _ in range(20_000):
        key = min(int(rng.paretovariate(0.6)), 4000)
        sketch.count(key)
        exact_counts[key] += 1
    for key, count in exact_counts.items():
        assert sketch.estimate(key) >= min(count, COUNT_MAX + 1)
    exact_count = sum(sketch.estimate(key) == min(count, COUNT_MAX + 1) for key, count in exact_counts.items())
    assert exact_count >= 0.95 * len(exact_counts)
    false_positives = sum(sketch.estimate(key) > 0 for key in range(10_000, 20_000))
    assert false_positives < 500


def test_estimate_of_a_key_decreases_while_other_keys_are_counted() -> None:
    sketch = FrequencySketch(100)
    for _ in range(15):
        sketch.count("old")
    estimate_before = sketch.estimate("old")
    for number in range(3000):
        sketch.count(number)
    assert sketch.estimate("old") < estimate_before // 2


@pytest.mark.parametrize("keys", [0, -1])
def test_sketch_of_size_zero_is_rejected(keys: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        FrequencySketch(keys)


def test_scan_of_ten_times_the_cache_lowers_the_hit_rate_by_less_than_five_percent() -> None:
    """The requests for 600 hot keys have a Zipf distribution, so a cache of 500 entries can answer most of them.

    An LRU cache of the same size loses most hot keys to the scan.
    """
    rng, entries = random.Random(first_seed()), 500
    hot_weights = [(1 / (rank + 1), rank) for rank in range(600)]
    weights = [weight for weight, _ in hot_weights]

    def measure_hit_rate(cache: AdmittingCache[object, int], scan: list[int]) -> float:
        """Return the hit rate of the requests for the hot set. A part of the scan follows each request."""
        hits, requests, remaining_keys = 0, 6000, list(scan)
        scanned_per_request = -(-len(scan) // requests)  # The quotient is rounded up.
        for key in rng.choices([rank for _, rank in hot_weights], weights, k=requests):
            if cache.get(key) is not None:
                hits += 1
            else:
                cache.put(key, 0, VALUE_BYTES)
            for number in remaining_keys[-scanned_per_request:] if scanned_per_request else []:
                # The keys of the scan follow 10,000, so they are not hot keys.
                if cache.get(10_000 + number) is None:
                    cache.put(10_000 + number, 0, VALUE_BYTES)
            del remaining_keys[len(remaining_keys) - scanned_per_request :]
        return hits / requests

    cache = _build_cache(entries)
    measure_hit_rate(cache, [])
    base_rate = measure_hit_rate(cache, [])
    hit_rate_with_scan = measure_hit_rate(cache, list(range(10 * entries)))
    hit_rate_after = measure_hit_rate(cache, [])
    assert base_rate > 0.8, "most requests are for the hottest keys, which fit into the cache"
    assert base_rate - hit_rate_with_scan < 0.05, (base_rate, hit_rate_with_scan)
    assert base_rate - hit_rate_after < 0.05, (base_rate, hit_rate_after)
    cache.check_invariants()


def test_new_hot_set_replaces_the_old_one() -> None:
    cache = _build_cache(100)
    for round_number in range(2):
        for _ in range(30):
            for number in range(60):
                if cache.get((round_number, number)) is None:
                    cache.put((round_number, number), 0, VALUE_BYTES)
    assert sum((1, number) in cache for number in range(60)) >= 55


def test_sequential_read_makes_no_key_popular() -> None:
    cache = _build_cache(10)
    for number in range(9):
        for _ in range(3):
            cache.get(number)
        cache.put(number, number, VALUE_BYTES)
    for number in range(100, 200):
        cache.get(number)
        cache.put(number, number, VALUE_BYTES)
        for _ in range(50):
            cache.get(number, counted=False)
    assert sum(number in cache for number in range(9)) == 9


def test_pinned_entries_stay_and_have_a_separate_budget() -> None:
    cache = _build_cache(20, pinned_bytes=5000)
    for number in range(5):
        assert cache.put(("pin", number), number, VALUE_BYTES, pinned=True)
    for number in range(200):
        for _ in range(5):
            cache.get(number)
        cache.put(number, number, VALUE_BYTES)
    assert [cache.get(("pin", number)) for number in range(5)] == list(range(5))
    cache.put(("pin", 5), 5, VALUE_BYTES, pinned=True)
    assert ("pin", 0) not in cache
    assert not cache.put("large", 0, 30_000, pinned=True)
    cache.check_invariants()


def test_holder_that_has_used_its_share_evicts_its_own_entries() -> None:
    cache = _build_cache(20, holder_bytes=10_000)
    for number in range(8):
        cache.put(("a", number), number, VALUE_BYTES, "a")
    for number in range(100):
        for _ in range(9):
            cache.get(("b", number))
        cache.put(("b", number), number, VALUE_BYTES, "b")
    assert cache.get_held_bytes("b") <= 10_000
    assert all(("a", number) in cache for number in range(8))
    cache.check_invariants()


def test_holder_that_pins_much_evicts_its_own_pinned_entries() -> None:
    # The pinned part has room for ten entries of 1,000 bytes, and a holder may pin half of them.
    cache = _build_cache(40, pinned_bytes=10_000, holder_bytes=20_000)
    for number in range(4):
        assert cache.put(("a", number), number, VALUE_BYTES, "a", pinned=True)
    for number in range(100):
        # The keys of b are requested more often than those of a, but evict only entries of b.
        for _ in range(9):
            cache.get(("b", number))
        cache.put(("b", number), number, VALUE_BYTES, "b", pinned=True)
        assert sum(("b", number) in cache for number in range(100)) <= 5, "a holder has at most half of the pinned part"
    assert all(("a", number) in cache for number in range(4))
    assert all(("b", number) in cache for number in range(95, 100))
    # Two holders may together use the whole pinned part, each within its share.
    for number in range(100):
        cache.put(("c", number), number, VALUE_BYTES, "c", pinned=True)
    assert sum((principal, number) in cache for principal in "abc" for number in range(100)) == 10
    cache.check_invariants()


def test_any_sequence_agrees_with_a_dict_that_may_lose_entries() -> None:
    rng = random.Random(first_seed())
    for _ in range(20):
        budget = rng.randrange(0, 20_000)
        cache: AdmittingCache[int, int] = AdmittingCache(
            budget,
            FrequencySketch(64),
            pinned_bytes=rng.randrange(0, budget + 1),
            holder_bytes=rng.choice((None, rng.randrange(0, 20_000))),
        )
        model: dict[int, int] = {}
        for step in range(1500):
            key = rng.randrange(60)
            match rng.randrange(10):
                case 0:
                    cache.discard(key)
                    model.pop(key, None)
                case 1 | 2 | 3:
                    holder, is_pinned = rng.choice("abc"), rng.random() < 0.2
                    response = cache.put(key, step, rng.randrange(0, 3000), holder, pinned=is_pinned)
                    model[key] = step
                    assert response == (key in cache)
                case _:
                    value = cache.get(key, counted=rng.random() < 0.9)
                    assert value is None or value == model[key]
            cache.check_invariants()


def test_disk_keeps_the_values_that_are_requested_more_often(tmp_path: Path) -> None:
    sketch = FrequencySketch(256)
    tier = DiskTier(
        tmp_path / "d",
        4 << 20,
        should_replace=lambda new_key, old_key: sketch.estimate(new_key) > sketch.estimate(old_key),
        holder_bytes=3 << 20,
    )
    data = bytes(100_000)
    hot_names = [f"hot{number}" for number in range(20)]
    for key in hot_names:
        for _ in range(3):
            sketch.count(make_database_key(key))
        assert tier.put(key, data)
    for number in range(100):
        key = f"scan{number}"
        sketch.count(make_database_key(key))
        tier.put(key, data, "other")
    assert all(tier.get(key) is not None for key in hot_names)
    assert tier.read_stats().used_bytes <= 4 << 20
    tier.check_invariants()
    tier.close()


def test_holder_keeps_its_disk_share_after_a_restart(tmp_path: Path) -> None:
    """Each value counts for a holder. If a holder reaches its limit of bytes, only its own values are evicted."""
    rng = random.Random(first_seed())
    for round_number in range(3):
        tier = DiskTier(tmp_path / "d", 8 << 20, holder_bytes=1 << 20)
        if not round_number:
            assert tier.put("small", bytes(500_000), "small holder")
        for _ in range(40):
            key = f"k{rng.randrange(60)}"
            if rng.random() < 0.2:
                tier.discard(key)
            else:
                tier.put(key, bytes(rng.randrange(1000, 200_000)), "large holder")
            tier.check_invariants()
        assert not tier.put("too large", bytes(2 << 20), "large holder")
        assert tier.get("small") is not None
        assert tier.read_stats().used_bytes < 2 << 20
        tier.close()
