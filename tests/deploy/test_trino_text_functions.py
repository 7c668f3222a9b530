"""Tests of Trino's `lower` and `upper`: an index on `lower(c)` finds their results through the proxy."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from seamark.connector.sql.choice import TRINO
from seamark.connector.sql.session import Engines, SqlSession
from tests.connector.lake import open_catalog
from tests.connector.sql.comparing import count_rows
from tests.connector.sql.test_text_functions import SCHEMA, run_seamark
from tests.index.case_folding.mappings import Mappings
from tests.index.case_folding.test_case_folding import check_mappings
from tests.index.case_folding.texts import change_case, draw_texts
from tests.seeds import first_seed
from tests.services.needs import NEEDS_TRINO
from tests.services.trino import CATALOG
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import run_trino_proxy

pytestmark = [*NEEDS_TRINO, pytest.mark.slow]
FILES = 12
MAPPINGS = """
    SELECT point, lower(chr(point)), upper(chr(point))
    FROM (SELECT a * 1000 + b AS point FROM UNNEST(sequence(0, 1114)) t(a) CROSS JOIN UNNEST(sequence(0, 999)) u(b))
    WHERE point BETWEEN 1 AND 1114111 AND point NOT BETWEEN 55296 AND 57343
    AND (lower(chr(point)) <> chr(point) OR upper(chr(point)) <> chr(point))
"""


def open_session(lake: TrinoLake, port: int) -> SqlSession:
    url = f"http://tests@127.0.0.1:{port}?catalog={CATALOG}"
    return SqlSession(lake.seamark.base_url, engines=Engines(wanted=TRINO, trino=url))


def test_all_characters_keep_their_folded_form_in_trino(trino_lake: TrinoLake) -> None:
    with open_session(trino_lake, trino_lake.trino.port) as trino:
        rows = trino.sql(MAPPINGS).to_arrow()
    points, *other_values = (column.to_pylist() for column in rows.columns)
    mappings: Mappings = {point: set(texts) for point, *texts in zip(points, *other_values, strict=True)}
    assert len(mappings) > 2_000
    check_mappings(mappings)


def test_random_texts_are_found_in_any_case_through_the_proxy(trino_lake: TrinoLake, tmp_path: Path) -> None:
    seed = first_seed()
    rng = random.Random(seed)
    texts = [[f"Person.Number{number}@Example.COM", *draw_texts(rng, 5)] for number in range(FILES)]
    url = trino_lake.seamark.base_url
    with open_catalog(url) as catalog:
        catalog.create_namespace("text_functions")
        table = catalog.create_table("text_functions.people", schema=SCHEMA)
        for number in range(FILES):
            ids = [100 * number + offset for offset in range(len(texts[number]))]
            table.append(pa.table({"id": ids, "email": texts[number]}, SCHEMA))
    run_seamark(url, "index", "create", "text_functions.people", "--kind", "bloom", "--columns", "upper(email)")
    run_seamark(url, "index", "build", "text_functions.people")
    flags = ("--trino", trino_lake.trino.base_url, "--kept-max", "0.5", "--budget-ms", "30000")
    with (
        run_trino_proxy(tmp_path, *flags, seamark=url) as proxy,
        open_session(trino_lake, trino_lake.trino.port) as trino,
        open_session(trino_lake, proxy.port) as proxied_session,
    ):
        for number in range(FILES):
            text = f"SELECT id FROM text_functions.people WHERE lower(email) = 'person.number{number}@example.com'"
            assert count_rows(proxied_session.sql(text)) == count_rows(trino.sql(text))
        assert proxy.count_statements("rewritten") == FILES
        for _ in range(100):
            function = rng.choice(["lower", "upper"])
            substring = change_case(rng, rng.choice(rng.choice(texts))).replace("'", "''")
            text = f"SELECT id FROM text_functions.people WHERE {function}(email) = '{substring}'"
            assert count_rows(proxied_session.sql(text)) == count_rows(trino.sql(text)), f"seed {seed}: {text}"
        assert proxy.count_statements("rewritten") > FILES + 50
    with open_catalog(url) as catalog:
        catalog.drop_table("text_functions.people")
        catalog.drop_namespace("text_functions")
