"""The results of long texts, which clients may send without end, are not kept."""

from __future__ import annotations

from seamark.metaserver.memoization import CHARACTERS_MAX, memoized


def test_results_of_short_texts_are_kept() -> None:
    calls: list[tuple[str, str]] = []

    @memoized(2)
    def joined(first: str, second: str) -> str:
        """Both."""
        calls.append((first, second))
        return first + second

    half = "x" * (CHARACTERS_MAX // 2)
    for _ in range(2):
        assert joined("a", "b") == "ab"
        assert joined(half, half) == half * 2
    assert calls == [("a", "b"), (half, half)]
    assert joined.__doc__ == "Both."
    for _ in range(2):
        assert len(joined(half, half + "x")) == CHARACTERS_MAX + 1
    assert len(calls) == 4
    assert joined("a", "b") == "ab"
    assert len(calls) == 4
