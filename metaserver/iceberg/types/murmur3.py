"""Murmur3, 32 bits, x86 variant, seed 0: the hash of Iceberg's bucket transform (spec: Appendix B)."""

from __future__ import annotations

from struct import iter_unpack

_MASK = 0xFFFFFFFF
_C1 = 0xCC9E2D51
_C2 = 0x1B873593


def murmur3(data: bytes) -> int:
    """The hash as an unsigned number; the spec prints it as a signed number."""
    whole = len(data) & ~3
    state = 0
    for (block,) in iter_unpack("<I", data[:whole]):
        state ^= _scrambled(block)
        state = (state << 13 | state >> 19) & _MASK
        state = (state * 5 + 0xE6546B64) & _MASK
    if whole < len(data):
        state ^= _scrambled(int.from_bytes(data[whole:], "little"))
    state ^= len(data) & _MASK
    state = (state ^ state >> 16) * 0x85EBCA6B & _MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & _MASK
    return state ^ state >> 16


def _scrambled(block: int) -> int:
    block = block * _C1 & _MASK
    block = (block << 15 | block >> 17) & _MASK
    return block * _C2 & _MASK
