"""Tests of the files that a process may open after it has restricted itself with Landlock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seamark.commands.confinement import landlock

SCRIPT = """
import json, subprocess, sys, threading
from seamark.commands.confinement import landlock
import seamark.connector
inside, outside = sys.argv[1:]
restrictions = {"changes": landlock.forbid_changes(), "reads": landlock.forbid_reads_except([inside])}

def attempt(name, action):
    try:
        action()
        restrictions[name] = "done"
    except OSError as error:
        restrictions[name] = type(error).__name__

def attempt_all(prefix):
    attempt(prefix + "read inside", lambda: open(inside + "/a").read())
    attempt(prefix + "read outside", lambda: open(outside + "/a").read())
    attempt(prefix + "read through a link", lambda: open(inside + "/link").read())
    attempt(prefix + "write inside", lambda: open(inside + "/b", "w"))
    attempt(prefix + "append inside", lambda: open(inside + "/a", "a"))
    attempt(prefix + "start", lambda: subprocess.run(["/bin/true"]))

attempt_all("")
thread = threading.Thread(target=attempt_all, args=("thread: ",))
thread.start()
thread.join()
import sqlite3, csv  # Python still finds its modules
print(json.dumps(restrictions))
"""


@pytest.mark.skipif(landlock._read_abi_version() < 3, reason="this kernel has no Landlock, or an old one")
def test_restricted_process_reads_only_allowed_files_and_writes_none(tmp_path: Path) -> None:
    inside_folder, outside_folder = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside_folder, outside_folder):
        folder.mkdir()
        (folder / "a").write_text("a")
    (inside_folder / "link").symlink_to(outside_folder / "a")
    result = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(inside_folder), str(outside_folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report.pop("changes")
    assert report.pop("reads")
    assert {name: outcome for name, outcome in report.items() if outcome == "done"} == {
        "read inside": "done",
        "thread: read inside": "done",
    }
    assert {value for value in report.values() if value != "done"} == {"PermissionError"}
