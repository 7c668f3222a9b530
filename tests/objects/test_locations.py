"""Tests that no location or name leads out of the warehouse, however a reader interprets it."""

from __future__ import annotations

import posixpath
import sys
import uuid
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.formats.storage.locations import make_location_key, parse_location
from seamark.metaserver.objects.warehouse import Warehouse, make_safe_segment

ROOTS = ["file:///srv/warehouse", "s3://lake/warehouse", "s3://lake", "file:///"]
UUID = uuid.UUID("0190b5a2-0000-7000-8000-000000000000")

any_name = st.text(min_size=1, max_size=300)
hostile_name = st.text(alphabet="./\\%2eEfF5cC \x00\n~:?#&+é漢", min_size=1, max_size=20)


def assert_inside(location: str, root: str) -> None:
    """Check that a location is inside of `root` for every reader.

    A reader may decode the location any number of times, and may read backslashes as slashes.
    """
    scheme, _, location_path = location.partition("://")
    root_scheme, _, root_path = root.partition("://")
    assert scheme == root_scheme
    decoded_path = location_path
    for _ in range(5):  # More often than any reader decodes a location.
        for path in (decoded_path, decoded_path.replace("\\", "/")):
            assert posixpath.normpath(path) == path.rstrip("/"), f"{path!r} is not plain"
            assert root_path.rstrip("/") == "" or path.startswith(root_path.rstrip("/") + "/")
            assert ".." not in PurePosixPath(path).parts
        decoded_path = unquote(decoded_path)
    parts = urlsplit(location)
    assert not parts.query
    assert not parts.fragment
    assert parts.netloc == urlsplit(root).netloc


@given(st.lists(st.one_of(any_name, hostile_name), min_size=1, max_size=4), st.one_of(any_name, hostile_name))
@example(["..", "..", ".."], "..")
@example(["/etc"], "passwd")
@example(["%2e%2e%2f"], "%252e%252e")
@example(["."], "...")
def test_no_name_leads_a_table_out_of_the_warehouse(levels: list[str], name: str) -> None:
    for root in ROOTS:
        warehouse = Warehouse(root)
        namespace = warehouse.make_namespace_location(tuple(levels))
        table = warehouse.table_location(namespace, name, UUID)
        for location in (namespace, table):
            assert warehouse.check(location) == location
            assert_inside(location, root)
        assert parse_location(namespace).holds(parse_location(table))


@given(st.lists(st.lists(any_name, min_size=1, max_size=3).map(tuple), unique=True, max_size=6))
def test_different_namespaces_have_different_locations(paths: list[tuple[str, ...]]) -> None:
    warehouse = Warehouse("s3://lake/warehouse")
    assert len({warehouse.make_namespace_location(path) for path in paths}) == len(paths)


@given(st.text(alphabet="ab./\\%2eEfF: \x00é?#@", max_size=40))
def test_accepted_location_is_inside_in_every_interpretation(tail: str) -> None:
    for root in ROOTS:
        warehouse = Warehouse(root)
        for text in (tail, root + tail, f"{root}/{tail}"):
            try:
                location = warehouse.check(text)
            except BadRequest:
                assert not warehouse.contains(text)
                continue
            assert_inside(location, root)
            assert warehouse.check(location) == location, "a second normalisation changes the location"


def test_long_locations_are_not_cached() -> None:
    """One request may name thousands of long locations, and the cache would hold their characters three times.

    A cache would hold a further reference to the text.
    """
    text = "s3://lake/" + "x" * 4000
    references_before = sys.getrefcount(text)
    assert parse_location(text).path == "x" * 4000
    assert sys.getrefcount(text) == references_before


def test_plain_names_stay_readable() -> None:
    assert make_safe_segment("orders_2026.v1") == "orders_2026.v1"
    assert make_safe_segment("Ünïcode orders").startswith("n_code_orders-")
    table = Warehouse("s3://lake/wh").table_location("s3://lake/wh/sales", "orders", UUID)
    assert table == "s3://lake/wh/sales/orders-0190b5a2000070008000000000000000"


@pytest.mark.parametrize(
    ("written_location", "normal"),
    [
        ("file:/srv/wh/t", "file:///srv/wh/t"),
        ("file:///srv/wh/t/", "file:///srv/wh/t"),
        ("FILE:///srv/wh/t", "file:///srv/wh/t"),
        ("s3a://lake/t", "s3://lake/t"),
        ("s3n://lake/t", "s3://lake/t"),
        ("S3://lake/t/", "s3://lake/t"),
        ("s3://lake/p=a%2Fb/dt=2026-01-01T00%3A00", "s3://lake/p=a%2Fb/dt=2026-01-01T00%3A00"),
        ("s3://lake/..hidden/a..b/...", "s3://lake/..hidden/a..b/..."),
        ("s3://lake/a b", "s3://lake/a b"),
    ],
)
def test_spellings_of_one_location_are_normalised(written_location: str, normal: str) -> None:
    assert Warehouse("file:///srv/wh", ["s3://lake"]).check(written_location) == normal


INVALID_LOCATIONS = [
    ("", "not a URI"),
    ("/srv/wh/t", "not a URI"),
    ("t", "not a URI"),
    ("http://169.254.169.254/latest/meta-data", "scheme 'http'"),
    ("https://lake.s3.amazonaws.com/t", "scheme 'https'"),
    ("viewfs://lake/t", "scheme 'viewfs'"),
    ("oss://nn/t", "scheme 'oss'"),
    ("file://host/srv/wh/t", "host 'host'"),
    ("file://localhost/srv/wh/t", "host 'localhost'"),
    ("file:srv/wh/t", "not absolute"),
    ("file:////srv/wh/t", "empty path segment"),
    ("file:///srv/wh/../../etc/passwd", "'..' segment"),
    ("file:///srv/wh/./t", "'.' or '..' segment"),
    ("file:///srv/wh/%2e%2e/t", "'..' segment"),
    ("file:///srv/wh/%252e%252e/t", "'..' segment"),
    ("file:///srv/wh/a%2f..%2f..%2ft", "'..' segment"),
    ("file:///srv/wh/a%5c..%5c..%5ct", "'..' segment"),
    ("file:///srv/wh/%" + "25" * 20 + "2e", "percent-encoded"),
    ("file:///srv/wh/t%00.json", "NUL"),
    ("file:///srv/wh//t", "empty path segment"),
    ("file:///srv/wh\\..\\t", "backslash"),
    ("file:///srv/wh/t\n", "control character"),
    ("file:///srv/wh/t\x00", "control character"),
    ("file:///srv/wh/t\ud800", "control character"),
    ("file:///srv/wh/t?x=1", "query"),
    ("file:///srv/wh/t#frag", "fragment"),
    ("s3://key:secret@lake/wh/t", "user information"),
    ("s3:/lake/wh/t", "no bucket"),
    ("s3:///wh/t", "bucket ''"),
    ("s3://lake:9000/wh/t", "bucket 'lake:9000'"),
    ("s3://la..ke/wh/t", "bucket 'la..ke'"),
    ("s3://lake%2Fx/wh/t", "bucket 'lake%2Fx'"),
    ("s3://other/wh/t", "outside the warehouse"),
    ("s3://lake/wh", "is the root of all tables"),
    ("s3://lake/wh2/t", "outside the warehouse"),
    ("s3://lake/WH/t", "outside the warehouse"),
    ("file:///srv/wh", "is the root of all tables"),
    ("file:///", "outside the warehouse"),
    ("s3://lake/wh/" + "x" * 5000, "characters"),
]


@pytest.mark.parametrize(("location", "reason"), INVALID_LOCATIONS)
def test_error_names_an_invalid_location_and_the_reason(location: str, reason: str) -> None:
    warehouse = Warehouse("file:///srv/wh", ["s3://lake/wh"])
    with pytest.raises(BadRequest) as error:
        warehouse.check(location, "The table's location")
    assert reason in error.value.message
    assert error.value.message.startswith("The table's location")
    assert not warehouse.contains(location)


def test_error_does_not_repeat_credentials_in_a_location() -> None:
    with pytest.raises(BadRequest) as error:
        Warehouse("s3://lake").check("s3://key:hunter2@lake/t")
    assert "hunter2" not in error.value.message


def test_namespace_but_no_table_may_be_at_the_root() -> None:
    warehouse = Warehouse("s3://lake/wh")
    assert warehouse.check("s3://lake/wh/", root_ok=True) == "s3://lake/wh"
    assert not warehouse.contains("s3://lake/wh")
    assert warehouse.table_location("s3://lake/wh", "t", UUID).startswith("s3://lake/wh/t-")


def test_location_of_a_namespace_cannot_be_outside_the_warehouse() -> None:
    with pytest.raises(BadRequest, match="The location of the namespace"):
        Warehouse("s3://lake/wh").table_location("s3://elsewhere/wh", "t", UUID)


@pytest.mark.parametrize("uri", ["ftp://x/y", "/srv/wh", "s3://", "file:///a/../b"])
def test_invalid_warehouse_is_a_configuration_error(uri: str) -> None:
    with pytest.raises(ConfigError, match="warehouse"):
        Warehouse(uri)
    with pytest.raises(ConfigError, match="allowed_locations"):
        Warehouse("s3://lake", [uri])


def test_nameservice_keeps_its_case_and_a_host_does_not() -> None:
    assert str(parse_location("hdfs://LakeHA/wh/T")) == "hdfs://LakeHA/wh/T"
    assert str(parse_location("HDFS://NameNode:8020/wh")) == "hdfs://namenode:8020/wh"
    # A name without a port can be a host, so two tables must not have locations that differ only in its case.
    keys = {make_location_key(parse_location(f"hdfs://{name}/wh")) for name in ("LakeHA", "lakeha")}
    assert keys == {"hdfs://lakeha/wh"}
    with pytest.raises(BadRequest, match="outside the warehouse"):
        Warehouse("hdfs://LakeHA/wh").check("hdfs://lakeha/wh/t")
