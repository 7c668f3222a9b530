"""Tests that the analysis limits its work for statements of malicious clients, or refuses such statements."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import sqlglot
from sqlglot import exp

from seamark.connector.analysis.algebra.equivalences import compute_equivalence_classes
from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.queries import RELATIONS_MAX
from seamark.connector.analysis.scans import find_scans
from seamark.connector.duckdb.kinds import replace_node
from seamark.connector.duckdb.statements import DuckDBStatement
from seamark.connector.plans import conditions

COLUMNS = {"x": "long", "y": "long"}
QUERIES_USING_A_NAME_TWICE = {
    "joined with itself": "SELECT a.* FROM {0} a JOIN {0} b ON a.x = b.x",
    "merged": "SELECT x, y FROM {0} UNION ALL SELECT y, x FROM {0}",
    "grouped": "SELECT a.x, max(b.y) y FROM {0} a JOIN {0} b USING (x) GROUP BY a.x",
}


@pytest.mark.parametrize("form", QUERIES_USING_A_NAME_TWICE)
def test_chain_of_names_that_are_used_twice_needs_bounded_work(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, weaken = Counter[str](), conditions.weaken

    def count_calls(*arguments: Any) -> Any:
        calls["weaken"] += 1
        return weaken(*arguments)

    monkeypatch.setattr(conditions, "weaken", count_calls)
    queries = ["SELECT * FROM s.t", *(QUERIES_USING_A_NAME_TWICE[form].format(f"c{number}") for number in range(39))]
    names = ", ".join(f"c{number} AS ({query})" for number, query in enumerate(queries))
    scans = find_scans(f"WITH {names} SELECT * FROM c39 WHERE x = 1", find_columns=lambda _: COLUMNS)
    assert [scan.table for scan in scans] == ["t"]
    assert 0 < calls["weaken"] < 50_000  # Without a limit, a chain of 14 names needs more calls.


def test_condition_reaches_a_name_that_is_used_twice() -> None:
    text = "WITH c AS (SELECT * FROM s.t) SELECT 1 FROM c WHERE x = 1 UNION ALL SELECT 1 FROM c WHERE x = 2"
    (scan,) = find_scans(text, find_columns=lambda _: COLUMNS)
    assert scan.predicate == '("x" = 1 OR "x" = 2)'


def test_long_chain_of_joins_derives_a_bounded_number_of_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The join column of each table is equal to the join columns of all other tables.

    Without a limit, the number of derived conditions grows with the square of the number of joins.
    """
    call_counts, move_columns = Counter[str](), conditions.SemiJoin.move_columns

    def count_calls(semi_join: conditions.SemiJoin, target: Any) -> Any:
        call_counts["semi-joins"] += 1
        return move_columns(semi_join, target)

    monkeypatch.setattr(conditions.SemiJoin, "move_columns", count_calls)
    joins = "".join(f" JOIN s.t a{number} ON a{number}.x = a{number - 1}.x" for number in range(1, 200))
    scans = find_scans(f"SELECT 1 FROM s.t a0{joins} WHERE a199.y = 3 AND a0.x = 1", find_columns=lambda _: COLUMNS)
    assert len(scans) == 200
    assert scans[0].predicate == '"x" = 1'
    assert call_counts["semi-joins"] < 10 * conditions.LEAVES_MAX  # Without a limit, the number is 89,000.


def test_equivalence_classes_contain_every_column_that_equalities_reach() -> None:
    rng = random.Random(3)
    for _ in range(300):
        references = [(source, name) for source in range(4) for name in "ab"]
        equal_pairs = [(rng.choice(references), rng.choice(references)) for _ in range(rng.randint(0, 7))]
        expected = {}
        for start in {reference for pair in equal_pairs for reference in pair}:
            reached_nodes, pending_nodes = {start}, [start]
            while pending_nodes:
                node = pending_nodes.pop()
                new_nodes = {other for pair in equal_pairs if node in pair for other in pair} - reached_nodes
                reached_nodes |= new_nodes
                pending_nodes += new_nodes
            expected[start] = reached_nodes
        assert compute_equivalence_classes(equal_pairs) == expected, equal_pairs


def test_statement_with_too_many_tables_is_not_analysed() -> None:
    def build_text(tables: int) -> str:
        return "SELECT 1 FROM " + ", ".join(f"s.t t{number}" for number in range(tables))

    assert len(find_scans(build_text(RELATIONS_MAX // 4), find_columns=lambda _: COLUMNS)) == RELATIONS_MAX // 4
    assert find_scans(build_text(RELATIONS_MAX), find_columns=lambda _: COLUMNS) == ()
    with pytest.raises(UnsupportedStatement, match="more than"):
        DuckDBStatement(build_text(RELATIONS_MAX))


class _ListWithoutIteration(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the replacement of one element reads the whole list")


def test_replacement_of_a_list_value_does_not_iterate_over_the_list() -> None:
    tree: Any = sqlglot.parse_one("SELECT x IN (1, 2, 3)")
    in_node = tree.find(exp.In)
    values = in_node.args["expressions"]
    in_node.args["expressions"] = _ListWithoutIteration(values)
    replace_node(values[1], exp.Literal.number(9))
    in_node.args["expressions"] = [in_node.args["expressions"][number] for number in range(3)]
    assert tree.sql() == "SELECT x IN (1, 9, 3)"


@pytest.mark.parametrize("seed", range(2))
def test_replace_node_makes_the_same_tree_as_replace_of_sqlglot(seed: int) -> None:
    rng = random.Random(seed)
    text = "SELECT f(a, b), CASE WHEN a = 1 THEN b ELSE (c) END FROM t WHERE a IN (b, c, 1) AND NOT b BETWEEN a AND c"
    for _ in range(30):  # Each time, three columns of two equal trees are replaced, one tree with each function.
        replaced_tree, expected_tree = sqlglot.parse_one(text), sqlglot.parse_one(text)
        for number in rng.sample(range(6), 3):
            for tree, replace in ((replaced_tree, replace_node), (expected_tree, lambda old, new: old.replace(new))):
                hash(tree)  # The tree caches its hash.
                columns = list(tree.find_all(exp.Column))
                replace(columns[number % len(columns)], exp.func("g", exp.column(f"n{number}")))
        assert replaced_tree.sql() == expected_tree.sql()
        assert replaced_tree == expected_tree
        for node in replaced_tree.walk():
            for child in node.iter_expressions():
                assert child.parent is node
                assert child.arg_key is not None
                original_node = node.args[child.arg_key]
                assert original_node is child if child.index is None else original_node[child.index] is child
