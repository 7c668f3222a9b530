"""Bloom filters of data files, which select the files that may contain a key.

`docs/reference/index-format.md` specifies the format.

Each data file has a separate filter over the hashes of its distinct keys. Files whose filters have the same number of
bits form a group. A group is stored transposed: row p consists of bit p of every filter. A lookup of a key reads k rows
of a group, and their AND is the result for all files of the group. If nothing is cached, this takes k short reads for
any number of files. A group of one file is the file's filter unchanged.

Rows are stored in pages, each with a checksum, because a probe reads k rows of a group and cannot check the rest. A
cleared bit would exclude a file that has the key, so no row is used before its page is checked.

No filter contains null or NaN, so the index cannot prune by a predicate that matches null or NaN. If a file has a text
of unknown case (`case_folding.py`), all bits of its filter are set: the filter contains every key, and queries do not
look for such a text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _bloom
from seamark.formats.index.keys.case_folding import UNKNOWN_CASE
from seamark.formats.index.keys.hashing import Hashes, compute_checksum, hash_key, hash_keys
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import CODE_MAX, Bytes, KeyRanges, Keys, Longs, Mask, make_key
from seamark.formats.index.kinds.kind import BlobReader, IndexKind, IndexParameter
from seamark.formats.index.kinds.queries import Flags, list_point_keys

FALSE_POSITIVE_PROBABILITY = 0.01
FPP_MIN, FPP_MAX = 1e-6, 0.5
HASHED_MAX = 2_000
"""The maximum number of keys of a join that are probed. With more keys, false positives would select every file."""
FILTER_BITS_MIN, FILTER_BITS_MAX = 1 << 8, 1 << 30
"""The minimum and maximum size of a filter in bits.

If a file has more keys than fit into the largest filter, there are more false positives, but no false negatives.
"""

_SEED = 0
_PAGE_BITS = 1 << 15
"""The maximum size of a page of several rows, in bits."""
_PAGE_CHECKSUM_BYTES = 4
_UNALIGNED_MAX = 128
"""The maximum number of files in a group whose rows are not aligned to bytes.

In such small groups, the padding would be too large.
"""
_GROUPS_MAX = 255
_HASH_COUNT_MAX = 32
_WORDS_PER_MERGE = 1 << 23
"""The number of words of filters that a merge has in memory."""
_MEMORY_PER_HEADER_BYTE = 16
"""The memory of an opened remote blob for each byte of its header."""
_KERNEL_RESERVE_BYTES = 8

_FIXED = struct.Struct("<4I")
"""The start of the header: the size of the header, the bits set per key, the number of files, the number of groups."""
FIXED_SIZE = _FIXED.size
_ENTRY = np.dtype([("filter_bits", "<u8"), ("files", "<u8"), ("offset", "<u8"), ("length", "<u8")])
_HEADER_CHECKSUM = struct.Struct("<Q")


def compute_hash_count(fpp: float) -> int:
    """Return k, the number of bits that are set for each key, for the false-positive rate `fpp`.

    Raises:
        ValueError: The rate is out of range.
    """
    if not FPP_MIN <= fpp <= FPP_MAX:
        raise ValueError(f"the false-positive rate must be between {FPP_MIN} and {FPP_MAX}; {fpp} is not")
    return max(1, round(-math.log2(fpp)))


def compute_filter_bits(keys: int, fpp: float) -> int:
    """Return the size in bits of a filter for `keys` distinct keys.

    The size is the lowest 2^e · {4, 5, 6, 7} / 4 that keeps the false-positive rate `fpp`, but at least FILTER_BITS_MIN
    and at most FILTER_BITS_MAX. With more keys than fit into FILTER_BITS_MAX, the rate is higher. Filters of the same
    size are stored together and probed together, so there are only few possible sizes. Above FILTER_BITS_MIN, a filter
    is at most a quarter larger than needed.
    """
    k = compute_hash_count(fpp)
    # The rate of a filter with m bits and n keys is (1 - e^(-kn/m))^k.
    needed_bits = math.ceil(keys * -k / math.log1p(-(fpp ** (1 / k))))
    if needed_bits <= FILTER_BITS_MIN:
        return FILTER_BITS_MIN
    quarter = 1 << needed_bits.bit_length() - 3
    return min(-(-needed_bits // quarter) * quarter, FILTER_BITS_MAX)


@dataclass(frozen=True, slots=True, eq=False)
class FileBloom:
    """The filter of a data file, uint64[filter bits / 64]. Bit p is bit p % 64 of word p // 64."""

    hash_count: int
    words: npt.NDArray[np.uint64]

    @property
    def filter_bits(self) -> int:
        return 64 * len(self.words)


def build_filter(keys: Keys, fpp: float = FALSE_POSITIVE_PROBABILITY) -> FileBloom:
    """Build the filter of the values of a term in a data file.

    For an index on `lower` or `upper`, a text may have characters that this version of Unicode does not assign, so it
    is unknown which texts differ from it only by case. All bits are then set. The filter then contains every key, so
    that no query excludes the file.
    """
    hashes = hash_keys(keys, _SEED)
    has_key = keys.present
    distinct = _bloom.distinct(hashes if has_key is None else hashes[has_key])
    k = compute_hash_count(fpp)
    if (distinct == _hash_unknown_case()).any():
        return FileBloom(k, np.full(FILTER_BITS_MIN // 64, CODE_MAX, dtype=np.uint64))
    return FileBloom(k, _bloom.fill(distinct, compute_filter_bits(len(distinct), fpp), k))


@cache
def _hash_unknown_case() -> np.uint64:
    return np.uint64(hash_key(make_key(UNKNOWN_CASE, "string"), _SEED))


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The position in a blob of the filters of one size.

    Attributes:
        filter_bits: The size of the filters in bits.
        files: The indexes of the files in the blob, ascending.
        offset: The position of the group in the blob.
    """

    filter_bits: int
    files: npt.NDArray[np.int32]
    offset: int

    @property
    def stride(self) -> int:
        """The number of bits from one row of the group to the next. A row has one bit of the filter of each file.

        If there are many files, each row begins at a whole byte.
        """
        file_count = len(self.files)
        return file_count if file_count <= _UNALIGNED_MAX else -(-file_count // 8) * 8

    @property
    def page_shift(self) -> int:
        """The binary logarithm of the number of rows in a page: as many as fit into 4 KiB, and at least one."""
        return max(0, (_PAGE_BITS // self.stride).bit_length() - 1)

    @property
    def page_bytes(self) -> int:
        """The number of bytes of a full page, without its checksum."""
        return -(-(self.stride << self.page_shift) // 8)

    @property
    def pages(self) -> int:
        return -(-self.filter_bits // (1 << self.page_shift))

    @property
    def length(self) -> int:
        """The number of bytes of all pages with their checksums. The last page may have fewer rows."""
        # Row p has bit p of each filter, in `stride` bits. A full page has 2**page_shift rows.
        last_rows = self.filter_bits - (self.pages - 1 << self.page_shift)
        last_page_bytes = -(-last_rows * self.stride // 8)
        full_pages = self.pages - 1
        return full_pages * (self.page_bytes + _PAGE_CHECKSUM_BYTES) + last_page_bytes + _PAGE_CHECKSUM_BYTES

    def locate_page(self, number: int) -> tuple[int, int]:
        """Return the offset in the blob and the length of a page with its checksum. The last page may be shorter."""
        start = number * (self.page_bytes + _PAGE_CHECKSUM_BYTES)
        return self.offset + start, min(self.page_bytes + _PAGE_CHECKSUM_BYTES, self.length - start)

    def make_geometry(self, first_page: int = 0, first_member: int = 0) -> Longs:
        """Return the group in the form of the kernels (`Group` in `_bloom.pyx`).

        Args:
            first_page: The number of pages of all groups before this group.
            first_member: The number of files of all groups before this group.
        """
        shape = [self.filter_bits, len(self.files), self.stride, self.page_shift, self.page_bytes]
        return np.array([*shape, self.offset, first_page, first_member], dtype=np.int64)


def encode_filters(entries: Sequence[FileBloom]) -> list[Bytes]:
    """Encode a blob from the filters of its data files, in order.

    Raises:
        ValueError: The filters set different numbers of bits for a key, or there are no filters.
    """
    counts = {entry.hash_count for entry in entries}
    if len(counts) != 1:
        raise ValueError(
            f"the filters of a blob must set the same number of bits per key; these filters set {sorted(counts)}"
        )

    def fill(group: _Group, buffer: Bytes) -> None:
        _bloom.slice_filters([entries[file].words for file in group.files.tolist()], group.make_geometry(), 0, buffer)

    return _encode_blob(counts.pop(), [entry.filter_bits for entry in entries], fill)


def merge_filters(parts: Sequence[tuple[Bloom, Mask]]) -> list[Bytes]:
    """Merge the filters of some files of several blobs into one blob. The files keep their order.

    The blob equals the encoding of the files' filters. In addition to the parts and the result, the merge needs 64 MB
    of memory, or 64 bits per file if that is more.

    Args:
        parts: The blobs, each with the files to keep as bool[files].

    Raises:
        ValueError: A page is damaged, the parts set different numbers of bits for a key, or there are no parts.
    """
    counts = {bloom.hash_count for bloom, _ in parts}
    if len(counts) != 1:
        raise ValueError(
            f"blobs can be merged only if they set the same number of bits per key; these blobs set {sorted(counts)}"
        )

    def fill(group: _Group, buffer: Bytes) -> None:
        total = group.filter_bits // 64
        step = max(1, _WORDS_PER_MERGE // sum(bloom.files for bloom, _ in parts))
        for first in range(0, total, step):
            words = min(step, total - first)
            filters = [
                file_filter
                for bloom, keep in parts
                for file_filter in bloom.filters(group.filter_bits, keep, first, words)
            ]
            _bloom.slice_filters(filters, group.make_geometry(), first, buffer)

    sizes = np.concatenate([bloom.filter_bits[keep] for bloom, keep in parts])
    return _encode_blob(counts.pop(), sizes.tolist(), fill)


def _encode_blob(k: int, bits_of_files: Sequence[int], fill: Callable[[_Group, Bytes], None]) -> list[Bytes]:
    """Encode the header and the groups of a blob. A group has all files whose filters have the same size.

    A group is stored in rows: row p has bit p of the filter of each file.

    Args:
        k: The number of bits that are set for each key.
        bits_of_files: The size of each file's filter in bits.
        fill: A function that sets the bits of a group's rows, in pages of zeros.
    """
    sizes, group_of_files = np.unique(np.array(bits_of_files, dtype=np.int64), return_inverse=True)
    header_bytes = _compute_header_size(len(bits_of_files), len(sizes))
    entries = np.zeros(len(sizes), dtype=_ENTRY)
    pieces: list[Bytes] = []
    offset = header_bytes
    for group_index, size in enumerate(sizes.tolist()):
        group = _Group(size, np.flatnonzero(group_of_files == group_index).astype(np.int32), offset)
        # The kernel writes complete words.
        buffer = np.zeros(group.length + _KERNEL_RESERVE_BYTES, dtype=np.uint8)
        fill(group, buffer)
        _bloom.seal(group.make_geometry(), buffer)
        entries[group_index] = (size, len(group.files), offset, group.length)
        pieces.append(buffer[: group.length])
        offset += group.length
    groups = group_of_files.astype(np.uint8).tobytes()
    header = _FIXED.pack(header_bytes, k, len(bits_of_files), len(sizes)) + entries.tobytes() + groups
    header = header.ljust(header_bytes - _HEADER_CHECKSUM.size, b"\0")
    return [np.frombuffer(header + _HEADER_CHECKSUM.pack(compute_checksum(header)), dtype=np.uint8), *pieces]


class Bloom:
    """The filters of a blob's data files, which are identified by their indexes in the blob.

    Attributes:
        files: The number of data files.
    """

    def __init__(self, blob: memoryview | bytes, size: int | None = None) -> None:
        """Open a blob. Pages are checked when they are first used.

        Args:
            blob: The blob. For remote probes, the header (`read_header_size`) is enough.
            size: The size of the blob, if `blob` is only its header.

        Raises:
            ValueError: The header is damaged, or its groups do not fill the blob.
        """
        self._data = np.frombuffer(blob, dtype=np.uint8)
        size = len(self._data) if size is None else size
        header_bytes = read_header_size(blob)
        if header_bytes > min(len(self._data), size):
            raise ValueError(f"bloom blob: {len(self._data)} bytes are too few for a header of {header_bytes} bytes")
        header = memoryview(blob)[:header_bytes]
        (checksum,) = _HEADER_CHECKSUM.unpack(header[-_HEADER_CHECKSUM.size :])
        if checksum != compute_checksum(header[: -_HEADER_CHECKSUM.size]):
            raise ValueError("bloom blob: the header does not match its checksum")
        _, self.hash_count, self.files, groups = _FIXED.unpack_from(header)
        if not 1 <= self.hash_count <= _HASH_COUNT_MAX or groups > _GROUPS_MAX:
            raise ValueError(f"bloom blob: {self.hash_count} bits per key and {groups} groups are not possible")
        if header_bytes != _compute_header_size(self.files, groups):
            raise ValueError(
                f"bloom blob: a header of {header_bytes} bytes is impossible for {self.files} files in {groups} groups"
            )
        self._groups = _decode_groups(header, self.files, groups, size)
        page_count, member_count, geometries = 0, 0, []
        for group in self._groups:
            geometries.append(group.make_geometry(page_count, member_count))
            page_count += group.pages
            member_count += len(group.files)
        self._geometry = np.array(geometries, dtype=np.int64).reshape(-1, 8)
        self._members = np.concatenate([np.zeros(0, dtype=np.int32), *(group.files for group in self._groups)])
        # Each row is a part of the blob that is in memory: its offset, its length, and its position in `_data`.
        self._spans = np.array([[0, len(self._data), 0]], dtype=np.int64)
        self._checked_pages = np.zeros(page_count if len(self._data) == size else 0, dtype=np.uint8)

    @property
    def filter_bits(self) -> Longs:
        """The size of each file's filter in bits, int64[files]."""
        bits = np.zeros(self.files, dtype=np.int64)
        for group in self._groups:
            bits[group.files] = group.filter_bits
        return bits

    def probe(self, hashes: Hashes) -> Bytes:
        """Return 1 for each file that may contain a key with one of the hashes, otherwise 0, as uint8[files].

        Raises:
            ValueError: A page is damaged.
        """
        return self._probe(self._data, self._spans, self._checked_pages, hashes)

    def list_byte_ranges(self, hashes: Hashes) -> list[tuple[int, int]]:
        """Return the offsets and lengths of the ranges that a probe reads, ascending.

        A key has k bits in a filter (`hash_count`), so at most k ranges are read for each hash and group of filters.
        """
        multipliers = _mix_hashes(hashes, self.hash_count)
        ranges: list[tuple[int, int]] = []
        for group in self._groups:
            # A multiplier has 32 bits, so this scales it to a position in the filter.
            bit_positions = multipliers * np.uint64(group.filter_bits) >> np.uint64(32)
            for page in np.unique(bit_positions >> np.uint64(group.page_shift)).tolist():
                offset, length = group.locate_page(page)
                if ranges and sum(ranges[-1]) == offset:  # The page follows the previous range.
                    offset, previous_length = ranges.pop()
                    length += previous_length
                ranges.append((offset, length))
        return ranges

    def probe_bytes(self, hashes: Hashes, parts: Sequence[memoryview | bytes]) -> Bytes:
        """Return the result of `probe` from bytes that were already read.

        Args:
            hashes: The hashes.
            parts: The bytes of the ranges that `list_byte_ranges` returns for the same hashes, in the same order.

        Raises:
            ValueError: A part has another length than its range, or a page is damaged.
        """
        spans = []
        position = 0
        for (offset, length), part in zip(self.list_byte_ranges(hashes), parts, strict=True):
            if len(part) != length:
                raise ValueError(f"bloom blob: {len(part)} bytes were read at {offset} instead of {length}")
            spans.append((offset, length, position))
            position += length
        data = np.frombuffer(b"".join(parts), dtype=np.uint8)
        table = np.array(spans, dtype=np.int64).reshape(-1, 3)
        # An empty array means that no page was checked before.
        return self._probe(data, table, checked_pages=np.zeros(0, dtype=np.uint8), hashes=hashes)

    def _probe(self, data: Bytes, spans: Longs, checked_pages: Bytes, hashes: Hashes) -> Bytes:
        flags = np.zeros(self.files, dtype=np.uint8)
        damaged_page = _bloom.probe(
            data, spans, self._geometry, self._members, checked_pages, hashes, self.hash_count, flags
        )
        if damaged_page >= 0:
            raise _make_damage_error(damaged_page)
        return flags

    def verify(self) -> None:
        """Check all pages.

        Raises:
            ValueError: A page is damaged.
        """
        for geometry in self._geometry:
            damaged_page = _bloom.damaged(self._data, geometry)
            if damaged_page >= 0:
                raise _make_damage_error(damaged_page)

    def filters(self, size: int, keep: Mask, first: int, words: int) -> list[npt.NDArray[np.uint64]]:
        """Return some words of the filters of one size: `words` words from the word `first` on.

        Args:
            size: The size of the filters in bits.
            keep: The files whose filters are returned, bool[files].
            first: The index of the first word.
            words: The number of words.

        Raises:
            ValueError: A page is damaged. A page is only checked when its first word is read. So the caller must read
                the words of the filters in order.
        """
        for group in self._groups:
            if group.filter_bits == size and keep[group.files].any():
                filters = np.empty((len(group.files), words), dtype=np.uint64)
                damaged_page = _bloom.unslice(self._data, group.make_geometry(), first, filters)
                if damaged_page >= 0:
                    raise _make_damage_error(damaged_page)
                return [filters[index] for index in np.flatnonzero(keep[group.files]).tolist()]
        return []


def read_header_size(start: memoryview | bytes) -> int:
    """Return the size of a blob's header from its first FIXED_SIZE bytes.

    Raises:
        ValueError: `start` has fewer bytes, or the size is invalid.
    """
    if len(start) < FIXED_SIZE:
        raise ValueError(f"bloom blob: {len(start)} bytes are too few for the start of a header")
    size, *_ = _FIXED.unpack_from(start)
    if size < FIXED_SIZE + _HEADER_CHECKSUM.size:
        raise ValueError(f"bloom blob: a header of {size} bytes is too short")
    return int(size)


def _compute_header_size(files: int, groups: int) -> int:
    return FIXED_SIZE + groups * _ENTRY.itemsize + -(-files // 8) * 8 + _HEADER_CHECKSUM.size


def _decode_groups(header: memoryview, files: int, count: int, size: int) -> list[_Group]:
    """Return the groups that the header of a blob describes. A group has the files with filters of the same size.

    Args:
        header: The header of the blob.
        files: The number of data files.
        count: The number of groups.
        size: The size of the blob in bytes.

    Raises:
        ValueError: The groups do not have exactly the layout that the writer produces.
    """
    entries = np.frombuffer(header, dtype=_ENTRY, count=count, offset=FIXED_SIZE)
    groups_offset = FIXED_SIZE + count * _ENTRY.itemsize
    group_of_files = np.frombuffer(header, dtype=np.uint8, count=files, offset=groups_offset)
    files_by_group = np.argsort(group_of_files, kind="stable").astype(np.int32)
    member_counts = np.bincount(group_of_files, minlength=count).tolist()
    if len(member_counts) != count:
        raise ValueError(f"bloom blob: a file refers to a group after the last, number {count - 1}")
    groups: list[_Group] = []
    first_member, offset, previous_bits = 0, len(header), 0
    for entry, members in zip(entries.tolist(), member_counts, strict=True):
        bits, *_ = entry
        if bits % 64 or not max(previous_bits + 1, 64) <= bits <= FILTER_BITS_MAX or not members:
            raise ValueError(
                f"bloom blob: a group of {members} filters of {bits} bits cannot follow a group of {previous_bits} bits"
            )
        group = _Group(bits, files_by_group[first_member : first_member + members], offset)
        if entry != (bits, members, offset, group.length):
            raise ValueError(
                f"bloom blob: the group of filters of {bits} bits does not begin where the previous group ends"
            )
        groups.append(group)
        first_member, offset, previous_bits = first_member + members, offset + group.length, bits
    if offset != size:
        raise ValueError(f"bloom blob: the blob has {size} bytes, but its groups end at byte {offset}")
    return groups


def _mix_hashes(hashes: Hashes, k: int) -> npt.NDArray[np.uint64]:
    """Return the numbers by which the kernel's `position` multiplies the size of a filter, uint64[hashes, k].

    They are k numbers of 32 bits, which replace k independent hashes of a key.
    """
    # The high half of a hash is the first number, and its low half, made odd, is the distance of the next numbers.
    low_half = np.uint64(0xFFFFFFFF)
    steps = np.outer(hashes & low_half | np.uint64(1), np.arange(k, dtype=np.uint64))
    multipliers: npt.NDArray[np.uint64] = (hashes >> np.uint64(32))[:, np.newaxis] + steps & low_half
    return multipliers


def _make_damage_error(offset: int) -> ValueError:
    """Return the error for a damaged page, which begins at `offset` in the blob."""
    return ValueError(f"bloom blob: the page at byte {offset} does not match its checksum, or is missing")


@dataclass(frozen=True, slots=True, eq=False)
class BloomQuery:
    """A query for files with a key that has one of these hashes (`hash_keys` with the seed 0, as in the filters)."""

    hashes: Hashes

    def mark_files(self, index: Bloom) -> Flags:
        """Return the files that may match, as `IndexQuery.mark_files` does."""
        return index.probe(self.hashes)


class RemoteBloom:
    """An index file in the storage. Its header is in memory, and each query reads the pages that it needs."""

    is_full = False  # No pages are cached, so the memory does not grow.

    def __init__(self, blob: BlobReader, bloom: Bloom, size_bytes: int) -> None:
        self._blob, self._bloom, self.size_bytes = blob, bloom, size_bytes
        self.data_files = bloom.files

    async def probe(self, query: BloomQuery) -> Flags | None:
        parts = await self._blob.read_all(self._bloom.list_byte_ranges(query.hashes))
        return None if parts is None else self._bloom.probe_bytes(query.hashes, parts)


class BloomKind(IndexKind[FileBloom, Bloom]):
    """The index kind of bloom indexes."""

    name = "bloom"
    takes_attributes = True
    parameters = (
        IndexParameter("fpp", "the fraction of false positives", FALSE_POSITIVE_PROBABILITY, FPP_MIN, FPP_MAX),
    )

    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> FileBloom:
        return build_filter(columns[0], parameters.get("fpp", FALSE_POSITIVE_PROBABILITY))

    def encode(self, entries: Sequence[FileBloom]) -> list[Bytes]:
        return encode_filters(entries)

    def merge(self, parts: Sequence[tuple[Bloom, Mask]]) -> list[Bytes]:
        return merge_filters(parts)

    def open(self, blob: memoryview) -> Bloom:
        return Bloom(blob)

    async def open_remote(self, blob: BlobReader) -> RemoteBloom:
        start = await blob.read_head(read_header_size)
        header_bytes = read_header_size(start)
        bloom = Bloom(start[:header_bytes], blob.length)
        return RemoteBloom(blob, bloom, _MEMORY_PER_HEADER_BYTE * header_bytes)

    def query(self, ranges: Sequence[KeyRanges]) -> BloomQuery | None:
        columns = list_point_keys(ranges)
        if columns is None:
            return None
        hashes = hash_keys(columns[0], _SEED)
        # Texts with characters of unknown case have one key. The filter of a file with this key matches all keys, so
        # the key needs no query beside other keys.
        if ranges[0].of_function and len(hashes) > 1:
            hashes = hashes[hashes != _hash_unknown_case()]
        return BloomQuery(hashes)

    def make_keys_query(self, keys: KeySet) -> BloomQuery | None:
        return None if len(keys) > HASHED_MAX else BloomQuery(hash_keys(keys.keys, _SEED))

    def compare(self, index: Bloom, number: int, columns: Sequence[Keys], sampled_rows: Sequence[int]) -> Iterator[str]:
        hashes = hash_keys(columns[0], _SEED)
        for row in sampled_rows:
            if not index.probe(hashes[row : row + 1])[number]:
                yield f"the filter does not contain the value of row {row}"


BLOOM = BloomKind()
