"""Recorded requests to Open Policy Agent (OPA), and its answers.

The fast tests replay the answers. A slow test compares them with a real OPA 1.x server that has the policy
`seamark.rego`.
"""

from __future__ import annotations

from typing import Any

ALLOW_PATH, BATCH_PATH = "/v1/data/seamark/allow", "/v1/data/seamark/allowed"
UNDEFINED_PATH = "/v1/data/seamark/no_such_rule"
ANN = {"name": "oidc:ann", "groups": ["oidc-group:shop"]}
ORDERS = {"kind": "table", "namespace": ["shop"], "name": "orders"}
SALARIES = {"kind": "table", "namespace": ["shop"], "name": "salaries"}
STAFF = {"kind": "table", "namespace": ["staff"], "name": "orders"}


def build_question(operation: str, privileges: list[str], **objects: Any) -> dict[str, Any]:
    return {"principal": ANN, "operation": operation, "privileges": privileges, "warehouse": "", **objects}


RECORDED_REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (ALLOW_PATH, build_question("planTableScan", ["plan"], object=ORDERS), {"result": True}),
    (ALLOW_PATH, build_question("planTableScan", ["plan"], object=SALARIES), {"result": False}),
    (ALLOW_PATH, build_question("loadCredentials", ["read"], object=STAFF), {"result": False}),
    (ALLOW_PATH, build_question("dropTable", ["drop"], object=ORDERS), {"result": False}),
    (
        ALLOW_PATH,
        build_question("namespaceExists", ["browse"], object={"kind": "namespace", "namespace": ["shop"]}),
        {"result": True},
    ),
    (
        ALLOW_PATH,
        build_question("listTimeline", ["browse"], object={"kind": "warehouse", "namespace": []}),
        {"result": True},
    ),
    (BATCH_PATH, build_question("tableExists", ["browse"], objects=[SALARIES, ORDERS, STAFF]), {"result": [1]}),
    (BATCH_PATH, build_question("tableExists", ["browse"], objects=[SALARIES, STAFF]), {"result": []}),
    (UNDEFINED_PATH, build_question("planTableScan", ["plan"], object=ORDERS), {}),
]
"""The path, the input and the answer of each request."""
