"""Tests that the server rejects every input of the table with its code and type, and changes nothing.

The reference page must contain the same answers.
"""

from __future__ import annotations

from pathlib import Path

from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.port import InstantFilter
from tests.api.bad_inputs import BAD_INPUTS, BODY_LIMIT_BYTES, PAGE, collect_answers, format_page, prepare_server
from tests.api.client import Api
from tests.server.rig import run_server


async def test_bad_inputs_get_the_errors_of_the_table_and_the_reference_page(tmp_path: Path) -> None:
    answers, warehouse = await collect_answers(tmp_path)
    wrong_cases = [
        (bad_input.group, bad_input.case, answer.status, answer.raw[:300])
        for bad_input, answer in answers
        if (answer.status, answer.json.get("error", {}).get("type")) != (bad_input.status, bad_input.type)
    ]
    assert wrong_cases == []
    assert PAGE.read_text() == format_page(answers, warehouse), "run python -m tests.api.bad_inputs"


async def test_rejected_inputs_leave_no_trace(tmp_path: Path) -> None:
    async with run_server(tmp_path, body_limit_bytes=BODY_LIMIT_BYTES) as server:
        inputs = await prepare_server(Api(server))
        store = server.components.store

        async def read_state() -> object:
            entries = [await store.list_entries(kind, ("db",), None, 100) for kind in EntryKind]
            files = sorted(str(path) for path in (tmp_path / "warehouse").rglob("*") if path.is_file())
            namespaces = [await store.load_namespace(path) for path in await store.list_namespaces((), None, 100)]
            return entries, files, namespaces, await store.list_instants(InstantFilter(), 100)

        state_before = await read_state()
        for bad_input in BAD_INPUTS:
            answer = await inputs.send(bad_input)
            assert answer.status < 500, bad_input
        assert await read_state() == state_before


async def test_errors_reveal_nothing_about_the_server(tmp_path: Path) -> None:
    answers, _ = await collect_answers(tmp_path)
    for bad_input, answer in answers:
        for secret in (b"Traceback", b".py", b"sqlite", b"SELECT ", b"secret"):
            assert secret not in answer.raw, (bad_input.case, secret)


def test_each_bad_input_has_a_unique_name() -> None:
    names = [(bad_input.group, bad_input.case) for bad_input in BAD_INPUTS]
    assert len(set(names)) == len(names)
