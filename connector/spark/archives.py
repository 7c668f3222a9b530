"""Imports Python modules from zip archives, and reads an archive's directory again only if the archive has changed.

Spark's Python workers import `pyspark` from `pyspark.zip`. Before each task, they invalidate Python's caches of module
files (`importlib.invalidate_caches`). Python up to 3.11 then reads the archive's directory of about 1,700 files again
for each imported package. The reading takes 0.1 s at the start of each task, and happens three times in a query of a
Python source, which plans in two workers and reads in a third worker. Python 3.12 reads the directory at most once.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from zipimport import zipimporter


class ArchiveFinder(zipimporter):
    """Imports modules from a zip archive, and reads the archive's directory again only if the archive has changed."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._stamp = self._read_stamp()

    def _read_stamp(self) -> tuple[int, int, int] | None:
        """Return the inode, size and modification time of the archive, or None if it cannot be read."""
        try:
            status = os.stat(self.archive)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def invalidate_caches(self) -> None:
        stamp = self._read_stamp()
        if stamp is None or stamp != self._stamp:
            self._stamp = stamp
            super().invalidate_caches()


def install_archive_finders() -> None:
    """Replace the finders of all current and future zip archives (`sys.path_hooks`).

    Nothing is replaced if `pyspark` does not come from a zip archive. Loaded modules do not change.
    """
    spec, hooks = find_spec("pyspark"), sys.path_hooks
    loader: object = None if spec is None else spec.loader
    if not isinstance(loader, zipimporter) or zipimporter not in hooks:
        return
    hooks[hooks.index(zipimporter)] = ArchiveFinder
    for path, finder in list(sys.path_importer_cache.items()):
        if type(finder) is zipimporter:
            sys.path_importer_cache[path] = ArchiveFinder(path)
