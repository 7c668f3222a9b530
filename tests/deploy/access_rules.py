"""Rules of one Trino with access control by a file, for tests in two schemas: `guarded` and `ruled`. anna owns all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.services.trino import Trino, trino_server

GUARDED = "(definer|invoker|hiding|summary|lending|keeping|opening)(~plan~.*)?"
EVERYTHING = ["SELECT", "INSERT", "DELETE", "UPDATE", "OWNERSHIP", "GRANT_SELECT"]


def _guarded(user: str, table: str, **more: Any) -> dict[str, Any]:
    return {"user": user, "schema": "guarded", "table": table, "privileges": ["SELECT"], **more}


def _ruled(user: str, table: str, **more: Any) -> dict[str, Any]:
    return {"user": user, "schema": "ruled", "table": table, "privileges": ["SELECT"], **more}


def _masked(*columns: str) -> list[dict[str, Any]]:
    return [{"name": one, "mask": "'XXXX'"} for one in columns]


RULES: dict[str, Any] = {
    "catalogs": [{"allow": "all"}],
    "schemas": [{"user": "anna", "owner": True}],
    "tables": [
        {"user": "anna", "privileges": EVERYTHING},
        _guarded("rita", GUARDED),
        _guarded("rolf", "definer"),
        _guarded("filip", GUARDED, filter="id > 4711"),
        _ruled("rita", "orders", filter="country = 'FR'", columns=_masked("card")),
        _ruled("rita", "customers", filter="number < 7"),
        _ruled("rita", "own", columns=_masked("card")),
        _ruled("dan", "orders", columns=[{"name": "card", "allow": False}]),
        _ruled("dan", "customers", privileges=[]),
        _ruled("dan", "grouped", columns=[{"name": "n", "allow": False}]),
        _ruled("sue", "orders|customers", privileges=[]),
        _ruled("sue", "lent", filter="country = 'DE'"),
        _ruled("sue", "grouped", columns=_masked("card")),
        _ruled("sue", "rich", privileges=[]),
        {"schema": "ruled", "privileges": ["SELECT"]},  # the catch-all: plans' names, too
        {"schema": "information_schema", "privileges": ["SELECT"]},
    ],
}


@contextmanager
def open_ruled_trino(folder: Path, uri: str) -> Iterator[Trino]:
    """Over the Seamark server at `uri`."""
    (folder / "rules.json").write_text(json.dumps(RULES))
    control = folder / "access.properties"
    control.write_text(f"access-control.name=file\nsecurity.config-file={folder}/rules.json\n")
    with trino_server(folder / "trino", uri=uri, properties={"access-control.config-files": str(control)}) as trino:
        yield trino
