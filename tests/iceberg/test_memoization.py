"""Tests that results for long texts, which clients may send without limit, are not cached."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seamark.formats.runtime.memoization import CHARACTERS_MAX, computed_once, memoize


def _return_text(text: str) -> str:
    """Return the text. This is the tested function with one parameter."""
    return text


def _join_two(first: str, second: str) -> str:
    """Return the joined texts."""
    return first + second


def _join_three(first: str, second: str, third: str) -> str:
    """Return the joined texts."""
    return first + second + third


def _join_optional(first: str, second: str = "-") -> str:
    """Return both texts joined. The default of the second text is a hyphen."""
    return first + second


@pytest.mark.parametrize(
    ("function", "cached_count"),
    [(_return_text, 1), (_join_two, 2), (_join_three, 3), (_join_optional, 1), (_join_optional, 2)],
)
def test_only_results_of_short_texts_are_cached(function: Callable[..., str], cached_count: int) -> None:
    calls: list[tuple[str, ...]] = []

    def record_call(*texts: str) -> str:
        calls.append(texts)
        return function(*texts)

    record_call.__wrapped__ = function  # type: ignore[attr-defined]  # inspect.signature reads this attribute.
    record_call.__doc__ = function.__doc__
    call = memoize(2)(record_call)
    short_texts = ("a",) * cached_count
    longest_texts = ("x" * (CHARACTERS_MAX - cached_count + 1), *short_texts[1:])
    too_long_texts = (longest_texts[0] + "x", *short_texts[1:])
    for _ in range(2):
        assert call(*short_texts) == function(*short_texts)
        assert call(*longest_texts) == function(*longest_texts)
    assert calls == [short_texts, longest_texts]
    assert call.__doc__ == function.__doc__
    for _ in range(2):
        assert call(*too_long_texts) == function(*too_long_texts)
    assert calls == [short_texts, longest_texts, too_long_texts, too_long_texts]
    assert call(*short_texts) == function(*short_texts)
    assert calls == [short_texts, longest_texts, too_long_texts, too_long_texts]


def test_cached_property_is_computed_once_for_each_instance() -> None:
    computed_names: list[str] = []

    class NamedObject:
        def __init__(self, name: str) -> None:
            self.name = name

        @computed_once
        def length(self) -> int:
            computed_names.append(self.name)
            return len(self.name)

    first_object, second_object = NamedObject("one"), NamedObject("other")
    assert [first_object.length, second_object.length, first_object.length, second_object.length] == [3, 5, 3, 5]
    assert computed_names == ["one", "other"]
