"""Tests of plan tasks and plan ids: a token opens unchanged for its own table and purpose only."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.metaserver.planner.scan.attribute_columns import AttributeColumn
from seamark.metaserver.planner.scan.request import PinnedRequest
from seamark.metaserver.planner.scan.tokens import (
    ROWS_MAX,
    TOKENS_BYTES_MAX,
    VERSION,
    Tokens,
    count_plan_tasks,
    pack_request,
)
from tests.access.keyrings import make_fixed_keyring

IDS = st.integers(-(2**63), 2**63 - 1)
REQUESTS = st.builds(
    PinnedRequest,
    snapshot_id=st.none() | IDS,
    start_snapshot_id=st.none() | IDS,
    end_snapshot_id=st.none() | IDS,
    schema_id=st.integers(0, 2**31 - 1),
    filter_json=st.binary(max_size=400),
    case_sensitive=st.booleans(),
    use_snapshot_schema=st.booleans(),
    stats_fields=st.lists(st.text(st.characters(codec="utf-8")), max_size=4).map(tuple),
    attributes=st.sampled_from([(), (AttributeColumn("region", 3, "lookup[ssb.supplier@5:1:6:string]", False),)]),
)
SAMPLE_REQUEST = PinnedRequest(
    snapshot_id=7, schema_id=0, filter_json=b'{"type":"eq","term":"a","value":3}', stats_fields=("a",)
)


@given(sent_request=REQUESTS, first_row=st.integers(0, ROWS_MAX), end_row=st.integers(0, ROWS_MAX), uuid=st.uuids())
def test_token_opens_on_any_replica_with_its_content(
    sent_request: PinnedRequest, first_row: int, end_row: int, uuid: object
) -> None:
    tokens, other_replica = Tokens(make_fixed_keyring()), Tokens(make_fixed_keyring())
    task = other_replica.open_plan_task(
        tokens.sign_plan_task(pack_request(sent_request), first_row, end_row, str(uuid)), str(uuid)
    )
    assert task is not None
    assert (task.request, task.first_row, task.end_row) == (sent_request, first_row, end_row)
    assert (
        other_replica.open_plan_id(tokens.sign_plan_id(pack_request(sent_request), str(uuid)), str(uuid))
        == sent_request
    )


def test_token_for_a_different_table_purpose_or_server_is_rejected() -> None:
    tokens = Tokens(make_fixed_keyring())
    plan_task, plan_id = (
        tokens.sign_plan_task(pack_request(SAMPLE_REQUEST), 0, 9, "one"),
        tokens.sign_plan_id(pack_request(SAMPLE_REQUEST), "one"),
    )
    assert tokens.open_plan_task(plan_task, "other") is None
    assert tokens.open_plan_id(plan_id, "other") is None
    assert tokens.open_plan_id(plan_task, "one") is None
    assert tokens.open_plan_task(plan_id, "one") is None
    assert Tokens(make_fixed_keyring(b"t")).open_plan_task(plan_task, "one") is None


@given(data=st.data())
def test_token_changed_at_any_byte_is_rejected(data: st.DataObject) -> None:
    token = Tokens(make_fixed_keyring()).sign_plan_task(pack_request(SAMPLE_REQUEST), 0, 9, "one")
    raw = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    changed_token = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    assert Tokens(make_fixed_keyring()).open_plan_task(changed_token, "one") is None


@given(token=st.text(st.characters(codec="utf-8")))
def test_invented_token_is_rejected(token: str) -> None:
    assert Tokens(make_fixed_keyring()).open_plan_task(token, "one") is None
    assert Tokens(make_fixed_keyring()).open_plan_id(token, "one") is None


def test_token_of_a_different_version_is_rejected() -> None:
    token = Tokens(make_fixed_keyring()).sign_plan_task(pack_request(SAMPLE_REQUEST), 0, 9, "one")
    raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    later_token = base64.urlsafe_b64encode(bytes((VERSION + 1,)) + raw[1:]).decode()
    assert Tokens(make_fixed_keyring()).open_plan_task(later_token, "one") is None


@pytest.mark.parametrize(
    ("files", "packed_bytes", "pages"),
    [
        (0, 100, 0),
        (1000, 100, 0),
        (1001, 100, 2),
        (8000, 100, 2),
        (8001, 100, 3),
        (1_000_000, 100, 250),
        (1_000_000, 100_000, 7),
        (1_000_000, 500_000, 0),
        (1_000_000, 50_000_000, 0),
    ],
)
def test_plan_is_split_into_pages_unless_tokens_would_be_larger_than_the_pages(
    files: int, packed_bytes: int, pages: int
) -> None:
    """A plan of more than 1000 files has at least two pages of about 4000 files.

    Each page has a token, which contains the packed request. The tokens of a plan have a maximum total size, so a plan
    with a large request has fewer pages, or none.
    """
    assert count_plan_tasks(files, packed_bytes, inline_limit=1000, page_size=4000) == pages


@given(files=st.integers(0, 10**7), size=st.integers(0, 3 << 20))
def test_tokens_of_one_answer_stay_within_their_limit(files: int, size: int) -> None:
    pages = count_plan_tasks(files, size, inline_limit=1000, page_size=4000)
    token = Tokens(make_fixed_keyring()).sign_plan_task(b"x" * size, 0, ROWS_MAX, "one") if pages else ""
    assert pages * len(token) <= TOKENS_BYTES_MAX
    assert pages <= files
