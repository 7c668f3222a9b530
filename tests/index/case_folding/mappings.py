"""The case mappings of code points in each engine.

Trino maps code points one by one (`java.lang.Character`). Spark uses ICU, or `java.lang.String`, in the locale of its
JVM. DuckDB and Python have their own tables.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyspark

Mappings = dict[int, set[str]]
"""The other texts that `lower` and `upper` return for each code point."""
_JAVA_SOURCE = Path(__file__).with_name("CaseMappings.java")


def read_java_mappings(java_path: str) -> tuple[Mappings, set[int]]:
    """Return the mappings of a JDK and of Spark's ICU, and the code points that are missing in ICU's Unicode."""
    (icu,) = Path(pyspark.__file__).parent.glob("jars/icu4j-*.jar")
    argv = [java_path, "-cp", str(icu), str(_JAVA_SOURCE)]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    mappings: Mappings = {}
    unassigned_points = set()
    for line in lines:
        point, _, texts = line.partition("\t")
        if texts == "unassigned":
            unassigned_points.add(int(point, 16))
        else:
            mappings[int(point, 16)] = {_decode_points(item) for item in texts.split(",")}
    return mappings, unassigned_points


def read_python_mappings() -> Mappings:
    return _keep_different((text, text.lower(), text.upper()) for text in _list_texts())


def read_duckdb_mappings() -> Mappings:
    texts = pa.table({"text": list(_list_texts())})
    rows = duckdb.connect().from_arrow(texts).project("text, lower(text), upper(text)").fetchall()
    return _keep_different(iter(rows))


def _list_texts() -> Iterator[str]:
    """Yield all code points except NUL, which ends texts in DuckDB, and surrogates, which UTF-8 cannot encode."""
    last_point = 0x10FFFF
    return (chr(point) for point in range(1, last_point + 1) if not 0xD800 <= point <= 0xDFFF)


def _keep_different(rows: Iterator[tuple[str, str, str]]) -> Mappings:
    return {ord(text): {lower, upper} - {text} for text, lower, upper in rows if {lower, upper} != {text}}


def _decode_points(points: str) -> str:
    return "".join(chr(int(point, 16)) for point in points.split())
