"""Clients that append in spite of all faults and record every outcome, and checks of the table afterwards.

The oracle is the record: every acknowledged commit is in the chain, no rejected commit is, each occurs at most once,
and an order exists that explains all of them (`linear`). Commits with unknown outcomes may be in the chain or not.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.faults.rigs.http import HttpClient, OutcomeUnknown
from tests.faults.rigs.linear import Event, find_violations


@dataclass
class RecordedOutcomes:
    """The outcomes that the clients received.

    `unexplained_answers` has the answers that no fault explains.
    """

    events: list[Event] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    unexplained_answers: list[str] = field(default_factory=list)

    def count_acknowledged(self) -> int:
        return self.outcomes["ok"]

    def check(self, client: HttpClient, name: str, exists: Callable[[str], bool], label: str) -> None:
        """Check the table against the recorded outcomes.

        Args:
            exists: Returns True if a location has a file.
            label: A description of the run, with its seed.
        """
        assert self.unexplained_answers == [], label
        assert self.count_acknowledged() > 0, f"{label} proved nothing"
        assert find_violations(client.read_chain(name), self.events) == [], f"{label}: {dict(self.outcomes)}"
        missing_paths = [location for location in client.list_metadata_files(name) if not exists(location)]
        assert missing_paths == [], f"{label}: files of a live table are gone"


def _classify_outcome(status: int, body: dict[str, dict[str, str]] | None) -> str | None:
    """Return ok, conflict, refused (certainly not executed) or unknown, or None if no fault explains the answer."""
    if status in (200, 409):
        return "ok" if status == 200 else "conflict"
    kind = (body or {}).get("error", {}).get("type")
    if status == 503:
        return "refused"
    if status == 500 and kind == "CommitStateUnknownException":
        return "unknown"
    return None


def append_until(
    stop: threading.Event,
    base_urls: Sequence[str],
    client_number: int,
    name: str,
    recorded: RecordedOutcomes,
    rng: random.Random,
) -> None:
    """Append with one client until `stop` is set.

    After a failure the client waits shortly and uses another replica, as engines do.

    Args:
        stop: The event that ends the client.
        base_urls: The addresses of the replicas.
        client_number: The number of the client, from which the ids of its snapshots follow.
        name: The name of the table.
        recorded: The outcomes, to which the client adds its own.
        rng: The source of random choices.
    """
    clients = [HttpClient(url, timeout_s=90) for url in base_urls]
    attempt = 0
    while not stop.is_set():
        client = rng.choice(clients)
        began_s = time.monotonic()
        try:
            status, body = client.call("GET", f"/v1/namespaces/db/tables/{name}?snapshots=refs")
        except OutcomeUnknown:
            stop.wait(0.05)
            continue
        if status == 503:
            stop.wait(0.05)
            continue
        if status != 200:
            recorded.unexplained_answers.append(f"load: {status} {body}")
            return
        head, sequence = body["metadata"].get("current-snapshot-id"), body["metadata"]["last-sequence-number"]
        head = None if head == -1 else head
        recorded.events.append(Event("read", began_s, time.monotonic(), "ok", value=head))
        attempt += 1
        snapshot_id = client_number * 1_000_000 + attempt  # No other client uses this id.
        began_s = time.monotonic()
        try:
            status, body = rng.choice(clients).append(snapshot_id, head, sequence + 1, name)
        except OutcomeUnknown:
            outcome: str | None = "unknown"
        else:
            outcome = _classify_outcome(status, body)
        end_s = time.monotonic()
        if outcome is None:
            recorded.unexplained_answers.append(f"commit: {status} {body}")
            return
        recorded.outcomes[outcome] += 1
        # A refused append is not recorded, so the check reports it if its snapshot is in the chain.
        if outcome != "refused":
            recorded.events.append(Event("append", began_s, end_s, outcome, head, snapshot_id))
        if outcome in ("refused", "unknown"):
            stop.wait(0.05)


@contextmanager
def run_writers(base_urls: Sequence[str], name: str, seed: int, clients: int = 4) -> Iterator[RecordedOutcomes]:
    """Let this number of clients append while the block runs. The yielded outcomes are complete after the block."""
    stop, recorded = threading.Event(), RecordedOutcomes()
    with ThreadPoolExecutor(clients) as pool:
        writers = [
            pool.submit(append_until, stop, base_urls, number, name, recorded, random.Random(seed * 100 + number))
            for number in range(1, clients + 1)
        ]
        try:
            yield recorded
        finally:
            stop.set()
        for writer in writers:
            writer.result(timeout=120)


def wait_for_commits(recorded: RecordedOutcomes, count: int, timeout_s: float) -> bool:
    """Wait until `count` further commits are acknowledged, and return whether they were within `timeout_s`.

    If the clients have received an unexplained answer, return False without waiting further.
    """
    goal, deadline = recorded.count_acknowledged() + count, time.monotonic() + timeout_s
    while recorded.count_acknowledged() < goal and not recorded.unexplained_answers:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return not recorded.unexplained_answers
