"""Tests of kernels under the compiler's sanitizers: a read past a buffer's end or undefined behaviour ends the
process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TESTS = {
    "decoder and packer": [
        "tests/iceberg/manifests/test_manifest.py",
        "tests/iceberg/manifests/test_manifest_list.py",
        "tests/iceberg/manifests/test_manifest_damage.py",
        "tests/index/kinds/test_packing.py",
    ],
    "indexes and comparisons": [
        "tests/index/kinds/test_hashing.py",
        "tests/index/kinds/test_bloom.py",
        "tests/index/kinds/test_bitmap.py",
        "tests/index/kinds/test_key_set.py",
        "tests/index/kinds/test_record.py",
        "tests/index/test_scan.py",
        "tests/index/test_scan_together.py",
    ],
}
KERNELS = {"_bitmap", "_bloom", "_hash", "_manifest", "_memory", "_ordered", "_pack", "_record", "_rows", "_scan"}
"""Compiled modules: the kernels that the tests import, and the plugin of their fixtures"""


def run_command(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)  # Compilers with sanitizers are slow, and slower on a busy machine.
@pytest.mark.parametrize("test_group", TESTS)
def test_compiled_modules_access_only_their_own_memory(test_group: str, tmp_path: Path) -> None:
    for name in ("formats", "metaserver", "cache", "connector", "commands", "tests"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(REPO / "seamark", tmp_path / "seamark", symlinks=True)  # The folder contains links to its siblings.
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPO / name, tmp_path)
    for kernel in [*(tmp_path / "formats").rglob("*.pyx"), *(tmp_path / "metaserver").rglob("*.pyx")]:
        if kernel.stem not in KERNELS:
            kernel.unlink()
    build = run_command(
        sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--parallel", "2", cwd=tmp_path, SEAMARK_CHECKED="1"
    )
    assert build.returncode == 0, build.stdout
    where = "import seamark.formats.iceberg as package; print(package.__path__[0])"
    result = run_command(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == str(tmp_path / "seamark" / "formats" / "iceberg")

    libraries = [
        subprocess.check_output(["cc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-s",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-k",
        "not leave_no_memory",  # The sanitizers themselves use memory.
        *TESTS[test_group],
    ]
    test_output = run_command(
        sys.executable,
        *arguments,
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
        PYTHONMALLOC="malloc",  # Python's own allocator would hide reads past the ends of small buffers.
        LD_PRELOAD=" ".join(libraries),
        ASAN_OPTIONS="detect_leaks=0",  # Python does not free most of its memory when it exits.
    )
    assert test_output.returncode == 0, test_output.stdout[-10_000:]
    assert " passed" in test_output.stdout
