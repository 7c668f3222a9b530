"""Tests of the files and hosts that a job's process may open, although it has the rights of the server's account."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from seamark.commands.confinement import landlock
from seamark.metaserver.services.launching.launchers import JobRequest

SCRIPT = """
import json, os, socket, subprocess, sys, tempfile, threading
from seamark.connector.client.errors import NoSuchResource, Unavailable
from seamark.connector.client.storage import Storage, confine
from seamark.connector.client.values import EngineTable
from seamark.commands.confinement import jobs
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.metaserver.services.launching.launchers import JobRequest

folder, url, other_port, service = sys.argv[1:]
fields = [{"id": 1, "name": "id", "required": False, "type": "long"}]
properties_by_table = {
    "own": {
        "seamark.allowed-locations": f"file://{folder}/allowed", "write.data.path": f"file://{folder}/data/own",
        "seamark.index.c": "cube(lookup[db.joined@5:1:1:long](id), lookup[db.gone@5:1:1:long](id); count(*))",
    },
    "joined": {"seamark.allowed-locations": f"file://{folder}/imported"}, "swapped": {},
    "waiting": {"seamark.index.c": "cube(lookup[db.busy@5:1:1:long](id); count(*))"},
}

class Client:
    def load_table(self, name):
        name = name if isinstance(name, str) else name[-1]
        name = name.rpartition(".")[2]
        if name == "busy":
            raise Unavailable("the server is busy", status=503)
        if name not in properties_by_table:
            raise NoSuchResource("the dimension table was dropped", status=404)
        metadata = build_table_metadata(
            uuid="3f2504e0-4f89-41d3-9a0c-0305e82c3301", location=f"file://{folder}/{name}", partition_spec=None,
            schema={"type": "struct", "fields": fields}, sort_order=None, now_ms=1,
            properties=properties_by_table[name],
        )
        return EngineTable(encode_table(metadata), metadata.location, {})

jobs.read_effective_properties = lambda client, table: {
    "seamark.clustering.joins": '{"j": {"table": "db.joined", "on": {"id": "id"}}}'
}
scratch = f"{folder}/scratch"
os.mkdir(scratch)
outcomes = {}
confine([folder])  # the warehouse, as for each job
try:  # a writer has replaced the folder of the table by a link to another table
    jobs.confine_job(Client(), JobRequest("compaction", ("db",), "swapped", url, None, (folder,), 0o022), scratch)
except PermissionError as error:
    outcomes["swapped"] = str(error)
try:  # a dimension table cannot be loaded at the moment
    jobs.confine_job(Client(), JobRequest("indexing", ("db",), "waiting", url, None, (folder,), 0o022), scratch)
except Unavailable as error:
    outcomes["waiting"] = str(error)
jobs.confine_job(Client(), JobRequest(service, ("db",), "own", url, None, (folder,), 0o022), scratch)

def attempt(name, action):
    try:
        action()
        outcomes[name] = "done"
    except OSError as error:
        outcomes[name] = type(error).__name__

def connect(port):
    with socket.create_connection(("127.0.0.1", port), 5):
        pass

def attempt_all(where):
    for name in ("own", "joined", "allowed", "imported", "other"):
        attempt(f"{where}read {name}", lambda: open(f"{folder}/{name}/a").read())
        attempt(f"{where}write {name}", lambda: open(f"{folder}/{name}/b", "w").write("b"))
        attempt(f"{where}remove {name}", lambda: os.remove(f"{folder}/{name}/b"))
    attempt(where + "read through a link", lambda: open(f"{folder}/own/link").read())
    attempt(where + "read the account's files", lambda: open(f"{folder}/keys.json").read())
    attempt(where + "make a temporary file", lambda: tempfile.TemporaryFile().write(b"x"))
    attempt(where + "write the data path", lambda: open(f"{folder}/data/own/b", "w").write("b"))
    attempt(where + "start", lambda: subprocess.run(["/bin/true"]))
    attempt(where + "reach the server", lambda: connect(int(url.rpartition(":")[2])))
    attempt(where + "reach another port", lambda: connect(int(other_port)))
    attempt(where + "listen", lambda: socket.create_server(("127.0.0.1", 0)).close())
    attempt(where + "signal another process", lambda: os.kill(os.getppid(), 0))

attempt_all("")
thread = threading.Thread(target=attempt_all, args=("thread: ",))
thread.start()
thread.join()
import sqlite3, csv  # Python still finds its modules
outcomes["storage"] = Storage().open(f"{folder}/own/a")[1]
attempt("storage elsewhere", lambda: Storage().open(f"{folder}/other/a"))
outcomes["dumps"] = open("/proc/self/limits").read().split("Max core file size")[1].split()[0]
print(json.dumps(outcomes))
"""
PERMITTED_ACTIONS = {
    *("read own", "write own", "remove own", "read joined", "read allowed", "read imported"),
    *("make a temporary file", "write the data path", "reach the server"),
}


@pytest.mark.skipif(
    landlock._read_abi_version() < 6, reason="this kernel has no Landlock, or one without ports and signals"
)
@pytest.mark.parametrize("service", ["clustering", "indexing"])
def test_job_opens_only_its_tables_files_and_the_hosts_that_it_needs(tmp_path: Path, service: str) -> None:
    for name in ("own", "joined", "allowed", "imported", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("a")
    (tmp_path / "keys.json").write_text("secret")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "other" / "a")
    (tmp_path / "swapped").symlink_to(tmp_path / "other")
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
    ):
        url, other_port = f"http://127.0.0.1:{server.getsockname()[1]}", str(listener.getsockname()[1])
        argv = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path), url, other_port, service]
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(result.stdout)
    # A link to another table has replaced the folder of this table.
    assert "a symbolic link leads to it" in outcomes.pop("swapped", "")
    # The server cannot load a dimension table of this table at the moment.
    assert outcomes.pop("waiting", "") == "the server is busy"
    assert outcomes.pop("storage") == f"{tmp_path}/own/a"
    assert outcomes.pop("storage elsewhere") == "PermissionError"
    assert outcomes.pop("dumps") == "0"  # The limit of core dumps in bytes.
    done_actions = {name for name, outcome in outcomes.items() if outcome == "done"}
    assert done_actions == PERMITTED_ACTIONS | {f"thread: {name}" for name in PERMITTED_ACTIONS}
    refusals = {outcome for name, outcome in outcomes.items() if outcome != "done" and "remove" not in name}
    assert refusals == {"PermissionError"}


def test_job_runs_unrestricted_on_a_kernel_without_landlock() -> None:
    """Landlock restricts the files that a process can open.

    Without it, only checks in Seamark's own code refuse the files of other tables.
    """
    script = (
        "from seamark.commands.confinement import landlock\n"
        "landlock._read_abi_version = lambda: 0\n"
        "print(landlock.confine_files(readable=[], writable=[]), open('/etc/hostname', 'rb').close())\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["False", "None"], result.stderr


INPUT_SCRIPT = """
import os, sys
from seamark.commands import job_worker

job_worker.JOBS["reading"] = lambda client, table: {"read": len(os.read(0, 1000))}
job_worker.confine_job = lambda *given: None
sys.argv[1:] = ["0"]
job_worker.main()
"""


def test_job_cannot_read_the_request_of_the_next_job() -> None:
    """The next request has a login for another namespace, and possibly keys."""
    job_request = JobRequest("reading", ("db",), "t", "http://127.0.0.1:1", token=None, folders=(), umask=0o022)
    request = msgspec.json.encode(job_request)
    argv = [sys.executable, "-P", "-c", INPUT_SCRIPT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(request + b"\n" + request + b"\n")
        worker.stdin.flush()
        for _ in range(2):
            assert json.loads(worker.stdout.readline())["totals"] == {"read": 0}
