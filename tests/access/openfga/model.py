"""Writes the authorization model for OpenFGA to `deploy/openfga/model.json`: `python -m tests.access.openfga.model`.

The model has the privileges of the catalog on each type of object. The relations of a privilege `read` are:

- `read` and `deny_read`, which an operator writes;
- `given_read`: granted on the object or above it, by `read`, by a privilege that includes it, or by a role;
- `refused_read`: denied on the object or above it, also by the denial of an included privilege;
- `can_read`, for which the server asks: given and not refused.
"""

from __future__ import annotations

import json
from typing import Any

from tests.access.test_rights_matrix import INCLUDED, PRIVILEGES
from tests.services.process import DEPLOY

PATH = DEPLOY / "openfga" / "model.json"
ROLES = ("reader", "writer", "admin", "owner")
CONTAINERS = {
    "server": [],
    "warehouse": ["server"],
    "namespace": ["warehouse", "namespace"],
    "table": ["namespace"],
    "function": ["namespace"],
}
"""The types that contain objects of each type."""


def name_relation(privilege: str) -> str:
    return privilege.replace("-", "_")


def build_model() -> dict[str, Any]:
    """Return the authorization model in the JSON of OpenFGA's API."""
    group = {
        "type": "group",
        "relations": {"member": {"this": {}}},
        "metadata": {"relations": {"member": {"directly_related_user_types": list_holders()}}},
    }
    types = [_build_type(name, containers) for name, containers in CONTAINERS.items()]
    return {"schema_version": "1.1", "type_definitions": [{"type": "user"}, group, *types]}


def list_holders() -> list[dict[str, Any]]:
    """Return the types of holders that a relation can have: a user, all users, and the members of a group."""
    return [{"type": "user"}, {"type": "user", "wildcard": {}}, {"type": "group", "relation": "member"}]


def _build_type(name: str, containers: list[str]) -> dict[str, Any]:
    """Return the definition of an object type for OpenFGA, with the relations that the module's docstring lists.

    Args:
        name: The type, a key of `CONTAINERS`.
        containers: The types that contain objects of this type.
    """
    direct_relations = [*ROLES, *(name_relation(privilege) for privilege in PRIVILEGES)]
    direct_relations += [f"deny_{name_relation(privilege)}" for privilege in PRIVILEGES]
    if name == "namespace":
        direct_relations.append("lister")
    relations: dict[str, Any] = {relation: {"this": {}} for relation in direct_relations}
    metadata: dict[str, Any] = {
        relation: {"directly_related_user_types": list_holders()} for relation in direct_relations
    }
    if containers:
        relations["parent"] = {"this": {}}
        metadata["parent"] = {"directly_related_user_types": [{"type": container} for container in containers]}
    if name == "server":
        relations["own_warehouse"] = {"this": {}}
        metadata["own_warehouse"] = {"directly_related_user_types": [{"type": "warehouse"}]}
    for privilege in PRIVILEGES:
        relation_name = name_relation(privilege)
        given_by = [_refer_to_relation(name_relation(other)) for other in PRIVILEGES if privilege in INCLUDED[other]]
        given_by += [_refer_to_relation(role) for role in ROLES if privilege in INCLUDED[role]]
        denials = [f"deny_{name_relation(other)}" for other in PRIVILEGES if other in INCLUDED[privilege]]
        refused_by = [_refer_to_relation(denial) for denial in denials]
        if containers:
            given_by.append(_refer_to_container("parent", f"given_{relation_name}"))
            refused_by.append(_refer_to_container("parent", f"refused_{relation_name}"))
        if name == "server":
            # An admin of the server's own warehouse is an admin of the server, and denials on this warehouse apply.
            given_by.append(_refer_to_container("own_warehouse", "admin"))
            refused_by += [_refer_to_container("own_warehouse", denial) for denial in denials]
        relations[f"given_{relation_name}"] = {"union": {"child": given_by}}
        relations[f"refused_{relation_name}"] = {"union": {"child": refused_by}}
        relations[f"can_{relation_name}"] = {
            "difference": {
                "base": _refer_to_relation(f"given_{relation_name}"),
                "subtract": _refer_to_relation(f"refused_{relation_name}"),
            }
        }
    if name == "namespace":
        relations["can_list"] = {"union": {"child": [_refer_to_relation("can_browse"), _refer_to_relation("lister")]}}
    elif name == "warehouse":
        relations["can_list"] = _refer_to_relation("can_browse")
    return {"type": name, "relations": relations, "metadata": {"relations": metadata}}


def _refer_to_relation(relation: str) -> dict[str, Any]:
    return {"computedUserset": {"object": "", "relation": relation}}


def _refer_to_container(container: str, relation: str) -> dict[str, Any]:
    return {"tupleToUserset": {"tupleset": {"relation": container}, "computedUserset": {"relation": relation}}}


def format_model() -> str:
    """Return the authorization model for OpenFGA as JSON, with a line for each type of object."""
    model = build_model()
    types = ",\n".join(
        json.dumps(type_definition, separators=(",", ":")) for type_definition in model["type_definitions"]
    )
    return f'{{"schema_version":"{model["schema_version"]}","type_definitions":[\n{types}\n]}}\n'


if __name__ == "__main__":
    PATH.write_text(format_model())
