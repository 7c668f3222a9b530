"""How long does a cold plan take, and how fast are manifests decoded?

A plan is cold if no data of the table is in memory. The first plan of a new table decodes every manifest. The first
plan after a restart finds decoded blocks on the local disk. For Java, the cold plan is the first plan of a new JVM that
has loaded the table's metadata. The manifests are in the page cache for all planners. The speed of decoding is the
number of entries per second of CPU time, for one manifest after another, from its bytes.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import fastavro
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestFile as TheirManifestFile
from pyiceberg.table import StaticTable

from bench.planning import java_peer, pyiceberg_peer
from bench.planning.filters import FILTERS, RANGES
from bench.planning.java_peer import run_java_planner
from bench.planning.ours import open_our_planner
from bench.planning.pyiceberg_peer import PyIcebergPlanner
from bench.planning.tables import GeneratedTable, generate_table
from bench.planning.warm import JAVA, PYICEBERG
from bench.report import OURS, Report, Row
from bench.targets import LOAD_CORE, pin_to_core
from seamark.formats.iceberg.manifests.avro import read_container
from seamark.formats.iceberg.manifests.manifest import INFLATED_LIMIT_BYTES, decode_manifest
from seamark.metaserver.index.blocks.encoding import encode_block

SIZES = (10_000, 100_000, 1_000_000)
DECODE_GOAL_ENTRIES_S = 200_000
COLD_GOAL_MS = {100_000: 500.0}
FASTER_GOAL = 3.0
"""The goal at a million files: how many times faster than Java's first plan."""
FASTAVRO = "fastavro"


async def run(folder: Path, *, quick: bool = False, sizes: tuple[int, ...] = SIZES) -> Report:
    report = Report(
        "planning_cold",
        "How long is a cold plan, and how fast is decode?",
        peer=(
            f"the first plan of Iceberg Java {java_peer.read_version()}; for decode, PyIceberg"
            f" {pyiceberg_peer.get_version()}"
        ),
    )
    for files in (2_000,) if quick else sizes:
        generated_table = generate_table(files)
        _load_into_page_cache(generated_table)
        await _measure_plans(report, folder, generated_table, rounds=1 if quick else 3)
    _measure_decoding(report, generate_table(2_000 if quick else 100_000), manifests=2 if quick else 50)
    report.notes.append(
        "The filter is the narrow range of the warm plans; no manifest can be left out by its partitions. First plan"
        " after a restart: the planner is new and its tier on disk holds every block."
    )
    return report


async def _measure_plans(report: Report, folder: Path, table: GeneratedTable, rounds: int) -> None:
    expected = FILTERS[RANGES[0]].build_expression(table)
    seamark_durations, second_durations, java_durations = [], [], []
    for number in range(rounds if table.files < 1_000_000 else min(rounds, 2)):
        with run_java_planner(table.metadata_location, table.files, folder / "java.log") as java_planner:
            plan = java_planner.plan(expected)
            java_durations.append(plan.ms)
        home = folder / f"home-{table.files}-{number}"
        async with open_our_planner(home, table) as seamark_planner:
            first = await seamark_planner.plan(expected)
        plan.check_same(first, f"{table.files:,} files, first plan")
        seamark_durations.append(first.ms)
        async with open_our_planner(home, table, disk=True) as seamark_planner:
            await seamark_planner.plan(expected)
        async with open_our_planner(home, table, disk=True) as seamark_planner:
            second_durations.append((await seamark_planner.plan(expected)).ms)
    values = {OURS: statistics.median(seamark_durations), JAVA: statistics.median(java_durations)}
    if table.files <= 100_000:
        values[PYICEBERG] = PyIcebergPlanner(table.metadata_location).plan(expected).ms
    goal = values[JAVA] / FASTER_GOAL if table.files >= 1_000_000 else COLD_GOAL_MS.get(table.files)
    report.rows.append(Row(f"{table.files:,} files, first plan ever", "plan", "ms", values, peer=JAVA, goal=goal))
    restarted_ms = {OURS: statistics.median(second_durations), JAVA: values[JAVA]}
    report.rows.append(Row(f"{table.files:,} files, first after a restart", "plan", "ms", restarted_ms, peer=JAVA))


def _load_into_page_cache(table: GeneratedTable) -> None:
    """Read all files of the table once, so that they are in the page cache."""
    for path in sorted((table.folder / "metadata").iterdir()):
        path.read_bytes()


def _measure_decoding(report: Report, table: GeneratedTable, manifests: int) -> None:
    """Measure the entries per second of Seamark, to columns and to blocks, and of the peers, to their objects."""
    paths = sorted((table.folder / "metadata").glob("*-m0.avro"))[:manifests]
    contents = [(path.read_bytes(), f"file://{path}") for path in paths]
    expected = {their_manifest.manifest_path for their_manifest in _list_pyiceberg_manifests(table)}
    assert {location for _, location in contents} <= expected
    sample = contents[: max(1, manifests // 10)]
    with pin_to_core(LOAD_CORE):
        columns = _measure_rate(lambda data, location: decode_manifest(data, location).rows, contents)
        inflate_rate = _measure_rate(_inflate, contents)
        blocks = _measure_rate(_decode_to_block, contents)
        peers = {FASTAVRO: _measure_rate(_count_with_fastavro, sample), PYICEBERG: _measure_pyiceberg(table, sample)}
    report.bounds["inflating alone, one thread"] = f"{inflate_rate:,.0f} entries/s"
    for measure, rate in (("to columns", columns), ("to a block", blocks)):
        values = {OURS: rate, **peers}
        row = Row(
            "decode, one thread",
            measure,
            "entries/s",
            values,
            lower_is_better=False,
            peer=PYICEBERG,
            goal=DECODE_GOAL_ENTRIES_S,
        )
        report.rows.append(row)


def _measure_rate(decode: Callable[[bytes, str], int], contents: list[tuple[bytes, str]]) -> float:
    """Return the entries per second of CPU time.

    Other processes change the CPU time less than the elapsed time.
    """
    decode(*contents[0])
    started_s = time.process_time()
    rows = sum(decode(data, location) for data, location in contents)
    return rows / (time.process_time() - started_s)


def _inflate(data: bytes, location: str) -> int:
    return int(read_container(data, location, inflated_limit_bytes=INFLATED_LIMIT_BYTES).counts.sum())


def _decode_to_block(data: bytes, location: str) -> int:
    decoded_manifest = decode_manifest(data, location)
    b"".join(encode_block(decoded_manifest))
    return decoded_manifest.rows


def _count_with_fastavro(data: bytes, _: str) -> int:
    return sum(1 for _ in fastavro.reader(io.BytesIO(data)))


def _list_pyiceberg_manifests(table: GeneratedTable) -> list[TheirManifestFile]:
    snapshot = StaticTable.from_metadata(table.metadata_location).current_snapshot()
    assert snapshot is not None
    return snapshot.manifests(PyArrowFileIO())


def _measure_pyiceberg(table: GeneratedTable, contents: list[tuple[bytes, str]]) -> float:
    files = PyArrowFileIO()
    manifests_by_path = {
        their_manifest.manifest_path: their_manifest for their_manifest in _list_pyiceberg_manifests(table)
    }
    return _measure_rate(lambda _, location: len(manifests_by_path[location].fetch_manifest_entry(files)), contents)
