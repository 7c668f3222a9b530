"""Parses the options of `format("seamark")` that readers and writers share: the server and the table."""

from __future__ import annotations

import os
from collections.abc import Mapping

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest


def open_client_and_table(options: Mapping[str, str]) -> tuple[SeamarkClient, str]:
    """Return a client of the server, and the name of the table, from the options `uri`, `token` and `table`.

    The option `path` replaces a missing `table`. The default of `uri` is the environment variable SEAMARK_URL. The
    names of the options are in lower case.

    Raises:
        InvalidRequest: The server or the table is missing.
    """
    uri = options.get("uri") or os.environ.get("SEAMARK_URL")
    table = options.get("table") or options.get("path")
    if not uri or not table:
        raise InvalidRequest(
            "Set option('uri', …) to the server's address, and option('table', …) to a table such as db.events"
        )
    return SeamarkClient(uri, token=options.get("token")), table


def parse_flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the value of a boolean option.

    Raises:
        InvalidRequest: The value is neither true nor false.
    """
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it must be true or false")
    return text == "true"
