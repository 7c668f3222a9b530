"""Tests of Trino's answer about its access rules, which decides whether a rewritten statement may return its rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seamark.connector.trino.protocol.access_rules import PlanInputs, RuleDecision, decide_access
from tests.connector.trino.protocol import build_rules, build_table

T, U, V = ("lake", "db", "t"), ("lake", "db", "u"), ("lake", "db", "v")
JOINED_INPUTS = PlanInputs({T: frozenset({"x", "k"}), U: frozenset({"y", "k"})}, limiting=frozenset({U}))
AGGREGATED_INPUTS = PlanInputs({T: frozenset({"x"})}, aggregated=frozenset({T}))
VIEW_INPUTS = PlanInputs({T: frozenset({"x"})}, views=frozenset({V}))


def decide_by_rules(inputs: PlanInputs, *tables: dict[str, Any], **properties: Any) -> RuleDecision:
    return decide_access(json.dumps(build_rules(*tables, **properties)).encode(), inputs)


@pytest.mark.parametrize(
    ("plan_inputs", "tables", "verdict"),
    [
        (JOINED_INPUTS, [build_table("t"), build_table("u")], RuleDecision.NO_RULES),
        (JOINED_INPUTS, [build_table("t"), build_table("u"), build_table("other")], RuleDecision.NO_RULES),
        (JOINED_INPUTS, [build_table("t", filters=["a = 1"]), build_table("u")], RuleDecision.NO_EFFECT),
        (JOINED_INPUTS, [build_table("t", masks={"z": "NULL"}), build_table("u")], RuleDecision.NO_EFFECT),
        (JOINED_INPUTS, [build_table("t"), build_table("u", masks={"z": "NULL"})], RuleDecision.NO_EFFECT),
        (
            JOINED_INPUTS,
            [build_table("t"), build_table("u"), build_table("other", filters=["a = 1"])],
            RuleDecision.NO_EFFECT,
        ),
        (JOINED_INPUTS, [build_table("t"), build_table("u", filters=["a = 1"])], RuleDecision.FORBIDDEN),
        (JOINED_INPUTS, [build_table("t", masks={"k": "NULL"}), build_table("u")], RuleDecision.FORBIDDEN),
        (JOINED_INPUTS, [build_table("t"), build_table("u", masks={"Y": "NULL"})], RuleDecision.FORBIDDEN),
        (
            JOINED_INPUTS,
            [build_table("t"), build_table("t", masks={"x": "1"}), build_table("u")],
            RuleDecision.FORBIDDEN,
        ),
        (
            JOINED_INPUTS,
            [build_table("t", filters=["a IN (SELECT b FROM c)"]), build_table("u")],
            RuleDecision.FORBIDDEN,
        ),
        (JOINED_INPUTS, [build_table("t", masks={"z": "(select 1)"}), build_table("u")], RuleDecision.FORBIDDEN),
        (JOINED_INPUTS, [build_table("t")], RuleDecision.UNKNOWN),
        (JOINED_INPUTS, [], RuleDecision.UNKNOWN),
        (AGGREGATED_INPUTS, [build_table("t")], RuleDecision.NO_RULES),
        (AGGREGATED_INPUTS, [build_table("t", filters=["a = 1"])], RuleDecision.FORBIDDEN),
        (AGGREGATED_INPUTS, [build_table("t", masks={"x": "NULL"})], RuleDecision.FORBIDDEN),
        (AGGREGATED_INPUTS, [build_table("t", masks={"z": "NULL"})], RuleDecision.NO_EFFECT),
        (AGGREGATED_INPUTS, [], RuleDecision.UNKNOWN),
        (VIEW_INPUTS, [build_table("t"), build_table("v"), build_table("v~plan~0")], RuleDecision.NO_RULES),
        (
            VIEW_INPUTS,
            [build_table("t"), build_table("v", filters=["a = 1"]), build_table("v~plan~0")],
            RuleDecision.FORBIDDEN,
        ),
        (
            VIEW_INPUTS,
            [build_table("t"), build_table("v", masks={"z": "1"}), build_table("v~plan~0")],
            RuleDecision.FORBIDDEN,
        ),
        (
            VIEW_INPUTS,
            [build_table("t"), build_table("v"), build_table("v~plan~0", filters=["a = 1"])],
            RuleDecision.FORBIDDEN,
        ),
        (VIEW_INPUTS, [build_table("t"), build_table("v~plan~0")], RuleDecision.UNKNOWN),
    ],
)
def test_rules_forbid_a_plan_by_the_columns_that_left_files_out(
    plan_inputs: PlanInputs, tables: list[dict[str, Any]], verdict: RuleDecision
) -> None:
    assert decide_by_rules(plan_inputs, *tables) is verdict


def test_explain_is_forbidden_if_any_rule_applies() -> None:
    """EXPLAIN ANALYZE shows the numbers of rows and files."""
    explain_inputs = PlanInputs({T: frozenset({"x"})}, explains=True)
    assert decide_by_rules(explain_inputs, build_table("t")) is RuleDecision.NO_RULES
    assert decide_by_rules(explain_inputs, build_table("t", filters=["a = 1"])) is RuleDecision.FORBIDDEN


@pytest.mark.parametrize(("value", "verdict"), [("true", RuleDecision.FORBIDDEN), ("false", RuleDecision.NO_RULES)])
def test_partition_filter_requirement_of_the_session_is_respected(value: str, verdict: RuleDecision) -> None:
    assert (
        decide_by_rules(VIEW_INPUTS, build_table("t"), build_table("v"), query_partition_filter_required=value)
        is verdict
    )


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"referencedTables": []}', b"<html>", b'{"session": 1}'])
def test_answer_without_known_rules_gives_no_decision(answer: bytes) -> None:
    assert decide_access(answer, PlanInputs()) is RuleDecision.UNKNOWN
