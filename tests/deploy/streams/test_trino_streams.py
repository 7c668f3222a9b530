"""Tests that Trino and the proxy return every acknowledged row of a stream table once, before and after its flush."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trino.exceptions
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from tests.deploy.shop import query_rows
from tests.seeds import first_seed
from tests.services.needs import NEEDS_TRINO
from tests.services.seamark import Seamark
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import run_trino_proxy
from tests.waits import block_until

pytestmark = [*NEEDS_TRINO, pytest.mark.slow]

SCHEMA = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))


class TrinoStream:
    """The stream table `events.t`, and a proxy that plans with the same server as Trino's catalog."""

    def __init__(self, server: Seamark, direct_port: int, proxy_port: int) -> None:
        self._server, self._direct_port, self._proxy_port = server, direct_port, proxy_port

    def post(self, *numbers: int) -> None:
        sent_rows = [{"id": number, "name": "ab"[number % 2]} for number in numbers]
        assert self._request("rows", json.dumps(sent_rows).encode())["rows"] == len(numbers)

    def flush(self) -> None:
        self._request("flush", b"")

    def _request(self, action: str, body: bytes) -> Any:
        url = f"{self._server.base_url}/api/v1/tables/events/t/{action}"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def run_sql(self, statement: str, *, is_planned: bool = True) -> list[Any]:
        port = self._proxy_port if is_planned else self._direct_port
        rows = query_rows(port, statement, schema="events")
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]


@pytest.fixture
def stream(trino_lake: TrinoLake, tmp_path: Path) -> Iterator[TrinoStream]:
    server = trino_lake.seamark
    with load_catalog("streams", type="rest", uri=server.base_url) as catalog:
        catalog.create_namespace("events")
        properties = {"seamark.stream.enabled": "true", "seamark.stream.flush-interval-ms": "3600000"}
        catalog.create_table("events.t", SCHEMA, properties=properties)
        arguments = ("--trino", trino_lake.trino.base_url, "--budget-ms", "30000", "--no-rules")
        with run_trino_proxy(tmp_path / "proxy", *arguments, seamark=server.base_url) as proxy:
            stream = TrinoStream(server, trino_lake.trino.port, proxy.port)
            stream.post(1)
            block_until(lambda: len(catalog.load_table("events.t").metadata.snapshots) == 1)
            yield stream
        catalog.purge_table("events.t")
        catalog.drop_namespace("events")


def test_trino_reads_appends_and_deletes_rows_of_a_stream(stream: TrinoStream) -> None:
    stream.post(2, 3)
    for is_planned in (True, False):
        assert stream.run_sql("SELECT id FROM t ORDER BY id", is_planned=is_planned) == [1, 2, 3]
        assert stream.run_sql("SELECT id FROM t WHERE id >= 2 ORDER BY id", is_planned=is_planned) == [2, 3]
        assert stream.run_sql("SELECT count(*), max(id) FROM t", is_planned=is_planned) == [(3, 3)]
    join = "SELECT a.id FROM t a JOIN t b ON a.name = b.name WHERE b.id = 3 ORDER BY a.id"
    assert stream.run_sql(join) == [1, 3]
    stream.run_sql("INSERT INTO t VALUES (4, 'a')")
    assert stream.run_sql("SELECT id FROM t ORDER BY id") == [1, 2, 3, 4]
    stream.flush()
    assert stream.run_sql("SELECT id FROM t ORDER BY id") == [1, 2, 3, 4]
    stream.run_sql("DELETE FROM t WHERE id = 2")
    stream.post(5)
    with pytest.raises(trino.exceptions.Error):
        stream.run_sql("DELETE FROM t WHERE id = 5")
    assert stream.run_sql("SELECT id FROM t ORDER BY id") == [1, 3, 4, 5]


def test_trino_reads_the_rows_of_a_model_after_random_changes(stream: TrinoStream) -> None:
    seed = first_seed()
    rng, model, last_id = random.Random(seed), {1}, 1
    for _ in range(30):
        match rng.choice(["post", "post", "flush", "insert", "delete"]):
            case "post":
                numbers = range(last_id + 1, last_id + 1 + rng.randint(1, 5))
                stream.post(*numbers)
                model |= set(numbers)
            case "flush":
                stream.flush()
                continue
            case "insert":
                numbers = range(last_id + 1, last_id + 2)
                stream.run_sql(f"INSERT INTO t VALUES ({numbers[0]}, 'a')")
                model |= set(numbers)
            case _:
                numbers = range(last_id, last_id + 1)
                stream.flush()
                minimum = last_id - rng.randint(3, 9)
                stream.run_sql(f"DELETE FROM t WHERE id < {minimum}")
                model = {row_id for row_id in model if row_id >= minimum}
        last_id = numbers[-1]
        where = rng.choice(["", f" WHERE id >= {last_id - 2}"])
        expected = sorted(row_id for row_id in model if not where or row_id >= last_id - 2)
        actual = stream.run_sql(f"SELECT id FROM t{where} ORDER BY id", is_planned=rng.random() < 0.7)
        assert actual == expected, (seed, where)
