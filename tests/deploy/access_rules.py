"""File-based access control for tests in the schemas `guarded`, `ruled` and `cubed`.

The user anna owns all tables. The user of all other tests also owns all tables, so that Trino answers as without
access control.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OWNERS = "anna|tests"
GUARDED = "(definer|invoker|hiding|summary|lending|keeping|opening)(~plan~.*)?"
EVERYTHING = ["SELECT", "INSERT", "DELETE", "UPDATE", "OWNERSHIP", "GRANT_SELECT"]


def _guarded(user: str, table: str, **more: Any) -> dict[str, Any]:
    return {"user": user, "schema": "guarded", "table": table, "privileges": ["SELECT"], **more}


def _ruled(user: str, table: str, **more: Any) -> dict[str, Any]:
    return {"user": user, "schema": "ruled", "table": table, "privileges": ["SELECT"], **more}


def _cubed(user: str, **more: Any) -> dict[str, Any]:
    return {"user": user, "schema": "cubed", "table": "orders", "privileges": ["SELECT"], **more}


def _masked(*columns: str) -> list[dict[str, Any]]:
    return [{"name": column, "mask": "'XXXX'"} for column in columns]


RULES: dict[str, Any] = {
    "catalogs": [{"allow": "all"}],
    "schemas": [{"user": OWNERS, "owner": True}],
    "tables": [
        {"user": OWNERS, "privileges": EVERYTHING},
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
        _cubed("rita", filter="country = 'FR'", columns=_masked("card")),
        _cubed("dan", columns=[{"name": "card", "allow": False}]),
        _cubed("sue", privileges=[]),
        {"schema": "ruled", "privileges": ["SELECT"]},  # The catch-all rule, which includes the names of plans
        {"schema": "information_schema", "privileges": ["SELECT"]},
    ],
}


def access_control(folder: Path) -> dict[str, str]:
    """Write the files of `RULES` to `folder`, and return the Trino properties that use them."""
    (folder / "rules.json").write_text(json.dumps(RULES))
    control = folder / "access.properties"
    control.write_text(f"access-control.name=file\nsecurity.config-file={folder}/rules.json\n")
    return {"access-control.config-files": str(control)}
