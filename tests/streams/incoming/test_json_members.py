"""Tests of JSON objects with a repeated key.

The server refuses them, because the decoder would keep only the last value.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from seamark.metaserver.streams.incoming.json_members import find_repeated_key, has_repeated_key
from tests.seeds import first_seed, mark_fast
from tests.streams.test_rows_over_http import LINES, StreamServer, create_stream_table, open_stream_server

_KEYS = ("a", "b", "a:", '\\"', "\\u0061", "d{", "é")
_TEXTS = ("a", "a:b", ":x", '\\":', "\\\\", " : ", "{", "}", "\\u003a", "")


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        yield stream


async def test_object_with_a_repeated_key_is_refused_in_each_format(stream: StreamServer) -> None:
    repeated_text = b'{"id": 1, "name": "a:b", "id": 2}'
    status, message = await stream.send_and_read_error(b"[" + repeated_text + b"]")
    assert (status, message) == (400, "The body has an object with the key 'id' twice; send each key once")
    status, message = await stream.send_and_read_error(
        b'{"id": 1}\n' + repeated_text + b'\n{"id": 3, "name": "x: y"}\n', LINES
    )
    assert (status, message) == (400, "Row 1 has an object with the key 'id' twice; send each key once")
    body = b'{"tables": [{"namespace": ["db"], "name": "t", "rows": [' + repeated_text + b"]}]}"
    async with stream.server.http.post(f"{stream.server.url}/api/v1/rows", data=body) as answer:
        assert answer.status == 400
        assert "with the key 'id' twice" in (await answer.json())["error"]["message"]
    assert (await stream.send(b'[{"id" : 7, "name": ":\\"id\\": {"}]'))[0] == 200
    assert await stream.ids() == [7]


def _write_value(rng: Random, depth: int) -> str:
    match rng.randrange(8 if depth < 3 else 5):  # The cases from 5 on nest values, so they end at depth 3.
        case 0:
            return str(rng.randrange(9))
        case 1 | 2:
            return f'"{rng.choice(_TEXTS)}"'
        case 3:
            return "null"
        case 4:
            return "1.5"
        case 5:
            return f"[{','.join(_write_value(rng, depth + 1) for _ in range(rng.randrange(3)))}]"
        case _:
            return _write_object(rng, depth + 1)


def _write_object(rng: Random, depth: int = 0) -> str:
    space = rng.choice(("", "", " ", "\t", "\n "))
    members = [
        f'"{rng.choice(_KEYS)}"{space}:{rng.choice(("", " "))}{_write_value(rng, depth)}'
        for _ in range(rng.randrange(4))
    ]
    return "{" + ",".join(members) + "}"


def _has_repeated_key_by_json(text: str) -> bool:
    are_repeated = []

    def record_repetition(pairs: list[tuple[str, Any]]) -> None:
        are_repeated.append(len(dict(pairs)) < len(pairs))

    json.loads(text, object_pairs_hook=record_repetition)
    return any(are_repeated)


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 100), 2))
def test_repeated_keys_of_random_values_are_found_as_by_python_json_parser(seed: int) -> None:
    rng = Random(seed)
    for _ in range(1000):
        text = f"[{','.join(_write_object(rng) for _ in range(rng.randrange(4)))}]"
        expected = _has_repeated_key_by_json(text)
        assert has_repeated_key(text.encode(), [msgspec.json.decode(text)]) == expected, text
        assert bool(find_repeated_key(text.encode())) == expected, text
