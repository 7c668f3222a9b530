"""The worker processes of SQL statements (`api/sql/`): a parent, and a child for each statement.

The parent imports all modules, so it can fork a child in milliseconds; it never receives a statement. A child plans and
reads tables as a client of the server, and runs the statement in DuckDB. Its token has the rights of the statement's
caller, and its environment contains no secrets. It writes no files, reads only below the locations of the statement's
tables, and has limits for memory and CPU time. If the kernel has Landlock, the kernel also enforces the restrictions of
files.

    python -m seamark.commands.sql.worker <socket> <memory limit in bytes> <time limit in seconds>
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa

from seamark.commands.confinement import landlock
from seamark.commands.confinement.jobs import PATHS, protect_memory_and_rights
from seamark.connector.client.errors import ClientError, InvalidRequest, Refused, Unavailable
from seamark.connector.client.file_systems import find_client_storage
from seamark.connector.client.storage import confine, open_confined_folders
from seamark.connector.read.tables import OpenTable
from seamark.connector.sql.duckdb_engine import DuckDBLimits
from seamark.connector.sql.rows import convert_to_json_rows
from seamark.connector.sql.session import ChosenPlan, SqlResult, SqlSession
from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.api.sql.protocol import (
    CONTROL,
    DATA,
    END,
    ERROR,
    FRAME,
    HEAD,
    START,
    CubeUse,
    StatementColumn,
    StatementError,
    StatementHead,
    StatementPlan,
    StatementRequest,
    TableRead,
)

_NICE = 5
"""The niceness of a child, so that the requests of the server have a higher priority."""
_IMPORTED_BY_DUCKDB = ("pandas", "pyarrow.dataset", "zoneinfo", "encodings.idna", "_strptime")
"""Modules that DuckDB imports when it first examines a Python object. The parent imports them once."""
_FILES_MAX = 1024
"""The maximum number of open files of a child."""
_FLUSH_BYTES = 256 << 10
_MESSAGE_MAX = 2000
"""The maximum length of an error message, in characters."""


class AnswerWriter:
    """Writes one answer as frames. It collects the data and writes them in frames of `_FLUSH_BYTES`."""

    def __init__(self, stream: BinaryIO, bytes_max: int) -> None:
        self._stream = stream
        self._bytes_max = self._remaining_bytes = bytes_max
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def send(self, kind: bytes, content: bytes) -> None:
        self.flush()
        self._write_frame(kind, content)

    def write(self, data: bytes) -> int:
        """Add data to the answer.

        Raises:
            InvalidRequest: The answer exceeds its limit of bytes.
        """
        content = bytes(data)
        self._remaining_bytes -= len(content)
        if self._remaining_bytes < 0:
            raise InvalidRequest(
                f"The answer has more than {self._bytes_max:,} bytes (sql_bytes_limit); select fewer rows or columns"
            )
        self._pending.append(content)
        self._pending_bytes += len(content)
        if self._pending_bytes >= _FLUSH_BYTES:
            self.flush()
        return len(content)

    def flush(self) -> None:
        data, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
        for start in range(0, len(data), _FLUSH_BYTES):
            self._write_frame(DATA, data[start : start + _FLUSH_BYTES])

    def discard(self) -> None:
        self._pending, self._pending_bytes = [], 0

    def _write_frame(self, kind: bytes, content: bytes) -> None:
        self._stream.write(FRAME.pack(kind, len(content)) + content)
        self._stream.flush()


def main() -> None:
    """Run the parent of the worker processes. It imports the modules that each child would otherwise import."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the server, which then ends this process.
    control_descriptor, memory_bytes, time_s = sys.argv[1:]
    for name in _IMPORTED_BY_DUCKDB:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # With this, children share the memory pages that they do not write.
    with socket.socket(fileno=int(control_descriptor)) as control:
        WorkerParent(control, memory_bytes=int(memory_bytes), time_s=float(time_s)).serve()


class WorkerParent:
    """The parent, which forks children until the server closes the socket, and then ends them.

    The message `START` carries two descriptors, the child's input and output; its answer is the child's id. The message
    `KILL` names a child. The system uses an id again only after this process has waited for its child, so `KILL` never
    ends another process.
    """

    def __init__(self, control: socket.socket, *, memory_bytes: int, time_s: float) -> None:
        self._control = control
        self._memory_bytes, self._time_s = memory_bytes, time_s
        self._children: set[int] = set()

    def serve(self) -> None:
        """Handle the messages of the server until it closes the socket.

        A message starts a child for a statement, or kills a child. When the server closes the socket, the message is
        empty, and all children are killed.
        """
        while True:
            try:
                message, descriptors, *_ = socket.recv_fds(self._control, CONTROL.size, 2)
            except InterruptedError:
                continue
            self._remove_ended_children()
            if len(message) < CONTROL.size:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                return
            kind, pid = CONTROL.unpack(message)
            if kind == START and len(descriptors) == 2:
                self._start(*descriptors)
            elif pid in self._children:
                os.kill(pid, signal.SIGKILL)

    def _start(self, request_fd: int, answer_fd: int) -> None:
        """Fork a child for a statement, and send its id to the server.

        Args:
            request_fd: The file descriptor of the request. Only the child keeps it open.
            answer_fd: The file descriptor of the answer. Only the child keeps it open.
        """
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                _run_child(request_fd, answer_fd, memory_bytes=self._memory_bytes, time_s=self._time_s)
            finally:
                os._exit(1)
        os.close(request_fd)
        os.close(answer_fd)
        self._children.add(pid)
        self._control.sendall(CONTROL.pack(START, pid))

    def _remove_ended_children(self) -> None:
        """Remove the children that have ended."""
        while self._children:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)


def _run_child(request_fd: int, answer_fd: int, *, memory_bytes: int, time_s: float) -> None:
    """Run one statement in the child process, and exit.

    A further thread ends the process when the server closes its end of the request.

    Args:
        request_fd: The file descriptor from which the child reads the request, as one line of JSON.
        answer_fd: The file descriptor to which the child writes the answer.
        memory_bytes: The maximum memory of the statement.
        time_s: The maximum run time in seconds.
    """
    os.setsid()
    os.dup2(request_fd, 0)
    os.dup2(2, 1)  # Libraries that print must not write into the answer.
    restrict_process(memory_bytes=memory_bytes, time_s=time_s)
    with os.fdopen(0, "rb", closefd=False) as source, os.fdopen(answer_fd, "wb", closefd=False) as stream:
        line = source.readline()
        if line:
            request = convert_json(line, StatementRequest)
            threading.Thread(target=_end_with_server, args=(source,), daemon=True).start()
            run(request, AnswerWriter(stream, request.bytes_max))
        os._exit(0)  # End without clean-up, because a thread of DuckDB or Arrow may still run.


def restrict_process(*, memory_bytes: int, time_s: float) -> None:
    """Permanently limit the resources of this process.

    The limit of CPU time is the run time on all CPUs. No file may grow, and no file may be changed.
    """
    os.nice(_NICE)
    os.umask(0o077)
    cpu_s = int(time_s * (os.cpu_count() or 1)) + 1
    for resource_kind, limit in (
        (resource.RLIMIT_DATA, _count_mapped_bytes() + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _FILES_MAX),
    ):
        hard_limit = resource.getrlimit(resource_kind)[1]
        # A zero means that there is no limit, except for the size of written files, where it forbids them.
        if limit or resource_kind == resource.RLIMIT_FSIZE:
            soft_limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
            resource.setrlimit(resource_kind, (soft_limit, soft_limit))
    protect_memory_and_rights()
    landlock.forbid_changes()


def _end_with_server(source: BinaryIO) -> None:
    source.read()
    os._exit(1)


def run(request: StatementRequest, writer: AnswerWriter) -> None:
    """Run the statement. Send its answer, or the reason why there is none."""
    try:
        _run(request, writer)
    except ClientError as error:
        status = error.status or (503 if isinstance(error, Unavailable) else 400 if isinstance(error, Refused) else 500)
        _send_error(writer, status, error.message)
    except (MemoryError, pa.ArrowMemoryError):
        _send_error(
            writer, 400, f"The statement needs more than {request.memory_bytes:,} bytes of memory (sql_memory_bytes)"
        )
    except Exception as error:  # noqa: BLE001  every error is sent to the server
        _send_error(writer, 500, f"{type(error).__name__}: {error}")


def _send_error(writer: AnswerWriter, status: int, message: str) -> None:
    writer.discard()
    writer.send(ERROR, msgspec.json.encode(StatementError(status, message[:_MESSAGE_MAX])))


def _run(request: StatementRequest, writer: AnswerWriter) -> None:
    """Run the statement, and send its rows or its plan in the requested format."""
    # DuckDB gets half of the memory, because the reader's batches and the answer need the rest.
    limits = DuckDBLimits(memory_bytes=request.memory_bytes // 2, threads=request.threads)
    with SqlSession(
        request.url,
        token=request.token,
        schema=request.schema,
        limits=limits,
        writes=False,
        check_tables=lambda tables: _confine_files(tables, request.roots),
        certificates=request.certificates,
        cubes=request.cubes,
        reports_runs=False,  # The server itself records the run.
        computes_groups=False,  # Files are read only after `check_tables` has restricted this process.
    ) as session:
        if request.format == "explain":
            head = _make_head(request, session.explain(request.statement))
            writer.send(HEAD, msgspec.json.encode(head))
            writer.write(msgspec.json.encode(head.plan))
        else:
            with closing(session.sql(request.statement)) as result:
                head = _make_head(request, result.explanation)
                writer.send(HEAD, msgspec.json.encode(head))
                (_write_arrow if request.format == "arrow" else _write_json)(request, result, head.plan, writer)
        writer.send(END, b"")


def _count_mapped_bytes() -> int:
    """Return the number of bytes of this process that count for RLIMIT_DATA.

    These are the memory of libraries, and the address space that allocators reserve.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        # The sixth field is the number of pages for data and the stack (proc(5)).
        return int(file.read().split()[5]) * resource.getpagesize()


def _confine_files(tables: list[OpenTable], roots: tuple[str, ...]) -> None:
    """Restrict this process to files below the tables' locations, which are below `roots`.

    Raises:
        InvalidRequest: The server does not vend keys for the storage of a table.
    """
    folders = []
    for table in tables:
        properties = table.metadata.properties
        locations = [table.metadata.location, *(properties[name] for name in PATHS if name in properties)]
        storage = find_client_storage(locations[0])
        if storage is not None and not storage.has_keys(table.storage.properties):
            raise InvalidRequest(
                f"The statement cannot read {'.'.join(table.name)}, because the server vends no keys for its storage. "
                "An operator can set s3_client_access to gateway, static or sts, azure_client_access to sas, or "
                "gcs_client_access to token"
            )
        folders += [location.removeprefix("file://").removeprefix("file:") for location in locations]
    confine((folder for folder in folders if folder.startswith("/")), roots)
    with open_confined_folders() as open_folders:
        landlock.forbid_reads_except(open_folders)


def _make_head(request: StatementRequest, chosen_plan: ChosenPlan) -> StatementHead:
    tables = tuple(
        TableRead(table.shown_name, table.files, table.considered_files, table.bytes, table.columns, table.joins)
        for table in chosen_plan.tables
    )
    cube = None if chosen_plan.cube is None else CubeUse(**asdict(chosen_plan.cube))
    plan = StatementPlan(request.id, chosen_plan.engine, chosen_plan.why, tables, cube)
    return StatementHead(plan, tuple(dict.fromkeys(table.name for table in chosen_plan.tables)))


def _limit_batches(request: StatementRequest, result: SqlResult, status: dict[str, bool]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the result with at most `rows_max` rows in total.

    If rows are left out, `truncated` in `status` becomes True.

    Raises:
        InvalidRequest: There are more rows, and the answer must not be truncated.
    """
    rows_left = request.rows_max
    for batch in result.batches:
        if batch.num_rows > rows_left:
            if not request.truncates:
                raise InvalidRequest(
                    f"The statement has more than {request.rows_max:,} rows (sql_rows_limit); add LIMIT"
                )
            status["truncated"] = True
            if rows_left:
                yield batch.slice(0, rows_left)
            return
        rows_left -= batch.num_rows
        yield batch


def _write_arrow(request: StatementRequest, result: SqlResult, plan: StatementPlan, writer: AnswerWriter) -> None:
    schema = result.schema.with_metadata({"seamark": msgspec.json.encode(plan)})
    sink: Any = pa.PythonFile(_Sink(writer), "w")
    with pa.ipc.new_stream(sink, schema) as batch_writer:
        for batch in _limit_batches(request, result, {}):
            batch_writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _write_json(request: StatementRequest, result: SqlResult, plan: StatementPlan, writer: AnswerWriter) -> None:
    """Write the plan, the columns and the rows as JSON, and whether the rows are complete."""
    columns = [StatementColumn(name, kind) for name, kind in zip(result.schema.names, result.types, strict=True)]
    # The answer is one JSON object: the fields of the plan without its closing brace, then columns, rows and
    # completeness.
    head = msgspec.json.encode(plan)[:-1] + b',"columns":' + msgspec.json.encode(columns)
    writer.write(head + b',"rows":[')
    status = {"truncated": False}
    separator = b""
    for batch in _limit_batches(request, result, status):
        if batch.num_rows:
            # The brackets are left out, because the rows of all batches are one list.
            writer.write(separator + msgspec.json.encode(convert_to_json_rows(batch))[1:-1])
            separator = b","
    writer.write(b'],"complete":' + (b"false" if status["truncated"] else b"true") + b"}")


class _Sink:
    """A file object that passes the output of Arrow's writer to the answer."""

    closed = False

    def __init__(self, writer: AnswerWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> int:
        return self._writer.write(data)

    def flush(self) -> None:
        """Do nothing. Frames are sent when they are large enough."""

    def close(self) -> None:
        """Do nothing. A frame marks the end of the answer."""


if __name__ == "__main__":
    main()
