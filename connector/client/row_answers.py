"""Parses responses with rows: the positions of the rows with given keys, and the rows that match a predicate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyroaring

Keys: TypeAlias = pa.Table | Mapping[str, Sequence[Any]]
"""The values of the keys, by column of the index."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The positions of the rows with the requested keys.

    Attributes:
        rows: A table with `key` (the index of the key), `file_path`, `position` and `undecided`, and, if requested,
            `spec_id` and `partition`.
    """

    snapshot_id: int | None
    index: str
    rows: pa.Table
    missing: int
    """The number of keys without a row."""
    complete: bool
    """Whether the index covers all live files. If not, other files may contain more rows with these keys."""
    uncovered_files: int
    uncovered: tuple[str, ...]
    """The first live files that the index does not cover."""
    undecided: int
    """The number of rows that may be deleted. `problems` has the files and the reasons."""
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FileRows:
    """The matching rows of a data file.

    Attributes:
        roaring: The positions as a portable 32-bit roaring bitmap, or None if every row may match.
    """

    file_path: str
    record_count: int
    roaring: bytes | None
    count: int | None
    exact: bool
    """Whether all of these rows match. If not, some of them may not match."""
    delete_files: int
    """The number of delete files that apply to the data file, even if deleted rows were left out."""
    undecided: int
    """The number of rows that may be deleted, because the server could not read a delete file within its limits."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The ascending positions of the rows, as int64[count].

        If every row may match, the result has the positions of all rows.
        """
        if self.roaring is None:
            return np.arange(self.record_count, dtype=np.int64)
        bitmap = pyroaring.BitMap.deserialize(self.roaring)
        return np.asarray(bitmap.to_array(), dtype=np.uint32).astype(np.int64)


def encode_keys(keys: Keys) -> bytes:
    """Return the body of the request for a lookup."""
    table = keys if isinstance(keys, pa.Table) else pa.table(dict(keys))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def parse_lookup(answer: pa.Table) -> LookupAnswer:
    """Parse the response to a lookup. The fields besides the rows are in the metadata of its schema.

    Raises:
        ValueError: A value in the response is invalid.
        KeyError: A field of the response is missing.
    """
    metadata = {name.decode(): value.decode() for name, value in (answer.schema.metadata or {}).items()}
    values = {name: value if name == "index" else json.loads(value) for name, value in metadata.items()}
    return LookupAnswer(
        snapshot_id=values["snapshot-id"],
        index=values["index"],
        rows=answer.replace_schema_metadata(None),
        missing=values["missing"],
        complete=values["complete"],
        uncovered_files=values["uncovered-files"],
        uncovered=tuple(values["uncovered"]),
        undecided=values["undecided"],
        problems=tuple((problem["file-path"], problem["problem"]) for problem in values["problems"]),
    )


def parse_file_rows(page: pa.Table) -> list[FileRows]:
    """Parse a page of files and their matching rows.

    Raises:
        KeyError: A column is missing.
    """
    names = ("file_path", "record_count", "rows", "count", "exact", "delete_files", "undecided")
    columns = [page.column(name).to_pylist() for name in names]
    return [FileRows(*values) for values in zip(*columns, strict=True)]


def join_pages(pages: Iterator[pa.Table]) -> pa.Table:
    """Return the rows of all pages as one table, with the schema metadata of the first page."""
    tables = list(pages)
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables([table.replace_schema_metadata(tables[0].schema.metadata) for table in tables])
