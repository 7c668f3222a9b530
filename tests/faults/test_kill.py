"""kill -9 at every step of a commit: never half of one, and a retry gets the first outcome."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

from tests.faults.dying_server import STEPS
from tests.faults.http import Client, Lost
from tests.services.process import ManagedProcess, free_port, http_ok
from tests.services.seamark import Seamark


def _uuid7() -> str:
    return str(uuid.UUID(int=(uuid.uuid4().int & ~(0xF << 76)) | 0x7 << 76))


@pytest.mark.parametrize("retry", ["with its idempotency key", "blindly", "as another commit on the same base"])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_server_leaves_all_of_a_commit_or_nothing(tmp_path: Path, step: str, retry: str) -> None:
    port, home = free_port(), tmp_path / "home"
    home.mkdir()
    argv = [sys.executable, "-m", "tests.faults.dying_server", step, "3", str(home), str(port)]
    root = str(Path(__file__).parents[2])
    dying = ManagedProcess(argv, log=tmp_path / "dying.log", env={"PYTHONPATH": root}, cwd=tmp_path)
    base_url = f"http://127.0.0.1:{port}"
    dying.start(lambda: http_ok(f"{base_url}/readyz"), timeout_s=30)
    key = _uuid7()
    try:
        client = Client(base_url)
        assert client.create_table()[0] == 200  # the first pass of most steps
        sequence = 0
        lost = None
        for snapshot_id in range(1, 6):
            try:
                status, body = client.append(snapshot_id, sequence or None, sequence + 1, key=key if sequence else None)
            except Lost:
                lost = snapshot_id
                break
            assert status == 200, body
            sequence = snapshot_id
            key = _uuid7()
        assert lost is not None, f"the server did not die at {step}"
    finally:
        dying.stop()

    with Seamark(home, port=port) as server:
        client = Client(server.base_url)
        acknowledged = list(range(1, lost))
        chain = client.chain()
        happened = chain == [*acknowledged, lost]
        assert happened or chain == acknowledged, chain
        assert happened == (step in ("after-swap", "before-reply")), f"{step}: {chain}"
        parent = acknowledged[-1] if acknowledged else None
        if retry == "as another commit on the same base":
            status, _ = client.append(900, parent, lost)
            assert status == (409 if happened else 200)
            assert client.chain() == ([*acknowledged, lost] if happened else [*acknowledged, 900])
            return
        status, body = client.append(lost, parent, lost, key=key if retry.startswith("with") and parent else None)
        assert status == 200, body
        assert body["metadata"]["current-snapshot-id"] == lost
        assert client.chain() == [*acknowledged, lost]
        assert client.append(lost + 1, lost, lost + 1)[0] == 200
