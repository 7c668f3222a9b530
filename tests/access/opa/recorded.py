"""Recorded requests to Open Policy Agent (OPA), and its answers.

The fast tests replay the answers. A slow test compares them with a real OPA 1.x server that has the policy
`seamark.rego`.
"""

from __future__ import annotations

from typing import Any

ALLOW, ALLOWED = "/v1/data/seamark/allow", "/v1/data/seamark/allowed"
UNDEFINED = "/v1/data/seamark/no_such_rule"
ANN = {"name": "oidc:ann", "groups": ["oidc-group:shop"]}
ORDERS = {"kind": "table", "namespace": ["shop"], "name": "orders"}
SALARIES = {"kind": "table", "namespace": ["shop"], "name": "salaries"}
STAFF = {"kind": "table", "namespace": ["staff"], "name": "orders"}


def build_question(operation: str, privileges: list[str], **objects: Any) -> dict[str, Any]:
    return {"principal": ANN, "operation": operation, "privileges": privileges, "warehouse": "", **objects}


RECORDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (ALLOW, build_question("planTableScan", ["plan"], object=ORDERS), {"result": True}),
    (ALLOW, build_question("planTableScan", ["plan"], object=SALARIES), {"result": False}),
    (ALLOW, build_question("loadCredentials", ["read"], object=STAFF), {"result": False}),
    (ALLOW, build_question("dropTable", ["drop"], object=ORDERS), {"result": False}),
    (
        ALLOW,
        build_question("namespaceExists", ["browse"], object={"kind": "namespace", "namespace": ["shop"]}),
        {"result": True},
    ),
    (
        ALLOW,
        build_question("listTimeline", ["browse"], object={"kind": "warehouse", "namespace": []}),
        {"result": True},
    ),
    (ALLOWED, build_question("tableExists", ["browse"], objects=[SALARIES, ORDERS, STAFF]), {"result": [1]}),
    (ALLOWED, build_question("tableExists", ["browse"], objects=[SALARIES, STAFF]), {"result": []}),
    (UNDEFINED, build_question("planTableScan", ["plan"], object=ORDERS), {}),
]
"""The path, the input and the answer of each request."""
