"""Defines the protocol between the server and the worker process of a statement.

The worker reads one request, a line of JSON, from its standard input. It answers with frames on a pipe. A frame has a
kind (one byte), the length of the content (four bytes, big-endian), and the content. The first frame is a head or an
error. Frames with data and the end follow the head. An error may also follow data.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec

from seamark.metaserver.api.http.describe import doc

CONTROL = struct.Struct(">cI")
"""The form of a message between the server and the parent of workers: a kind and the process id of a worker."""
START, KILL = b"S", b"K"
"""The kinds of messages to the parent of workers."""
HEAD, DATA, ERROR, END = b"H", b"D", b"E", b"F"
"""The kinds of frames."""
FRAME = struct.Struct(">cI")
"""The form of the start of a frame: its kind and the length of its content."""
FRAME_BYTES_MAX = 8 << 20
"""The maximum length of the content of a frame."""
Format = Literal["json", "arrow", "explain"]


class StatementRequest(msgspec.Struct, frozen=True):
    """The request that the server sends to a worker."""

    statement: str
    schema: str | None
    id: str
    format: Format
    url: str
    certificates: str
    """The certificates of the server (PEM), or an empty text if `url` has a name that the certificates contain."""
    token: str | None
    rows_max: int
    truncates: bool
    """Whether the answer ends after `rows_max` rows. If it is false, more rows are an error."""
    bytes_max: int
    time_s: float
    memory_bytes: int
    threads: int
    cubes: str = "on"
    """Whether queries use cubes: `on`, `exact` or `off` (`SqlSession`)."""
    roots: tuple[str, ...] = ()
    """The local folders of the warehouse, as the operator names them."""


class TableRead(msgspec.Struct, frozen=True, rename="kebab"):
    """The files and columns that a statement reads of one table."""

    table: str
    files: Annotated[int, doc("The number of data files that are read.")]
    considered_files: Annotated[int, doc("The number of data files of the snapshot.")]
    bytes: Annotated[int, doc("The size of the files that are read, in bytes.")]
    columns: Annotated[int, doc("The number of columns that are read.")]
    joins: Annotated[
        tuple[tuple[str, int | None], ...],
        doc(
            "For each join that pruned files: the column, and the number of keys of the other table. The number is "
            "null if an index on attributes of the other table pruned the files."
        ),
    ]


class CubeUse(msgspec.Struct, frozen=True, rename="kebab"):
    """The use of cubes by a statement."""

    index: Annotated[str | None, doc("The cube that answers the query, or null if no cube does.")]
    files: Annotated[int, doc("The number of data files that are answered from the cube.")]
    row_files: Annotated[int, doc("The number of data files whose rows are read.")]
    reason: Annotated[str | None, doc("The reason why no cube is used, or null if a cube is used.")]


class StatementPlan(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The plan of a statement, which is the whole answer of `explain`."""

    statement_id: str
    engine: str
    why: Annotated[str, doc("The reason why this engine runs the statement.")]
    tables: tuple[TableRead, ...]
    cube: Annotated[CubeUse | None, doc("The use of cubes. It is absent if the tables have no cubes.")] = None


class StatementColumn(msgspec.Struct, frozen=True):
    """A column of an answer."""

    name: str
    type: Annotated[str, doc("The type in the SQL dialect.")]


class StatementHead(msgspec.Struct, frozen=True):
    """The first part of an answer, before its rows.

    Attributes:
        tables: For each table that the statement reads, the levels of its namespace and its name.
    """

    plan: StatementPlan
    tables: tuple[tuple[str, ...], ...]


class StatementError(msgspec.Struct, frozen=True):
    """An error of a statement."""

    status: int
    message: str
