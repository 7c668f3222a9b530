"""Tables of a separate server, which Spark's Iceberg and Seamark both write and read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.session import connect
from seamark.connector.write.target import WriteTarget
from seamark.formats.protocol.wire import INDEX_FOLDER
from tests.engines.conftest import collect_rows
from tests.services.seamark import Seamark


@dataclass(frozen=True)
class SparkTables:
    """Tables of a server, which a test changes by a Seamark client and by Spark's SQL.

    Attributes:
        db: The name in Spark of the namespace `db`. In SQL statements, `{db}` is replaced by it.
    """

    client: IndexClient
    spark: SparkSession
    db: str

    @classmethod
    @contextmanager
    def open(cls, spark: SparkSession, folder: Path) -> Iterator[Self]:
        with Seamark(folder) as server:
            connect(spark, folder.name, server.base_url)
            tables = cls(IndexClient(server.base_url), spark, f"{folder.name}.db")
            tables.run_sql("CREATE NAMESPACE {db}")
            yield tables
            tables.client.close()

    def run_sql(self, text: str) -> list[tuple[Any, ...]]:
        return collect_rows(self.spark.sql(text.replace("{db}", self.db)))

    def list_files(self, table: str) -> set[str]:
        """Return the data, delete and index files on storage, whether or not a table names them."""
        target = WriteTarget.from_engine_table(self.client.load_table(f"db.{table}"))
        location = Path(urlsplit(target.location).path)
        data = {str(path) for path in (location / "data").rglob("*") if path.suffix in (".parquet", ".puffin")}
        return data | {str(path) for path in (location / INDEX_FOLDER).rglob("*") if path.is_file()}
