"""The data source `format("seamark")`: Spark reads and writes tables through the server, without Iceberg's jars.

    register(spark)

`reader.py` and `row_stream.py` have the readers. `sink.py` and `log_sink.py` have the writers that Spark's JVM calls.
`frame_writer.py` has the writers of PySpark's DataFrameWriter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from seamark.connector.spark.source.reader import (
    BatchReader,
    FilteringReader,
    Options,
    StreamReader,
    check_schema,
    select_schema,
)
from seamark.connector.spark.source.row_stream import RowStreamReader, reads_rows
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.connector.spark.source import frame_writer, log_sink, sink
else:
    frame_writer = LazyModule("seamark.connector.spark.source.frame_writer")
    # Most queries only read, so the writers are imported when they are needed.
    log_sink = LazyModule("seamark.connector.spark.source.log_sink")
    sink = LazyModule("seamark.connector.spark.source.sink")


class SeamarkSource(DataSource):
    """The data source `seamark`."""

    @classmethod
    def name(cls) -> str:
        return "seamark"

    def schema(self) -> spark_types.StructType:
        """Return the schema with the columns of the option `columns`, or with all columns of the snapshot."""
        options = Options.parse(self.options)
        return select_schema(options.open(), options)

    def reader(self, schema: spark_types.StructType) -> DataSourceReader:
        options = Options.parse(self.options).with_fresh_rows()
        source_table = options.open()
        reader_class = FilteringReader if options.push_filters else BatchReader
        return reader_class(options, source_table, check_schema(schema, source_table))

    def streamReader(self, schema: spark_types.StructType) -> DataSourceStreamReader:  # noqa: N802
        options = Options.parse(self.options)
        source_table = options.open()
        stream_reader = RowStreamReader if reads_rows(options, source_table.metadata) else StreamReader
        return stream_reader(options, source_table, check_schema(schema, source_table))

    def writer(self, schema: spark_types.StructType, overwrite: bool) -> DataSourceWriter:
        return sink.BatchWriter(sink.SinkOptions.parse(self.options, schema, overwrite=overwrite, streaming=False))

    def streamWriter(self, schema: spark_types.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        if log_sink.writes_log(self.options):
            return log_sink.LogWriter(log_sink.LogSinkOptions.parse(self.options, schema, overwrite=overwrite))
        return sink.StreamWriter(sink.SinkOptions.parse(self.options, schema, overwrite=overwrite, streaming=True))


def register(spark: SparkSession) -> None:
    """Register `format("seamark")` with a session, and with PySpark's DataFrameWriter (`frame_writer.py`)."""
    spark.dataSource.register(SeamarkSource)
    frame_writer.install()
