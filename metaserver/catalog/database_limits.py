"""Limits for the database: the rows and bytes that a principal may write within an hour, and the size of a namespace.

Tables, views, functions and namespaces stay until a client drops them. Therefore their number is limited in
each top-level namespace, which usually belongs to one tenant. Other rows are removed after a retention time or with
their table: instants, idempotency keys, audit records, reports, index files, producers and plans. For them, the limit
of hourly writes is sufficient.

These limits never refuse a drop. Each worker has its own counters.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import msgspec

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Forbidden, TooManyRequests
from seamark.metaserver.access.principal import ANONYMOUS, get_current_principal
from seamark.metaserver.catalog.quotas import Quota
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.operations import (
    CreateEntry,
    CreateNamespace,
    Operation,
    RecordInstant,
    RenameEntry,
    ReplaceNamespaceProperties,
    RestoreEntry,
    SaveAudit,
)
from seamark.metaserver.store.port import PointerStore

WINDOW_S = 3600.0
COUNTED_AGAIN_S = 10.0
"""The time for which a full namespace is not counted again.

Counting a million rows takes 0.1 s.
"""
_NAMESPACES_MAX = 10_000
_ADDS_NOTHING = (
    *("Check", "Drop", "End", "Forget", "Lease", "Move", "Quarantine", "Release", "Remove", "Renew", "Retire"),
    *("Revoke", "Swap", "Take"),
)
"""The prefixes of operations that add no rows."""
_RETRY_S = 60
_UNKNOWN_BYTES = 128 << 10
"""The assumed size of an operation that cannot be encoded: the size of the largest report."""


class DatabaseShares:
    """The rows and bytes that each principal has written to the database within an hour."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._rows_limit, self._bytes_limit = settings.database_rows_limit, settings.database_bytes_limit
        self._rows, self._bytes = Quota(self._rows_limit), Quota(self._bytes_limit)

    def charge(self, operations: Sequence[Operation]) -> None:
        """Count the rows and bytes of a transaction for the principals that caused it, except anonymous requests."""
        now_s = self._clock.monotonic()
        # A task that commits the changes of several principals together runs in the context of one of their requests.
        instants = (
            operation.instant.principal_name for operation in operations if isinstance(operation, RecordInstant)
        )
        senders = list(dict.fromkeys(principal for principal in instants if principal)) or [get_current_principal()]
        for number, operation in enumerate(operations):
            if type(operation).__name__.startswith(_ADDS_NOTHING):
                continue
            # An operation that names no principal counts for one of the senders, in rotation.
            parts: list[tuple[str, object]] = [(senders[number % len(senders)], operation)]
            # Audit records are written by a task of the server itself.
            if isinstance(operation, SaveAudit):
                parts = [(record.principal_name, record) for record in operation.records]
            elif isinstance(operation, RecordInstant) and operation.instant.principal_name:
                parts = [(operation.instant.principal_name, operation)]
            for principal, part in parts:
                if principal and principal != ANONYMOUS.name:
                    self._rows.add(principal, now_s, now_s + WINDOW_S)
                    self._bytes.add(principal, now_s, now_s + WINDOW_S, _estimate_size_bytes(part))

    def require_room(self, principal: str) -> None:
        """Check that the principal has not used up its share of writes within the last hour.

        Anonymous requests have no limit.

        Raises:
            TooManyRequests: The principal has used up its share.
        """
        if principal == ANONYMOUS.name:
            return
        now_s = self._clock.monotonic()
        for quota, limit, description, setting in (
            (self._rows, self._rows_limit, "rows", "database_rows_limit"),
            (self._bytes, self._bytes_limit, "bytes", "database_bytes_limit"),
        ):
            if not quota.has_room(principal, now_s):
                raise TooManyRequests(
                    f"{principal[:100]} has written {limit:,} {description} to the database within an hour "
                    f"({setting}); try again later, or ask the operator for a higher limit",
                    _RETRY_S,
                )


def _estimate_size_bytes(part: object) -> int:
    """Return the approximate size of a value in the database.

    The function never raises an error, because the transaction has already succeeded.
    """
    try:
        return len(msgspec.msgpack.encode(part, enc_hook=repr))
    except (ValueError, TypeError, OverflowError, RecursionError):
        # A report of an engine may have integers of any length.
        return _UNKNOWN_BYTES


class _Size(msgspec.Struct):
    """The rows and characters at the time `counted_s`, and the rows and characters that were added since then."""

    counted_s: float
    rows: int
    characters: int
    added_rows: int = 0
    added_characters: int = 0


class NamespaceSizes:
    """The sizes of top-level namespaces.

    Counting a namespace in the database is slow, so each replica adds its own additions to its last count. A replica
    counts the namespace again after its additions may have used half of the free room. The new count includes the
    additions of other replicas.
    """

    def __init__(self) -> None:
        self._known_sizes: dict[str, _Size] = {}
        self._count_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check_and_count_additions(
        self, store: PointerStore, settings: Settings, clock: Clock, operations: Sequence[Operation]
    ) -> None:
        """Check that the operations stay within the limits of their namespaces, and count what they add.

        Raises:
            Forbidden: A namespace would exceed its limit.
        """
        rows, characters = await _count_additions(store, operations)
        # The limits are those of top-level namespaces. A lower namespace counts as a part of its top-level namespace.
        for top_namespace in rows | characters:
            count_lock = self._count_locks.setdefault(top_namespace, asyncio.Lock())
            async with count_lock:
                size = self._known_sizes.get(top_namespace)
                if size is None or _must_count_again(
                    size, rows[top_namespace], characters[top_namespace], settings, clock.monotonic()
                ):
                    if len(self._known_sizes) >= _NAMESPACES_MAX:  # Later checks count the namespaces again.
                        self._known_sizes.clear()
                    size = self._known_sizes[top_namespace] = _Size(
                        clock.monotonic(), *await store.measure_namespace(top_namespace)
                    )
                _check_limits(top_namespace, size, rows[top_namespace], characters[top_namespace], settings)
                size.added_rows += rows[top_namespace]
                size.added_characters += characters[top_namespace]


async def _count_additions(store: PointerStore, operations: Sequence[Operation]) -> tuple[Counter[str], Counter[str]]:
    """Return the rows and the characters of properties that the operations add, by top-level namespace."""
    rows, characters = Counter[str](), Counter[str]()
    for operation in operations:
        match operation:
            case CreateNamespace():
                rows[operation.path[0]] += 1
                characters[operation.path[0]] += _count_characters(operation.properties)
            case ReplaceNamespaceProperties():
                stored_namespace = await store.load_namespace(operation.path)
                former_characters = 0 if stored_namespace is None else _count_characters(stored_namespace.properties)
                characters[operation.path[0]] += max(0, _count_characters(operation.properties) - former_characters)
            case CreateEntry():
                rows[operation.entry.namespace[0]] += 1
            # A rename within a top-level namespace adds nothing. A dropped entry already counts in its namespace.
            case RenameEntry() if operation.namespace[0] != operation.to_namespace[0]:
                rows[operation.to_namespace[0]] += 1
            case RestoreEntry():
                dropped_entry = await store.find_dropped(operation.dropped_id)
                if dropped_entry is None or dropped_entry.entry.namespace[0] != operation.namespace[0]:
                    rows[operation.namespace[0]] += 1
    return rows, characters


def _count_characters(properties: Mapping[str, str]) -> int:
    return sum(len(key) + len(value) for key, value in properties.items())


def _must_count_again(size: _Size, rows: int, characters: int, settings: Settings, now_s: float) -> bool:
    """Return whether the size must be counted again before it is compared with the limits."""
    is_old = now_s - size.counted_s >= COUNTED_AGAIN_S
    for counted_amount, added_amount, amount, limit in (
        (size.rows, size.added_rows, rows, settings.namespace_entries_limit),
        (size.characters, size.added_characters, characters, settings.namespace_properties_limit),
    ):
        if counted_amount + added_amount + amount > limit:
            # A recent count without additions is exact, so counting again would not change the refusal.
            if is_old or added_amount:
                return True
        # The additions have used more than half of the free room.
        elif is_old and 2 * (added_amount + amount) > limit - counted_amount:
            return True
    return False


def _check_limits(top: str, size: _Size, rows: int, characters: int, settings: Settings) -> None:
    if rows and size.rows + size.added_rows + rows > settings.namespace_entries_limit:
        raise Forbidden(
            f"The namespace {top[:100]!r} has {size.rows:,} namespaces, tables, views and functions, some dropped; "
            f"the limit is {settings.namespace_entries_limit:,} (namespace_entries_limit). Drop and purge some, or ask "
            "the operator for a higher limit"
        )
    if characters and size.characters + size.added_characters + characters > settings.namespace_properties_limit:
        raise Forbidden(
            f"The namespaces in {top[:100]!r} have {size.characters:,} characters of properties; the limit is "
            f"{settings.namespace_properties_limit:,} (namespace_properties_limit). Remove some, or ask the operator "
            "for a higher limit"
        )
