"""Tests that the envelope rejects every value except the one that was put under the key."""

from __future__ import annotations

import random

import pytest

from seamark.cache.envelope import HEADER_BYTES, Damaged, compute_key_digest, extract_payload, make_header
from tests.seeds import mark_fast


def seal_payload(key: str, payload: bytes) -> bytes:
    return make_header(compute_key_digest(key), [memoryview(payload)]) + payload


@pytest.mark.parametrize("size", [0, 1, 100, 100_000])
def test_sealed_value_is_unsealed_without_a_copy(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    data = memoryview(seal_payload("k", payload))
    view = extract_payload(compute_key_digest("k"), data)
    assert view == payload
    assert view.obj is data.obj


def test_parts_are_sealed_as_one_payload() -> None:
    parts = [memoryview(part) for part in (b"a", b"", b"bc", bytes(1000))]
    assert make_header(compute_key_digest("k"), parts) == make_header(
        compute_key_digest("k"), [memoryview(b"".join(parts))]
    )


def test_every_flipped_bit_is_rejected() -> None:
    good_payload = seal_payload("k", b"payload of some bytes")
    for bit in range(len(good_payload) * 8):
        data = bytearray(good_payload)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            extract_payload(compute_key_digest("k"), memoryview(data))


def test_every_truncated_length_is_rejected() -> None:
    good_payload = seal_payload("k", b"payload of some bytes")
    for length in range(len(good_payload)):
        with pytest.raises(Damaged):
            extract_payload(compute_key_digest("k"), memoryview(good_payload)[:length])
    with pytest.raises(Damaged, match="the payload has"):
        extract_payload(compute_key_digest("k"), memoryview(good_payload + b"\0"))


def test_value_of_another_key_is_rejected() -> None:
    with pytest.raises(Damaged, match="another key"):
        extract_payload(compute_key_digest("a"), memoryview(seal_payload("b", b"x")))


def test_error_for_a_future_layout_names_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.cache.envelope.VERSION", 2)
    later_payload = seal_payload("k", b"x")
    monkeypatch.undo()
    with pytest.raises(Damaged, match="version 2"):
        extract_payload(compute_key_digest("k"), memoryview(later_payload))


@pytest.mark.parametrize("seed", mark_fast(range(20), 3))
def test_random_overwrites_cuts_and_shifts_are_rejected(seed: int) -> None:
    source = random.Random(seed)
    good_payload = seal_payload("k", source.randbytes(3_000))
    assert HEADER_BYTES == 64
    for _ in range(50):
        data = bytearray(good_payload)
        start, length = source.randrange(len(data)), source.randint(1, 200)
        match source.randrange(3):
            case 0:
                data[start : start + length] = source.randbytes(len(data[start : start + length]))
            case 1:
                del data[start : start + length]
            case _:
                data[start:start] = source.randbytes(length)
        if data != good_payload:
            with pytest.raises(Damaged):
                extract_payload(compute_key_digest("k"), memoryview(data))
