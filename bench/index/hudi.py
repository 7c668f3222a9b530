"""How long do the record indexes of Seamark and Hudi take to find the rows of keys in tables with the same rows?

Hudi 1.2 has a global record index, and runs on PySpark 3.5 in `local[2]` (`hudi_peer.py`; `make hudi` downloads both).
The benchmark queries it in two ways. SQL is the way of its users; most of the time is the fixed cost of a query,
which is also reported. Hudi's own reader of the metadata table runs in the driver's JVM without a Spark job, and can
be compared with an index in memory. Seamark is queried over HTTP with its client, and in the process of the benchmark.
All systems are warm, and are queried alternately for existing keys, with new keys each time.

Hudi's answer by SQL contains the rows. Seamark's answer has the file and position of each row, and `files read` is the
number of files that Hudi's query reads.
"""

from __future__ import annotations

import json
import statistics
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bench.hudi import HudiSession, open_session
from bench.report import OURS, AnswersDiffer, Report, Row
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.write.appends import append
from seamark.formats.index.index_file import open_index_file
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import hash_rows
from seamark.formats.index.kinds.record import RecordBlob
from tests.services.seamark import Seamark

KEYS, QUICK_KEYS = 1_000_000, 20_000
FILES = 10
BATCHES = (1, 10_000)
TABLE, INDEX = "bench.t", "keys"
SQL, READER, OPENED, JOB = "hudi-sql", "hudi-reader", "hudi-reader-open", "hudi-empty-query"
WAYS = {SQL: "sql", READER: "index", OPENED: "opened", JOB: "job"}
"""The name of each way in the requests to Hudi's session."""
HTTP, DIRECT = "over HTTP", "in process"


class SeamarkIndex:
    """A table of Seamark with a record index. The benchmark queries the index over HTTP and in process.

    Attributes:
        seconds: The time that the build of the index took.
    """

    def __init__(self, client: IndexClient, table: pa.Table) -> None:
        self._client = client
        client._request("POST", "/v1/namespaces", {}, json.dumps({"namespace": ["bench"]}).encode())
        fields = [
            {"id": 1, "name": "k", "required": True, "type": "string"},
            {"id": 2, "name": "v", "required": False, "type": "long"},
        ]
        body = {"name": "t", "schema": {"type": "struct", "fields": fields}}
        client._request("POST", "/v1/namespaces/bench/tables", {}, json.dumps(body).encode())
        for part in range(FILES):
            append(client, TABLE, table.take(np.arange(part, table.num_rows, FILES)))
        client.put_index(TABLE, INDEX, kind="record", columns=["k"])
        with closing(InProcessWorkers()) as workers:
            started_s = time.perf_counter()
            build(client, TABLE, INDEX, workers)
            self.seconds = time.perf_counter() - started_s
        self.index = client.index(TABLE, INDEX)
        locations = [index_file["location"] for index_file in self.index.json["index-files"]]
        self._records = [RecordBlob(open_index_file(Storage().read(location), location).blob) for location in locations]

    def look_up_over_http(self, keys: pa.Array) -> int:
        return len(self._client.lookup(TABLE, pa.table({"k": keys}), index=INDEX).rows)

    def look_up_in_process(self, keys: pa.Array) -> int:
        columns = [convert_to_keys(keys, "string")]
        hashes = hash_rows(columns, 0), hash_rows(columns, 1)
        return sum(len(record.lookup(*hashes)[0]) for record in self._records)


async def run(folder: Path, *, quick: bool = False) -> Report:
    """Build both record indexes over the same rows, and compare lookups of one key and of many keys."""
    report = Report("index_hudi", "Our record index and Hudi's", peer="Hudi 1.2, queried as the row says")
    count, rounds = (QUICK_KEYS, 2) if quick else (KEYS, 7)
    draw = np.random.default_rng(12)
    halves = draw.integers(0, 1 << 63, (count, 2)).tolist()
    keys = np.array([str(uuid.UUID(int=high << 64 | low)) for high, low in halves])
    table, rows = pa.table({"k": keys, "v": np.arange(count)}), folder / "rows.parquet"
    pq.write_table(table, rows)
    with (
        Seamark(folder / "seamark", env={"SEAMARK_LOG_LEVEL": "warning"}) as server,
        open_session("bench.index.hudi_peer", folder / "hudi", str(rows), str(FILES)) as peer,
        closing(IndexClient(server.base_url)) as client,
    ):
        answer = peer.read_answer()  # The process answers when it has written and indexed the table.
        seamark_index = SeamarkIndex(client, table)
        _report_sizes(report, seamark_index, answer, count)
        for batch in BATCHES:
            _measure_lookups(
                report, seamark_index, peer, [draw.choice(keys, batch, replace=False) for _ in range(rounds + 1)]
            )
    report.notes += [
        f"{count:,} rows in {FILES} data files, keys are UUIDs as strings. The systems are "
        f"queried alternately. Each time is the median of {rounds} lookups, after one lookup as a warm-up.",
        f"{JOB} is the SQL query SELECT 1. Its time is the fixed cost of each query, and is contained in {SQL}.",
        f"{SQL}: column and partition statistics are off. With them, Spark plans a list of 10,000 keys for minutes.",
        f"{READER} opens the metadata table for each lookup, as a query must. {OPENED} keeps it open.",
        f"Hudi's index has {answer['index_files']} files. CREATE INDEX built it after the rows were written.",
    ]
    return report


def _report_sizes(report: Report, seamark_index: SeamarkIndex, index: dict[str, Any], count: int) -> None:
    build_s = {OURS: seamark_index.seconds, SQL: index["seconds"]}
    sizes = {OURS: seamark_index.index.size_bytes / count, SQL: index["index_bytes"] / count}
    report.rows.append(Row("index", "built, by command", "s", build_s, peer=SQL))
    report.rows.append(Row("index", "an entry", "B", sizes, peer=SQL))


def _measure_lookups(
    report: Report, seamark_index: SeamarkIndex, peer: HudiSession, draws: list[npt.NDArray[Any]]
) -> None:
    """Look up each draw of keys in all systems. The first draw warms them up and is not counted.

    Seamark is queried over HTTP and in this process. Hudi is queried by SQL and by its reader of the metadata table
    (`WAYS`).
    """
    durations: dict[str, list[float]] = {}
    files_read = []
    for draw in draws:
        for name, look_up in {HTTP: seamark_index.look_up_over_http, DIRECT: seamark_index.look_up_in_process}.items():
            queries = pa.array(draw)
            started_s = time.perf_counter()
            result = look_up(queries)
            durations.setdefault(name, []).append((time.perf_counter() - started_s) * 1000)
            _check_count(name, result, len(draw))
        for name, request_name in WAYS.items():
            answer = peer.ask(way=request_name, keys=draw.tolist())
            durations.setdefault(name, []).append(answer["seconds"] * 1000)
            if name != JOB:
                _check_count(name, answer["found"], len(draw))
            if name == SQL:
                files_read.append(answer["files"])
    ms = {name: statistics.median(times[1:]) for name, times in durations.items()}
    case = f"{len(draws[0]):,} key{'s' * (len(draws[0]) > 1)}"
    lookup_ms = {OURS: ms[HTTP], SQL: ms[SQL], JOB: ms[JOB]}
    readers = {name: ms[name] for name in (READER, OPENED)}
    fastest_reader = min(readers, key=lambda name: readers[name])
    report.rows += [
        Row(case, f"{HTTP}; by SQL", "ms", lookup_ms, peer=SQL),
        Row(case, f"{HTTP}; by the reader", "ms", {**readers, OURS: ms[HTTP]}, peer=fastest_reader),
        Row(case, f"{DIRECT}; by the reader", "ms", {**readers, OURS: ms[DIRECT]}, peer=fastest_reader),
        Row(case, "data files read by SQL", "", {SQL: statistics.median(files_read)}, peer=SQL),
    ]


def _check_count(name: str, found_count: int, requested_count: int) -> None:
    if found_count != requested_count:
        raise AnswersDiffer(f"{name} found {found_count} rows of {requested_count} keys")
