"""Write encrypted files with Spark, wait for a line of input, and read the merged files.

The program is a separate process, because a JVM reads its class path when it starts.

    python -m tests.engines.encryption.spark_files FOLDER CLASSES
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, LongType, StringType, StructField, StructType

from seamark.metaserver.objects.local import drop_checksums

MASTER_KEY_BYTES = {"kf": 1, "k1": 2, "k2": 3}
"""The master keys. Each of the 16 bytes of a key has this value."""
CASES = {
    "uniform": {"uniform.key": "kf"},
    "columns": {"footer.key": "kf", "column.keys": "k1:text;k2:long,tags.list.element"},
    "single": {"footer.key": "kf", "column.keys": "k1:text", "double.wrapping": "false", "data.key.length.bits": "256"},
    "signed": {"footer.key": "kf", "column.keys": "k1:text", "plaintext.footer": "true"},
    "counted": {"footer.key": "kf", "column.keys": "k1:text,long", "algorithm": "AES_GCM_CTR_V1"},
    "version2": {"footer.key": "kf", "column.keys": "k1:text,tags.list.element"},
    "plain": {},
}
ROWS = 3000


def _build_field(name: str, kind: DataType, number: int) -> StructField:
    return StructField(name, kind, True, {"parquet.field.id": number})


SCHEMA = StructType(
    [
        _build_field("long", LongType(), 1),
        _build_field("text", StringType(), 101),
        _build_field("tags", ArrayType(StringType()), 201),
    ]
)


def main(folder: Path, classes: str) -> None:
    """Write encrypted files with Spark, and read the files that the test has merged.

    The program prints "written" after it has written two files for each case. After a line on stdin, it reads each file
    `ours*.parquet`, which is a merged file, and prints its name and totals. Then it reads each folder `replaced-*`, in
    which a merged file has replaced Spark's file, before and after the checksum of the old file is deleted.
    """
    conf = {
        "spark.ui.enabled": "false",
        "spark.driver.extraClassPath": classes,
        "spark.driver.memory": "1g",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.parquet.crypto.factory.class": "org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory",
        "spark.hadoop.parquet.encryption.kms.client.class": "LocalKms",
        **{f"spark.hadoop.test.master.{name}": str(number) for name, number in MASTER_KEY_BYTES.items()},
    }
    spark = SparkSession.builder.master("local[1]").config(map=conf).getOrCreate()
    for name, options in CASES.items():
        for file_number in range(2):
            rows = [(number, f"t{file_number} {number % 97}", [f"{number}"] * (number % 3)) for number in range(ROWS)]
            writer = spark.createDataFrame(rows, SCHEMA).coalesce(1).write
            write_options = {f"parquet.encryption.{key}": value for key, value in options.items()}
            write_options |= {"parquet.bloom.filter.enabled#text": "true", "parquet.page.row.count.limit": "500"}
            write_options["parquet.enable.dictionary#text"] = (
                "false"  # With a dictionary, parquet-java writes no filter.
            )
            if name == "version2":
                write_options["parquet.writer.version"] = "v2"
            writer.options(**write_options).parquet(str(folder / f"{name}-{file_number}"))
    print("written", flush=True)
    sys.stdin.readline()
    for path in sorted(folder.glob("ours*.parquet")):
        read_frame = spark.read.parquet(str(path))
        read_frame.createOrReplaceTempView("t")
        row = spark.sql(
            "SELECT count(*), sum(long), count(DISTINCT text), sum(size(tags)), max(get(tags, 1)) FROM t"
        ).collect()[0]
        rows_with_text = spark.sql("SELECT count(*) FROM t WHERE text = 't1 5'").collect()[0][0]
        totals_of_page = spark.sql(
            "SELECT sum(size(tags)), count(text) FROM t WHERE long BETWEEN 1200 AND 1203"
        ).collect()[0]
        print(json.dumps([path.stem, *row, rows_with_text, *totals_of_page]), flush=True)
    for path in sorted(folder.glob("replaced-*")):
        (file,) = path.glob("*.parquet")
        read_frame = spark.read.schema(SCHEMA).parquet(str(path))
        try:
            row = str(read_frame.agg({"long": "sum"}).collect()[0][0])
        except Exception as error:  # noqa: BLE001
            row = "ChecksumException" if "ChecksumException" in str(error) else str(error)[:500]
        folder_descriptor = os.open(path, os.O_RDONLY)
        drop_checksums(folder_descriptor, file.name)
        os.close(folder_descriptor)
        print(json.dumps([path.stem, row, read_frame.agg({"long": "sum"}).collect()[0][0]]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
