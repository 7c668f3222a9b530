"""The class of an invalid input, and parts that several inputs share.

In a body, `{location}` and `{view}` stand for the metadata files of the table `db.t` and the view `db.v`, and
`{warehouse}` stands for the warehouse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.api.client import SCHEMA

BODY_LIMIT_BYTES = 1 << 18
NAMESPACES_PATH = "/v1/namespaces"
NAMESPACE_PATH = f"{NAMESPACES_PATH}/db"
TABLES_PATH = f"{NAMESPACE_PATH}/tables"
VIEWS_PATH = f"{NAMESPACE_PATH}/views"
BAD_REQUEST = "BadRequestException"
BEYOND_LONG = 2**63


@dataclass(frozen=True)
class BadInput:
    group: str
    case: str
    method: str
    path: str
    body: Any = None
    """JSON, or raw bytes"""
    status: int = 400
    type: str = BAD_REQUEST
    headers: tuple[tuple[str, str], ...] = ()


def build_table_commit(*updates: Any, requirements: Any = ()) -> dict[str, Any]:
    return {"requirements": list(requirements), "updates": list(updates)}


def make_table(**fields: Any) -> dict[str, Any]:
    return {"name": "new", "schema": SCHEMA, **fields}
