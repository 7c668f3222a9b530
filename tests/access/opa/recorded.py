"""The questions to Open Policy Agent and its answers, which the fast tests replay and a slow test asks the real server.

Each answer is that of OPA 1.x for the policy `seamark.rego`.
"""

from __future__ import annotations

from typing import Any

ALLOW, ALLOWED = "/v1/data/seamark/allow", "/v1/data/seamark/allowed"
UNDEFINED = "/v1/data/seamark/no_such_rule"
ANN = {"name": "oidc:ann", "groups": ["oidc-group:shop"]}
ORDERS = {"kind": "table", "namespace": ["shop"], "name": "orders"}
SALARIES = {"kind": "table", "namespace": ["shop"], "name": "salaries"}
STAFF = {"kind": "table", "namespace": ["staff"], "name": "orders"}


def ask(operation: str, privileges: list[str], **objects: Any) -> dict[str, Any]:
    return {"principal": ANN, "operation": operation, "privileges": privileges, "warehouse": "", **objects}


RECORDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (ALLOW, ask("planTableScan", ["plan"], object=ORDERS), {"result": True}),
    (ALLOW, ask("planTableScan", ["plan"], object=SALARIES), {"result": False}),
    (ALLOW, ask("loadCredentials", ["read"], object=STAFF), {"result": False}),
    (ALLOW, ask("dropTable", ["drop"], object=ORDERS), {"result": False}),
    (ALLOW, ask("namespaceExists", ["browse"], object={"kind": "namespace", "namespace": ["shop"]}), {"result": True}),
    (ALLOW, ask("listTimeline", ["browse"], object={"kind": "warehouse", "namespace": []}), {"result": True}),
    (ALLOWED, ask("tableExists", ["browse"], objects=[SALARIES, ORDERS, STAFF]), {"result": [1]}),
    (ALLOWED, ask("tableExists", ["browse"], objects=[SALARIES, STAFF]), {"result": []}),
    (UNDEFINED, ask("planTableScan", ["plan"], object=ORDERS), {}),
]
"""The path, the input and the answer of each request."""
