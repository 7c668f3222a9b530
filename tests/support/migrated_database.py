"""New SQLite databases of tests are copies of one migrated database, because the migrations take 9 ms of CPU time.

That is a third of the CPU time of a server's start. Tests of the store itself use new files (`create_empty_databases`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from seamark.metaserver.store.sql import sqlite

_create_empty_database = sqlite.create_private_database


def replace_database_creation_by_copies() -> None:
    """Let stores of this process create each new database as a copy of a migrated one."""
    vars(sqlite)["create_private_database"] = _create_migrated_database


@contextmanager
def create_empty_databases() -> Iterator[None]:
    """Let stores of this process create and migrate empty databases, as a real server does, until the context ends.

    The function of the module is replaced, because the store calls it by its name in the module.
    """
    create_database = sqlite.create_private_database
    vars(sqlite)["create_private_database"] = _create_empty_database
    try:
        yield
    finally:
        vars(sqlite)["create_private_database"] = create_database


def _create_migrated_database(path: Path) -> None:
    """Copy the migrated database to `path`, unless a file exists, and open it with `_create_empty_database`."""
    if not os.path.lexists(path):
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(_read_migrated_database())
        # Another process may create the database meanwhile. A link makes the whole file visible at once.
        with suppress(FileExistsError):
            os.link(name, path)
        os.unlink(name)
    _create_empty_database(path)


@cache
def _read_migrated_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder, create_empty_databases():
        path = Path(folder) / "seamark.db"
        sqlite._open_for_writing(path).close()
        return path.read_bytes()
