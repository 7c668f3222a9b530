"""Values for a pointer store, with defaults for each field that a test may override."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any

from seamark.formats.runtime.errors import (
    SeamarkError,
)
from seamark.metaserver.store.model import Entry, EntryKind, IdempotencyRecord, Instant, InstantState, NamespacePath
from seamark.metaserver.store.operations import SwapPointer

TABLE, VIEW, FUNCTION = EntryKind.TABLE, EntryKind.VIEW, EntryKind.FUNCTION
NS: NamespacePath = ("ns",)


def make_entry(name: str, kind: EntryKind = TABLE, namespace: NamespacePath = NS, **fields: Any) -> Entry:
    options: dict[str, Any] = {
        "uuid": f"uuid-of-{name}",
        "metadata_location": f"file:///w/{name}/0.json",
        "created_ms": 5,
    } | fields
    return Entry(kind=kind, namespace=namespace, name=name, **options)


def make_swap(name: str, expected: str, new_location: str, **fields: Any) -> SwapPointer:
    options: dict[str, Any] = {"kind": TABLE, "namespace": NS, "uuid": f"uuid-of-{name}", "now_ms": 7} | fields
    return SwapPointer(name=name, expected_location=expected, new_location=new_location, **options)


def make_instant(instant_id: str, **fields: Any) -> Instant:
    options: dict[str, Any] = {
        "action": "commit",
        "state": InstantState.COMPLETED,
        "kind": TABLE,
        "namespace": NS,
        "name": "t",
        "uuid": "uuid-of-t",
        "requested_ms": 1,
        "completed_ms": 2,
    } | fields
    return Instant(id=instant_id, **options)


def make_idempotency(key: str, expires_ms: int, **fields: Any) -> IdempotencyRecord:
    options: dict[str, Any] = {
        "scope": "ann POST /v1/x",
        "request_hash": "h",
        "status": 200,
        "body": b"\x00\xffanswer",
    } | fields
    return IdempotencyRecord(key=key, expires_ms=expires_ms, **options)


def list_ids(instants: Iterable[Any]) -> list[str]:
    return [item.id for item in instants]


async def get_outcome(attempt: Awaitable[Any]) -> str:
    """Await the attempt, and return "won" if it succeeds, or the kind of its error."""
    try:
        await attempt
    except SeamarkError as error:
        return error.kind
    return "won"


def replace_position(instant: Instant, position: str) -> Instant:
    return Instant(**{name: getattr(instant, name) for name in instant.__struct_fields__} | {"position": position})
