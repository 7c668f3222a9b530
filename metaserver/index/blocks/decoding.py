"""Decoding of manifests to blocks outside the event loop: in threads, and for large loads also in processes.

Decoding releases the GIL most of the time, but not always. So several threads are only about 1.5 times as fast as one
thread. A process has its own GIL, but takes a quarter of a second to start, so it is useful only for many manifests.
Processes start while threads already decode, and end after the load.

A process returns the same bytes as a thread. If no process can be started, or a process ends unexpectedly, the
thread itself decodes the manifest. Each process ends when its standard input ends, so no process outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import structlog

from seamark.formats.iceberg.manifests.manifest import decode_manifest
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.index.blocks.encoding import encode_block

PROCESSES_MIN_BYTES = 64 << 20
"""The minimum total size of manifests for which processes start: about 160,000 entries, and a second of work."""
_PIPE_BYTES = 1 << 20
"""The size of the pipes to and from a process.

Linux allows this size without privileges. With large pipes, a manifest and its block need few context switches.
"""
_END_S = 5.0
"""The time in which a process must end before it is killed."""
_REQUEST_HEAD = struct.Struct("<IQ")
"""The head of a request: the lengths of the location and of the manifest, which follow the head."""
_ANSWER_HEAD = struct.Struct("<BQ")
"""The head of an answer: its type and its length. The bytes of the answer follow the head."""
_READY, _BLOCK, _CORRUPT = range(3)
"""The types of answers: the process has started, a block, and the message of a damaged manifest."""

log = structlog.get_logger()


class _ProcessLost(Exception):
    """Raised if a decoding process has ended, or if its answer is invalid."""


class Decoders:
    """Decodes manifests in the threads of the executor, and in processes.

    There are up to `threads` processes while `expect_manifests` is active for `processes_min_bytes` or more.
    """

    def __init__(self, executor: ThreadPoolExecutor, threads: int, *, processes_min_bytes: int = PROCESSES_MIN_BYTES):
        self._executor = executor
        # A single thread does not compete for the GIL, so processes would not help.
        self._processes_max = threads if threads > 1 else 0
        self._min_bytes = processes_min_bytes
        self._lock = threading.Lock()
        """The lock of all attributes below."""
        self._active_loads = 0
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self.manifests_decoded_by_processes = 0
        """The number of manifests that processes have decoded, instead of the threads of this process."""

    async def decode(self, data: bytes, location: str) -> bytes | memoryview:
        """Decode a manifest, and return the bytes of its block: the packed columns of its entries.

        Raises:
            Corrupt: The manifest is damaged; the message contains its location.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._decode_in_process, data, location)

    @contextmanager
    def expect_manifests(self, size_bytes: int) -> Iterator[None]:
        """While the context is active, let processes decode manifests if their total size is large.

        At the end of the last such context, the idle processes end.
        """
        if size_bytes < self._min_bytes or not self._processes_max:
            yield
            return
        with self._lock:
            self._active_loads += 1
            earlier_count = self.manifests_decoded_by_processes
        try:
            yield
        finally:
            with self._lock:
                self._active_loads -= 1
                idle, self._idle = ([], self._idle) if self._active_loads else (self._idle, [])
            count = self.manifests_decoded_by_processes - earlier_count
            log.info("manifests_decoded", size_bytes=size_bytes, by_processes=count)
            with contextlib.suppress(RuntimeError):  # After the executor's shutdown, `close` ends the processes.
                for process in idle:
                    self._executor.submit(self._end_process, process)

    def close(self) -> None:
        """End the remaining processes. The method is called after the executor's shutdown."""
        for process in list(self._processes):
            self._end_process(process)

    def _decode_in_process(self, data: bytes, location: str) -> bytes | memoryview:
        """Decode a manifest in an idle process, or in this thread if there is none or the process is lost."""
        process = self._take_process()
        if process is None:
            return decode_block_memory(data, location)
        try:
            block_memory = process.decode(data, location)
        except _ProcessLost as error:
            log.warning("decoder_lost", manifest=location, error=str(error))
            self._end_process(process)
            return decode_block_memory(data, location)
        except Corrupt:
            self._return_process(process)
            raise
        self._return_process(process)
        return block_memory

    def _take_process(self) -> _Process | None:
        """Return an idle process, or None. If more processes are allowed, start one for later callers.

        Processes are used and started only within `expect_manifests`.
        """
        with self._lock:
            if not self._active_loads:
                return None
            for index, process in enumerate(self._idle):
                if process.is_ready():
                    self.manifests_decoded_by_processes += 1
                    return self._idle.pop(index)
            if len(self._processes) >= self._processes_max:
                return None
            try:
                new_process = _Process()
            except OSError as error:
                log.warning("decoder_not_started", error=str(error))
                # The environment may not allow processes.
                self._processes_max = 0
                return None
            self._processes.add(new_process)
            self._idle.append(new_process)
            return None

    def _return_process(self, process: _Process) -> None:
        """Make a process idle. If no caller decodes many bytes of manifests (`expect_manifests`), end it instead."""
        with self._lock:
            if self._active_loads:
                self._idle.append(process)
                return
        self._end_process(process)

    def _end_process(self, process: _Process) -> None:
        process.end()
        with self._lock:
            self._processes.discard(process)


class _Process:
    """A decoding process, with the parent's ends of its pipes.

    Only one thread at a time may use an instance.
    """

    def __init__(self) -> None:
        """Start the process.

        Raises:
            OSError: The process cannot be started.
        """
        # `-I` ignores the environment and the working folder, so the process gets the module path as arguments.
        program = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"
        module_folders = [entry or os.getcwd() for entry in sys.path]
        self._process = subprocess.Popen(  # noqa: S603  this program
            [sys.executable, "-I", "-c", program, *module_folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        requests, responses = self._process.stdin, self._process.stdout
        assert requests is not None
        assert responses is not None
        self._pipes = requests, responses
        self._request_fd, self._response_fd = requests.fileno(), responses.fileno()
        for descriptor in (self._request_fd, self._response_fd):
            # A smaller pipe only makes decoding slower.
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._is_ready = False

    def is_ready(self) -> bool:
        """Return whether the process has started to read, without waiting.

        The result is also True if the process has ended unexpectedly. Its next use then reports an error.
        """
        if not self._is_ready:
            poll = select.poll()
            poll.register(self._response_fd, select.POLLIN | select.POLLHUP)
            self._is_ready = bool(poll.poll(0))
            if self._is_ready:
                # Read the answer `_READY`. If the process has ended instead, its next use reports this.
                with contextlib.suppress(_ProcessLost):
                    self._read_answer()
        return self._is_ready

    def decode(self, data: bytes, location: str) -> memoryview:
        """Decode a manifest in the process, like `decode_block_memory`.

        Raises:
            Corrupt: The manifest is damaged.
            _ProcessLost: The process has ended, or its answer is invalid.
        """
        encoded_location = location.encode()
        self._write(memoryview(_REQUEST_HEAD.pack(len(encoded_location), len(data)) + encoded_location))
        self._write(memoryview(data))
        kind, answer = self._read_answer()
        if kind == _CORRUPT:
            raise Corrupt(bytes(answer).decode())
        if kind != _BLOCK:
            raise _ProcessLost(f"the type of its answer is {kind}, not {_BLOCK} or {_CORRUPT}")
        return answer

    def _read_answer(self) -> tuple[int, memoryview]:
        """Return the type and the bytes of the next answer."""
        kind, size = _ANSWER_HEAD.unpack(self._read(_ANSWER_HEAD.size))
        return kind, self._read(size)

    def _write(self, data: memoryview) -> None:
        """Write data to the process.

        Raises:
            _ProcessLost: The process has ended.
        """
        try:
            while data:
                data = data[os.write(self._request_fd, data) :]
        except OSError as error:
            raise _ProcessLost(str(error)) from error

    def _read(self, size: int) -> memoryview:
        """Read exactly `size` bytes of the answer.

        Raises:
            _ProcessLost: The process has ended, or the size is too large.
        """
        try:
            buffer = np.empty(size, np.uint8).data
        except (MemoryError, ValueError) as error:
            raise _ProcessLost(f"its answer has {size} bytes, which do not fit into memory") from error
        position = 0
        while position < size:
            try:
                read_bytes = os.readv(self._response_fd, [buffer[position:]])
            except OSError as error:
                raise _ProcessLost(str(error)) from error
            if not read_bytes:
                raise _ProcessLost(f"the process ended after {position} bytes of {size}")
            position += read_bytes
        return buffer

    def end(self) -> None:
        """End the process, and wait for it, usually a few milliseconds.

        The process ends when its input is closed. It is killed if this takes longer than `_END_S`.
        """
        for pipe in self._pipes:
            pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def decode_block_memory(data: bytes | memoryview, location: str) -> bytes:
    """Decode a manifest, and return the bytes of its block: the packed columns of its entries.

    Raises:
        Corrupt: The manifest is damaged; the message contains its location.
    """
    return b"".join(encode_block(decode_manifest(data, location)))


def serve_decoding(requests: BinaryIO, responses: BinaryIO) -> None:
    """Decode manifests until the input ends.

    Each request has a location and the bytes of a manifest. The answer is the decoded manifest (a block), or the
    message of `Corrupt`. Any other error ends the process. The parent then decodes the manifest itself, and gets the
    same error.
    """
    _write_answer(responses, _READY, b"")
    while head := requests.read(_REQUEST_HEAD.size):
        location_bytes, data_bytes = _REQUEST_HEAD.unpack(head)
        location = requests.read(location_bytes).decode()
        data = requests.read(data_bytes)
        if len(data) < data_bytes:  # The parent has ended.
            return
        try:
            _write_answer(responses, _BLOCK, decode_block_memory(data, location))
        except Corrupt as error:
            _write_answer(responses, _CORRUPT, error.message.encode())


def _write_answer(answers: BinaryIO, kind: int, data: bytes) -> None:
    answers.write(_ANSWER_HEAD.pack(kind, len(data)))
    answers.write(data)
    answers.flush()


def main() -> None:
    """Run a decoding process.

    The process ignores Ctrl-C in a terminal, and ends when its input ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve_decoding(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The parent has ended. Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
