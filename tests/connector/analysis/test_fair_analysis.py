"""Tests that long statements do not delay short statements.

The server analyses at most one long statement at a time, in parallel with short statements. It serves the clients
alternately.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from seamark.connector.analysis import statement_cache as reading
from seamark.connector.analysis.lexer import parse_execute
from seamark.connector.analysis.statement_cache import IN_LOOP_CHARACTERS_MAX, SHORT_CHARACTERS_MAX, set_client
from seamark.connector.trino import rewriter as rewriting
from seamark.connector.trino.protocol.sessions import Session
from seamark.connector.trino.rewriter import RewriteLimits
from tests.connector.trino.played import NumberedPlans, open_rewriter
from tests.waits import until

SESSION = Session(catalog="lake", schema="db")
WAIT_S = 60


def build_statement(number: int, space_count: int = 0) -> str:
    return f"SELECT * FROM t WHERE id = {number}{' ' * space_count} AND id < 1000"


async def test_short_statements_are_analysed_while_one_long_statement_is_analysed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_statement, may_continue = reading._read, threading.Event()
    running_count, running_max = 0, 0

    def count_and_read(text: Any, *arguments: Any) -> Any:
        nonlocal running_count, running_max
        if len(text.text) <= SHORT_CHARACTERS_MAX:
            return read_statement(text, *arguments)
        running_count += 1
        running_max = max(running_max, running_count)
        assert may_continue.wait(WAIT_S)
        running_count -= 1
        return read_statement(text, *arguments)

    monkeypatch.setattr(reading, "_read", count_and_read)
    async with open_rewriter(NumberedPlans(), RewriteLimits(budget_s=WAIT_S)) as rewriter:
        long_tasks = [
            asyncio.create_task(rewriter.rewrite(build_statement(number, SHORT_CHARACTERS_MAX), SESSION))
            for number in range(3)
        ]
        rewrite = await rewriter.rewrite(build_statement(7), SESSION)
        assert rewrite.statement is not None
        assert not any(task.done() for task in long_tasks)
        may_continue.set()
        assert all([(await task).statement is not None for task in long_tasks])
    assert (running_count, running_max) == (0, 1)


async def test_client_with_many_statements_delays_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    read_statement, has_started, may_continue, read_texts = reading._read, threading.Event(), threading.Event(), []

    def wait_and_read(text: Any, *arguments: Any) -> Any:
        read_texts.append(text.text)
        has_started.set()
        assert may_continue.wait(WAIT_S)
        return read_statement(text, *arguments)

    monkeypatch.setattr(reading, "_read", wait_and_read)
    async with open_rewriter(NumberedPlans(), RewriteLimits(budget_s=WAIT_S)) as rewriter:

        async def rewrite_as(number: int, address: str, principal: str) -> Any:
            with set_client(address, principal):
                return await rewriter.rewrite(build_statement(number), SESSION)

        # The first client uses another name for each statement, so its address identifies it.
        rewrites = [asyncio.create_task(rewrite_as(number, "10.0.0.1", f"name {number}")) for number in range(5)]
        assert await asyncio.to_thread(has_started.wait, WAIT_S)
        other_task = asyncio.create_task(rewrite_as(9, "10.0.0.2", "ann"))
        await until(lambda: "address 10.0.0.2" in rewriter._reader._short_lock._locks_by_holder)
        may_continue.set()
        for task in (*rewrites, other_task):
            assert (await task).statement is not None
    # The new client's statement runs after the current statement and at most one waiting statement.
    assert build_statement(9) in read_texts[:3]


async def test_long_statement_is_not_tokenized_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_ids, original_parse = [], parse_execute

    def record_and_parse(text: str) -> Any:
        thread_ids.append(threading.get_ident())
        return original_parse(text)

    monkeypatch.setattr(rewriting, "parse_execute", record_and_parse)
    session = Session(catalog="lake", schema="db", prepared={"p": "SELECT * FROM t WHERE id = ?"})
    async with open_rewriter(NumberedPlans(), RewriteLimits(budget_s=WAIT_S)) as rewriter:
        for text in ("EXECUTE p USING 1", f"EXECUTE p USING{' ' * IN_LOOP_CHARACTERS_MAX} 1"):
            assert (await rewriter.rewrite(text, session)).statement is not None
    assert len(thread_ids) == 2
    assert [thread_id == threading.get_ident() for thread_id in thread_ids] == [True, False]
