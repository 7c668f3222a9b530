"""Answers about rows: where the rows of keys are, and which rows of which files match a predicate."""

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
"""One column for each of the index's, by name."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The positions of the rows with given keys.

    `rows` has `key` (number of the key), `file_path`, `position` and `undecided`, and, if requested, `spec_id` and
    `partition`.
    """

    snapshot_id: int | None
    index: str
    rows: pa.Table
    missing: int
    """Keys without a row."""
    complete: bool
    """False where live files are not covered by the index: they may hold more rows."""
    uncovered_files: int
    uncovered: tuple[str, ...]
    """The first of them."""
    undecided: int
    """Rows that may be deleted; `problems` (file, why) say why that is not known."""
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a data file that match.

    `roaring` is a 32-bit roaring bitmap, portable; None for any row.
    """

    file_path: str
    record_count: int
    roaring: bytes | None
    count: int | None
    exact: bool
    """False where some of these rows may not match."""
    delete_files: int
    """That apply to the file, whether or not deleted rows were taken out."""
    undecided: int

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64[count], ascending; all rows where any may match."""
        if self.roaring is None:
            return np.arange(self.record_count, dtype=np.int64)
        bitmap = pyroaring.BitMap.deserialize(self.roaring)
        return np.asarray(bitmap.to_array(), dtype=np.uint32).astype(np.int64)


def keys_stream(keys: Keys) -> bytes:
    """Return the body of a lookup."""
    table = keys if isinstance(keys, pa.Table) else pa.table(dict(keys))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def lookup_of(answer: pa.Table) -> Lookup:
    """Parse an answer.

    Raises:
        ValueError, KeyError: The answer has another form.
    """
    about = {name.decode(): value.decode() for name, value in (answer.schema.metadata or {}).items()}
    said = {name: value if name == "index" else json.loads(value) for name, value in about.items()}
    return Lookup(
        snapshot_id=said["snapshot-id"],
        index=said["index"],
        rows=answer.replace_schema_metadata(None),
        missing=said["missing"],
        complete=said["complete"],
        uncovered_files=said["uncovered-files"],
        uncovered=tuple(said["uncovered"]),
        undecided=said["undecided"],
        problems=tuple((one["file-path"], one["problem"]) for one in said["problems"]),
    )


def file_rows_of(page: pa.Table) -> list[FileRows]:
    """Parse an answer.

    Raises:
        KeyError: The answer has another form.
    """
    names = ("file_path", "record_count", "rows", "count", "exact", "delete_files", "undecided")
    columns = [page.column(name).to_pylist() for name in names]
    return [FileRows(*values) for values in zip(*columns, strict=True)]


def join_pages(pages: Iterator[pa.Table]) -> pa.Table:
    """Return the rows of all pages, with the schema's metadata of the first."""
    tables = list(pages)
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables([table.replace_schema_metadata(tables[0].schema.metadata) for table in tables])
