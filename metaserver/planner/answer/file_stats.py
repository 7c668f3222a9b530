"""Encodes column statistics as JSON (REST spec, `CountMap` and `ValueMap`): counts as numbers, bounds in
hexadecimal.
"""

from __future__ import annotations

from collections.abc import Callable

from seamark.formats.iceberg.types.values import FLOATS, INTS, LONGS, encode
from seamark.formats.index.packing import MISSING, Longs, PackedColumn
from seamark.metaserver.index.blocks.block import Block, doubles_at, longs_at, present_at
from seamark.metaserver.planner.answer._answer import HEX, write
from seamark.metaserver.planner.answer.block_layout import strings

_COUNTS = {
    "column-sizes": "column_sizes",
    "value-counts": "value_counts",
    "null-value-counts": "null_value_counts",
    "nan-value-counts": "nan_value_counts",
}
_DTYPES = {
    "boolean": "<i1",
    **dict.fromkeys(INTS, "<i4"),
    **dict.fromkeys(LONGS, "<i8"),
    "float": "<f4",
    "double": "<f8",
}
"""Single-value serialisation of types with a fixed size (Iceberg spec, appendix D)."""

Texts = Callable[[Longs], list[str | None]]
"""Reads many rows at once; None for rows without a value."""


class FileStats:
    """Encodes column statistics of one block's files."""

    def __init__(self, block: Block, columns: tuple[int, ...]) -> None:
        stored = [column for column in columns if column in block.columns]
        self._maps: list[tuple[str, list[tuple[str, Texts]]]] = [
            (wire, [(str(column), _counts(block.count_column(name, column))) for column in stored])
            for wire, name in _COUNTS.items()
        ]
        for side in ("lower", "upper"):
            bounds = [(str(column), _bounds(block, side, column)) for column in stored]
            self._maps.append((f"{side}-bounds", [(key, read) for key, read in bounds if read is not None]))

    def write(self, rows: Longs) -> list[bytes]:
        """`,"value-counts":{…},…` for each row; maps without keys are omitted."""
        written = [_written_map(name, columns, rows) for name, columns in self._maps if columns]
        return [text.encode() for text in map("".join, zip(*written, strict=True))] if written else [b""] * len(rows)


def _written_map(name: str, columns: list[tuple[str, Texts]], rows: Longs) -> list[str]:
    keys = [key for key, _ in columns]
    values = zip(*(read(rows) for _, read in columns), strict=True)
    return [_map(name, keys, texts) for texts in values]


def _map(name: str, keys: list[str], texts: tuple[str | None, ...]) -> str:
    present = [text for text in texts if text is not None]
    if not present:
        return ""
    if len(present) < len(keys):
        keys = [key for key, text in zip(keys, texts, strict=True) if text is not None]
    return f',"{name}":{{"keys":[{",".join(keys)}],"values":[{",".join(present)}]}}'


def _counts(column: PackedColumn | None) -> Texts:
    if column is None:
        return lambda rows: [None] * len(rows)
    return lambda rows: [None if count == MISSING else str(count) for count in longs_at(column, rows).tolist()]


def _bounds(block: Block, side: str, column_id: int) -> Texts | None:
    """None if the block has no bounds of this column."""
    column, kind = block.bound_column(side, column_id), block.kind(column_id)
    if column is None or kind is None:
        return None
    dtype = _DTYPES.get(kind)
    if dtype is None and not kind.startswith("decimal"):
        parts = ((HEX, b"=", b"", strings(block, column)),)
        return lambda rows: [
            f'"{text[1:]}"' if text else None for text in write(rows, parts, block.rows, b",").decode().split(",")
        ]
    if dtype is None:
        return lambda rows: [_bound(block, side, column_id, kind, row) for row in rows.tolist()]
    read_at = doubles_at if kind in FLOATS else longs_at

    def read(rows: Longs) -> list[str | None]:
        numbers = read_at(column, rows).astype(dtype)
        size = 2 * numbers.itemsize
        digits = numbers.tobytes().hex().upper()
        present = present_at(column, rows).tolist()
        return [f'"{digits[at * size : (at + 1) * size]}"' if known else None for at, known in enumerate(present)]

    return read


def _bound(block: Block, side: str, column_id: int, kind: str, row: int) -> str | None:
    value = block.bound(side, column_id, row)
    return None if value is None else f'"{encode(kind, value).hex().upper()}"'
