"""Extensions that the program adds to the server that it starts.

The server does not import the connector. Packages above the server contain the routes that need the connector, and the
processes that run jobs and statements as clients of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """Additional routes, and the modules of processes that the server starts.

    `seamark.commands` contains the extensions of `seamark serve`.
    """

    routes: tuple[ModuleType, ...]
    """The modules with endpoints that are served in addition to the server's own endpoints."""
    job_worker: str
    """The module that runs jobs of table services: `python -m MODULE <memory limit in bytes>`."""
    spark_driver: str
    """The module whose function `main` runs a job inside a Spark driver."""
    row_files: str
    """The module that reads and writes rows of streams: `conform_rows`, `pack_rows`, `decode_rows`, `encode_rows`."""
    statement_worker: str
    """The module that runs SQL statements: `python -m MODULE <socket> <memory limit in bytes> <time limit in s>`."""
