"""Tests that a check of rights is not repeated for some seconds for the same sender, session and columns."""

from __future__ import annotations

from multidict import CIMultiDict

from seamark.connector.trino.protocol.checked_rights import CHECKS_MAX, CheckedRights
from seamark.connector.trino.protocol.coordinators import Coordinator, Coordinators

CHECK = "SELECT t0.a FROM t AS t0 WHERE FALSE"


def make_headers(**changes: str) -> CIMultiDict[str]:
    headers = CIMultiDict({"X-Trino-User": "anna", "Authorization": "Basic abc", "X-Trino-Schema": "shop"})
    headers.update({name.replace("_", "-"): value for name, value in changes.items()})
    return headers


def get_coordinator(number: int = 0) -> Coordinator:
    return Coordinators(("http://127.0.0.1:1", "http://127.0.0.1:2")).all[number]


def test_check_is_remembered_for_the_same_sender_session_and_columns() -> None:
    now_s = 0.0
    rights = CheckedRights(10.0, lambda: now_s)
    coordinator = get_coordinator()
    assert not rights.has(coordinator, make_headers(), CHECK)
    rights.remember(coordinator, make_headers(), CHECK)
    assert rights.has(coordinator, make_headers(), CHECK)
    assert rights.has(coordinator, make_headers(Content_Length="7", Traceparent="00-1"), CHECK)
    for name, value in (("X_Trino_User", "rita"), ("Authorization", "Basic x"), ("X_Trino_Role", "r"), ("Cookie", "c")):
        assert not rights.has(coordinator, make_headers(**{name: value}), CHECK)
    assert not rights.has(coordinator, make_headers(X_Trino_Schema="other"), CHECK)
    assert not rights.has(coordinator, make_headers(), CHECK.replace("t0.a", "t0.b"))
    assert not rights.has(get_coordinator(1), make_headers(), CHECK)
    now_s = 10.0
    assert not rights.has(coordinator, make_headers(), CHECK)


def test_no_check_is_remembered_if_the_time_is_zero() -> None:
    rights = CheckedRights(0.0, lambda: 0.0)
    rights.remember(get_coordinator(), make_headers(), CHECK)
    assert not rights.has(get_coordinator(), make_headers(), CHECK)


def test_number_of_remembered_checks_is_limited() -> None:
    rights = CheckedRights(10.0, lambda: 0.0)
    for number in range(CHECKS_MAX + 5):
        rights.remember(get_coordinator(), make_headers(), f"{CHECK} AND {number}")
    assert len(rights._until_s) == CHECKS_MAX
