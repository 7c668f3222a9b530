"""Extensions that the program adds to the server that it starts.

The server does not import the connector. Routes that need it, and the processes that run jobs and statements as clients
of the server, are in packages above the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """Routes, and the modules of processes that the server starts.

    `seamark.commands` has those of `seamark serve`.
    """

    routes: tuple[ModuleType, ...]
    """Modules with endpoints, which are served beside the server's own."""
    job_worker: str
    """The module that runs jobs of table services: `python -m MODULE <memory limit in bytes>`."""
    spark_driver: str
    """The module whose function `main` runs a job inside a Spark driver."""
    row_files: str
    """The module that reads and writes rows of streams as files: `conform_rows`, `pack_rows`, `encode_rows`."""
    statement_worker: str
    """The module that runs SQL statements: `python -m MODULE <socket> <memory limit in bytes> <time limit in s>`."""
