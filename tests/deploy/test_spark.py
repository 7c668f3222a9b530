"""Tests of Spark's command line with the configuration folder that compose mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.services.process import CACHE, DEPLOY
from tests.services.s3 import S3
from tests.services.seamark import Seamark


@pytest.mark.spark
@pytest.mark.slow
def test_spark_sql_uses_seamark_with_the_mounted_configuration(tmp_path: Path, s3: S3, s3_bucket: str) -> None:
    """Only the addresses differ: compose uses the names of services, and the test uses ports of this machine."""
    warehouse = f"s3://{s3_bucket}/warehouse"
    with Seamark(tmp_path / "seamark", warehouse=warehouse, env=s3.build_seamark_env()) as seamark:
        environment = {
            "spark.master": "local[1]",
            "spark.driver.extraClassPath": f"{CACHE / 'jars'}/*",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.catalog.seamark.uri": seamark.base_url,
            "spark.sql.catalog.seamark.s3.endpoint": s3.endpoint,
        }
        env = {
            **os.environ,
            "SPARK_CONF_DIR": str(DEPLOY / "spark"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SEAMARK_TOKEN": "unused",
            "PYSPARK_PYTHON": sys.executable,
            "AWS_REGION": s3.region,
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        }
        sql = (
            "CREATE NAMESPACE seamark.shop; CREATE TABLE shop.t AS SELECT 40 + 2 AS answer; SELECT answer FROM shop.t;"
        )
        argv = [str(Path(pyspark.__file__).parent / "bin" / "spark-sql")]
        argv += [part for key, value in environment.items() for part in ("--conf", f"{key}={value}")]
        result = subprocess.run([*argv, "-e", sql], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "42" in result.stdout.split()
