"""The contract of every cache tier. Each tier's test inherits the class and creates a tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from seamark.cache.tier import Tier
from tests.cache.payloads import make_payload
from tests.seeds import examples


class TierContract:
    """The tests that each cache tier passes. A subclass opens the tier."""

    BUDGET_BYTES = 8 << 20

    def open(self, budget_bytes: int) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with closing(self.open(self.BUDGET_BYTES)) as tier:
            yield tier
            tier.check_invariants()

    # A file of 64 KiB or more is mapped. The file has a header of 64 bytes before the value.
    @pytest.mark.parametrize("size", [0, 1, 63, 4096, 65_471, 65_472, 65_536, 1_000_003])
    def test_cached_value_equals_the_stored_value(self, tier: Tier, size: int) -> None:
        value = make_payload("k", size)
        assert tier.get("k") is None
        assert tier.put("k", value)
        for _ in range(3):
            view = tier.get("k")
            assert view is not None
            assert (view.readonly, view.format, view.ndim) == (True, "B", 1)
            assert view == value
        stats = tier.read_stats()
        assert (stats.hits, stats.misses, stats.entries) == (3, 1, 1)

    def test_payload_in_parts_is_stored_as_one_value(self, tier: Tier) -> None:
        words = memoryview(bytes(range(240))).cast("q")
        assert tier.put("k", [b"ab", bytearray(b""), words, memoryview(b"z")])
        assert tier.get("k") == b"ab" + bytes(range(240)) + b"z"

    def test_payload_that_is_not_bytes_raises_an_error(self, tier: Tier) -> None:
        with pytest.raises(TypeError):
            tier.put("k", ["text"])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            tier.put("k", memoryview(b"abcd")[::2])
        assert tier.get("k") is None

    def test_keys_of_any_form_are_distinct(self, tier: Tier) -> None:
        keys = [
            "",
            "a",
            "A",
            "a/b",
            "../../etc/passwd",
            "é",
            "e\u0301",
            "\udcff",
            "x" * 10_000,
            "x" * 10_001,
            "\0",
            "a\0",
        ]
        for key in keys:
            assert tier.put(key, key.encode("utf-8", "surrogatepass"))
        for key in keys:
            assert tier.get(key) == key.encode("utf-8", "surrogatepass")

    def test_discarded_key_is_missing_and_can_be_discarded_again(self, tier: Tier) -> None:
        tier.put("k", make_payload("k", 100_000))
        tier.put("l", b"stays")
        tier.get("k")
        tier.discard("k")
        tier.discard("k")
        tier.discard("never seen")
        assert tier.get("k") is None
        assert tier.get("l") == b"stays"
        assert tier.read_stats().entries == 1

    def test_value_put_again_is_counted_once(self, tier: Tier) -> None:
        for _ in range(5):
            assert tier.put("k", make_payload("k", 3 << 20))
        assert tier.read_stats().entries == 1
        assert tier.get("k") == make_payload("k", 3 << 20)

    def test_least_recently_used_values_are_evicted_first(self, tier: Tier) -> None:
        keys = [f"k{number}" for number in range(6)]
        for key in keys:
            tier.put(key, make_payload(key, 1 << 20))
        assert tier.get("k0") is not None
        # 6 values of 1 MiB and this value of 2.5 MiB exceed the budget of 8 MiB.
        assert tier.put("new", make_payload("new", 5 << 19))
        held_keys = [key for key in [*keys, "new"] if tier.get(key) is not None]
        assert "k0" in held_keys
        assert "new" in held_keys
        assert "k1" not in held_keys
        evicted_keys = [key for key in keys if key not in held_keys]
        assert evicted_keys == keys[1 : 1 + len(evicted_keys)], "the evicted values are the oldest, after k0 was read"
        assert tier.read_stats().evictions >= 1

    def test_value_larger_than_the_budget_is_rejected_and_evicts_nothing(self, tier: Tier) -> None:
        tier.put("k", make_payload("k", 1 << 20))
        assert not tier.put("huge", bytes(self.BUDGET_BYTES + 1))
        assert tier.get("huge") is None
        assert tier.get("k") == make_payload("k", 1 << 20)
        assert (tier.read_stats().refused, tier.read_stats().evictions) == (1, 0)

    def test_payload_outlives_its_entry_and_its_tier(self, tier: Tier) -> None:
        value = make_payload("k", 2 << 20)
        tier.put("k", value)
        view = tier.get("k")
        assert view is not None
        part = view[12_345:1_000_000]
        del view
        tier.discard("k")
        for number in range(10):
            tier.put(f"filler {number}", bytes(2 << 20))
        tier.close()
        assert part == value[12_345:1_000_000]

    def test_closed_tier_misses_and_can_be_closed_twice(self) -> None:
        tier = self.open(self.BUDGET_BYTES)
        tier.put("k", bytes(100_000))
        tier.get("k")
        tier.close()
        tier.close()
        assert tier.get("k") is None
        assert not tier.put("l", b"")
        assert tier.read_stats().hits == 1

    def test_any_sequence_agrees_with_a_dict_that_may_lose_entries(self) -> None:
        contract = self

        class Machine(RuleBasedStateMachine):
            """A machine of random operations on the tier, compared with a dictionary of the values that were put."""

            def __init__(self) -> None:
                super().__init__()
                self.tier = contract.open(1 << 21)
                self.model: dict[str, bytes] = {}
                self.views: list[tuple[memoryview, bytes]] = []

            keys = st.integers(0, 12).map(lambda number: f"k{number}")
            # The key determines the size and the content, because keys are immutable. The last size exceeds the budget.
            sizes = (0, 100, 5_000, 70_000, 300_000, 700_000, 3_000_000)

            @rule(key=keys)
            def put(self, key: str) -> None:
                value = make_payload(key, self.sizes[int(key[1:]) % len(self.sizes)])
                response = self.tier.put(key, value)
                assert response == (len(value) < 3_000_000)
                if response:
                    self.model[key] = value
                    assert self.tier.get(key) == value, "the tier does not evict a value that was just put"

            @rule(key=keys)
            def get(self, key: str) -> None:
                view = self.tier.get(key)
                if view is None:
                    self.model.pop(key, None)
                else:
                    assert view == self.model[key]
                    self.views = [*self.views[-3:], (view, self.model[key])]

            @rule(key=keys)
            def discard(self, key: str) -> None:
                self.tier.discard(key)
                self.model.pop(key, None)

            @precondition(lambda self: self.views)
            @rule()
            def read_views_again(self) -> None:
                for view, value in self.views:
                    assert view == value

            @invariant()
            def check_statistics(self) -> None:
                self.tier.check_invariants()
                stats = self.tier.read_stats()
                assert stats.used_bytes <= stats.budget_bytes
                assert (stats.errors, stats.damaged) == (0, 0), stats.last_error

            def teardown(self) -> None:
                self.tier.close()

        run_state_machine_as_test(Machine, settings=settings(max_examples=examples(15, 8), stateful_step_count=25))
