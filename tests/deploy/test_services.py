"""Tests of the services that other tests use, and of the behaviour that these tests rely on."""

from __future__ import annotations

from pathlib import Path

import botocore.exceptions
import pytest
from pyspark.sql import SparkSession

from tests.services.postgres import Postgres
from tests.services.process import ManagedProcess, ServiceFailed
from tests.services.s3 import S3
from tests.services.spark import new_catalog


def test_postgres_uses_the_compose_configuration_and_keeps_acknowledged_writes(postgres: Postgres) -> None:
    assert postgres.run_sql("SHOW fsync") == "on"
    assert postgres.run_sql("SHOW synchronous_commit") == "on"
    assert postgres.run_sql("SHOW password_encryption") == "scram-sha-256"


def test_each_postgres_database_starts_empty(postgres: Postgres) -> None:
    first_url, second_url = postgres.create_database(), postgres.create_database()
    postgres.run_sql("CREATE TABLE t (a int)", first_url.rsplit("/", 1)[1])
    assert postgres.run_sql("SELECT count(*) FROM pg_tables WHERE tablename = 't'", second_url.rsplit("/", 1)[1]) == "0"
    for url in (first_url, second_url):
        postgres.drop_database(url)


def test_emptied_postgres_database_equals_a_new_one(postgres: Postgres) -> None:
    schema_query = "SELECT nspowner::regrole, nspacl FROM pg_namespace WHERE nspname = 'public'"
    name, url = "emptied", postgres.create_database("emptied")
    new_schema = postgres.run_sql(schema_query, name)
    postgres.run_sql("CREATE TABLE t (a int); REVOKE ALL ON SCHEMA public FROM PUBLIC", name)
    postgres.clear_database(url)
    assert postgres.run_sql("SELECT count(*) FROM pg_tables WHERE tablename = 't'", name) == "0"
    assert postgres.run_sql(schema_query, name) == new_schema
    postgres.drop_database(url)


def test_s3_keeps_the_first_of_two_conditional_puts(s3: S3, s3_bucket: str) -> None:
    client = s3.client()
    try:
        client.put_object(Bucket=s3_bucket, Key="k", Body=b"first", IfNoneMatch="*")
        with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=s3_bucket, Key="k", Body=b"second", IfNoneMatch="*")
        assert client.get_object(Bucket=s3_bucket, Key="k")["Body"].read() == b"first"
    finally:
        client.close()


def test_service_that_dies_at_its_start_reports_the_reason(tmp_path: Path) -> None:
    process = ManagedProcess(["sh", "-c", "echo no licence >&2; exit 3"], log=tmp_path / "log")
    with pytest.raises(ServiceFailed, match=r"ended with 3 .*\n.*\nno licence"):
        process.start(lambda: False, timeout_s=60)


def test_service_that_never_becomes_ready_is_ended(tmp_path: Path) -> None:
    process = ManagedProcess(["sleep", "600"], log=tmp_path / "log")
    with pytest.raises(ServiceFailed, match="not ready after"):
        process.start(lambda: False, timeout_s=0.2)
    assert not process.running()


@pytest.mark.slow  # Only this test needs Iceberg's Java server, which takes long to start.
@pytest.mark.spark
def test_spark_uses_a_rest_catalog_added_while_it_runs(spark: SparkSession, java_catalog: str) -> None:
    name = new_catalog(spark, java_catalog)
    spark.sql(f"CREATE NAMESPACE {name}.smoke")
    spark.sql(f"CREATE TABLE {name}.smoke.t USING iceberg AS SELECT id, id * 2 AS twice FROM range(10)")
    assert spark.table(f"{name}.smoke.t").selectExpr("sum(twice)").collect()[0][0] == 90
    # The function runs in a Python process of Spark, which the query above does not start.
    assert spark.sparkContext.parallelize([1, 2], numSlices=1).map(lambda n: n + 1).sum() == 5
