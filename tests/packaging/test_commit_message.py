"""Tests of the hook that checks commit messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.commits.check_message import find_faults
from tests.packaging.test_imports import REPO

BODY = "\n\nTwo tables in one folder can delete each other's files.\n"


@pytest.mark.parametrize(
    "message",
    [
        "Reject overlapping locations on rename" + BODY,
        "Process rows in batches" + BODY,
        "Seed the random tests" + BODY,
        "Merge branch 'cubes'",
        'Revert "Reject overlapping locations"\n\nThis reverts commit 1234.',
        "Add a limit" + BODY + "# Please enter the commit message.\n",
    ],
)
def test_valid_or_generated_message_is_accepted(message: str) -> None:
    assert find_faults(message) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("Reject " + "x" * 66 + BODY, "has 73 characters"),
        ("reject overlapping locations" + BODY, "capital letter"),
        ("Rejects overlapping locations" + BODY, "'Rejects'"),
        ("Rejected overlapping locations" + BODY, "'Rejected'"),
        ("Rejecting overlapping locations" + BODY, "'Rejecting'"),
        ("Reject overlapping locations." + BODY, "full stop"),
        ("Reject overlapping locations\nTwo tables share a folder.", "second line is not empty"),
        ("Reject overlapping locations", "body is missing"),
        (
            "Reject overlapping locations\n\n# ------------------------ >8 ------------------------\ndiff",
            "body is missing",
        ),
    ],
)
def test_fault_of_a_message_is_reported(message: str, fault: str) -> None:
    assert fault in "\n".join(find_faults(message))


def test_hook_rejects_a_message_without_a_body(tmp_path: Path) -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook.get("stages") == ["commit-msg"]]
    message_file = tmp_path / "COMMIT_EDITMSG"
    for text, status in (("Add a limit\n", 1), ("Add a limit\n\nMemory was unbounded.\n", 0)):
        message_file.write_text(text)
        command = [sys.executable, *hook["entry"].split()[1:], str(message_file)]
        assert subprocess.run(command, cwd=REPO, capture_output=True).returncode == status
