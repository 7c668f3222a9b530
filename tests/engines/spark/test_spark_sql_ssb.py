"""Tests of the Star Schema Benchmark through `seamark.spark.sql`: Spark's answers, from the files with the right
dates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from bench.ssb.generate import TABLES, generate_ssb
from bench.ssb.queries import QUERIES
from bench.ssb.spark import write_table
from seamark.connector.spark.query.queries import rewrite_query
from seamark.spark import sql
from tests.services.process import CACHE
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

pytestmark = [
    pytest.mark.slow,
]

FILES = 42
"""The number of fact files. They are ordered by date, six for each of the seven years."""
KEPT_FILES_MAX = {
    **dict.fromkeys(("Q1.1", "Q4.2", "Q4.3"), 15),
    **dict.fromkeys(("Q1.2", "Q1.3", "Q3.4"), 3),
    **dict.fromkeys(("Q3.1", "Q3.2", "Q3.3"), 39),
}
"""The largest number of fact files that conditions on years, months and weeks keep.

The other queries have no conditions on dates.
"""


@pytest.fixture(scope="module")
def ssb(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = generate_ssb(CACHE / "ssb", 0.01)
    with Seamark(tmp_path_factory.mktemp("ssb")) as server:
        db = f"{new_catalog(spark, server.base_url)}.ssb"
        spark.sql(f"CREATE NAMESPACE {db}")
        for table in TABLES:
            write_table(spark, folder, table, f"{db}.{table}", FILES)
        spark.sql(f"USE {db}")
        yield spark


@pytest.mark.parametrize("name", QUERIES)
def test_each_ssb_query_has_sparks_answer_from_fewer_files(ssb: SparkSession, name: str) -> None:
    expected = ssb.sql(QUERIES[name]).collect()
    assert sql(ssb, QUERIES[name]).collect() == expected
    rewrite = rewrite_query(ssb, QUERIES[name])
    match = re.search(rf"\bssb\.lineorder=(\d+)/{FILES}\b", rewrite.summary)
    assert (int(match[1]) if match else FILES) <= KEPT_FILES_MAX.get(name, FILES), rewrite.summary
    assert (match is not None) == (name in KEPT_FILES_MAX), rewrite.summary
