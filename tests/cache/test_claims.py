"""Tests of claims between processes: one claim at a time for a key, until it is released or its process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seamark.cache.claims import Claims

REPO = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, pathlib
from seamark.cache.claims import Claims
claims = Claims(pathlib.Path(sys.argv[1]))
print(claims.take("k"), flush=True)
for line in sys.stdin:
    claims.release(line.strip())
    print("released", flush=True)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_key_is_claimed_by_one_process_until_it_releases_it(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    with start_holder(tmp_path / "claims") as other_holder:
        assert other_holder.stdin is not None
        assert other_holder.stdout is not None
        assert other_holder.stdout.readline() == "True\n"
        assert not claims.take("k")
        assert claims.take("another")
        other_holder.stdin.write("k\n")
        other_holder.stdin.flush()
        assert other_holder.stdout.readline() == "released\n"
        assert claims.take("k")
        other_holder.stdin.close()
    claims.close()


def test_claim_ends_with_its_process(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    with start_holder(tmp_path / "claims") as other_holder:
        assert other_holder.stdout is not None
        assert other_holder.stdout.readline() == "True\n"
        assert not claims.take("k")
        other_holder.kill()
        other_holder.wait()
        assert claims.take("k")
    claims.close()


def test_claim_is_exclusive_within_a_process(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    assert claims.take("k")
    assert not claims.take("k")
    claims.release("k")
    claims.release("k")
    assert claims.take("k")
    claims.close()
    claims.close()


@pytest.mark.parametrize("place", ["a file", "a folder"])
def test_every_first_claim_is_granted_if_file_locks_do_not_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    claims = Claims(tmp_path / "file" / "claims" if place == "a file" else tmp_path)
    assert claims.take("k")
    assert not claims.take("k")
    claims.release("k")
    assert claims.take("k")
    claims.close()
