"""Tables into which a Spark session and a client upsert rows, and helpers of the upsert tests."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from seamark.connector.write.row_changes import Report
from seamark.spark import write
from tests.engines.tables import SparkTables

BUCKETS, RECORD = "PARTITIONED BY (bucket(4, id))", "'seamark.index.ids'='record(id)'"
Row = tuple[str | None, int | None, int | None]
Model = dict[int, Row]


class UpsertTables(SparkTables):
    """Tables that tests change by keys. A `Model` has the expected rows by id."""

    def create(self, name: str, spec: str = "", *properties: str, version: int = 3, columns: str = "") -> None:
        property_list = ", ".join([f"'format-version'='{version}'", *properties])
        columns = columns or "id bigint NOT NULL, land string, v int, ts int"
        self.run_sql(f"CREATE TABLE {{db}}.{name} ({columns}) USING iceberg {spec} TBLPROPERTIES ({property_list})")

    def build_frame(self, model: Model) -> DataFrame:
        rows = [(id_, *row) for id_, row in model.items()]
        return self.spark.createDataFrame(rows, "id int, land string, v int, ts int")

    def upsert(self, frame: DataFrame, table: str, **arguments: Any) -> Report:
        return write(frame, f"db.{table}", client=self.client, mode="upsert", **{"keys": ["id"], **arguments})

    def delete(self, frame: DataFrame, table: str, **arguments: Any) -> Report:
        return write(frame, f"db.{table}", client=self.client, mode="delete", **arguments)

    def read_model(self, table: str, time_travel: str = "") -> Model:
        """Return the rows by key, and check that each key occurs once."""
        actual = self.run_sql(f"SELECT id, land, v, ts FROM {{db}}.{table} {time_travel}")
        rows_by_id = {id_: (land, v, ts) for id_, land, v, ts in actual}
        assert len(rows_by_id) == len(actual), sorted(actual)
        return rows_by_id

    def count_live_files(self, table: str) -> int:
        return len(self.run_sql(f"SELECT 1 FROM {{db}}.{table}.data_files"))


TASKS = {"driver_rows": 0}
"""Write options with which tasks change all rows, and the driver none."""
