"""May this principal do that there? Pure: a table of operations and the grants that a principal carries.

A grant is a role on a namespace and all below it; on the empty path, on the whole catalog. `reader` < `writer` <
`admin`, and each includes the ones before.

| who | may |
|---|---|
| any login | read the configuration, list those namespaces that it has a part in, read the metrics of the server |
| a grant below | list the parents of its namespaces, and learn that they exist |
| reader | list, load, probe, plan, explain, plan tables; credentials to read; send reports; timelines, files, indexes |
| writer | create, commit, index, drop, rename, undrop; create, change and drop namespaces (if empty); plan views |
| writer of the whole catalog | register, which points a name at any file of the warehouse, also one of others |
| admin | purge what was dropped before its retention ends; give and take grants within its namespace |
| admin of the whole catalog | tokens, which are not of any namespace; the audit log |

Dropping is a writer's: it can be undropped. `purgeRequested` on a drop, too, since files stay for the retention. An
operation that touches several places (rename, undrop elsewhere, a transaction of many tables) needs the role in each;
the caller asks once per place. An operation that the table does not know needs an admin of the whole catalog: to forget
a line here locks out, it never lets in.
"""

from __future__ import annotations

import shlex
from enum import Enum

import msgspec

from metaserver.access.principal import RANKS, Principal, Role, show_path
from metaserver.errors import Forbidden
from metaserver.store.port import NamespacePath


class Scope(Enum):
    NAMESPACE = "a grant on the namespace or above it"
    CATALOG = "a grant on the whole catalog"
    SEEN = "a grant on the namespace, above it or below it"
    LOGIN = "any login"


class Rule(msgspec.Struct, frozen=True):
    role: Role
    scope: Scope = Scope.NAMESPACE
    reads: bool = False
    """A reader's operations do in any case."""


_UNKNOWN = Rule(Role.ADMIN, Scope.CATALOG)


def _rules() -> dict[str, Rule]:
    reader = """loadNamespaceMetadata listTables loadTable tableExists loadCredentials reportMetrics signRequest
        listViews loadView viewExists listFunctions loadFunction
        planTableScan fetchPlanningResult cancelPlanning fetchScanTasks
        listDropped listTableMetrics listTimeline listTableTimeline
        listFiles listColumnStats listPartitions explain makePlanTable renewPlanTable leasePlanSnapshots
        listIndexes loadIndex loadIndexBuild listIndexBuildFiles lookupKeys selectRows"""
    writer = """createNamespace dropNamespace updateProperties createTable updateTable dropTable unregisterTable
        renameTable createView replaceView dropView renameView commitTransaction commitChange undrop
        putFunction dropFunction
        putIndex dropIndex startIndexBuild registerIndexFiles finishIndexBuild
        quarantineIndexFile rebuildIndexRegistry listUnheldFiles recordIndexAudit"""
    admin = "purgeDropped addGrant removeGrant"
    rules = {
        name: Rule(role)
        for role, names in ((Role.READER, reader), (Role.WRITER, writer), (Role.ADMIN, admin))
        for name in names.split()
    }
    for name in ("getConfig", "metrics", "listGrants"):
        rules[name] = Rule(Role.READER, Scope.LOGIN)
    for name in ("listNamespaces", "namespaceExists"):
        rules[name] = Rule(Role.READER, Scope.SEEN)
    for name in ("registerTable", "registerView"):
        rules[name] = Rule(Role.WRITER, Scope.CATALOG)
    for name in ("createToken", "revokeToken"):
        rules[name] = Rule(Role.ADMIN, Scope.CATALOG)
    rules["makePlanView"] = Rule(Role.WRITER, reads=True)
    for name in ("listTokens", "listAudit"):
        rules[name] = Rule(Role.ADMIN, Scope.CATALOG, reads=True)
    return rules


RULES = _rules()
"""By operation id: the Iceberg REST specification's for its routes, the OpenAPI document's for ours."""


def changes(operation: str) -> bool:
    """Whether the operation changes something that an audit is about. Unknown operations do, so that none is missed."""
    rule = RULES.get(operation, _UNKNOWN)
    return not rule.reads and rule.role is not Role.READER


class Authorizer:
    """Has no state: replicas and tests may make as many as they like."""

    def require(self, principal: Principal, operation: str, namespace: NamespacePath) -> None:
        """Forbidden unless `principal` may do `operation` in `namespace`; says which grant would allow it."""
        if self.allows(principal, operation, namespace):
            return
        rule = RULES.get(operation, _UNKNOWN)
        wide = rule.scope is Scope.CATALOG or not namespace
        place = "the whole catalog" if wide else f"namespace {show_path(namespace)} or one above it"
        command = f"seamark grant add {shlex.quote(principal.name)} {rule.role.value}"
        if not wide:
            command += f" --namespace {shlex.quote(show_path(namespace))}"
        where = f" in {show_path(namespace)}" if namespace else ""
        raise Forbidden(
            f"{principal.name} may not {operation}{where}: it needs the role {rule.role.value} on {place}. "
            f"An admin gives it with: {command}"
        )

    def require_somewhere(self, principal: Principal, operation: str) -> None:
        """Forbidden unless `principal` may do `operation` in some namespace or other."""
        rule = RULES.get(operation, _UNKNOWN)
        if not any(self.allows(principal, operation, grant.namespace) for grant in principal.grants):
            raise Forbidden(
                f"{principal.name} may not {operation} anywhere: it needs the role {rule.role.value}. "
                f"An admin gives it with: seamark grant add {shlex.quote(principal.name)} {rule.role.value}"
            )

    def allows(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        rule = RULES.get(operation, _UNKNOWN)
        if rule.scope is Scope.LOGIN:
            return True
        if rule.scope is Scope.SEEN:
            # The root is in everybody's sight; what is listed there is filtered.
            return not namespace or self.visible(principal, namespace)
        return self.holds(principal, rule.role, () if rule.scope is Scope.CATALOG else namespace)

    def holds(self, principal: Principal, role: Role, namespace: NamespacePath) -> bool:
        """Whether a grant gives at least `role` on `namespace` or above it."""
        rank = RANKS[role]
        for grant in principal.grants:  # asked of every request: `any` would start a generator each time
            if RANKS.get(grant.role, 0) >= rank and namespace[: len(grant.namespace)] == grant.namespace:
                return True
        return False

    def confines(self, principal: Principal) -> tuple[NamespacePath, ...] | None:
        """The namespaces that `principal` may write, topmost each; None where that is the whole catalog."""
        if self.holds(principal, Role.WRITER, ()):
            return None
        return tuple(grant.namespace for grant in principal.grants if RANKS.get(grant.role, 0) >= Role.WRITER.rank)

    def visible(self, principal: Principal, namespace: NamespacePath) -> bool:
        """Whether a listing may show this namespace: it or something above or below is granted."""
        return any(
            grant.role in RANKS
            and (namespace[: len(grant.namespace)] == grant.namespace or grant.namespace[: len(namespace)] == namespace)
            for grant in principal.grants
        )
