"""Zip archives that Python modules come from, whose lists of contents are read anew only where they have changed.

Spark's Python workers have `pyspark` from `pyspark.zip`, and before each piece of work they have Python forget what it
knows of module files (`importlib.invalidate_caches`). Up to Python 3.11 that reads the archive's list of some 1,700
files once for each package of it in use: 0.1 s before anything else happens, three times in a query of a Python
source, which plans in two workers and reads in a third. Python 3.12 reads it at most once.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from zipimport import zipimporter


class Archive(zipimporter):
    """The rule it keeps: an archive that was replaced or changed is seen by the next import that asks for it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._stamp = self._stamp_now()

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.archive)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def invalidate_caches(self) -> None:
        stamp = self._stamp_now()
        if stamp is None or stamp != self._stamp:
            self._stamp = stamp
            super().invalidate_caches()


def keep_contents() -> None:
    """In a process that has `pyspark` from one, of all archives in use and those to come. Finders are replaced where
    Python keeps them for that (`sys.path_hooks`); modules stay as they are."""
    spec, hooks = find_spec("pyspark"), sys.path_hooks
    loader: object = None if spec is None else spec.loader
    if not isinstance(loader, zipimporter) or zipimporter not in hooks:
        return
    hooks[hooks.index(zipimporter)] = Archive
    for path, finder in list(sys.path_importer_cache.items()):
        if type(finder) is zipimporter:
            sys.path_importer_cache[path] = Archive(path)
