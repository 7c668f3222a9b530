"""The layout of a block's columns, in the form in which `_answer.write` encodes its files.

The layout does not depend on the request; it is built once and cached as long as the block lives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from seamark.formats.index.packing import MISSING, NONE, Form, Longs, PackedColumn
from seamark.formats.protocol.wire import encode_json as to_json
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.index.blocks.block import Block, longs_at
from seamark.metaserver.planner.answer._answer import CHOICE, CONSTANT, HEX, ITEMS, NUMBER, TEXT, write

_CONTENTS = {MISSING: b"data", 0: b"data", 1: b"position-deletes", 2: b"equality-deletes"}
"""Version 1 manifests lack the field."""
_DELETE_NUMBERS = ("content_offset", "content_size_in_bytes")

Part = tuple[object, ...]
"""A part in the format of `_answer.write`."""


class naming:  # noqa: N801  a context manager; each answer enters several, and a generator costs thrice as much
    """Converts errors into Corrupt with the path of the block's manifest."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        self._block = block

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, (ValueError, KeyError)):
            raise Corrupt(f"The manifest {self._block.location} has an invalid entry: {error}") from None


class BlockLayout(NamedTuple):
    """The layout of a block's columns and the text that all of its files share.

    It contains addresses, which are valid as long as the block lives.
    """

    opening: bytes
    content: Part | None
    """None if the files differ."""
    path: Part
    format: Part | None
    """None if the files differ."""
    optional: tuple[Part, ...]
    """Without fields inherited from the manifest list, which depend on the snapshot (`inheritance.py`)."""
    partition: tuple[Part | None, ...]
    """Parts that distinguish the values of each partition field; None for floats, which `write` does not support."""

    @property
    def size_bytes(self) -> int:
        return _size_of(tuple(self))


def layout_of(block: Block) -> BlockLayout:
    """The block's layout. Corrupt, with the manifest's path, if a required column is missing."""
    layout = block.derived.get(BlockLayout)
    if layout is None:
        with naming(block):
            layout = block.keep(_layout(block))
    return layout


def _size_of(part: object) -> int:
    return sys.getsizeof(part) + (sum(map(_size_of, part)) if isinstance(part, tuple) else 0)


def _layout(block: Block) -> BlockLayout:
    path, format_, content = block.text_column("file_path"), block.text_column("file_format"), _uniform_content(block)
    if path is None:
        raise ValueError("file_path is null")
    if format_ is None:
        raise ValueError("file_format is null")
    return BlockLayout(
        b'{"spec-id":%d,"content":"' % block.spec_id,
        None if content is None else (CONSTANT, content),
        (TEXT, b'","file-path":"', b'"', strings(block, path)),
        (CONSTANT, _format(format_.packed.common)) if format_.packed.width == 0 else None,
        tuple(_optional_parts(block)),
        tuple(_partition_key_part(block, column) for column in block.partition_columns),
    )


def _uniform_content(block: Block) -> bytes | None:
    column = block.long_column("content")
    if column is None:
        return _CONTENTS[MISSING]
    uniform = column.packed.width == 0 and column.packed.presence == NONE
    return _CONTENTS[column.packed.base] if uniform else None


def contents(block: Block, rows: Longs) -> list[bytes]:
    """The content type of each row's file, for blocks in which it varies."""
    column = block.long_column("content")
    assert column is not None
    return [_CONTENTS[content] for content in longs_at(column, rows).tolist()]


def formats(block: Block, rows: Longs) -> list[bytes]:
    """The file format of each row's file, with its JSON key. ValueError for a file without a format."""
    column = block.text_column("file_format")
    assert column is not None
    return [_format(column.key(row)) for row in rows.tolist()]


def _optional_parts(block: Block) -> Iterator[Part]:
    is_data = block.content == 0
    for name in ("file_size_in_bytes", "record_count", "sort_order_id", *(() if is_data else _DELETE_NUMBERS)):
        if (column := block.long_column(name)) is not None:
            yield NUMBER, _key(name), _integers(block, column)
    for name in ("split_offsets",) if is_data else ("split_offsets", "equality_ids"):
        if (columns := block.list_columns(name)) is not None:
            sizes, values = columns
            yield ITEMS, _key(name) + b"[", b"]", _integers(block, sizes), _integers(block, values), values.rows
    if (metadata := block.text_column("key_metadata")) is not None:
        yield HEX, _key("key_metadata") + b'"', b'"', strings(block, metadata)
    if not is_data and (path := block.text_column("referenced_data_file")) is not None:
        yield TEXT, _key("referenced_data_file") + b'"', b'"', strings(block, path)


def _key(name: str) -> bytes:
    return f',"{name.replace("_", "-")}":'.encode()


@lru_cache(maxsize=16)
def _format(name: object) -> bytes:
    if not isinstance(name, bytes):
        raise ValueError("file_format is null")
    return b',"file-format":' + to_json(name.decode().lower())


def strings(block: Block, column: PackedColumn) -> Part:
    packed = column.packed
    offsets = _at(block, packed.lengths), packed.lengths_width, _at(block, packed.ends), _at(block, packed.tails)
    return packed.width, _at(block, packed.codes), _at(block, packed.presence), packed.common, *offsets


def _integers(block: Block, column: PackedColumn) -> Part:
    packed = column.packed
    return packed.width, _at(block, packed.codes), _at(block, packed.presence), packed.base


def _at(block: Block, offset: int) -> int:
    return 0 if offset == NONE else block.address + offset


def _partition_key_part(block: Block, column: PackedColumn | None) -> Part | None:
    if column is None:
        return CONSTANT, b""
    if column.packed.form == Form.FLOATS:
        return None
    # The prefix distinguishes an empty string, or a zero, from null.
    if column.packed.form == Form.STRINGS:
        return HEX, b"=", b"", strings(block, column)
    return NUMBER, b"=", _integers(block, column)


def keys(block: Block, columns: BlockLayout, fields: Sequence[int], rows: Longs) -> list[bytes]:
    """A key of these partition fields for each row, equal for equal values. `fields`: positions in the tuple."""
    if not fields:
        return [b""] * len(rows)
    parts: list[Part] = []
    for field in fields:
        # Keys have the written form, because 0.0 == -0.0.
        parts += (CONSTANT, b";"), columns.partition[field] or (CHOICE, _float_keys(block, field, rows))
    return write(rows, tuple(parts), block.rows, b",").split(b",")


def _float_keys(block: Block, field: int, rows: Longs) -> list[bytes]:
    column = block.partition_columns[field]
    assert column is not None
    return [repr(column.key(row)).encode() for row in rows.tolist()]
