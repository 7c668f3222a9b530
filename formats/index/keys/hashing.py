"""XXH64 hashes of keys, of rows and of data files, which indexes store instead of values and file paths.

All hashes are XXH64 (xxHash specification 0.1.1) with the given seed. They are part of the file format, so the results
must never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _hash
from seamark.formats.index.keys.keys import Key, Keys

Hashes = npt.NDArray[np.uint64]


def hash_keys(keys: Keys, seed: int) -> Hashes:
    """Return the hash of each key, uint64[rows].

    It is the hash of the 8 bytes of a code, little-endian, or of the bytes of a row. The hashes of null and NaN are
    undefined.
    """
    if keys.codes is not None:
        return _hash.hash_codes(keys.codes, seed)
    assert keys.heap is not None
    assert keys.starts is not None
    return _hash.hash_spans(keys.heap, keys.starts, seed)


def hash_key(key: Key, seed: int) -> int:
    """Return the hash of a key, with the same result as `hash_keys`."""
    return _hash.hash_word(key, seed) if isinstance(key, int) else _hash.hash_bytes(key, seed)


def hash_rows(columns: Sequence[Keys], seed: int) -> Hashes:
    """Return the hash of each row's composite key, uint64[rows].

    The hash is over the length (u32, little-endian) and the bytes of each column. Null has the length 0xFFFFFFFF, and
    NaN the length 0xFFFFFFFE; both have no bytes. So different rows have different bytes.

    Raises:
        ValueError: The columns have different numbers of rows, or a value has 4 GiB or more.
    """
    rows = {column.rows for column in columns}
    if len(rows) != 1:
        raise ValueError(f"the columns of a composite key have {sorted(rows)} rows; they must have the same number")
    parts = [(column.codes, column.starts, column.heap, column.valid, column.nan) for column in columns]
    return _hash.hash_rows(parts, rows.pop(), seed)


def hash_halves(columns: Sequence[Keys]) -> tuple[Hashes, Hashes]:
    """Return the high and the low half of each row's 128-bit hash, uint64[rows] each.

    They are the results of `hash_rows` with the seeds 0 and 1.
    """
    return hash_rows(columns, 0), hash_rows(columns, 1)


def compute_file_ids(paths: Sequence[str], sizes: npt.ArrayLike, records: npt.ArrayLike) -> Hashes:
    """Return the ids of immutable data files, uint64[files, 2].

    An id consists of two hashes, with the seeds 0 and 1, of the path (UTF-8), the size in bytes and the record count
    (u64, little-endian). If another file replaces a file at the same path, the id changes if the size or the record
    count differs.
    """
    return _hash.hash_files(list(paths), np.asarray(sizes, dtype=np.uint64), np.asarray(records, dtype=np.uint64))


def compute_checksum(data: memoryview | bytes | npt.NDArray[np.uint8], seed: int = 0) -> int:
    """Return the XXH64 of a section of a blob.

    Some sections have only 4 bytes for the checksum. They store its low 4 bytes.
    """
    return _hash.hash_bytes(data, seed)
