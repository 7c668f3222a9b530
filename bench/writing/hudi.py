"""Hudi tables with a bucket index, in their own Spark session (`bench/hudi.py`, `hudi_peer.py`).

A bulk insert of a base's data files creates each table once. It is stored next to the bases. A run works on a copy
that shares the data files, because Hudi rewrites no data file in place.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from bench.hudi import HudiSession
from bench.writing.tables import BASES, Base, RowBatch
from bench.writing.writers import COPY_ON_WRITE, DDL

FORMAT_VERSION = 1


class HudiWriter:
    """The writer of one Hudi table. `mode` is MERGE_ON_READ or COPY_ON_WRITE."""

    def __init__(
        self, name: str, base: Base, peer: HudiSession, folder: Path, *, mode: str, bases: Path = BASES
    ) -> None:
        self.name, self.folder = name, folder
        self._peer = peer
        self._kind = "COPY_ON_WRITE" if mode == COPY_ON_WRITE else "MERGE_ON_READ"
        base_folder = self._copy_base(base, bases)
        # Files that Hudi changes in place are copied. Other files get a hard link.
        shutil.copytree(base_folder, folder, copy_function=_copy_file)

    def _copy_base(self, base: Base, bases: Path) -> Path:
        base_folder = bases / f"{base.rows}-hudi-{self._kind.lower()}"
        marker = base_folder.with_suffix(".json")
        expected = json.dumps({"format": FORMAT_VERSION, "of": base.metadata["table-uuid"]})
        if not (marker.exists() and marker.read_text() == expected):
            shutil.rmtree(base_folder, ignore_errors=True)
            files = [str(path) for path in (bases / f"{base.rows}-{base.layout}").rglob("*.parquet")]
            self._peer.ask(do="make", location=base_folder.as_uri(), kind=self._kind, files=files)
            marker.write_text(expected)
        return base_folder

    def upsert(self, batch: RowBatch) -> float:
        request = {"location": self.folder.as_uri(), "kind": self._kind, "path": str(batch.path), "schema": DDL}
        return float(self._peer.ask(do="upsert", **request)["seconds"])

    def count_rows_by_version(self) -> dict[int, int]:
        versions = self._peer.ask(do="count_rows_by_version", location=self.folder.as_uri())["versions"]
        return {int(version): rows for version, rows in versions.items()}

    def tidy(self) -> None:
        """Keep only the latest base file of each file group, as Hudi's cleaner does.

        The time is not part of a batch.
        """
        if self._kind == "COPY_ON_WRITE":
            groups: dict[str, list[Path]] = {}
            for path in self.folder.glob("*.parquet"):  # <file group>_<write token>_<instant>.parquet
                groups.setdefault(path.name.partition("_")[0], []).append(path)
            for group in groups.values():
                for path in sorted(group, key=lambda path: path.stem.rpartition("_")[2])[:-1]:
                    path.unlink()


def _copy_file(source: str, target: str) -> None:
    if source.endswith(".parquet"):
        with suppress(OSError):  # The target is on another file system.
            os.link(source, target)
            return
    shutil.copy2(source, target)
