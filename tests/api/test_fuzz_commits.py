"""Tests with random commits of updates. Each update is valid alone, but most commits are invalid.

Ids collide or do not exist, types cannot change, and references name removed objects. The server accepts or rejects
each commit, never with a 5xx. Afterwards the table can be loaded, and PyIceberg reads its metadata.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.table.metadata import TableMetadataUtil

from tests.services.seamark import Seamark

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
EXAMPLES = 25
LONG_CAMPAIGN_EXAMPLES = 3_000

ids = st.sampled_from([-1, 0, 1, 2, 3, 4, 1000, 1001, 2**31 - 1])
names = st.sampled_from(["id", "data", "ID", "a", "b", "a.b", "", "雪", "main", "x" * 300])
refs = st.sampled_from(["main", "b1", "t1"])
texts = st.sampled_from(["", "1", "true", "none", "gzip", "-1", "999999999999999999999", "x"])
keys = st.sampled_from(
    [
        "a",
        "format-version",
        "uuid",
        "current-schema",
        "write.metadata.previous-versions-max",
        "write.metadata.delete-after-commit.enabled",
        "write.metadata.compression-codec",
        "write.metadata.path",
        "gc.enabled",
        "commit.retry.num-retries",
    ]
)
number_types = [
    "int",
    "long",
    "float",
    "double",
    "decimal(9,2)",
    "decimal(38,10)",
    "date",
    "timestamp",
    "timestamptz_ns",
]
non_number_types = [
    "string",
    "binary",
    "fixed[4]",
    "uuid",
    "boolean",
    "unknown",
    "variant",
    "geometry",
    "geography(srid:4326)",
]
primitives = st.sampled_from([*number_types, *non_number_types])


def draw_fields(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"id": ids, "name": names, "required": st.booleans(), "type": inner},
        optional={"doc": texts, "initial-default": st.sampled_from([1, "x", None, 1.5]), "write-default": ids},
    )


types = st.recursive(
    primitives,
    lambda inner: st.one_of(
        st.builds(
            lambda element, drawn_id: {
                "type": "list",
                "element-id": drawn_id,
                "element": element,
                "element-required": False,
            },
            inner,
            ids,
        ),
        st.builds(
            lambda value, key_id, value_id: {
                "type": "map", "key-id": key_id, "key": "string", "value-id": value_id, "value": value,
                "value-required": True,
            },
            inner, ids, ids,
        ),
        st.builds(lambda fields: {"type": "struct", "fields": fields}, st.lists(draw_fields(inner), max_size=3)),
    ),
    max_leaves=4,
)  # fmt: skip


schemas = st.fixed_dictionaries(
    {"type": st.just("struct"), "fields": st.lists(draw_fields(types), max_size=4)},
    optional={"schema-id": ids, "identifier-field-ids": st.lists(ids, max_size=2)},
)
transforms = st.sampled_from(
    ["identity", "bucket[4]", "bucket[0]", "truncate[2]", "year", "day", "hour", "void", "new"]
)
specs = st.fixed_dictionaries(
    {
        "fields": st.lists(
            st.fixed_dictionaries(
                {"name": names, "source-id": ids, "transform": transforms}, optional={"field-id": ids}
            ),
            max_size=3,
        )
    },
    optional={"spec-id": ids},
)
orders = st.fixed_dictionaries(
    {
        "order-id": ids,
        "fields": st.lists(
            st.fixed_dictionaries(
                {
                    "source-id": ids,
                    "transform": transforms,
                    "direction": st.sampled_from(["asc", "desc"]),
                    "null-order": st.sampled_from(["nulls-first", "nulls-last"]),
                }
            ),
            max_size=2,
        ),
    }
)
snapshots = st.fixed_dictionaries(
    {
        "snapshot-id": ids,
        "sequence-number": ids,
        "timestamp-ms": st.sampled_from([0, -1, 1_700_000_000_000, 4_000_000_000_000, 2**63 - 1]),
        "manifest-list": st.sampled_from(["file:///a.avro", "", "s3://b/c"]),
        "summary": st.sampled_from([{"operation": "append"}, {}, {"operation": "overwrite", "added-records": "x"}]),
    },
    optional={"parent-snapshot-id": ids, "schema-id": ids, "first-row-id": ids, "added-rows": ids, "key-id": texts},
)
statistics = st.fixed_dictionaries(
    {
        "snapshot-id": ids,
        "statistics-path": st.just("file:///s.puffin"),
        "file-size-in-bytes": ids,
        "file-footer-size-in-bytes": ids,
        "blob-metadata": st.just([]),
    }
)
partition_statistics = st.fixed_dictionaries(
    {"snapshot-id": ids, "statistics-path": st.just("file:///s.parquet"), "file-size-in-bytes": ids}
)
references = st.fixed_dictionaries(
    {"ref-name": refs, "type": st.sampled_from(["branch", "tag"]), "snapshot-id": ids},
    optional={"max-ref-age-ms": ids, "max-snapshot-age-ms": ids, "min-snapshots-to-keep": ids},
)
encryption = st.fixed_dictionaries(
    {"key-id": texts, "encrypted-key-metadata": st.sampled_from(["AAAA", "!", ""])}, optional={"encrypted-by-id": texts}
)


def _draw_action(name: str, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"action": st.just(name), **{key.replace("_", "-"): value for key, value in values.items()}}
    )


UPDATES = st.one_of(
    _draw_action("assign-uuid", uuid=st.sampled_from([str(uuid.UUID(int=7, version=4)), "x"])),
    _draw_action("upgrade-format-version", format_version=ids),
    _draw_action("add-schema", schema=schemas),
    _draw_action("set-current-schema", schema_id=ids),
    _draw_action("add-spec", spec=specs),
    _draw_action("set-default-spec", spec_id=ids),
    _draw_action("add-sort-order", sort_order=orders),
    _draw_action("set-default-sort-order", sort_order_id=ids),
    _draw_action("add-snapshot", snapshot=snapshots),
    st.builds(lambda ref: {"action": "set-snapshot-ref", **ref}, references),
    _draw_action("remove-snapshots", snapshot_ids=st.lists(ids, max_size=3)),
    _draw_action("remove-snapshot-ref", ref_name=refs),
    _draw_action("set-location", location=st.sampled_from(["", "file:///etc", "x"])),
    _draw_action("set-properties", updates=st.dictionaries(keys, texts, max_size=3)),
    _draw_action("remove-properties", removals=st.lists(keys, max_size=3)),
    _draw_action("set-statistics", snapshot_id=ids, statistics=statistics),
    _draw_action("remove-statistics", snapshot_id=ids),
    _draw_action("set-partition-statistics", partition_statistics=partition_statistics),
    _draw_action("remove-partition-statistics", snapshot_id=ids),
    _draw_action("remove-partition-specs", spec_ids=st.lists(ids, max_size=2)),
    _draw_action("remove-schemas", schema_ids=st.lists(ids, max_size=2)),
    _draw_action("add-encryption-key", encryption_key=encryption),
    _draw_action("remove-encryption-key", key_id=texts),
    _draw_action("enable-row-lineage"),
)
REQUIREMENTS = st.one_of(
    st.just({"type": "assert-create"}),
    st.builds(
        lambda ref, drawn_id: {"type": "assert-ref-snapshot-id", "ref": ref, "snapshot-id": drawn_id},
        refs,
        ids | st.none(),
    ),
    st.builds(lambda drawn_id: {"type": "assert-last-assigned-field-id", "last-assigned-field-id": drawn_id}, ids),
    st.builds(lambda drawn_id: {"type": "assert-current-schema-id", "current-schema-id": drawn_id}, ids),
    st.builds(
        lambda drawn_id: {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": drawn_id}, ids
    ),
    st.builds(lambda drawn_id: {"type": "assert-default-spec-id", "default-spec-id": drawn_id}, ids),
    st.builds(lambda drawn_id: {"type": "assert-default-sort-order-id", "default-sort-order-id": drawn_id}, ids),
)
SCHEMA = {"type": "struct", "fields": [{"id": 1, "name": "id", "required": True, "type": "long"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("commits") / "home") as server:
        yield server
        assert server.running()
        assert "unexpected error" not in server.log.read_text()


def _run_campaign(server: Seamark, examples: int) -> None:
    """Send random commits to new tables, and check that each table can be read after each answer."""
    tables_url = f"{server.base_url}/v1/namespaces/db/tables"
    requests.post(f"{server.base_url}/v1/namespaces", json={"namespace": ["db"]}, timeout=60)
    status_counts: dict[int, int] = {}
    with requests.Session() as http:

        @settings(
            max_examples=examples,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(
            version=st.sampled_from(["1", "2", "3"]),
            commits=st.lists(
                st.tuples(st.lists(REQUIREMENTS, max_size=1), st.lists(UPDATES, min_size=1, max_size=4)),
                min_size=1,
                max_size=5,
            ),
        )
        def commit_to_new_table(version: str, commits: list[tuple[list[Any], list[Any]]]) -> None:
            table: Any = {"name": "t", "schema": SCHEMA, "properties": {"format-version": version}}
            created_table = http.post(tables_url, json=table)
            assert created_table.status_code == 200, created_table.text
            try:
                for requirements, updates in commits:
                    body: Any = {"requirements": requirements, "updates": updates}
                    answer = http.post(f"{tables_url}/t", json=body)
                    status_counts[answer.status_code] = status_counts.get(answer.status_code, 0) + 1
                    assert answer.status_code in (200, 400, 409), answer.text
                    loaded_table = http.get(f"{tables_url}/t")
                    assert loaded_table.status_code == 200, loaded_table.text
                    if answer.status_code == 200:
                        assert loaded_table.json()["metadata"] == answer.json()["metadata"]
                        _check_readable(loaded_table.json()["metadata"])
                    assert http.get(f"{tables_url}/t?snapshots=refs").status_code == 200
            finally:
                http.delete(f"{tables_url}/t")

        commit_to_new_table()
    assert {200, 400, 409} <= set(status_counts), status_counts
    assert status_counts[200] > sum(status_counts.values()) / 50, (
        f"The server committed too few changes: {status_counts}"
    )


def _check_readable(metadata: dict[str, Any]) -> None:
    """Check that PyIceberg parses the metadata, unless they have a type or transform that PyIceberg may not support."""
    text = str(metadata)
    # "new" is a transform that no specification defines.
    if any(word in text for word in ("variant", "geometry", "geography", "'new'")):
        return
    TableMetadataUtil.parse_obj(metadata)


def test_no_commit_breaks_the_server_or_the_table(server: Seamark) -> None:
    _run_campaign(server, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_commit_breaks_the_server_or_the_table_in_a_long_campaign(server: Seamark) -> None:
    _run_campaign(server, LONG_CAMPAIGN_EXAMPLES)
