"""File-based access control for tests in the schemas `guarded`, `ruled` and `cubed`.

The user anna owns all tables. The user of all other tests also owns all tables, so that Trino answers as without
access control.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OWNERS = "anna|tests"
# The views, and the names of their plans
GUARDED_VIEWS = "(definer|invoker|hiding|summary|lending|keeping|opening)(~plan~.*)?"
ALL_PRIVILEGES = ["SELECT", "INSERT", "DELETE", "UPDATE", "OWNERSHIP", "GRANT_SELECT"]


def _build_guarded_rule(user: str, table: str, **fields: Any) -> dict[str, Any]:
    return {"user": user, "schema": "guarded", "table": table, "privileges": ["SELECT"], **fields}


def _build_ruled_rule(user: str, table: str, **fields: Any) -> dict[str, Any]:
    return {"user": user, "schema": "ruled", "table": table, "privileges": ["SELECT"], **fields}


def _build_cubed_rule(user: str, **fields: Any) -> dict[str, Any]:
    return {"user": user, "schema": "cubed", "table": "orders|areas", "privileges": ["SELECT"], **fields}


def _build_column_masks(*columns: str) -> list[dict[str, Any]]:
    return [{"name": column, "mask": "'XXXX'"} for column in columns]


RULES: dict[str, Any] = {
    "catalogs": [{"allow": "all"}],
    "schemas": [{"user": OWNERS, "owner": True}],
    "tables": [
        {"user": OWNERS, "privileges": ALL_PRIVILEGES},
        _build_guarded_rule("rita", GUARDED_VIEWS),
        _build_guarded_rule("rolf", "definer"),
        _build_guarded_rule("filip", GUARDED_VIEWS, filter="id > 4711"),
        _build_ruled_rule("rita", "orders", filter="country = 'FR'", columns=_build_column_masks("card")),
        _build_ruled_rule("rita", "customers", filter="number < 7"),
        _build_ruled_rule("rita", "own", columns=_build_column_masks("card")),
        _build_ruled_rule("dan", "orders", columns=[{"name": "card", "allow": False}]),
        _build_ruled_rule("dan", "customers", privileges=[]),
        _build_ruled_rule("dan", "grouped", columns=[{"name": "n", "allow": False}]),
        _build_ruled_rule("sue", "orders|customers", privileges=[]),
        _build_ruled_rule("sue", "lent", filter="country = 'DE'"),
        _build_ruled_rule("sue", "grouped", columns=_build_column_masks("card")),
        _build_ruled_rule("sue", "rich", privileges=[]),
        _build_cubed_rule("rita", filter="country = 'FR'", columns=_build_column_masks("card")),
        _build_cubed_rule("dan", columns=[{"name": "card", "allow": False}]),
        _build_cubed_rule("sue", privileges=[]),
        {"user": "rita|dan|sue", "schema": "cubed", "table": "sales|kinds", "privileges": ["SELECT"]},
        {"schema": "ruled", "privileges": ["SELECT"]},  # This rule also applies to the names of plans.
        {"schema": "information_schema", "privileges": ["SELECT"]},
    ],
}


def write_access_control(folder: Path) -> dict[str, str]:
    """Write the files of `RULES` to `folder`, and return the Trino properties that use them."""
    (folder / "rules.json").write_text(json.dumps(RULES))
    control = folder / "access.properties"
    control.write_text(f"access-control.name=file\nsecurity.config-file={folder}/rules.json\n")
    return {"access-control.config-files": str(control)}
