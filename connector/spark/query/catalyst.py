"""Gives access to Spark's plans and expressions over py4j.

Spark itself parses the SQL. Its parser knows the positions of table names, its analyser resolves names, and its
optimiser rules bring the plan into a simple form. `plan_reader.py` and `conditions.py` read that plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from seamark.connector.spark.scala import OPTIMIZER, SPARK, find_statics, to_list, to_strings

Node: TypeAlias = Any
"""A node of a plan or of an expression, in the JVM."""
T = TypeVar("T")
_ATTRIBUTE = re.compile(r"(.*)#([0-9]+)[A-Za-z]?", re.DOTALL)
"""The text form of an attribute in Spark: its name and its id."""
_LEVEL = re.compile(r"[A-Za-z0-9_]+|`[^`]+`")
_IDENTIFIER = re.compile(rf"Some\(((?:{_LEVEL.pattern})(?:\.(?:{_LEVEL.pattern}))*)\)")
"""The text form of an existing table identifier (`Some` in Scala).

Spark puts backquotes around each level that is not a plain word, and doubles the backquotes in the level.
"""
_ANALYSIS = f"{SPARK}catalyst.analysis."
_FIRST_RULES = (
    f"{OPTIMIZER}EliminateResolvedHint",
    f"{_ANALYSIS}EliminateSubqueryAliases",
    f"{_ANALYSIS}EliminateView",
    f"{OPTIMIZER}ReplaceExpressions",
    f"{OPTIMIZER}RewriteWithExpression",
    f"{OPTIMIZER}RewriteNonCorrelatedExists",
    f"{OPTIMIZER}PullupCorrelatedPredicates",
    f"{OPTIMIZER}RewritePredicateSubquery",
    f"{OPTIMIZER}RewriteCorrelatedScalarSubquery",
    f"{OPTIMIZER}RewriteLateralSubquery",
)
_LEAVES = frozenset({"DataSourceV2Relation", "UnresolvedRelation", "OneRowRelation", "LocalRelation"})
_UNARY = frozenset(
    {"Aggregate", "Distinct", "Filter", "GlobalLimit", "LocalLimit", "Offset", "Project", "Sort", "SubqueryAlias"}
    | {"UnresolvedHaving", "View", "Window"}
)
"""Kinds of nodes with a single child. Calling `child()` on them saves two calls to the JVM."""
_FOLDING = f"{OPTIMIZER}ConstantFolding"
_ROUNDS_MAX = 3
"""The maximum number of rounds in which the rules are applied. A round that changes nothing is the last."""
_RULES_OF_EACH_ROUND = (
    f"{OPTIMIZER}BooleanSimplification",
    f"{OPTIMIZER}SimplifyCasts",
    f"{OPTIMIZER}UnwrapCastInBinaryComparison",
    f"{OPTIMIZER}LikeSimplification",
    f"{OPTIMIZER}CombineFilters",
    f"{OPTIMIZER}PushDownPredicates",
    f"{OPTIMIZER}EliminateOuterJoin",
    f"{OPTIMIZER}PushDownLeftSemiAntiJoin",
    f"{OPTIMIZER}InferFiltersFromConstraints",
)
"""Optimiser rules that are applied in each round. None of them reads data or statistics, or builds a scan."""


class Catalyst:
    """Access to the plans of one Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self.session = spark._jsparkSession
        self._statics = find_statics(spark)
        self._kinds: dict[str, str] = {}
        self._ids: dict[str, int] = {}
        self._types: dict[str, str] = {}
        """Kinds, ids and types of nodes, by py4j's id of the reference to the node.

        Py4j never uses such an id again. A call to the JVM takes 0.1 ms, and a query needs a thousand of these values.
        """

    def find_kind(self, node: Node) -> str:
        """Return the simple name of the node's class, or "" if the class does not belong to Spark."""
        kind = self._kinds.get(node._target_id)
        if kind is None:
            name = str(self._statics.name_of(node, ""))
            kind = self._kinds[node._target_id] = name.rpartition(".")[2] if name.startswith(SPARK) else ""
        return kind

    @cached_property
    def _parser(self) -> Any:
        return self.session.sessionState().sqlParser()

    def parse(self, text: str) -> Node:
        return self._parser.parsePlan(text)

    def analyze(self, plan: Node) -> Node:
        """Return the plan after Spark's analyser has resolved it. The plan is not run.

        Raises:
            PySparkException: Spark does not accept the plan.
        """
        return self.session.sessionState().executePlan(plan, self._statics.skip_mode).analyzed()

    def parse_names(self, text: str) -> tuple[str, ...]:
        """Return the levels of a table name."""
        return tuple(to_strings(self._parser.parseMultipartIdentifier(text)))

    def read_iceberg_schema(self, table: Any) -> dict[str, Any]:
        """Return the schema of an Iceberg table in the form of the table metadata."""
        schema: dict[str, Any] = json.loads(self._statics.schema_json(table.schema()))
        return schema

    def read_iceberg_snapshot(self, table: Any) -> dict[str, Any] | None:
        """Return the current snapshot of an Iceberg table in the form of the table metadata."""
        snapshot = table.currentSnapshot()
        return None if snapshot is None else json.loads(self._statics.snapshot_json(snapshot))

    def read_property(self, table: Any, name: str) -> str:
        """Return a property of an Iceberg table, or "" if it is not set."""
        return str(table.properties().get(name) or "")

    def has_cached(self) -> bool:
        return not self.session.sharedState().cacheManager().isEmpty()

    @property
    def _current(self) -> Any:
        return self._statics.current_like

    # Expressions

    def read_id(self, attribute: Node) -> int:
        """Return the id of an attribute, by which Spark distinguishes attributes of the same name."""
        number = self._ids.get(attribute._target_id)
        if number is None:
            text = None
            # The text form of these nodes ends in the id.
            if self.find_kind(attribute) in (
                "AttributeReference",
                "Alias",
            ):
                text = _ATTRIBUTE.fullmatch(str(attribute.toString()))
            number = int(attribute.exprId().id()) if text is None else int(text[2])
            self._ids[attribute._target_id] = number
        return number

    def read_type(self, expression: Node) -> str:
        kind = self._types.get(expression._target_id)
        if kind is None:
            kind = self._types[expression._target_id] = str(expression.dataType().catalogString())
        return kind

    def remove_identity_casts(self, expression: Node) -> Node:
        """Return an expression without casts to the type that it already has.

        Spark's analyser adds such casts to IN.
        """
        while self.find_kind(expression) == "Cast" and self.read_type(expression.child()) == self.read_type(expression):
            expression = expression.child()
        return expression

    def is_constant(self, expression: Node) -> bool:
        """Return whether the expression has the same value whenever it is evaluated.

        For Spark, the current time is foldable and deterministic, so it is excluded separately.
        """
        return expression.foldable() and expression.deterministic() and not expression.containsPattern(self._current)

    def has_current_time(self, plan: Node) -> bool:
        """Return whether an expression in the plan uses the current time."""
        return bool(plan.containsPattern(self._current))

    def list_operands(self, expression: Node, kind: str) -> list[Node]:
        """Return the operands of nested ANDs or ORs, from left to right."""
        operands, pending = [], [expression]
        while pending:
            node = pending.pop()
            if self.find_kind(node) == kind:
                pending += [node.right(), node.left()]
            else:
                operands.append(node)
        return operands

    # Plans

    def list_children(self, node: Node) -> list[Node]:
        kind = self.find_kind(node)
        if kind in _LEAVES:
            return []
        if kind in _UNARY:
            return [node.child()]
        return [node.left(), node.right()] if kind == "Join" else to_list(node.children())

    def has_subqueries(self, plan: Node) -> bool:
        """Return whether an expression in the plan has a subquery."""
        return bool(plan.containsPattern(self._statics.plan_expression))

    def leaves(self, plan: Node) -> list[Node]:
        """Return the leaves of the plan and of its subqueries: the nodes without children, such as tables."""
        return [leaf for query in (plan, *to_list(plan.subqueriesAll())) for leaf in to_list(query.collectLeaves())]

    def find_aliased_leaves(self, plan: Node, read_leaf: Callable[[str], T | None]) -> Iterator[tuple[Node, T | None]]:
        """Yield all leaves of the plan.

        Each leaf is in a pair with the result of `read_leaf` for the name of the alias directly above the leaf. It is
        None if there is no alias. If several aliases follow each other, the outermost alias with a result is used.
        """
        remaining_nodes: list[tuple[Node, T | None]] = [(plan, None)]
        with_subqueries = self.has_subqueries(plan)
        while remaining_nodes:
            node, alias = remaining_nodes.pop()
            if self.find_kind(node) == "SubqueryAlias":
                alias = alias if alias is not None else read_leaf(str(node.alias()))
                remaining_nodes.append((node.child(), alias))
                continue
            children = self.list_children(node)
            child_nodes = [*children, *(to_list(node.subqueries()) if with_subqueries else ())]
            remaining_nodes += [(child, None) for child in child_nodes]
            if not children:
                yield node, alias

    def list_attributes(self, plan: Node) -> list[tuple[int, str]]:
        """Return the ids and names of the plan's outputs.

        The method makes only two calls to the JVM, because tables may have a thousand columns.
        """
        return self._read_ids_and_names(plan.output())

    def list_reference_ids(self, node: Node) -> frozenset[int]:
        """Return the ids of the attributes in an expression, or in all expressions of a plan node."""
        return frozenset(number for number, _ in self.list_references(node))

    def list_references(self, node: Node) -> list[tuple[int, str]]:
        """Return the ids and names of the attributes in an expression, or in all expressions of a plan node."""
        return self._read_ids_and_names(node.references().toSeq())

    def _read_ids_and_names(self, attributes: Node) -> list[tuple[int, str]]:
        """Return the ids and names of attributes.

        Further calls to the JVM are needed for an attribute whose text form is unknown.
        """
        ids_and_names = []
        for place, text in enumerate(to_strings(attributes)):
            match = _ATTRIBUTE.fullmatch(text)
            if match is None:
                attribute = attributes.apply(place)
                ids_and_names.append((self.read_id(attribute), str(attribute.name())))
            else:
                ids_and_names.append((int(match[2]), match[1]))
        return ids_and_names

    def read_class_name(self, node: Node) -> str:
        """Return the full name of the node's class."""
        return str(self._statics.name_of(node, ""))

    def read_identifier(self, relation: Node) -> tuple[str, ...] | None:
        """Return the namespace levels and the name of a catalog table, or None for another relation.

        The method parses the text form of the identifier. Reading each level alone would take a call to the JVM
        for each level, and another call to release each object.
        """
        identifier = relation.identifier()
        match = _IDENTIFIER.fullmatch(str(identifier.toString()))
        if match is not None:
            return tuple(level.strip("`") for level in _LEVEL.findall(match[1]))
        if identifier.isEmpty():
            return None
        identifier_object = identifier.get()
        return (*identifier_object.namespace(), str(identifier_object.name()))

    def is_catalog_table(self, leaf: Node) -> bool:
        """Return whether the leaf is a table of a catalog."""
        return self.find_kind(leaf) == "DataSourceV2Relation"

    def inline_with(self, plan: Node) -> Node:
        """Return the plan with each reference to a query of WITH replaced by the query."""
        return self._statics.inline_cte.apply(plan)

    def simplify(self, plan: Node) -> Node:
        """Return a plan that has the same rows for any data, but joins in place of subqueries.

        Conditions are pushed down to the tables. Rules of Spark's optimiser are applied until the plan no longer
        changes, at most `_ROUNDS_MAX` times.
        """
        for rule in _FIRST_RULES:
            plan = self._apply(rule, plan)
        # Constant folding must not replace the current time by a constant.
        folding_rules = () if plan.containsPattern(self._current) else (_FOLDING,)
        for _ in range(_ROUNDS_MAX):
            previous_plan = plan
            for rule in (*folding_rules, *_RULES_OF_EACH_ROUND):
                plan = self._apply(rule, plan)
            if plan.fastEquals(previous_plan):
                break
        return plan

    def _apply(self, rule: str, plan: Node) -> Node:
        """Apply a rule of Spark's optimiser.

        The plan stays unchanged if this version of Spark does not have the rule, or if the rule fails.
        """
        try:
            return self._statics.find_object(rule).apply(plan)
        except (Py4JError, PySparkException, TypeError):
            return plan
