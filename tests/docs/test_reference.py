"""Reference pages that are lists match the code, and pages that are written by hand are complete."""

from __future__ import annotations

import json
import re

import pytest
from aiohttp import web

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.api.openapi import build_document
from seamark.metaserver.store.model import EntryKind, Instant, InstantState
from seamark.metaserver.store.sql.migrations import MIGRATIONS
from seamark.metaserver.timeline.events import InstantAnswer, build_cloud_event
from tests.api.rest.standard import read_operations
from tests.docs.pages import REPO, Page
from tests.docs.reference import PAGES, REFERENCE, SERVICES_PAGE, format_services_page, list_served_operations
from tests.rck.kit import DISABLED_BY_THE_KIT

INSTANT = Instant(
    id="i",
    action="commit",
    state=InstantState.COMPLETED,
    kind=EntryKind.TABLE,
    namespace=("shop",),
    name="orders",
    uuid="u",
    requested_ms=1,
    completed_ms=2,
    position="1",
)


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_matches_the_code(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "run `python -m tests.docs.reference`"


def test_list_of_table_services_matches_the_declarations() -> None:
    assert SERVICES_PAGE.read_text() == format_services_page(), "run `python -m tests.docs.reference`"


def test_every_table_of_the_database_is_explained() -> None:
    statements = "\n".join(
        sql for migration in MIGRATIONS for statements_of_dialect in migration.values() for sql in statements_of_dialect
    )
    created_tables = set(re.findall(r"CREATE TABLE (\w+)", statements)) | {"schema_version"}
    page = Page(REFERENCE / "database-schema.md")
    explained_tables = set(re.findall(r"^\| `(\w+)` \|", page.text, flags=re.MULTILINE))
    assert explained_tables == created_tables


def test_timeline_page_shows_instants_and_events_in_their_format() -> None:
    documents = [json.loads(block.text) for block in Page(REFERENCE / "timeline.md").blocks if block.language == "json"]
    instants = next(document for document in documents if "instants" in document)["instants"]
    assert instants
    assert all(tuple(instant) == InstantAnswer.__struct_encode_fields__ for instant in instants)
    event = next(document for document in documents if "specversion" in document)
    assert event.keys() == build_cloud_event(INSTANT, "file:///w").keys()
    assert event["type"] == build_cloud_event(INSTANT, "file:///w")["type"]


def test_timeline_page_names_every_state_and_parameter() -> None:
    app = web.Application()
    add_routes(app, EXTENSIONS)
    document = build_document(app)
    text = (REFERENCE / "timeline.md").read_text()
    expected = {state.value for state in InstantState}
    expected |= {parameter["name"] for parameter in document["paths"]["/api/v1/timeline"]["get"]["parameters"]}
    assert {name for name in expected if f"`{name}`" not in text} == set()


def test_numbers_of_the_readme_match_the_code() -> None:
    text = " ".join(Page(REPO / "README.md").text.split())
    assert f"**{len(list_served_operations())} of the {len(read_operations())} operations**" in text
    numerals = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert f"{numerals[len(DISABLED_BY_THE_KIT)]} of them are switched off by the kit itself" in text
