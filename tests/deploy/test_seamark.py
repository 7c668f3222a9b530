"""Tests of Seamark with compose's settings file, over PostgreSQL and S3 as in compose."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from tests.services.process import DEPLOY
from tests.services.s3 import S3
from tests.services.seamark import Seamark


def test_mounted_settings_serve_tables_over_postgresql_and_s3(
    start_seamark: Callable[..., Seamark], postgres_url: str, s3: S3, s3_bucket: str
) -> None:
    """The test replaces only the addresses, and allows access without a login from the loopback interface."""
    environment = {
        "SEAMARK_CONFIG": str(DEPLOY / "seamark" / "seamark.toml"),
        "SEAMARK_AUTH": "none",
        **s3.build_seamark_env(),
    }
    server = start_seamark(database=postgres_url, warehouse=f"s3://{s3_bucket}/warehouse", env=environment)
    catalog = load_catalog("seamark", type="rest", uri=server.base_url, **s3.build_client_properties())
    catalog.create_namespace("shop")
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
    table = catalog.create_table("shop.orders", schema=rows.schema)
    table.append(rows)
    assert catalog.load_table("shop.orders").scan().to_arrow().num_rows == 3
    assert table.location().startswith(f"s3://{s3_bucket}/warehouse/")
    catalog.close()
    assert '"event":"serving"' in server.log.read_text(), "log_format = json comes from the file"
