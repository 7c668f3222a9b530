"""Tests of preloading by policy: after a commit the chosen files are in the cache before any client reads them."""

from __future__ import annotations

import json
import re
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.io import load_file_io
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from tests.gateway.rig import GatewayRig, open_rig
from tests.peers.fault_proxy import FaultProxy, run_fault_proxy
from tests.services.s3 import S3
from tests.waits import block_until

PARTITIONED_SCHEMA = Schema(NestedField(1, "id", LongType()), NestedField(2, "p", StringType()))
SPEC = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "p"))


@pytest.fixture(scope="module")
def proxy(s3: S3) -> Iterator[FaultProxy]:
    host, port = s3.endpoint.removeprefix("http://").split(":")
    with run_fault_proxy(host, int(port)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def counting_rig(tmp_path_factory: pytest.TempPathFactory, s3: S3, proxy: FaultProxy) -> Iterator[GatewayRig]:
    with open_rig(tmp_path_factory.mktemp("preloading"), s3, SEAMARK_S3_ENDPOINT=proxy.url) as rig:
        yield rig


def open_catalog(rig: GatewayRig) -> RestCatalog:
    catalog = RestCatalog(uuid.uuid4().hex, uri=rig.seamark.base_url)
    catalog.create_namespace_if_not_exists("pre")
    return catalog


def count_events(rig: GatewayRig, name: str) -> float:
    with urllib.request.urlopen(f"{rig.seamark.base_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    matches = re.findall(rf'^seamark_gateway_cache_events{{[^}}]*event="{name}"[^}}]*}} (\S+)$', text, re.M)
    return sum(map(float, matches))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", ["files", "footers"])
def test_chosen_partitions_are_cached_before_their_first_reader(
    counting_rig: GatewayRig, proxy: FaultProxy, s3: S3, kind: str
) -> None:
    catalog = open_catalog(counting_rig)
    hot_filter = json.dumps({"type": "eq", "term": "p", "value": "hot"})
    properties = {
        "seamark.cache.preload": kind,
        "seamark.cache.preload-filter": hot_filter,
        "seamark.cache.pinned": "true",
    }
    table = catalog.create_table(f"pre.{kind}", PARTITIONED_SCHEMA, partition_spec=SPEC, properties=properties)
    table.io = load_file_io(s3.build_client_properties())  # PyIceberg does not read its own writes through the cache.
    preloaded_before = count_events(counting_rig, "preloaded_file")
    for number in range(2):
        rows = pa.table({"id": range(number, number + 50), "p": ["hot", "cold"] * 25})
        table.append(rows)
    block_until(lambda: count_events(counting_rig, "preloaded_file") >= preloaded_before + 2)
    files = {task.file.file_path: task.file.partition[0] for task in table.scan().plan_files()}
    assert sorted(files.values()) == ["cold", "cold", "hot", "hot"]
    proxy.requests.clear()
    keys = counting_rig.load_keys(kind, namespace="pre")
    client = keys.make_client()
    try:
        for path, partition in files.items():
            bucket, _, key = path.removeprefix("s3://").partition("/")
            data = (counting_rig.folder / bucket / key).read_bytes()
            assert client.get_object(Bucket=bucket, Key=key, Range="bytes=-100")["Body"].read() == data[-100:]
            assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == data
            request_count = sum(
                count for request, count in proxy.requests.items() if request.endswith(key.rpartition("/")[2])
            )
            assert (request_count == 0) is (partition == "hot"), (path, proxy.requests)
    finally:
        client.close()
    assert count_events(counting_rig, "preloaded_file") == preloaded_before + 2


@pytest.mark.slow
def test_files_outside_the_tables_location_are_not_preloaded(counting_rig: GatewayRig, s3: S3) -> None:
    """The metadata names files of another table, as after Spark's `add_files`."""
    catalog = open_catalog(counting_rig)
    schema = Schema(NestedField(1, "id", LongType()))
    other_table = catalog.create_table("pre.other", schema)
    other_table.append(pa.table({"id": range(10)}))
    (path,) = [task.file.file_path for task in other_table.scan().plan_files()]
    preloaded_before = count_events(counting_rig, "preloaded_file")
    table = catalog.create_table("pre.thief", schema, properties={"seamark.cache.preload": "files"})
    # PyIceberg reads the files with its own credentials, without the gateway.
    table.io = load_file_io(s3.build_client_properties())
    table.add_files([path])
    log: Path = counting_rig.seamark.log
    block_until(lambda: any("not preloaded" in line and "thief" in line for line in log.read_text().splitlines()))
    assert count_events(counting_rig, "preloaded_file") == preloaded_before


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("filter_text", ["no JSON", '{"type": "eq", "term": "missing", "value": 1}', "[" * 5000])
def test_unusable_preload_filter_is_logged_and_nothing_is_preloaded(counting_rig: GatewayRig, filter_text: str) -> None:
    catalog = open_catalog(counting_rig)
    preloaded_before, log = count_events(counting_rig, "preloaded_file"), counting_rig.seamark.log
    name = f"f{uuid.uuid4().hex}"
    properties = {"seamark.cache.preload": "files", "seamark.cache.preload-filter": filter_text}
    table = catalog.create_table(f"pre.{name}", Schema(NestedField(1, "id", LongType())), properties=properties)
    table.append(pa.table({"id": range(10)}))
    block_until(lambda: any("not preloaded" in line and name in line for line in log.read_text().splitlines()))
    assert count_events(counting_rig, "preloaded_file") == preloaded_before
