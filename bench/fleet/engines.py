"""How much faster are the queries of SSB through the objects gateway, in Trino and Spark, if the store is far away?

The engines are unmodified. Both ways read the same data files of the same store, behind a proxy that delays each
request. `direct` is a Seamark server without a gateway: its clients read from the store with the keys of the store.
The clients of the other server read through its gateway with vended keys. Each query runs both ways in turn. The
engines warm up with a small copy of the tables, so in the first round the objects are not in the gateway's cache.
In later rounds they are. All answers are compared with the answers of DuckDB.

    python -m bench.fleet.engines
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from bench.gateway import run_delaying_store
from bench.report import OURS, AnswersDiffer, Report, Row
from bench.ssb.generate import TABLES, generate_ssb, get_table_path
from bench.ssb.queries import QUERIES, Oracle
from bench.ssb.spark import FACT
from bench.trino.asking import TrinoConnection
from tests.services.process import CACHE, choose_free_port
from tests.services.s3 import S3, run_s3
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog, spark_session
from tests.services.trino import trino_server

SCALE, FACT_FILES = 0.5, 60
WARM_SCALE, WARM_FILES = 0.01, 2
ROUNDS = 3
DIRECT_SERVER = "direct"
LAKE, WARM = "ssb", "warm"
_SPARK_OPTIONS = {"spark.driver.memory": "3g", "spark.driver.extraJavaOptions": "", "spark.sql.shuffle.partitions": "4"}
_FSSPEC = {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"}
"""PyIceberg uses fsspec, because versitygw refuses the last part of pyarrow's multipart uploads."""
RunQuery = Callable[[str, str], Sequence[Sequence[object]]]
"""A function of (SQL, namespace) that returns the rows of the query."""


@dataclass(frozen=True)
class ServersOnSlowStore:
    """Two servers with the same tables; `store` is the S3 store with delayed responses."""

    store: S3
    gateway_url: str
    gateway: Seamark
    direct_server: Seamark


@contextmanager
def open_lake(folder: Path, scale: float, files: int) -> Iterator[ServersOnSlowStore]:
    """Generate the SSB data, and start a server with a gateway and a server without one over a delayed store."""
    with ExitStack() as stack:
        near_store = stack.enter_context(run_s3(folder, keep_alive=True))
        slow_store = replace(near_store, endpoint=stack.enter_context(run_delaying_store(near_store.endpoint, 1)))
        warehouse, port = f"s3://{near_store.create_bucket()}/wh", choose_free_port()
        env = {**slow_store.build_seamark_env(), "SEAMARK_LOG_LEVEL": "warning"}
        gateway_env = {"SEAMARK_GATEWAY_PORT": str(port), "SEAMARK_S3_CLIENT_ACCESS": "gateway"}
        direct_server = stack.enter_context(Seamark(folder / "direct", warehouse=warehouse, env=env))
        gateway = stack.enter_context(Seamark(folder / "gateway", warehouse=warehouse, env=env | gateway_env))
        for namespace, size, files_per_table in ((WARM, WARM_SCALE, WARM_FILES), (LAKE, scale, files)):
            _write(generate_ssb(CACHE / "ssb", size), near_store, direct_server, gateway, namespace, files_per_table)
        yield ServersOnSlowStore(slow_store, f"http://127.0.0.1:{port}", gateway, direct_server)


def _write(data: Path, near_store: S3, direct_server: Seamark, gateway: Seamark, namespace: str, files: int) -> None:
    """Create the tables through the direct server, without the delay, and register them with the other server."""
    with closing(
        RestCatalog("near", uri=direct_server.base_url, **near_store.build_client_properties(), **_FSSPEC)
    ) as catalog:
        catalog.create_namespace(namespace)
        gateway_catalog = RestCatalog("gateway", uri=gateway.base_url)
        gateway_catalog.create_namespace(namespace)
        for name in TABLES:
            rows = _to_iceberg_types(pq.read_table(get_table_path(data, name)))
            table = catalog.create_table((namespace, name), schema=rows.schema)
            step = -(-len(rows) // (files if name == FACT else 1))
            rows = rows.sort_by("lo_orderdate") if name == FACT else rows
            with table.transaction() as transaction:
                for start in range(0, len(rows), step):
                    transaction.append(rows.slice(start, step))
            gateway_catalog.register_table((namespace, name), catalog.load_table((namespace, name)).metadata_location)


def _to_iceberg_types(rows: pa.Table) -> pa.Table:
    """Return the rows with types that Iceberg has."""
    for number, field in enumerate(rows.schema):
        if pa.types.is_unsigned_integer(field.type) or pa.types.is_int16(field.type) or pa.types.is_int8(field.type):
            rows = rows.set_column(number, field.name, pc.cast(rows[field.name], pa.int64()))
    return rows


def compare_servers(report: Report, engine: str, runners: Mapping[str, RunQuery], oracle: Oracle, rounds: int) -> None:
    """Run each query through both servers alternately, in one round of first reads and then in `rounds` rounds.

    Before, each query runs once on the small copy of the tables in the namespace `WARM`.

    Args:
        runners: The function that runs a query, for each of the two servers.
    """
    for run_query in runners.values():
        for sql in QUERIES.values():
            run_query(sql, WARM)
    times: dict[str, list[list[float]]] = {server: [[] for _ in range(rounds + 1)] for server in runners}
    for round_index in range(rounds + 1):
        for query_index, (name, sql) in enumerate(QUERIES.items()):
            order = list(runners.items())[:: 1 if (query_index + round_index) % 2 else -1]
            for server, run_query in order:
                began_s = time.perf_counter()
                answer = run_query(sql, LAKE)
                times[server][round_index].append(time.perf_counter() - began_s)
                difference = oracle.describe_difference(sql, answer)
                if difference:
                    raise AnswersDiffer(f"{engine}, {server}, {name}: {difference}")

    def add_row(measure: str, value: Callable[[list[list[float]]], float]) -> None:
        values = {server: value(durations) for server, durations in times.items()}
        report.rows.append(Row(f"{engine}: {len(QUERIES)} queries", measure, "s", values, peer=DIRECT_SERVER))

    add_row("first round", lambda durations: sum(durations[0]))
    add_row("later rounds, median", lambda durations: statistics.median(map(sum, durations[1:])))
    for query_index, name in enumerate(QUERIES):
        values = {
            server: statistics.median(durations[query_index] for durations in time[1:])
            for server, time in times.items()
        }
        report.rows.append(Row(f"{engine}: {name}", "later rounds, median", "s", values, peer=DIRECT_SERVER))


def run_trino(report: Report, folder: Path, slow_servers: ServersOnSlowStore, oracle: Oracle, rounds: int) -> None:
    gateway_s3 = replace(
        slow_servers.store, endpoint=slow_servers.gateway_url, access_key="unused", secret_key="unused"
    )
    vended_properties = {"iceberg.rest-catalog.vended-credentials-enabled": "true"}
    with ExitStack() as stack:
        runners: dict[str, RunQuery] = {}
        for way, server, store, catalog in (
            (OURS, slow_servers.gateway, gateway_s3, vended_properties),
            (DIRECT_SERVER, slow_servers.direct_server, slow_servers.store, {}),
        ):
            served_trino_server = trino_server(
                folder / f"trino-{way}", uri=server.base_url, s3=store, catalog=catalog, jvm=()
            )
            url = stack.enter_context(served_trino_server).base_url
            client = stack.enter_context(closing(TrinoConnection(url, url)))
            runners[way] = lambda sql, namespace, client=client: client.read_rows(sql, namespace)  # type: ignore[misc]
        compare_servers(report, "Trino", runners, oracle, rounds)


def run_spark(report: Report, folder: Path, slow_servers: ServersOnSlowStore, oracle: Oracle, rounds: int) -> None:
    s3_io = {"io-impl": "org.apache.iceberg.aws.s3.S3FileIO", "client.region": slow_servers.store.region}
    with spark_session(folder / "spark", _SPARK_OPTIONS) as session:
        ways = {
            OURS: _build_spark_runner(session, new_catalog(session, slow_servers.gateway.base_url, extra=s3_io)),
            DIRECT_SERVER: _build_spark_runner(
                session,
                new_catalog(
                    session,
                    slow_servers.direct_server.base_url,
                    extra=s3_io | slow_servers.store.build_client_properties(),
                ),
            ),
        }
        compare_servers(report, "Spark", ways, oracle, rounds)


def _build_spark_runner(session: SparkSession, catalog: str) -> RunQuery:
    def ask(sql: str, namespace: str) -> Sequence[Any]:
        session.sql(f"USE {catalog}.{namespace}")
        return [tuple(row) for row in session.sql(sql).collect()]

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="make a short run that writes no results")
    quick = parser.parse_args().quick
    scale, files, rounds = (0.01, 4, 1) if quick else (SCALE, FACT_FILES, ROUNDS)
    report = Report("gateway_engines", "What do SSB's queries gain by the objects gateway?", peer="the store itself")
    with tempfile.TemporaryDirectory(prefix="seamark-bench-") as text:
        folder = Path(text)
        with (
            open_lake(folder, scale, files) as slow_servers,
            closing(Oracle(generate_ssb(CACHE / "ssb", scale))) as oracle,
        ):
            oracle.prepare()
            run_trino(report, folder, slow_servers, oracle, rounds)
            run_spark(report, folder, slow_servers, oracle, rounds)
    report.notes += [
        f"Scale {scale:g}: {round(6_000_000 * scale):,} facts in {files} files, sorted by date; {rounds} later rounds.",
        "The store is versitygw behind a proxy that delays each request by 15 ms in the median and up to 200 ms.",
        "No index and no proxy for Trino: both ways open the same files.",
    ]
    if not quick:
        report.save()
    print(report.format_markdown())


if __name__ == "__main__":
    main()
