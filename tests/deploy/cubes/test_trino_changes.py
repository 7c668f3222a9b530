"""Trino returns the same rows from cubes through the proxy while schemas, partitions and dimension tables change."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from seamark.connector.client.indexes import IndexClient
from tests.connector.cubes.test_evolving_tables import EvolvingTable
from tests.connector.sql.test_star_joins import StarSchema
from tests.deploy.cubes.test_trino_cubes import CubeRig, rig
from tests.seeds import examples, first_seed
from tests.services.needs import NEEDS_TRINO

__all__ = ["rig"]

pytestmark = [*NEEDS_TRINO, pytest.mark.slow, pytest.mark.timeout(3600)]


def compare_with_rows(rig: CubeRig, sql: str, context: str) -> str:
    """Check that a query has the same rows through the proxy and directly. Return `cube`, `rows` or `refused`.

    `cube` means that the proxy read a cube. If Trino refuses the query directly, it must also refuse it through the
    proxy.
    """
    direct_answer, answer = (rig.read(sql, port) for port in (rig.trino.port, rig.proxy.port))
    if isinstance(direct_answer, str):  # The message may contain a part of the rewritten statement.
        assert isinstance(answer, str), f"{context}: {direct_answer}"
        return "refused"
    assert answer == direct_answer, context
    return "cube" if "; cube=" in rig.read_outcome(sql) else "rows"


def test_queries_of_changing_schemas_return_the_same_rows_from_cubes(rig: CubeRig) -> None:
    counts = Counter[str]()
    with closing(IndexClient(rig.seamark.base_url)) as client:
        for seed in range(first_seed(), first_seed() + examples(12, 2)):
            rng = random.Random(seed)
            table = EvolvingTable(rig.seamark.base_url, client, rng, f"cubed.evolving{seed}")
            table.append()
            table.add_cube()
            table.add_cube()
            table.build()
            for _ in range(4):
                for _ in range(rng.randint(1, 4)):
                    table.change()
                for _ in range(5):
                    sql = table.draw_query(" FOR VERSION AS OF {}")
                    counts[compare_with_rows(rig, sql, f"seed {seed}: {sql}")] += 1
    assert counts["cube"] > counts.total() / 12, counts


def test_random_star_joins_of_changing_tables_return_the_same_rows_from_cubes(rig: CubeRig) -> None:
    counts = Counter[str]()
    server: Any = SimpleNamespace(url=rig.seamark.base_url)
    with closing(IndexClient(server.url)) as client:
        for seed in range(first_seed(), first_seed() + examples(12, 2)):
            rng = random.Random(seed)
            star = StarSchema(server, client, rng, f"stars{seed}")
            star.append_facts(60)
            star.append_facts(40)
            star.build()
            star.pin_attributes()
            changes = (star.change_dimension, star.maintain, star.tag, star.delete_facts, star.build)
            for _ in range(4):
                for _ in range(6):
                    sql = star.draw_query()
                    counts[compare_with_rows(rig, sql, f"seed {seed}: {sql}")] += 1
                for change in rng.sample(changes, 2):
                    change()
                star.append_facts(rng.choice((1, 30)))
                if rng.random() < 0.5:
                    star.pin_attributes()
    assert counts["cube"] > counts.total() / 20, counts
