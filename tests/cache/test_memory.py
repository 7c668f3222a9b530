"""Tests of the memory tier, compared with a plain model: contents, evictions and accounted size."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from seamark.cache.memory import ENTRY_OVERHEAD_BYTES, MemoryCache, SharedCache
from tests.seeds import first_seed, mark_fast


def test_least_recently_used_value_is_evicted_first() -> None:
    cache: MemoryCache[str, int] = MemoryCache(3 * (100 + ENTRY_OVERHEAD_BYTES))
    for number, key in enumerate("abc"):
        assert cache.put(key, number, 100)
    assert cache.get("a") == 0
    cache.put("d", 3, 100)
    assert [key for key in "abcd" if key in cache] == ["a", "c", "d"]
    assert cache.get("b") is None


def test_value_larger_than_the_budget_is_rejected_and_evicts_only_its_predecessor() -> None:
    cache: MemoryCache[str, str] = MemoryCache(1000)
    cache.put("a", "kept", 100)
    cache.put("b", "old", 100)
    assert not cache.put("b", "huge", 1001)
    assert cache.get("a") == "kept"
    assert cache.get("b") is None, "the cache has evicted the outdated value"
    assert cache.read_stats().refused == 1
    cache.check_invariants()


def test_replaced_value_is_counted_once() -> None:
    cache: MemoryCache[str, str] = MemoryCache(10_000)
    cache.put("a", "x", 500)
    cache.put("a", "y", 700)
    assert cache.read_stats().used_bytes == 700 + ENTRY_OVERHEAD_BYTES
    assert cache.get("a") == "y"
    cache.clear()
    assert (cache.read_stats().used_bytes, len(cache)) == (0, 0)


def test_empty_values_count_with_their_overhead() -> None:
    cache: MemoryCache[int, None] = MemoryCache(10 * ENTRY_OVERHEAD_BYTES)
    for number in range(1000):
        cache.put(number, None, 0)
    assert len(cache) == 10
    assert cache.read_stats().evictions == 990


def test_cache_with_a_zero_budget_keeps_no_value() -> None:
    cache: MemoryCache[str, int] = MemoryCache(0)
    assert not cache.put("a", 1, 0)
    assert cache.get("a") is None


def test_negative_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        MemoryCache(-1)
    cache: MemoryCache[str, int] = MemoryCache(1000)
    with pytest.raises(ValueError, match="must be 0 or more"):
        cache.put("a", 1, -1)


@pytest.mark.parametrize("seed", mark_fast(range(20), 3))
def test_random_operations_agree_with_a_model(seed: int) -> None:
    source = random.Random(seed)
    budget = source.choice([0, 300, 5_000, 50_000])
    cache: MemoryCache[int, int] = MemoryCache(budget)
    model: OrderedDict[int, tuple[int, int]] = OrderedDict()
    hits = misses = 0
    for step in range(600):
        key, size = source.randrange(40), source.randrange(2_000)
        match source.randrange(5):
            case 0 | 1:
                expected = model.get(key)
                hits, misses = hits + (expected is not None), misses + (expected is None)
                assert cache.get(key) == (expected[0] if expected else None), f"seed {seed}, step {step}"
                if expected:
                    model.move_to_end(key)
            case 2 | 3:
                model.pop(key, None)
                charged_bytes = size + ENTRY_OVERHEAD_BYTES
                if charged_bytes <= budget:
                    while sum(entry[1] for entry in model.values()) + charged_bytes > budget:
                        model.popitem(last=False)
                    model[key] = (step, charged_bytes)
                assert cache.put(key, step, size) is (charged_bytes <= budget)
            case _:
                model.pop(key, None)
                cache.discard(key)
        cache.check_invariants()
        assert {number for number in range(40) if number in cache} == set(model), f"seed {seed}, step {step}"
    stats = cache.read_stats()
    assert (stats.hits, stats.misses, stats.entries) == (hits, misses, len(model))
    assert stats.used_bytes == sum(entry[1] for entry in model.values())


def test_holder_of_a_shared_cache_evicts_its_own_entries_if_its_share_is_full() -> None:
    cache: SharedCache[tuple[str, int], int] = SharedCache(20 * ENTRY_OVERHEAD_BYTES, 10 * ENTRY_OVERHEAD_BYTES)
    for number in range(8):
        cache.put(("a", number), number, 0, "a")
    for number in range(100):
        cache.put(("b", number), number, 0, "b")
    assert [cache.get(("a", number)) for number in range(8)] == list(range(8))
    assert [number for number in range(100) if ("b", number) in cache] == list(range(90, 100))
    cache.check_invariants()


@pytest.mark.parametrize("round_number", mark_fast(range(20), 3))
def test_shared_cache_keeps_the_most_recently_used_entries(round_number: int) -> None:
    """The model is one list of the entries (key, value, size, holder), with the least recently used entry first."""
    rng = random.Random(first_seed() * 1000 + round_number)
    budget, share = rng.randrange(0, 5000), rng.randrange(0, 5000)
    share = min(budget, share)  # A holder also evicts its own entries first if its share is larger than the cache.
    cache: SharedCache[int, int] = SharedCache(budget, share)
    model: list[tuple[int, int, int, str]] = []
    for step in range(800):
        key = rng.randrange(40)  # The keys are few, so that most of them are used again.
        entries = [entry for entry in model if entry[0] == key]
        chance = rng.random()
        if chance < 0.1:
            cache.discard(key)
            model = [entry for entry in model if entry[0] != key]
        elif chance < 0.6:
            holder, size = rng.choice("abc"), rng.choice([0, 0, 100, 900])
            charged_bytes = size + ENTRY_OVERHEAD_BYTES
            fits = charged_bytes <= min(budget, share)
            assert cache.put(key, step, size, holder) == fits
            model = [entry for entry in model if entry[0] != key]
            if fits:
                while sum(entry[2] for entry in model if entry[3] == holder) + charged_bytes > share:
                    model.remove(next(entry for entry in model if entry[3] == holder))
                while sum(entry[2] for entry in model) + charged_bytes > budget:
                    model.pop(0)
                model.append((key, step, charged_bytes, holder))
        else:
            assert cache.get(key) == (entries[0][1] if entries else None)
            if entries:
                model.remove(entries[0])
                model.append(entries[0])
        assert {entry[0] for entry in model} == {number for number in range(40) if number in cache}
        cache.check_invariants()
