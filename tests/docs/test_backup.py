"""The page's commands for the back-up and the restore of the database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.docs.pages import REPO, Page
from tests.services.seamark import Seamark


def run_block(text: str, folder: Path) -> None:
    """Run the only bash block of `docs/how-to/operate.md` that contains this text."""
    blocks = Page(REPO / "docs" / "how-to" / "operate.md").blocks
    (command,) = (block.text for block in blocks if block.language == "bash" and text in block.text)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=True, timeout=60)


def create_namespace(server: Seamark, name: str) -> None:
    body = json.dumps({"namespace": [name]}).encode()
    request = urllib.request.Request(f"{server.base_url}/v1/namespaces", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


def list_namespaces(server: Seamark) -> list[list[str]]:
    with urllib.request.urlopen(f"{server.base_url}/v1/namespaces", timeout=30) as answer:
        namespaces: list[list[str]] = json.load(answer)["namespaces"]
        return namespaces


def test_backup_is_restored_over_the_database_of_a_killed_server(tmp_path: Path) -> None:
    with Seamark(tmp_path / "seamark-home") as server:
        create_namespace(server, "before")
        run_block("seamark backup", tmp_path)
        create_namespace(server, "after")
        server.kill9()
        assert (server.home / "seamark.db-wal").stat().st_size > 0, (
            "the server must leave a WAL, whose rows would replace rows of the backup"
        )
        run_block("seamark restore", tmp_path)
        server.start()
        assert list_namespaces(server) == [["before"]]
