"""A process that has imported the server's modules and forks servers, because imports take most of a start's CPU time.

Only tests use it, after they called `enable()`. Benchmarks start new interpreters. The child runs the same script or
module as `__main__`, with its own session, folder and environment, and with its output in its log. If the environment
differs in a variable that modules may read during their import, the program is started as a new interpreter.

A server with several workers normally spawns them. In a child of the fork server, these workers are forks of the child.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

from prometheus_client import values

REPO = Path(__file__).resolve().parents[2]
MODULES = (
    "seamark.commands.main",
    "seamark.commands.serving.serve",
    "seamark.metaserver.store.sql.sqlite",
    "seamark.metaserver.objects.local",
    "tests.faults.rigs.dying_server",
)
_OWN_PREFIXES = ("SEAMARK_", "PYTHONPATH", "PYTEST_", "PYSPARK_", "SPARK_")
"""Prefixes of environment variables that no module reads during its import."""
_SHELL_VARIABLES = {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}
"""Environment variables of a shell that no module reads during its import."""
_MESSAGE_BYTES = 1 << 20
_environment: dict[str, str] | None = None
"""The environment of the fork server, or None if `enable` was not called."""
_server: ForkServer | None = None
_fork_lock = threading.Lock()


class ForkedProcess:
    """A child of the fork server, with the interface of `subprocess.Popen`. The child sends its exit code."""

    def __init__(self, argv: Sequence[str], pid: int, end_pipe: int) -> None:
        self.args = list(argv)
        self.pid = pid
        self.returncode: int | None = None
        self._end_pipe = end_pipe

    def poll(self) -> int | None:
        return self._read_exit_code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read_exit_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _read_exit_code(self, timeout_s: float | None) -> int | None:
        """Wait for the exit code, remember it and return it. Return None if the child has not ended in time."""
        if self.returncode is None and select.select([self._end_pipe], [], [], timeout_s)[0]:
            exit_message = os.read(self._end_pipe, 16)
            os.close(self._end_pipe)
            # Without data, the fork server itself has ended.
            self.returncode = int(exit_message) if exit_message else -signal.SIGKILL
        return self.returncode


class ForkServer:
    """The client of the fork server in the test process. One thread at a time may fork."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", __name__, str(child_socket.fileno())]
        self._process = subprocess.Popen(
            argv, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[child_socket.fileno()], start_new_session=True,
        )  # fmt: skip
        child_socket.close()

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, output: int, errors: int
    ) -> ForkedProcess:
        end_pipe, child_pipe = os.pipe()
        request = {"argv": list(argv), "env": dict(env), "cwd": str(cwd or Path.cwd()), "umask": _read_umask()}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [output, errors, child_pipe])
        os.close(child_pipe)
        pid = int(self._socket.recv(_MESSAGE_BYTES) or 0)
        if not pid:
            os.close(end_pipe)
            raise RuntimeError(f"the fork server has ended with {self._process.wait(60)}")
        return ForkedProcess(argv, pid, end_pipe)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


def enable() -> None:
    """Let `fork` use the fork server from now on.

    Call it once, after all test modules were imported and before a test changes the environment.
    """
    global _environment
    _environment = dict(os.environ)


def fork(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, output: int, errors: int | None = None
) -> ForkedProcess | None:
    """Return the forked process of a Python program, or None if the program needs a new interpreter.

    The program is `SCRIPT …` or `PYTHON -m MODULE …`. Its output goes to the file descriptor `output`, and its errors
    to `errors` if it is given.
    """
    global _server
    if _environment is None or _list_variables_read_by_imports(env) != _list_variables_read_by_imports(_environment):
        return None
    with _fork_lock:
        if _server is None:
            _server = ForkServer(_environment)
            atexit.register(_server.close)
        return _server.fork(argv, env, cwd, output, output if errors is None else errors)


def _list_variables_read_by_imports(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a module may read during its import. Variables of a shell and of tests are not read."""
    return {
        name: value
        for name, value in env.items()
        if not name.startswith(_OWN_PREFIXES) and name not in _SHELL_VARIABLES
    }


def _read_umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    _, umask = next(line for line in lines if line.startswith("Umask:")).split()
    return int(umask, 8)


def _serve(control: socket.socket) -> dict[str, object] | None:
    """Fork processes until the tests end.

    Return None at the end. In a child, return the program that the child must run.
    """
    children: dict[int, int] = {}
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    while True:
        ready_pipes = select.select([control, wake_reader], [], [])[0]
        if wake_reader in ready_pipes:
            with suppress(BlockingIOError):
                os.read(wake_reader, 4096)
            reap_children(children)
        if control not in ready_pipes:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
        if not message:
            return None
        output, errors, end_pipe = descriptors
        pid = os.fork()
        if pid:
            children[pid] = end_pipe
            os.close(output)
            os.close(errors)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (wake_reader, wake_writer, end_pipe, *children.values()):
            os.close(descriptor)
        os.setsid()
        control.send(str(os.getpid()).encode())  # From here on, signals to the process group reach the child.
        control.close()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        request: dict[str, object] = json.loads(message)
        return request


def reap_children(children: dict[int, int]) -> None:
    """Send the exit codes of ended children to their callers.

    Args:
        children: The pipe for the exit code of each child, by its process id. Ended children are removed.
    """
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end_pipe = children.pop(pid)
        with suppress(BrokenPipeError):  # No caller waits for the process.
            os.write(end_pipe, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(end_pipe)


def run_program(argv: list[str], env: dict[str, str], cwd: str, umask: int) -> None:
    """Become the requested process: set its environment, folder and umask, and run its module or script.

    Args:
        argv: `PYTHON -m MODULE …` or `SCRIPT …`.
        env: The environment of the process.
        cwd: The folder of the process.
        umask: The umask of the process.
    """
    os.umask(umask)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    _fork_workers()
    if argv[1] == "-m":
        sys.argv = argv[2:]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")


def _fork_workers() -> None:
    """Let multiprocessing fork this process instead of starting an interpreter that imports all modules again.

    The new process reads its function and arguments from a pipe, as a spawned process does. A process with several
    threads is not forked.
    """
    spawn = util.spawnv_passfds

    def fork_or_spawn(path: bytes, arguments: list[str], descriptors: Sequence[int]) -> int:
        is_worker = arguments[-1] == "--multiprocessing-fork"  # If it is not a worker, it is the resource tracker.
        if not is_worker or len(os.listdir("/proc/self/task")) > 1:
            return spawn(path, arguments, descriptors)
        pid = os.fork()
        if not pid:
            _run_worker(arguments[-2], descriptors)
        return pid

    util.spawnv_passfds = fork_or_spawn


def _run_worker(program: str, descriptors: Sequence[int]) -> NoReturn:
    """Run a program of multiprocessing after a fork, with the descriptors and signals of a new process."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_DFL)
    for descriptor_name in os.listdir("/proc/self/fd"):
        if int(descriptor_name) > 2 and int(descriptor_name) not in descriptors:
            with suppress(OSError):  # The descriptor of the folder listing is closed already.
                os.close(int(descriptor_name))
    values.ValueClass = values.get_value_class()  # The supervisor has set the folder of the workers' metrics.
    sys.argv = ["-c", "--multiprocessing-fork"]
    code = 1
    try:
        exec(program, {"__name__": "__main__"})
    except SystemExit as exit_error:
        code = int(exit_error.code or 0)
    except BaseException:  # noqa: BLE001 - an error must not reach the frames of the supervisor
        traceback.print_exc()
    _end_process(code)


def _end_process(code: int) -> NoReturn:
    """End the process like an interpreter, but without destroying all objects.

    The destruction would copy the pages that all children share, and take longer than a start and an end together.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main() -> None:
    """Import the modules that servers need, and fork a process for each request until the caller ends."""
    for name in MODULES:
        importlib.import_module(name)
    migrated_database = importlib.import_module("tests.support.migrated_database")
    migrated_database.replace_database_creation_by_copies()
    gc.collect()
    gc.freeze()  # A garbage collection in a child would copy all pages.
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        try:
            run_program(**request)  # type: ignore[arg-type]
        except SystemExit as exit_error:
            if isinstance(exit_error.code, str):
                raise
            _end_process(exit_error.code or 0)
        _end_process(0)


if __name__ == "__main__":
    main()
