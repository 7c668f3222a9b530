"""Tests with PyIceberg's client over HTTP: encoded names, paging, and exceptions.

`tests/engines` tests the rows that PyIceberg reads and writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from tests.api.rest.test_names import NAMES
from tests.catalog.rig import use_metadata_file_without_digest
from tests.services.seamark import Seamark

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SCHEMA = Schema(NestedField(1, "id", LongType(), required=True), NestedField(2, "data", StringType()))


@pytest.fixture
def catalog(start_seamark: Callable[..., Seamark]) -> Iterator[RestCatalog]:
    server = start_seamark(env={"SEAMARK_PAGE_LIMIT": "7"})
    with RestCatalog("seamark", uri=server.base_url, **{"rest-page-size": "5"}) as catalog:
        yield catalog


def test_every_name_can_be_created_listed_loaded_renamed_and_dropped(catalog: RestCatalog) -> None:
    for name in NAMES:
        catalog.create_namespace((name,))
        catalog.create_table((name, name), SCHEMA)
        assert catalog.list_tables((name,)) == [(name, name)]
        assert catalog.load_table((name, name)).name() == (name, name)
        assert catalog.table_exists((name, name))
    assert sorted(catalog.list_namespaces()) == sorted((name,) for name in NAMES)
    namespace = NAMES[0]
    for name in NAMES[1:]:
        catalog.rename_table((name, name), (namespace, name))
        catalog.drop_namespace((name,))
    assert sorted(catalog.list_tables((namespace,))) == sorted((namespace, name) for name in NAMES)
    for name in NAMES:
        catalog.drop_table((namespace, name))
    catalog.drop_namespace((namespace,))
    assert catalog.list_namespaces() == []


def test_nested_namespaces_have_their_properties(catalog: RestCatalog) -> None:
    catalog.create_namespace("a")
    catalog.create_namespace(("a", "b.c"), {"owner": "ann"})
    assert catalog.list_namespaces(("a",)) == [("a", "b.c")]
    assert catalog.load_namespace_properties(("a", "b.c"))["owner"] == "ann"
    summary = catalog.update_namespace_properties(("a", "b.c"), {"owner", "none"}, {"team": "x"})
    assert (summary.removed, summary.updated, summary.missing) == (["owner"], ["team"], ["none"])


def test_errors_raise_the_clients_matching_exceptions(catalog: RestCatalog) -> None:
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("db")
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("db.t", SCHEMA)
    with pytest.raises(NamespaceNotEmptyError):
        catalog.drop_namespace("db")
    with pytest.raises(NoSuchTableError):
        catalog.load_table("db.none")
    with pytest.raises(NoSuchNamespaceError):
        catalog.create_table("none.t", SCHEMA)
    catalog.drop_table("db.t")
    catalog.create_table("db.t", SCHEMA)
    with pytest.raises(CommitFailedException):
        table.transaction().set_properties(x="1").commit_transaction()


def test_table_is_registered_from_the_metadata_of_a_dropped_table(catalog: RestCatalog) -> None:
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA, properties={"a": "1"})
    catalog.drop_table("db.t")
    registered_table = catalog.register_table("db.again", table.metadata_location)
    assert registered_table.metadata == table.metadata
    assert registered_table.properties["a"] == "1"


def test_stored_properties_do_not_change_where_a_client_opens_files(catalog: RestCatalog) -> None:
    catalog.create_namespace("stored")
    created_table = catalog.create_table(("stored", "t"), SCHEMA, properties={"team": "x"})
    path = use_metadata_file_without_digest(created_table.metadata_location)
    document = json.loads(path.read_text())
    forbidden_properties = {
        "s3.signer.uri": "http://127.0.0.1:9",
        "py-io-impl": "nowhere.IO",
        "token": "t",
        "uri": "http://127.0.0.1:9",
    }
    document["properties"].update(forbidden_properties)
    path.write_text(json.dumps(document))
    loaded_table = catalog.load_table(("stored", "t"))
    assert loaded_table.properties["team"] == "x"
    assert not forbidden_properties.keys() & loaded_table.properties.keys()
    assert loaded_table.io.properties["uri"] == catalog.properties["uri"]
    assert not {"s3.signer.uri", "py-io-impl", "token"} & loaded_table.io.properties.keys()
    with pytest.raises(BadRequestError, match=r"s3\.signer\.uri"):
        loaded_table.transaction().set_properties({"s3.signer.uri": "http://127.0.0.1:9"}).commit_transaction()
