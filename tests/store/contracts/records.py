"""The contract of pointer stores for records that are not pointers: keys, metrics, audit records, tokens, grants."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import (
    AlreadyExists,
    CommitConflict,
    NotFound,
)
from seamark.metaserver.store.model import AccessToken, AuditRecord, DroppedEntry, Grant, MetricsReport
from seamark.metaserver.store.operations import (
    CheckFence,
    CreateEntry,
    CreateNamespace,
    DropEntry,
    DropNamespace,
    RemoveGrant,
    RemoveGrantsOf,
    RenameEntry,
    RestoreEntry,
    RevokeToken,
    SaveAudit,
    SaveCursor,
    SaveGrant,
    SaveIdempotency,
    SaveMetricsReport,
    SaveToken,
    TakeLease,
)
from seamark.metaserver.store.port import GROUPS_MAX, IdempotencyTaken
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import NS, TABLE, get_outcome, list_ids, make_entry, make_idempotency
from tests.store.store_pair import StorePair


class RecordsContract(StorePair):
    """The tests of records that each store passes."""

    # Tests of idempotency keys

    async def test_first_answer_to_a_key_is_kept_and_a_second_transaction_is_undone(
        self, store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        record = make_idempotency("k", clock.now_ms() + 100)
        await store.transact([SaveIdempotency(record)])
        assert await store.find_idempotency_record("k", clock.now_ms()) == record
        with pytest.raises(IdempotencyTaken):
            await store.transact(
                [CreateEntry(make_entry("t")), SaveIdempotency(make_idempotency("k", clock.now_ms() + 900))]
            )
        assert await store.load_entry(TABLE, NS, "t") is None
        assert await store.find_idempotency_record("k", clock.now_ms()) == record
        assert await store.find_idempotency_record("other", clock.now_ms()) is None

    async def test_expired_key_can_be_used_again(self, store: GeneratorStore, clock: SimulatedClock) -> None:
        await store.transact([SaveIdempotency(make_idempotency("k", clock.now_ms() + 100))])
        clock.advance(100)
        assert await store.find_idempotency_record("k", clock.now_ms()) is None
        second_record = make_idempotency(
            "k", clock.now_ms() + 100, status=404, body=None, metadata_location="file:///m"
        )
        await store.transact([SaveIdempotency(second_record)])
        assert await store.find_idempotency_record("k", clock.now_ms()) == second_record

    async def test_only_one_of_concurrent_requests_with_a_key_is_recorded(
        self, store: GeneratorStore, other_store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        async def attempt(number: int) -> bool:
            record = make_idempotency("k", clock.now_ms() + 100, status=200 + number)
            entry = make_entry(f"t{number}")
            try:
                await (store, other_store)[number % 2].transact([CreateEntry(entry), SaveIdempotency(record)])
            except IdempotencyTaken:
                return False
            return True

        is_recorded = await asyncio.gather(*(attempt(number) for number in range(20)))
        assert is_recorded.count(True) == 1
        record = await store.find_idempotency_record("k", clock.now_ms())
        assert record is not None
        assert record.status == 200 + is_recorded.index(True)
        assert [entry.name for entry in await store.list_entries(TABLE, NS, None, 99)] == [
            f"t{is_recorded.index(True)}"
        ]

    # Tests of metrics, audit records, tokens, grants, cursors, leases and secrets

    async def test_metrics_reports_are_stored_and_listed(self, store: GeneratorStore) -> None:
        reports = [
            MetricsReport(f"m{n}", ("x", "y")[n % 2], NS, "t", "scan-report", n or None, n, "ann", {"n": n, "e": {}})
            for n in range(6)
        ]
        await store.transact([SaveMetricsReport(report) for report in reports])
        assert await store.list_metrics_reports(None, None, 99) == reports
        assert await store.list_metrics_reports(None, "m2", 2) == reports[3:5]
        assert await store.list_metrics_reports("x", None, 99) == reports[::2]
        assert await store.list_metrics_reports("x", "m0", 1) == [reports[2]]

    async def test_audit_records_are_stored_in_batches_of_any_size(self, store: GeneratorStore) -> None:
        records = tuple(
            AuditRecord(f"a{n:03}", n, "ann", "commitTable", "ns.t", "allowed", 200, f"r{n}", "127.0.0.1")
            for n in range(150)
        )
        await store.transact([SaveAudit(records[:83]), SaveAudit(())])
        await store.transact([SaveAudit(records)])
        assert await store.read_audit_records(None, 999) == list(records)
        assert await store.read_audit_records("a100", 2) == list(records[101:103])

    async def test_old_records_are_pruned_within_the_limit(self, store: GeneratorStore, clock: SimulatedClock) -> None:
        now_ms = clock.now_ms()
        await store.transact([SaveIdempotency(make_idempotency(f"k{n}", now_ms - 2 + n)) for n in range(5)])
        await store.transact([SaveAudit((AuditRecord("a1", 5, *("x",) * 4, 200, "r"),))])
        await store.transact([SaveMetricsReport(MetricsReport("m1", "u", NS, "t", "r", None, 5, "w", {}))])
        assert await store.prune(now_ms, audit_before_ms=5, metrics_before_ms=5, limit=2) == 2
        assert await store.prune(now_ms, audit_before_ms=5, metrics_before_ms=5, limit=9) == 1
        assert [await store.find_idempotency_record(f"k{n}", 0) is None for n in range(5)] == [True] * 3 + [False] * 2
        assert await store.prune(now_ms, audit_before_ms=6, metrics_before_ms=6, limit=9) == 2
        assert await store.read_audit_records(None, 9) == []
        assert await store.list_metrics_reports(None, None, 9) == []

    async def test_token_keeps_its_name_until_it_is_revoked_or_expires(
        self, store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        now_ms = clock.now_ms()
        first_token = AccessToken("1", "ann", "digest1", now_ms, None)
        await store.transact([SaveToken(first_token)])
        assert await store.find_token_by_digest("digest1") == first_token
        assert await store.find_token_by_digest("digest2") is None
        assert (await store.find_token_by_name("ann"), await store.find_token_by_name("an")) == (first_token, None)
        with pytest.raises(AlreadyExists, match="ann"):
            await store.transact([SaveToken(AccessToken("2", "ann", "digest2", now_ms))])
        await store.transact([RevokeToken("ann", now_ms + 1)])
        revoked_token = await store.find_token_by_digest("digest1")
        assert revoked_token is not None
        assert revoked_token.revoked_ms == now_ms + 1
        assert await store.find_token_by_name("ann") is None
        with pytest.raises(NotFound):
            await store.transact([RevokeToken("ann", now_ms + 2)])
        await store.transact([SaveToken(AccessToken("3", "ann", "digest3", now_ms, expires_ms=now_ms + 10))])
        with pytest.raises(AlreadyExists):
            await store.transact([SaveToken(AccessToken("4", "ann", "digest4", now_ms))])
        clock.advance(10)
        with pytest.raises(NotFound):
            await store.transact([RevokeToken("ann", clock.now_ms())])
        await store.transact([SaveToken(AccessToken("4", "ann", "digest4", now_ms))])
        assert list_ids(await store.list_tokens()) == ["1", "3", "4"]

    async def test_grants_are_saved_once_and_removed(self, store: GeneratorStore) -> None:
        server_grant, namespace_grant = Grant("ann", "admin"), Grant("ann", "reader", ("a", "b"))
        await store.transact(
            [
                SaveGrant(server_grant),
                SaveGrant(namespace_grant),
                SaveGrant(namespace_grant),
                SaveGrant(Grant("bob", "reader")),
            ]
        )
        assert await store.grants("ann") == [server_grant, namespace_grant]
        assert len(await store.grants(None)) == 3
        await store.transact([RemoveGrant(namespace_grant)])
        assert await store.grants("ann") == [server_grant]
        with pytest.raises(NotFound, match=r"reader for ann on a\.b"):
            await store.transact([RemoveGrant(namespace_grant)])

    async def test_grants_of_several_principals_are_read_by_one_call(self, store: GeneratorStore) -> None:
        grants = [Grant("a-group:1", "admin"), Grant("a-group:2", "reader", ("a", "b")), Grant("b-group:1", "reader")]
        await store.transact([SaveGrant(grant) for grant in grants])
        assert await store.list_grants_of_principals(("a-group:2", "missing", "a-group:1")) == grants[:2]
        assert await store.list_grants_of_principals(()) == []
        other_groups = tuple(f"other:{number}" for number in range(GROUPS_MAX - 1))
        assert await store.list_grants_of_principals((*other_groups, "b-group:1")) == grants[2:]

    async def test_drop_of_an_entry_removes_its_grants_but_not_its_denials(self, store: GeneratorStore) -> None:
        denial = Grant("ann", "browse", NS, "table", "t", deny=True)
        function_grant = Grant("ann", "read", NS, "function", "t")
        owner_grant = Grant("bob", "owner", NS, "table", "t")
        await store.transact([CreateEntry(make_entry("t"))])
        await store.transact(
            [SaveGrant(grant) for grant in (denial, function_grant, owner_grant, Grant("ann", "reader", NS))]
        )
        assert await store.grants("bob") == []
        assert (
            await store.list_owned(("ann", "bob"), NS, "t")
            == await store.list_owned(("bob",), NS, None)
            == [owner_grant]
        )
        assert await store.owns_any(("x", "bob"))
        assert not await store.owns_any(("ann",))
        await store.transact([RenameEntry(TABLE, NS, "t", NS, "u")])
        moved_grants = [msgspec.structs.replace(grant, name="u") for grant in (denial, owner_grant)]
        assert [grant for grant in await store.grants(None) if grant.name == "u"] == moved_grants
        dropped_entry = DroppedEntry(
            id="d", entry=make_entry("u"), purge=False, dropped_ms=1, expires_ms=2**60, principal_name="w"
        )
        await store.transact([DropEntry(TABLE, NS, "u", keep=dropped_entry)])
        denials = [msgspec.structs.replace(denial, name=name) for name in ("t", "u", "back")]
        assert {grant for grant in await store.grants(None) if grant.name} == {function_grant, *denials[:2]}
        await store.transact([RestoreEntry("d", NS, "back")])
        restored_grants = [msgspec.structs.replace(grant, name="back") for grant in (denial, owner_grant)]
        assert [grant for grant in await store.grants(None) if grant.name == "back"] == restored_grants
        await store.transact([DropEntry(TABLE, NS, "back")])
        assert {grant for grant in await store.grants(None) if grant.name} == {function_grant, *denials}

    async def test_drop_of_a_namespace_removes_its_grants_but_not_its_denials(self, store: GeneratorStore) -> None:
        neighbor_grant = Grant("ann", "admin", ("fi",))
        denial = Grant("bob", "read", ("fin", "x"), deny=True)
        removed_grants = [Grant("ann", "admin", path) for path in (("fin",), ("fin", "x"), ("fin", "x", "y"))]
        removed_grants.append(Grant("ann", "read", ("fin",), "table", "t"))
        await store.transact(
            [CreateNamespace(path=("fin",), properties={}), *map(SaveGrant, (*removed_grants, neighbor_grant, denial))]
        )
        await store.transact([DropNamespace(path=("fin",))])
        assert await store.grants(None) == [neighbor_grant, denial]

    async def test_removal_of_all_grants_of_a_principal_keeps_its_denials(self, store: GeneratorStore) -> None:
        denial, other_grant = Grant("ann", "read", NS, deny=True), Grant("bob", "owner", NS, "table", "t")
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("u"))])
        owned_grants = [Grant("ann", "owner", NS, "table", name) for name in ("t", "u")]
        await store.transact(list(map(SaveGrant, (*owned_grants, Grant("ann", "admin"), denial, other_grant))))
        dropped_entry = DroppedEntry(
            id="d", entry=make_entry("u"), purge=False, dropped_ms=1, expires_ms=2**60, principal_name="w"
        )
        await store.transact([DropEntry(TABLE, NS, "u", keep=dropped_entry)])
        await store.transact([RemoveGrantsOf("ann")])
        await store.transact([RestoreEntry("d", NS, "u")])
        assert await store.grants(None) == [denial, other_grant]

    async def test_cursor_moves_only_from_the_position_that_was_read(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        assert await store.load_cursor("hook") is None
        with pytest.raises(CommitConflict):
            await store.transact([SaveCursor("hook", "5", "6")])
        await store.transact([SaveCursor("hook", None, "5")])
        with pytest.raises(CommitConflict):
            await store.transact([SaveCursor("hook", None, "5")])
        outcomes = await asyncio.gather(
            *(
                get_outcome(replica.transact([SaveCursor("hook", "5", f"6{number}")]))
                for number, replica in enumerate((store, other_store))
            )
        )
        assert sorted(outcomes) == ["commit_conflict", "won"]
        assert await store.load_cursor("hook") == f"6{outcomes.index('won')}"

    async def test_lease_has_one_holder_and_a_rising_fencing_number(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        assert await store.transact([TakeLease("l", "a", now_ms=0, until_ms=10)]) == [1]
        assert await store.transact([TakeLease("l", "a", now_ms=5, until_ms=15)]) == [1]
        with pytest.raises(CommitConflict):
            await other_store.transact([TakeLease("l", "b", now_ms=14, until_ms=30)])
        assert await other_store.transact([TakeLease("l", "b", now_ms=15, until_ms=30)]) == [2]
        with pytest.raises(CommitConflict):
            await store.transact([TakeLease("l", "a", now_ms=29, until_ms=50)])
        assert await store.transact([TakeLease("l", "a", now_ms=30, until_ms=50)]) == [3]
        assert (await other_store.read_fencing_number("l"), await other_store.read_fencing_number("unknown")) == (3, 0)
        await other_store.transact([CheckFence("l", 3)])
        for name, fence in (("l", 2), ("l", 4), ("unknown", 1)):
            with pytest.raises(CommitConflict):
                await other_store.transact([CheckFence(name, fence)])

    async def test_all_replicas_get_the_first_secret(self, store: GeneratorStore, other_store: GeneratorStore) -> None:
        results = await asyncio.gather(
            *((store, other_store)[n % 2].swap_secret("signing", None, bytes([n, 0, 255])) for n in range(8)),
        )
        assert len(set(results)) == 1
        assert await other_store.swap_secret("signing", None, b"late") == results[0]
        assert await store.load_secret("signing") == results[0]
        assert await store.load_secret("another") is None

    async def test_secret_is_replaced_only_by_a_caller_who_knows_the_old_one(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.swap_secret("signing", None, b"first")
        assert await other_store.swap_secret("signing", b"first", b"second") == b"second"
        assert await store.swap_secret("signing", b"first", b"third") == b"second"
        assert await store.load_secret("signing") == b"second"
        assert await store.swap_secret("gone", b"first", b"third") == b""
        assert await store.load_secret("gone") is None
