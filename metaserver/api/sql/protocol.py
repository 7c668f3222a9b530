"""The protocol between the server and the worker process of a statement.

The worker reads one request, a line of JSON, from its standard input. It answers with frames on a pipe: a kind (one
byte), the length of the content (four bytes, big-endian), and the content. First comes a head or an error, then data,
then the end. An error may also follow data.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec

from seamark.metaserver.api.http.describe import doc

CONTROL = struct.Struct(">cI")
"""The form of a message between the server and the parent of workers: a kind, and the id of a worker."""
START, KILL = b"S", b"K"
HEAD, DATA, ERROR, END = b"H", b"D", b"E", b"F"
FRAME = struct.Struct(">cI")
FRAME_BYTES_MAX = 8 << 20
Format = Literal["json", "arrow", "explain"]


class StatementRequest(msgspec.Struct, frozen=True):
    statement: str
    schema: str | None
    id: str
    format: Format
    url: str
    certificates: str
    """The certificates of the server (PEM), if `url` has an address that the certificates may not name."""
    token: str | None
    rows_max: int
    truncates: bool
    """Whether the answer ends after `rows_max` rows. Otherwise, more rows are an error."""
    bytes_max: int
    time_s: float
    memory_bytes: int
    threads: int
    cubes: str = "on"
    """Whether queries use cubes (`SqlSession`)."""
    roots: tuple[str, ...] = ()
    """The local folders of the warehouse, as the operator names them."""


class TableRead(msgspec.Struct, frozen=True, rename="kebab"):
    table: str
    files: Annotated[int, doc("Data files to read.")]
    considered_files: Annotated[int, doc("Data files of the snapshot.")]
    bytes: Annotated[int, doc("Bytes of the files to read.")]
    columns: Annotated[int, doc("Columns to read.")]
    joins: Annotated[
        tuple[tuple[str, int | None], ...],
        doc(
            "Columns by which rows of other tables left out files, and numbers of keys; null for an index on "
            "attributes of the other table."
        ),
    ]


class CubeUse(msgspec.Struct, frozen=True, rename="kebab"):
    index: Annotated[str | None, doc("The cube that answers the query; null if only rows answer it.")]
    files: Annotated[int, doc("Data files that are answered from the cube.")]
    row_files: Annotated[int, doc("Data files whose rows are read.")]
    reason: Annotated[str | None, doc("Why no cube is used.")]


class StatementPlan(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The head of an answer, and the whole answer of `explain`."""

    statement_id: str
    engine: str
    why: Annotated[str, doc("Why this engine runs the statement.")]
    tables: tuple[TableRead, ...]
    cube: Annotated[CubeUse | None, doc("The use of cubes; absent if the tables have none.")] = None


class StatementColumn(msgspec.Struct, frozen=True):
    name: str
    type: Annotated[str, doc("The type in the SQL dialect.")]


class StatementHead(msgspec.Struct, frozen=True):
    """The head of an answer.

    Attributes:
        tables: The levels and the names of the tables that the statement reads.
    """

    plan: StatementPlan
    tables: tuple[tuple[str, ...], ...]


class StatementError(msgspec.Struct, frozen=True):
    status: int
    message: str
