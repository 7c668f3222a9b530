"""Spark's own trees, of queries and of expressions, as far as they are read here, over py4j.

Nothing of SQL is read by us: Spark's parser says where a table's name stands, its analyser what each name means, and
its rules bring the query into a shape in which little has to be known of the rest. What is built on top of that is in
`relations.py` (which of a table's rows can matter) and `conditions.py` (what that is in the catalog's words).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

Node: TypeAlias = Any
"""A tree's node in the JVM."""
T = TypeVar("T")
_SCHEMAS = "org.apache.iceberg.SchemaParser"
_ATTRIBUTE = re.compile(r"(.*)#([0-9]+)[A-Za-z]?", re.DOTALL)
"""As Spark shows one."""
_SPARK = "org.apache.spark.sql."
_OPTIMIZER, _ANALYSIS = f"{_SPARK}catalyst.optimizer.", f"{_SPARK}catalyst.analysis."
_FIRST = (
    f"{_OPTIMIZER}EliminateResolvedHint",
    f"{_ANALYSIS}EliminateSubqueryAliases",
    f"{_ANALYSIS}EliminateView",
    f"{_OPTIMIZER}ReplaceExpressions",
    f"{_OPTIMIZER}RewriteWithExpression",
    f"{_OPTIMIZER}RewriteNonCorrelatedExists",
    f"{_OPTIMIZER}PullupCorrelatedPredicates",
    f"{_OPTIMIZER}RewritePredicateSubquery",
    f"{_OPTIMIZER}RewriteCorrelatedScalarSubquery",
)
_FOLDING = f"{_OPTIMIZER}ConstantFolding"
_ROUNDS = 3
_EACH_ROUND = (
    f"{_OPTIMIZER}BooleanSimplification",
    f"{_OPTIMIZER}SimplifyCasts",
    f"{_OPTIMIZER}UnwrapCastInBinaryComparison",
    f"{_OPTIMIZER}LikeSimplification",
    f"{_OPTIMIZER}CombineFilters",
    f"{_OPTIMIZER}PushDownPredicates",
    f"{_OPTIMIZER}EliminateOuterJoin",
    f"{_OPTIMIZER}PushDownLeftSemiAntiJoin",
    f"{_OPTIMIZER}InferFiltersFromConstraints",
)
"""None of them looks at data or statistics, or builds a scan."""


def items(given: Any) -> list[Any]:
    """Of a Seq of Scala's."""
    return [given.apply(at) for at in range(given.size())]


class Catalyst:
    """Of one session."""

    def __init__(self, spark: SparkSession) -> None:
        self.session = spark._jsparkSession
        self._jvm = cast("Any", spark._jvm)
        self._kinds: dict[str, str] = {}

    def kind(self, node: Node) -> str:
        """The name of its class, if that is Spark's own."""
        name = str(node.getClass().getName())
        found = self._kinds.get(name)
        if found is None:
            found = self._kinds[name] = name.rpartition(".")[2] if name.startswith(_SPARK) else ""
        return found

    def parsed(self, text: str) -> Node:
        return self.session.sessionState().sqlParser().parsePlan(text)

    def names(self, text: str) -> tuple[str, ...]:
        """Of a reference to a table."""
        return tuple(items(self.session.sessionState().sqlParser().parseMultipartIdentifier(text)))

    def iceberg_schema(self, table: Any) -> dict[str, Any]:
        """Of an Iceberg table, as its metadata has it."""
        schema: dict[str, Any] = json.loads(getattr(self._jvm, _SCHEMAS).toJson(table.schema()))
        return schema

    def has_cached(self) -> bool:
        return not self.session.sharedState().cacheManager().isEmpty()

    @cached_property
    def _current(self) -> Any:
        return getattr(self._jvm, f"{_SPARK}catalyst.trees.TreePattern").CURRENT_LIKE()

    # Expressions

    def id_of(self, attribute: Node) -> int:
        return int(attribute.exprId().id())

    def type_of(self, expression: Node) -> str:
        return str(expression.dataType().catalogString())

    def is_constant(self, expression: Node) -> bool:
        """And the same whenever it is evaluated."""
        return expression.foldable() and expression.deterministic() and not expression.containsPattern(self._current)

    def operands(self, expression: Node, kind: str) -> list[Node]:
        """Of nested ANDs, or ORs, as one; from left to right."""
        found, left = [], [expression]
        while left:
            one = left.pop()
            if self.kind(one) == kind:
                left += [one.right(), one.left()]
            else:
                found.append(one)
        return found

    # Plans

    def leaves(self, plan: Node) -> list[Node]:
        """Those of its subqueries, too."""
        return [leaf for one in (plan, *items(plan.subqueriesAll())) for leaf in items(one.collectLeaves())]

    def aliased(self, plan: Node, read: Callable[[str], T | None]) -> Iterator[tuple[Node, T | None]]:
        """All leaves, and what `read` makes of the names that stand right above them."""
        left: list[tuple[Node, T | None]] = [(plan, None)]
        while left:
            node, found = left.pop()
            if self.kind(node) == "SubqueryAlias":
                found = found if found is not None else read(str(node.alias()))
                left.append((node.child(), found))
                continue
            below = [*items(node.children()), *items(node.subqueries())]
            left += [(one, None) for one in below]
            if node.children().isEmpty():
                yield node, found

    def attributes(self, leaf: Node) -> list[tuple[int, str]]:
        """Ids and names, in one call: tables may have a thousand."""
        found = [_ATTRIBUTE.fullmatch(one) for one in str(leaf.output().mkString("\0")).split("\0")]
        return [(int(one[2]), one[1]) for one in found if one is not None]

    def is_relation(self, leaf: Node) -> bool:
        """A table's, of a catalog."""
        return self.kind(leaf) == "DataSourceV2Relation"

    def inlined(self, plan: Node) -> Node:
        """With WITH put in its places."""
        return getattr(self._jvm, f"{_OPTIMIZER}InlineCTE")(True, False).apply(plan)

    def simplified(self, plan: Node) -> Node:
        """A plan that has the same rows, whatever the tables hold: subqueries made joins as far as they can be,
        conditions near the tables."""
        for rule in _FIRST:
            plan = self._applied(rule, plan)
        # Folded now, what time it is would be so for ever.
        folding = () if plan.containsPattern(self._current) else (_FOLDING,)
        for _ in range(_ROUNDS):
            before = plan
            for rule in (*folding, *_EACH_ROUND):
                plan = self._applied(rule, plan)
            if plan.fastEquals(before):
                break
        return plan

    def _applied(self, rule: str, plan: Node) -> Node:
        """As it is where this version of Spark has no such rule, or it does not suit the plan."""
        try:
            return getattr(self._jvm, f"{rule}$").__getattr__("MODULE$").apply(plan)
        except (Py4JError, PySparkException, TypeError):
            return plan
