"""Archives of modules, such as Spark's workers have for `pyspark`.

Changes of an archive are seen, and unchanged archives are not read again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from zipimport import zipimporter

import pytest

from seamark.connector.spark.archives import ArchiveFinder


def write_archive(path: Path, modules: Iterable[str]) -> None:
    with zipfile.ZipFile(path, "w") as zip_file:
        for module in modules:
            zip_file.writestr(f"{module}.py", f"name = {module!r}\n")


def test_module_that_was_added_to_the_archive_is_found(tmp_path: Path) -> None:
    path = tmp_path / "modules.zip"
    write_archive(path, ["one"])
    finder = ArchiveFinder(str(path))
    assert finder.find_spec("one") is not None
    assert finder.find_spec("two") is None
    write_archive(path, ["one", "two"])
    finder.invalidate_caches()
    assert finder.find_spec("two") is not None


def test_modules_of_a_deleted_archive_are_found_again_when_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "modules.zip"
    write_archive(path, ["one"])
    finder = ArchiveFinder(str(path))
    path.unlink()
    finder.invalidate_caches()
    assert finder.find_spec("one") is None
    write_archive(path, ["one"])
    finder.invalidate_caches()
    assert finder.find_spec("one") is not None


def test_unchanged_archive_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "modules.zip"
    write_archive(path, ["one"])
    finder, python_importer = ArchiveFinder(str(path)), zipimporter(str(path))
    stat_before = path.stat()
    with path.open("r+b") as file:  # The new content has the same size and time.
        file.write(b"\0" * stat_before.st_size)
    os.utime(path, ns=(stat_before.st_atime_ns, stat_before.st_mtime_ns))
    finder.invalidate_caches()
    assert finder.find_spec("one") is not None
    if sys.version_info < (3, 12):  # A finder that reads the archive again finds no modules.
        python_importer.invalidate_caches()
        assert python_importer.find_spec("one") is None


@pytest.mark.parametrize("zipped", [True, False])
def test_finders_are_replaced_only_if_pyspark_comes_from_an_archive(zipped: bool, tmp_path: Path) -> None:
    write_archive(tmp_path / "pyspark.zip", ["pyspark"])
    write_archive(tmp_path / "other.zip", ["other", "another"])
    script = (
        "import sys, other; from seamark.connector.spark.archives import install_archive_finders; "
        "install_archive_finders(); import another; "
        "finders = [finder for finder in sys.path_importer_cache.values() if hasattr(finder, 'archive')]; "
        "print(sorted({type(finder).__name__ for finder in finders}))"
    )
    path = [str(tmp_path / "other.zip"), *([str(tmp_path / "pyspark.zip")] if zipped else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ("['ArchiveFinder']" if zipped else "['zipimporter']")
