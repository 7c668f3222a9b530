"""A toy index kind, a signature of a data file's keys: it shows what a module needs to define a kind."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from seamark.formats.index.keys.hashing import hash_keys
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import KeyRanges, Keys
from seamark.formats.index.kinds.kind import IndexKind, IndexParameter, Mask
from seamark.formats.index.kinds.queries import Flags, list_point_keys

_HEAD = struct.Struct("<II")
"""Width of a signature, CRC-32 of all signatures"""

Signature = npt.NDArray[np.uint8]
"""uint8[width]: 1 at the hash of a key modulo the width."""


class Signatures:
    def __init__(self, blob: memoryview) -> None:
        width, self._checksum = _HEAD.unpack_from(blob)
        self.rows = np.frombuffer(blob, np.uint8, offset=_HEAD.size).reshape(-1, width)
        self.verify()

    @property
    def files(self) -> int:
        return len(self.rows)

    def verify(self) -> None:
        if crc32(self.rows.tobytes()) != self._checksum:
            raise ValueError("the signatures do not match their checksum")


@dataclass(frozen=True, eq=False)
class SignatureQuestion:
    hashes: npt.NDArray[np.uint64]

    def mark_files(self, index: Signatures) -> Flags:
        positions = self.hashes % np.uint64(index.rows.shape[1])
        flags: Flags = index.rows[:, positions].any(axis=1).astype(np.uint8)
        return flags


class SignatureKind(IndexKind[Signature, Signatures]):
    name = "signature"
    parameters = (IndexParameter("width", "the bits of a signature", 256, 8, 65_536),)

    def supports_type(self, type_name: str) -> bool:
        return type_name != "boolean"

    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> Signature:
        keys, width = columns[0], int(parameters["width"])
        hashes = hash_keys(keys, 0)
        signature = np.zeros(width, np.uint8)
        signature[(hashes if keys.present is None else hashes[keys.present]) % np.uint64(width)] = 1
        return signature

    def encode(self, entries: Sequence[Signature]) -> list[bytes]:
        data = np.stack(entries).tobytes()
        return [_HEAD.pack(len(entries[0]), crc32(data)), data]

    def merge(self, parts: Sequence[tuple[Signatures, Mask]]) -> list[bytes]:
        return self.encode([signature for index, keep in parts for signature in index.rows[keep]])

    def open(self, blob: memoryview) -> Signatures:
        return Signatures(blob)

    def query(self, key_ranges: Sequence[KeyRanges]) -> SignatureQuestion | None:
        columns = list_point_keys(key_ranges)
        return None if columns is None else SignatureQuestion(hash_keys(columns[0], 0))

    def make_keys_query(self, keys: KeySet) -> SignatureQuestion:
        return SignatureQuestion(hash_keys(keys.keys, 0))

    def compare(
        self, index: Signatures, number: int, columns: Sequence[Keys], sampled_rows: Sequence[int]
    ) -> Iterator[str]:
        hashes = hash_keys(columns[0], 0)
        for row in sampled_rows:
            if not SignatureQuestion(hashes[row : row + 1]).mark_files(index)[number]:
                yield f"the signature does not know the value of row {row}"


SIGNATURE = SignatureKind()
