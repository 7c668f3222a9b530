"""Starts a worker process for each SQL statement, so that the statements of different callers share no state.

The parent of the workers starts with the first statement, and forks a worker in milliseconds. The parent gets no
secrets of the server, and ends when its socket closes. A worker ends when its input closes. These processes therefore
do not outlive the server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import (
    BadRequest,
    Forbidden,
    NoSuchTable,
    RetryLater,
    SeamarkError,
    StorageError,
    Unauthenticated,
)
from seamark.metaserver.api.sql.protocol import (
    CONTROL,
    ERROR,
    FRAME,
    FRAME_BYTES_MAX,
    KILL,
    START,
    StatementError,
    StatementRequest,
)

_BUFFER_BYTES = 1 << 20
_VARIABLES = frozenset(
    ("PATH", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
)
_FIXED_VARIABLES = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""The fixed environment variables of a worker.

The last three variables keep the parent of workers free of threads, because a fork would not copy threads.
"""
_ERRORS: dict[int, type[SeamarkError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NoSuchTable,
    503: RetryLater,
}


def list_worker_variables() -> dict[str, str]:
    """Return the environment of a worker.

    It contains only harmless variables of this process and fixed values. So a statement cannot read the server's keys
    for a cloud, or the credentials of a cloud machine.
    """
    variables = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("LC_")}
    if "SEAMARK_CA" in os.environ:
        variables["SEAMARK_CA"] = os.environ["SEAMARK_CA"]
    return {**variables, **_FIXED_VARIABLES}


class StatementWorker:
    """A process for one statement. `close` ends it."""

    def __init__(
        self,
        workers: StatementWorkers,
        pid: int,
        input_transport: asyncio.WriteTransport,
        frames: asyncio.StreamReader,
        output_transport: asyncio.ReadTransport,
    ) -> None:
        self._workers = workers
        self._pid = pid
        self._input, self._frames, self._output = input_transport, frames, output_transport

    def ask(self, request: StatementRequest) -> None:
        """Send the request to the process."""
        self._input.write(msgspec.json.encode(request) + b"\n")

    async def read_frame(self) -> tuple[bytes, bytes]:
        """Return the kind and the content of the next frame, which is a message of the worker.

        If the frame is an error, the method raises the error that the worker reports.

        Raises:
            BadRequest: The worker was ended because it exceeded its limits of memory or processor time.
            StorageError: The frame is too long.
        """
        try:
            kind, length = FRAME.unpack(await self._frames.readexactly(FRAME.size))
            if length > FRAME_BYTES_MAX:
                raise StorageError(
                    f"The worker process of the statement sent a frame of {length:,} bytes; "
                    f"the limit is {FRAME_BYTES_MAX:,}"
                )
            content = await self._frames.readexactly(length)
        except asyncio.IncompleteReadError:
            raise BadRequest(
                "The statement was ended: it needs more memory or processor time than sql_memory_bytes and sql_time_s "
                "allow. Read fewer rows or columns"
            ) from None
        if kind == ERROR:
            error = convert_json(content, StatementError)
            raise _ERRORS.get(error.status, BadRequest if error.status < 500 else StorageError)(error.message)
        return kind, content

    def close(self) -> None:
        """End the process."""
        self._input.close()
        self._output.close()
        self._workers.kill(self._pid)


class StatementWorkers:
    """Starts workers, which run `module`. `memory_bytes` and `time_s` limit each worker."""

    def __init__(self, module: str, *, memory_bytes: int, time_s: float) -> None:
        self._module = module
        self._arguments = (str(memory_bytes), str(time_s))
        self._parent: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._start_lock = asyncio.Lock()

    async def start(self) -> StatementWorker:
        """Start a worker process that waits for a statement.

        The parent process of all workers gets the worker's ends of two pipes over a socket, starts the worker with
        them, and answers with its process id. An incomplete answer means that the parent has ended.

        Raises:
            RetryLater: No worker can be started.
        """
        loop = asyncio.get_running_loop()
        async with self._start_lock:
            control = await self._connect_parent()
            (worker_stdin, input_descriptor), (output_descriptor, worker_stdout) = (
                os.pipe2(os.O_CLOEXEC),
                os.pipe2(os.O_CLOEXEC),
            )
            try:
                await loop.run_in_executor(
                    None, socket.send_fds, control, [CONTROL.pack(START, 0)], [worker_stdin, worker_stdout]
                )
                answer = await loop.run_in_executor(None, control.recv, CONTROL.size, socket.MSG_WAITALL)
            except OSError:
                answer = b""
            finally:
                os.close(worker_stdin)
                os.close(worker_stdout)
        input_transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(input_descriptor, "wb", 0))
        frames = asyncio.StreamReader(limit=_BUFFER_BYTES)
        output_transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(frames), os.fdopen(output_descriptor, "rb", 0)
        )
        if len(answer) < CONTROL.size:
            input_transport.close()
            output_transport.close()
            await self.close()
            raise RetryLater("No process for the statement could be started; send the statement again")
        return StatementWorker(self, CONTROL.unpack(answer)[1], input_transport, frames, output_transport)

    def kill(self, pid: int) -> None:
        """End the worker with this process id."""
        if self._control is not None:
            with suppress(OSError):
                self._control.send(CONTROL.pack(KILL, pid), socket.MSG_DONTWAIT)

    async def close(self) -> None:
        """End the parent and all workers."""
        control, self._control = self._control, None
        parent, self._parent = self._parent, None
        if control is not None:
            control.close()
        if parent is not None:
            await parent.wait()

    async def _connect_parent(self) -> socket.socket:
        """Return the socket of the parent, the process that forks the workers. If it does not run, start it."""
        if self._control is not None and self._parent is not None and self._parent.returncode is None:
            return self._control
        await self.close()
        own_socket, parent_socket = socket.socketpair()
        with parent_socket:
            self._parent = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # The working directory must not be searched for modules.
                "-m",
                self._module,
                str(parent_socket.fileno()),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                env=list_worker_variables(),
                pass_fds=(parent_socket.fileno(),),
                start_new_session=True,
            )
        self._control = own_socket
        return own_socket
