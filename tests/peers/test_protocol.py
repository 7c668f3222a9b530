"""Tests of requests to a replica: it accepts them only from replicas of the catalog, with short-lived tickets, for its
files.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import Unauthenticated
from seamark.formats.runtime.tls import CA_VARIABLE
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.peers.peers import USED_TICKETS_NAME
from seamark.metaserver.peers.protocol import (
    FILE_PATH,
    HEAD_BYTES,
    LOCATION_HEADER,
    TICKET_HEADER,
    AnswerHead,
    BadAnswer,
    Outcome,
    PeerTickets,
    is_immutable,
)
from seamark.metaserver.peers.used_tickets import UsedTickets
from tests.access.keyrings import make_fixed_keyring
from tests.peers.rig import Node, introduce_nodes, open_node
from tests.peers.test_files import create_files, create_name, set_long_timeouts
from tests.services.authority import Authority

ADDRESS = "10.0.0.1:8183"
LOCATION = "s3://lake/w/t/metadata/snap-1-3f2504e0-4f89-41d3-9a0c-0305e82c3301.avro"


class UnlimitedTickets:
    """A record of used tickets that accepts a ticket any number of times.

    With it, tests can send one ticket repeatedly to test the other checks of a ticket.
    """

    def accept(self, nonce: bytes, issued_ms: int, until_ms: int, now_ms: int) -> bool:
        return True


@dataclass
class ProtocolRig:
    node: Node
    tickets: PeerTickets
    http: aiohttp.ClientSession
    location: str

    async def ask(self, headers: dict[str, str], path: str = FILE_PATH, method: str = "GET") -> tuple[int, bytes]:
        url = f"http://{self.node.address}{path}"
        async with self.http.request(method, url, headers=headers) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ProtocolRig]:
    async with open_node(tmp_path, "a") as node, aiohttp.ClientSession() as http:
        location = next(iter(await create_files([node], 1, 100)))
        yield ProtocolRig(node, node.peers.client._tickets, http, location)


async def test_only_a_request_with_a_valid_ticket_is_answered(rig: ProtocolRig) -> None:
    headers, mac = rig.tickets.issue(rig.node.address, rig.location)
    status, body = await rig.ask(headers)
    assert status == 200
    assert rig.tickets.unseal(mac, body[:HEAD_BYTES]).outcome is Outcome.FOUND
    assert len(body) == HEAD_BYTES + 100
    reads = rig.node.stored_objects.reads.total()

    ticket = headers[TICKET_HEADER]
    raw_ticket = base64.urlsafe_b64decode(ticket)
    other_location = rig.location.replace("/t/", "/u/")
    forged_tickets = PeerTickets(make_fixed_keyring(b"x"), SystemClock(), UnlimitedTickets(), leeway_s=30)
    for bad_headers in (
        {},
        {LOCATION_HEADER: headers[LOCATION_HEADER]},
        {**headers, LOCATION_HEADER: other_location},
        {**headers, TICKET_HEADER: ""},
        {**headers, TICKET_HEADER: "x" * 8000},
        {**headers, TICKET_HEADER: ticket[:-1] + "!"},
        rig.tickets.issue("10.0.0.2:8183", rig.location)[0],
        forged_tickets.issue(rig.node.address, rig.location)[0],
        *(
            {**headers, TICKET_HEADER: base64.urlsafe_b64encode(_flip_byte(raw_ticket, start)).decode()}
            for start in range(0, len(raw_ticket), 5)
        ),
    ):
        assert (await rig.ask(bad_headers))[0] == 401, bad_headers
    assert rig.node.stored_objects.reads.total() == reads


async def test_ticket_is_accepted_once_even_after_a_restart(tmp_path: Path) -> None:
    """An attacker on the network between replicas repeats requests, possibly to another worker of the replica."""
    repeated_headers: list[dict[str, str]] = []
    async with open_node(tmp_path, "a") as node, aiohttp.ClientSession() as http:
        location = next(iter(await create_files([node], count=1, size=100)))
        rig = ProtocolRig(node, node.peers.client._tickets, http, location)
        for _ in range(20):
            headers, _ = rig.tickets.issue(node.address, location)
            assert (await rig.ask(headers))[0] == 200
            assert await rig.ask(headers) == (401, b"")
            repeated_headers.append(headers)
        reads = node.stored_objects.reads.total()
        with closing(UsedTickets(node.settings.home / USED_TICKETS_NAME, SystemClock().now_ms())) as worker:
            other_tickets = PeerTickets(rig.tickets._keyring, SystemClock(), worker, leeway_s=30)
            with pytest.raises(Unauthenticated, match="was sent before"):
                other_tickets.verify_request(node.address, headers[LOCATION_HEADER], headers[TICKET_HEADER])
        assert await asyncio.gather(*(rig.ask(headers) for headers in repeated_headers)) == [(401, b"")] * 20
        assert node.stored_objects.reads.total() == reads
        address = node.address
    async with open_node(tmp_path, "a", peer_address=address) as node, aiohttp.ClientSession() as http:
        rig_after_restart = ProtocolRig(node, node.peers.client._tickets, http, location)
        for headers in repeated_headers:
            assert await rig_after_restart.ask(headers) == (401, b"")
        assert (await rig_after_restart.ask(rig_after_restart.tickets.issue(address, location)[0]))[0] == 200


def test_record_of_tickets_is_limited_and_rejects_tickets_that_do_not_fit(tmp_path: Path) -> None:
    """The record stores a used ticket until the ticket has expired, and then reuses its place.

    The arguments of `accept` are the nonce, and the times at which the ticket was issued, expires and arrives.
    """
    with closing(UsedTickets(tmp_path / "used", now_ms=1000)) as used_tickets:
        # The first four bytes of a nonce choose its group, which has 16 places.
        nonces = [bytes(4) + number.to_bytes(12, "big") for number in range(17)]
        assert [used_tickets.accept(nonce, 1000, 5000, 2000) for nonce in nonces] == [True] * 16 + [False]
        assert not any(used_tickets.accept(nonce, 1000, 5000, 5000) for nonce in nonces)
        last_nonce, nonce_of_other_group = nonces[16], bytes(3) + b"\1" * 13
        assert used_tickets.accept(last_nonce, 6000, 9000, 5001)
        assert not used_tickets.accept(nonce_of_other_group, 999, 5000, 2000)  # The ticket is older than the record.
    assert (tmp_path / "used").stat().st_mode & 0o777 == 0o600
    with closing(UsedTickets(tmp_path / "used", now_ms=7000)) as used_tickets:
        assert not used_tickets.accept(last_nonce, 6000, 9000, 7000)
        assert used_tickets.accept(bytes(16), 6000, 9000, 7000)
    size = (tmp_path / "used").stat().st_size
    (tmp_path / "used").write_bytes(b"damaged")
    with closing(UsedTickets(tmp_path / "used", now_ms=8000)) as used_tickets:
        assert not used_tickets.accept(last_nonce, 6000, 9000, 8000)  # The ticket is older than the new record.
        assert used_tickets.accept(last_nonce, 8000, 9000, 8000)
    assert (tmp_path / "used").stat().st_size == size


def _flip_byte(raw: bytes, offset: int) -> bytes:
    return raw[:offset] + bytes([raw[offset] ^ 1]) + raw[offset + 1 :]


async def test_replica_sends_no_file_outside_the_catalog_even_to_another_replica(
    rig: ProtocolRig, tmp_path: Path
) -> None:
    rng = random.Random(3)
    secret = tmp_path / create_name(rng, 1)
    secret.write_bytes(b"secret")
    warehouse = rig.node.settings.warehouse
    for location in (
        f"file://{secret}",
        f"{warehouse}/../{secret.name}",
        f"{warehouse}/t/../../{secret.name}",
        f"{warehouse}/t/metadata/v1.metadata.json",
        f"s3://other/{create_name(rng, 2)}",
        f"http://127.0.0.1/{create_name(rng, 3)}",
        warehouse,
        "",
    ):
        status, body = await rig.ask(rig.tickets.issue(rig.node.address, location)[0])
        assert (status, body) == (400, b""), location
    assert not any("secret" in location or secret.name in location for location in rig.node.stored_objects.reads)


async def test_peer_port_has_a_single_route_that_only_reads(rig: ProtocolRig) -> None:
    headers, _ = rig.tickets.issue(rig.node.address, rig.location)
    for path in ("/", "/v1/config", "/metrics", "/api/v1/replicas", "/peers/v2/file", f"{FILE_PATH}/"):
        assert (await rig.ask(headers, path))[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert (await rig.ask(headers, method=method))[0] == 405


async def test_replicas_with_a_certificate_use_https_and_verify_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    authority.issue("replica")
    tls = {"tls_cert": str(authority.certificate), "tls_key": str(authority.key)}

    async def read_through(trusted_path: Path) -> tuple[int, int]:
        """Read files through two replicas that trust the certificates in a file.

        Return (number of files that the other replica has sent, number of failed requests to it).
        """
        monkeypatch.setenv(CA_VARIABLE, str(trusted_path))
        folder = tmp_path / trusted_path.stem
        folder.mkdir()
        async with open_node(folder, "a", **tls) as first_node, open_node(folder, "b", **tls) as second_node:
            await introduce_nodes(first_node, second_node)
            set_long_timeouts(first_node)
            files = await create_files([first_node], count=20, size=100)
            assert [await first_node.read(location) for location in files] == list(files.values())
            counts = first_node.peers.objects.counts
            return counts.hits + counts.fetched, counts.failed

    assert (await read_through(authority.file))[0] > 0
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    stranger = Authority(other_folder).file.rename(other_folder / "stranger.pem")
    answers, failures = await read_through(stranger)
    assert answers == 0
    assert failures > 0


def test_ticket_is_valid_for_its_lifetime_and_the_allowed_clock_difference() -> None:
    clock = SimulatedClock(seed=1)
    keyring = make_fixed_keyring(b"s", clock)
    tickets = PeerTickets(keyring, clock, UnlimitedTickets(), leeway_s=30)
    headers, mac = tickets.issue(ADDRESS, LOCATION)
    arguments = headers[LOCATION_HEADER], headers[TICKET_HEADER]
    assert tickets.verify_request(ADDRESS, *arguments) == (LOCATION, mac)
    # The ticket expires 10 s after its issue (`TICKET_S`), and the clocks may differ by 30 s.
    clock.advance(39_000)
    assert tickets.verify_request(ADDRESS, *arguments) == (LOCATION, mac)
    clock.advance(1_001)
    with pytest.raises(Unauthenticated, match="expired"):
        tickets.verify_request(ADDRESS, *arguments)
    clock.advance(-80_000)  # Now the clock is more than 30 s before the issue.
    with pytest.raises(Unauthenticated, match="expired"):
        tickets.verify_request(ADDRESS, *arguments)


def test_ticket_of_a_retired_key_is_rejected() -> None:
    clock = SimulatedClock(seed=1)
    keyring = make_fixed_keyring(b"s", clock)
    tickets = PeerTickets(keyring, clock, UnlimitedTickets(), leeway_s=30)
    headers, mac = tickets.issue(ADDRESS, LOCATION)
    keyring.replace(make_fixed_keyring(b"n", clock).keys)
    with pytest.raises(Unauthenticated):
        tickets.verify_request(ADDRESS, headers[LOCATION_HEADER], headers[TICKET_HEADER])
    with pytest.raises(BadAnswer):
        tickets.unseal(mac, bytes(HEAD_BYTES))


def test_answer_is_valid_only_for_its_own_request() -> None:
    clock = SimulatedClock(seed=1)
    tickets = PeerTickets(make_fixed_keyring(b"s", clock), clock, UnlimitedTickets(), leeway_s=30)
    macs = [tickets.issue(ADDRESS, LOCATION)[1] for _ in range(2)]
    head = AnswerHead(Outcome.FOUND, 5, bytes(range(32)))
    sealed_head = tickets.seal(macs[0], head)
    assert tickets.unseal(macs[0], sealed_head) == head
    for data in (
        sealed_head[:-1],
        sealed_head + b"x",
        b"",
        *(_flip_byte(sealed_head, index) for index in range(HEAD_BYTES)),
    ):
        with pytest.raises(BadAnswer):
            tickets.unseal(macs[0], data)
    with pytest.raises(BadAnswer):
        tickets.unseal(macs[1], sealed_head)
    with pytest.raises(BadAnswer, match="outcome"):
        tickets.unseal(macs[0], tickets.seal(macs[0], AnswerHead(9, 0, bytes(32))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("snap-1-1-3f2504e0-4f89-41d3-9a0c-0305e82c3301.avro", True),
        ("00001-3F2504E0-4F89-41D3-9A0C-0305E82C3301.metadata.json", True),
        ("v12.metadata.json", False),
        ("version-hint.text", False),
        ("", False),
    ],
)
def test_only_names_with_a_uuid_are_immutable(name: str, expected: bool) -> None:
    folder = "s3://lake/3f2504e0-4f89-41d3-9a0c-0305e82c3301"
    assert is_immutable(f"{folder}/{name}") is expected


def test_peer_keys_of_two_catalogs_differ() -> None:
    clock = SimulatedClock(seed=1)
    keyring: Keyring = make_fixed_keyring(b"s", clock)
    assert keyring.find_signing_key("peer")[1] != keyring.find_signing_key("service-token")[1]
