"""Star Schema Benchmark data as Parquet, made from the data of a TPC-H generator (tpchgen-cli) by `schema.sql`.

The transformation is that of the paper: lineitem and orders become one fact table with dates as yyyymmdd and money in
cents; partsupp, comments and clerks are left out; nations and regions become columns of the dimensions; cities, brands
and a date dimension are added. The same scale gives the same rows on every machine.

Differences from the paper's own program (dbgen):
- customer (30,000 × scale), supplier (2,000 × scale) and part (200,000 × ⌊1 + log₂ scale⌋, linear below 1) are the
  first rows of TPC-H's larger tables. The keys of the facts are reduced modulo their numbers of rows, so all keys
  exist.
- City digits and brand numbers come from a hash of the key, while dbgen draws them; both are uniform.
- The category is the first part of TPC-H's brand (a manufacturer and one of five), the colour the first word of the
  part's name.
- The date dimension has all 2,557 days of 1992–1998; dbgen has one day less.
- lo_orderkey is 64 bits wide. Only the city is padded with blanks, as its definition requires.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb

TABLES = ("date", "supplier", "customer", "part", "lineorder")
"""The tables in the order of their size; each is one Parquet file, `<table>.parquet`."""

FORMAT = 1
"""The version of the generated data. It must increase when the output of `schema.sql` changes; caches are replaced."""

SOURCES = ("region", "nation", "supplier", "customer", "part", "orders", "lineitem")


def compute_dimension_rows(scale: float) -> dict[str, int]:
    """Return the number of rows of customer, supplier and part at a scale factor of the Star Schema Benchmark.

    Raises:
        ValueError: The scale factor is less than 0.001 or more than 1000.
    """
    if not 0.001 <= scale <= 1000:
        raise ValueError(
            f"scale factor {scale:g} is out of range: use 0.001 to 1000 (1 is 6 million rows of lineorder)"
        )
    parts = 200_000 * math.floor(1 + math.log2(scale)) if scale >= 1 else round(200_000 * scale)
    return {"customers": round(30_000 * scale), "suppliers": round(2_000 * scale), "parts": parts}


def get_table_path(folder: Path, table: str) -> Path:
    return folder / f"{table}.parquet"


def generate_ssb(cache: Path, scale: float, progress: Callable[[str, int, int], None] = lambda *_: None) -> Path:
    """Return the folder with the five Parquet files of `scale`. If it is not below `cache`, generate it.

    The folder appears with all files or not at all.
    Args:
        progress: Called during the generation with a step, the work done and the total work.
    """
    rows = compute_dimension_rows(scale)
    folder = cache / f"sf{scale:g}"
    marker = folder / "made.json"
    if marker.exists() and json.loads(marker.read_text()).get("format") == FORMAT:
        return folder
    building = cache / f".sf{scale:g}-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    total = 1 + len(TABLES)
    try:
        (building / "tpch").mkdir(parents=True)
        progress("TPC-H", 0, total)
        _generate_tpch(scale, building / "tpch")
        with duckdb.connect() as db:
            _define_views(db, building / "tpch", rows)
            for tables_done, table in enumerate(TABLES, start=1):
                progress(f"SSB {table}", tables_done, total)
                target = str(get_table_path(building, table))
                db.execute(f"COPY (FROM ssb_{table}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
        progress("done", total, total)
        shutil.rmtree(building / "tpch")
        (building / marker.name).write_text(json.dumps({"format": FORMAT, "scale": scale, **rows}))
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _generate_tpch(scale: float, folder: Path) -> None:
    program = Path(sys.executable).parent / "tpchgen-cli"
    argv = [str(program), "parquet", "-s", f"{scale:g}", "-T", ",".join(SOURCES), "-o", str(folder), "--quiet"]
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"tpchgen-cli could not make TPC-H data: {result.stderr.strip()}")


def _define_views(db: duckdb.DuckDBPyConnection, tpch: Path, rows: dict[str, int]) -> None:
    for source in SOURCES:
        db.execute(f"CREATE VIEW {source} AS FROM '{tpch / source}.parquet'")
    for name, count in rows.items():
        db.execute(f"SET VARIABLE {name} = {count}")
    db.execute((Path(__file__).parent / "schema.sql").read_text())
