"""Tests of `df.write.format("seamark")` in all modes and with options.

Iceberg's reader in the same Spark checks the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.spark.frames.table_creation import split_terms
from seamark.connector.write.target import WriteTarget
from tests.engines.tables import SparkTables


class FrameWriterTables(SparkTables):
    """Tables of one server, which tests write with DataFrames and read with Iceberg."""

    @property
    def uri(self) -> str:
        return str(self.spark.conf.get(f"spark.sql.catalog.{self.db.partition('.')[0]}.uri"))

    def build_frame(self, *rows: tuple[Any, ...], columns: str = "id bigint, day string, v int") -> DataFrame:
        return self.spark.createDataFrame(list(rows), columns)

    def make_writer(self, frame: DataFrame, save_mode: str | None = "append", **options: str) -> Any:
        writer = frame.write.format("seamark").options(**options)
        return writer if save_mode is None else writer.mode(save_mode)

    def read_rows(self, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
        return sorted(self.run_sql(f"SELECT {columns} FROM {{db}}.{table}"), key=repr)


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrameWriterTables]:
    with FrameWriterTables.open(spark, tmp_path_factory.mktemp("framewriter")) as tables:
        yield tables


def read_refusal(write: Any, *arguments: Any) -> str:
    """Return the error text of a write that is refused, and check that it is one line."""
    with pytest.raises(AnalysisException) as error:
        write(*arguments)
    text = str(error.value)
    assert "Traceback" not in text
    assert "\n" not in text.strip(), text
    return text


def test_frame_writer_creates_tables_and_writes_in_all_modes(rig: FrameWriterTables) -> None:
    first_frame, second_frame = rig.build_frame((1, "a", 1), (2, "b", 2)), rig.build_frame((3, "b", 3))
    new_options = {"partitioning": "bucket(4, id)", "property.format-version": "3", "property.owner.Team": "x"}
    # The default mode creates the table if it does not exist.
    rig.make_writer(first_frame, None, **new_options).partitionBy("day").saveAsTable(f"{rig.db}.t")
    target = WriteTarget.from_engine_table(rig.client.load_table("db.t"))
    assert target.format_version == 3
    assert target.properties["owner.Team"] == "x"
    assert [field.transform for field in target.spec.fields] == ["identity", "bucket[4]"]
    assert "exists" in read_refusal(rig.make_writer(second_frame, None).saveAsTable, f"{rig.db}.t")
    rig.make_writer(second_frame, "ignore").saveAsTable(f"{rig.db}.t")
    assert rig.read_rows("t") == [(1, "a", 1), (2, "b", 2)]
    rig.make_writer(second_frame, "append", uri=rig.uri).save("db.t")
    assert rig.read_rows("t") == [(1, "a", 1), (2, "b", 2), (3, "b", 3)]
    rig.make_writer(rig.build_frame((9, "b", 9)), "overwrite", partitionOverwriteMode="dynamic").save(f"{rig.db}.t")
    assert {(1, "a", 1), (9, "b", 9)} <= set(rig.read_rows("t"))
    rig.make_writer(first_frame, "overwrite").save(f"{rig.db}.t")
    assert rig.read_rows("t") == [(1, "a", 1), (2, "b", 2)]
    rig.make_writer(rig.build_frame((2, "b", 20), (5, "e", 5)), "append", mode="upsert", keys="id").save(f"{rig.db}.t")
    rig.make_writer(
        rig.build_frame((1, "a", 0), (2, "b", 19)), "append", mode="upsert", keys="id, day", precombine="v"
    ).save(f"{rig.db}.t")
    assert rig.read_rows("t") == [(1, "a", 1), (2, "b", 20), (5, "e", 5)]
    rig.make_writer(rig.build_frame((5,), columns="id bigint"), "append", mode="delete", keys="id").save(f"{rig.db}.t")
    rig.make_writer(second_frame, None).insertInto(f"{rig.db}.t")
    assert rig.read_rows("t") == [(1, "a", 1), (2, "b", 20), (3, "b", 3)]


@pytest.mark.slow
def test_merge_schema_adds_columns_and_widens_types(rig: FrameWriterTables) -> None:
    rig.make_writer(rig.build_frame((1, "a", 1)), None).saveAsTable(f"{rig.db}.evolved")
    wide_frame = rig.build_frame(
        (2, "b", 2**40, "new", {"x": 1.5}), columns="id bigint, day string, v bigint, w string, m map<string, double>"
    )
    assert "no column" in read_refusal(rig.make_writer(wide_frame, "append").save, f"{rig.db}.evolved")
    rig.make_writer(wide_frame, "append", mergeSchema="true").save(f"{rig.db}.evolved")
    assert rig.read_rows("evolved") == [(1, "a", 1, None, None), (2, "b", 2**40, "new", {"x": 1.5})]
    rig.make_writer(rig.build_frame((3, "c", 3)), "append", mergeSchema="true").save(f"{rig.db}.evolved")
    assert (3, "c", 3, None, None) in rig.read_rows("evolved")


@pytest.mark.slow
def test_refusal_is_one_sentence_and_suggests_the_right_catalog(rig: FrameWriterTables) -> None:
    frame, catalog = rig.build_frame((1, "a", 1)), rig.db.partition(".")[0]
    assert f"did you mean '{catalog}'" in read_refusal(rig.make_writer(frame).saveAsTable, f"{catalog[:-1]}.db.t")
    assert "is a catalog of this session" in read_refusal(
        rig.make_writer(frame, uri=rig.uri).save, f"{catalog}.db.nowhere"
    )
    assert "Unknown options" in read_refusal(rig.make_writer(frame, kees="id").save, f"{rig.db}.t2")
    assert "keys require" in read_refusal(rig.make_writer(frame, keys="id").save, f"{rig.db}.t2")
    assert "does not exist" in read_refusal(rig.make_writer(frame).insertInto, f"{rig.db}.t2")
    assert "not a partition transform" in read_refusal(
        rig.make_writer(frame, partitioning="hash(id)").save, f"{rig.db}.t2"
    )
    rig.run_sql("CREATE TABLE {db}.strict (id bigint NOT NULL, v int) USING iceberg")
    nulls = rig.build_frame((None, 1), columns="id bigint, v int")
    assert "is required" in read_refusal(rig.make_writer(nulls).save, f"{rig.db}.strict")
    assert rig.read_rows("strict") == []


@pytest.mark.slow
def test_writes_in_other_formats_are_unchanged(rig: FrameWriterTables, tmp_path: Any) -> None:
    rig.build_frame((1, "a", 1)).write.format("parquet").save(str(tmp_path / "out"))
    assert rig.spark.read.parquet(str(tmp_path / "out")).count() == 1
    rig.build_frame((1, "a", 1)).write.saveAsTable(f"{rig.db}.plain", format="iceberg")
    assert rig.read_rows("plain") == [(1, "a", 1)]


def test_partitioning_text_is_split_into_terms() -> None:
    assert split_terms("bucket(16, id), days(ts) , region") == ["bucket(16, id)", "days(ts)", "region"]
