"""A server that kills itself with SIGKILL at a step of a change that a file states.

    SEAMARK_HOME=… SEAMARK_PORT=… python -m tests.faults.rigs.dying_server

The file `<home>/kill` has a line `STEP NTH`: the server dies when it reaches STEP for the NTH time after the file was
created. The components are real. Wrappers around the store and the objects tell `KillSwitch` that a step is reached.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.metaserver import server
from seamark.metaserver.api.listening import bind_socket
from seamark.metaserver.commit.engine_commits.engine_commits import EngineCommits
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import resolve_settings
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, DropEntry, RenameEntry, RestoreEntry, SwapPointer

_CHANGES = (SwapPointer, CreateEntry, DropEntry, RenameEntry, RestoreEntry)
STEPS = ("before-metadata-write", "after-metadata-write", "before-swap", "after-swap", "before-reply")


KILL_FILE = "kill"
"""The name of the file that states at which step the server dies."""


class KillSwitch:
    """Kills the process at the step and the repetition that the file KILL_FILE names, such as `before-swap 2`."""

    def __init__(self, home: Path) -> None:
        self._file = home / KILL_FILE
        self._passed_steps = 0

    def pass_step(self, step: str) -> None:
        if not self._file.exists():
            return
        fatal_step, nth = self._file.read_text().split()
        self._passed_steps += step == fatal_step
        if self._passed_steps == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)


class KillingWrapper:
    """Passes all calls on to `inner`. Subclasses replace the methods with steps at which the process may die."""

    def __init__(self, inner: Any, kill_switch: KillSwitch) -> None:
        self._inner = inner
        self._kill_switch = kill_switch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DyingStore(KillingWrapper):
    async def transact(self, operations: Any) -> Any:
        commits = any(isinstance(operation, _CHANGES) for operation in operations)
        if commits:
            self._kill_switch.pass_step("before-swap")
        result = await self._inner.transact(operations)
        if commits:
            self._kill_switch.pass_step("after-swap")
        return result


class DyingObjects(KillingWrapper):
    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        self._kill_switch.pass_step("before-metadata-write")
        await self._inner.create(location, data, durable=durable)
        self._kill_switch.pass_step("after-metadata-write")


def main(settings: Settings) -> None:
    """Serve with wrappers that kill this process at the step in the file `kill`."""
    kill_switch = KillSwitch(settings.home)
    commit = EngineCommits.commit

    @asynccontextmanager
    async def open_dying_store(*args: Any, **options: Any) -> Any:
        async with open_store(*args, **options) as inner:
            yield DyingStore(inner, kill_switch)

    @asynccontextmanager
    async def open_dying_objects(*args: Any, **options: Any) -> Any:
        async with open_objects(*args, **options) as inner:
            yield DyingObjects(inner, kill_switch)

    async def commit_and_pass_step(self: EngineCommits, *args: Any, **options: Any) -> Any:
        result = await commit(self, *args, **options)
        kill_switch.pass_step("before-reply")
        return result

    server.open_store = open_dying_store  # type: ignore[attr-defined]
    server.open_objects = open_dying_objects  # type: ignore[attr-defined]
    EngineCommits.commit = commit_and_pass_step  # type: ignore[method-assign]
    server.run(settings, bind_socket(settings, shared=False), EXTENSIONS, lambda: None)


if __name__ == "__main__":
    main(resolve_settings({}, os.environ))
