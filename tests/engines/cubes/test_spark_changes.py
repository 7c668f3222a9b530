"""`seamark.spark.sql` returns the same rows from cubes while the schema and the partitions of the table change."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from seamark.connector.client.indexes import IndexClient
from seamark.spark import sql
from tests.connector.cubes.test_evolving_tables import EvolvingTable
from tests.engines.cubes.test_spark_cubes import compare_with_rows
from tests.seeds import examples, first_seed
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_queries_of_changing_schemas_return_the_same_rows_from_cubes(spark: SparkSession, tmp_path: Path) -> None:
    counts = Counter[str]()
    with Seamark(tmp_path) as server, closing(IndexClient(server.base_url)) as client:
        catalog = new_catalog(spark, server.base_url)
        for seed in range(first_seed(), first_seed() + examples(12, 2)):
            rng = random.Random(seed)
            table = EvolvingTable(server.base_url, client, rng, f"db.evolving{seed}")
            table.append()
            table.add_cube()
            table.add_cube()
            table.build()
            for _ in range(4):
                for _ in range(rng.randint(1, 4)):
                    table.change()
                for _ in range(5):
                    text = table.draw_query(" FOR VERSION AS OF {}").replace('"', "`")
                    text = text.replace(f" FROM {table.name}", f" FROM {catalog}.{table.name}")
                    try:
                        spark.sql(text).collect()
                    except (AnalysisException, PySparkException):  # Such as an average of texts that are not numbers.
                        with pytest.raises((AnalysisException, PySparkException)):
                            sql(spark, text, cubes="on").collect()
                        counts["refused"] += 1
                        continue
                    counts[compare_with_rows(spark, text)] += 1
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 12, counts
