"""Find metrics of data and delete files that readers cannot use, and drop or correct them.

Some engines write unusable metrics. For example, DuckDB 1.5.5 cuts the lower bound of a text inside a character, and
then Trino cannot read the table at all. Without a bound, readers still read the file, so dropping a bound costs time
but no rows. Metrics are corrected only if this is possible without reading the file:

- A lower bound of text is cut before the first bytes that are not UTF-8, because a prefix is still a lower bound.
- A decimal gets the minimum number of bytes (Iceberg spec, appendix D), as some readers expect.
- Other bounds are dropped if they are not values of the column's type, are NaN, or are above the upper bound. Counts
  are dropped if they are negative. Counts of nulls or NaN are also dropped if they are above the count of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from seamark.formats.iceberg.manifests.content_file import ContentFile
from seamark.formats.iceberg.manifests.manifest import BoundsByColumn, DecodedManifest
from seamark.formats.iceberg.types.schema import Type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import Value, decode_bound, encode_single_value

BOUNDS_MAX = 1_000_000
"""The maximum number of bounds of a manifest that are compared. It takes about a second."""
LOWER, UPPER = "lower_bounds", "upper_bounds"
_PART_COUNTS = ("null_value_counts", "nan_value_counts")
_COUNTS = ("column_sizes", "value_counts", *_PART_COUNTS)
_OPAQUE_TYPES = frozenset({"variant", "geometry", "geography"})
"""The types whose bounds are not single values."""
_UNCOMPARED_TYPES = frozenset({"uuid"})
"""The types whose bounds are not compared, because Java's writers order UUIDs as two signed halves."""
FindType = Callable[[int], Type | None]
"""A function that returns the type of a column by its id, or None if no schema of the table has the column."""


def repair_file(file: ContentFile, find_type: FindType) -> ContentFile:
    """Return the file without the metrics that readers cannot use.

    A count is unusable if it is negative. A count of nulls or NaNs is also unusable if it exceeds the count of values.
    `_repair_pair` describes bounds. If all metrics are usable, the result is the same object.

    Args:
        file: The file.
        find_type: A function that returns the type of a column id, or None.
    """
    changes: dict[str, dict[int, int] | dict[int, bytes]] = {}
    for name in _COUNTS:
        counts: Mapping[int, int] = getattr(file, name) or {}
        counts_max = file.value_counts or {} if name in _PART_COUNTS else {}
        usable_counts = {
            column: count for column, count in counts.items() if 0 <= count <= max(counts_max.get(column, count), 0)
        }
        if len(usable_counts) < len(counts):
            changes[name] = usable_counts
    lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
    usable_lower: dict[int, bytes] = {}
    usable_upper: dict[int, bytes] = {}
    for column in {**lower, **upper}:
        lower_bound, upper_bound = _repair_pair(find_type(column), lower.get(column), upper.get(column))
        if lower_bound is not None:
            usable_lower[column] = lower_bound
        if upper_bound is not None:
            usable_upper[column] = upper_bound
    if usable_lower != lower:
        changes[LOWER] = usable_lower
    if usable_upper != upper:
        changes[UPPER] = usable_upper
    return msgspec.structs.replace(file, **changes) if changes else file


def has_unusable_metrics(manifest: DecodedManifest, find_type: FindType) -> bool:
    """Return whether `repair_file` would change a file of the manifest.

    If the manifest has more than `BOUNDS_MAX` bounds, it is not checked, because the check takes about a second for
    this number, and the result is False.
    """
    bound_count = sum(len(rows) for columns in manifest.bounds.values() for rows, _, _ in columns.values())
    if bound_count > BOUNDS_MAX:
        return False
    return any(_check_counts(manifest)) or any(_check_bounds(manifest, find_type))


def _check_counts(manifest: DecodedManifest) -> Iterator[bool]:
    """Check the counts, and yield True for each failed check and False for each other check.

    No count is negative. Counts of nulls or NaN are at most the count of values.
    """
    for name in _COUNTS:
        for column, (rows, counts) in manifest.counts.get(name, {}).items():
            yield bool((counts < 0).any())
            value_counts = manifest.counts.get("value_counts", {}).get(column)
            if name in _PART_COUNTS and value_counts is not None:
                counted_rows, counts_max = value_counts
                if not len(counted_rows):
                    continue
                indexes = np.searchsorted(counted_rows, rows)
                is_present = counted_rows.take(indexes, mode="clip") == rows
                yield bool((counts[is_present] > counts_max.take(indexes[is_present])).any())


def _check_bounds(manifest: DecodedManifest, find_type: FindType) -> Iterator[bool]:
    """Check each distinct pair of bounds of a column, and yield whether `repair_file` would change it."""
    heap = manifest.heap.tobytes()
    lower, upper = manifest.bounds.get(LOWER, {}), manifest.bounds.get(UPPER, {})
    for column in {**lower, **upper}:
        kind = find_type(column)
        low, high = _read_bounds_by_row(lower, column, heap), _read_bounds_by_row(upper, column, heap)
        # The files of a manifest often have equal bounds.
        for pair in {(low.get(row), high.get(row)) for row in {**low, **high}}:
            yield _repair_pair(kind, *pair) != pair


def _read_bounds_by_row(bounds: BoundsByColumn, column: int, heap: bytes) -> dict[int, bytes]:
    if column not in bounds:
        return {}
    rows, starts, lengths = (values.tolist() for values in bounds[column])
    return {
        row: heap[start : start + length]
        for row, start, length in zip(rows, starts, lengths, strict=True)
        if length >= 0
    }


def _repair_pair(kind: Type | None, lower: bytes | None, upper: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Return the usable bounds of a column, corrected if necessary. An unusable bound becomes None.

    Bounds that cannot be decoded are unusable, and so are both bounds if the lower bound is above the upper bound. A
    lower bound of a string may be cut within a character; the rest of this character is removed.
    """
    if kind is None:  # The table has no such column, so no plan reads the bounds.
        return lower, upper
    if not isinstance(kind, str):
        return None, None  # Structs, lists and maps have no bounds.
    name = get_base_name(kind)
    if name in _OPAQUE_TYPES:
        return lower, upper
    if name == "string" and lower is not None:
        lower = _trim_partial_character(lower)
    lower_value, upper_value = _decode_or_none(kind, lower), _decode_or_none(kind, upper)
    has_both = lower_value is not None and upper_value is not None
    if has_both and name not in _UNCOMPARED_TYPES and lower_value > upper_value:  # type: ignore[operator]
        return None, None
    return _encode_bound(kind, lower_value, lower), _encode_bound(kind, upper_value, upper)


def _decode_or_none(kind: str, data: bytes | None) -> Value | None:
    if data is None:
        return None
    try:
        return decode_bound(kind, data)
    except ValueError:
        return None


def _encode_bound(kind: str, value: Value | None, data: bytes | None) -> bytes | None:
    """Return the bytes of a repaired bound.

    They are the stored bytes, except for a decimal, whose stored bytes may be longer than the spec allows.

    Args:
        kind: The type of the column.
        value: The value of the bound, or None if the bound is unusable.
        data: The stored bytes, or None if there is no bound.
    """
    if value is None:
        return None
    return encode_single_value(kind, value) if kind.startswith("decimal") else data


def _trim_partial_character(text: bytes) -> bytes | None:
    """Return the text up to its first bytes that are not UTF-8, or None if no text precedes them.

    A valid text is returned unchanged.
    """
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start] or None
    return text
