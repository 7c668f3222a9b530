"""The operations of the Iceberg REST specification, read from its YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SPEC = Path(__file__).parent / "spec" / "rest-catalog-open-api.yaml"
_METHODS = ("get", "post", "delete", "head", "put", "patch")
PLANNING_OPERATIONS = frozenset({"planTableScan", "fetchPlanningResult", "cancelPlanning", "fetchScanTasks"})
"""Operations that only read. Three of them accept an Idempotency-Key, but the server records nothing under it."""


@dataclass(frozen=True)
class Operation:
    id: str
    method: str
    template: str
    has_idempotency_key: bool
    """True if the operation accepts an Idempotency-Key."""

    @property
    def endpoint(self) -> str:
        return f"{self.method} {self.template}"


DRAFTS = (Operation("getEvents", "POST", "/v1/{prefix}/events", has_idempotency_key=False),)
"""Operations of drafts of the specification that the server serves."""


@cache
def read_specification() -> dict[str, Any]:
    document = yaml.load(SPEC.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert isinstance(document, dict)
    return document


@cache
def read_operations() -> tuple[Operation, ...]:
    """Return all operations of the specification."""
    operations = []
    for template, methods in read_specification()["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                parameter_references = [parameter.get("$ref", "") for parameter in operation.get("parameters", ())]
                has_key = "#/components/parameters/idempotency-key" in parameter_references
                operations.append(Operation(operation["operationId"], method.upper(), template, has_key))
    return tuple(operations)
