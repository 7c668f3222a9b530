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
from bench.writing.tables import BASES, BaseTable, RowBatch
from bench.writing.writers import COPY_ON_WRITE, DDL

FORMAT_VERSION = 1


class HudiWriter:
    """The writer of one Hudi table, which works on a copy of a stored table.

    Args:
        base: The table of Seamark's benchmark whose rows the Hudi table has.
        peer: The Spark session that runs Hudi.
        folder: The folder of the copy.
        mode: MERGE_ON_READ or COPY_ON_WRITE.
        bases: The folder in which the tables with the original rows are stored.
    """

    def __init__(
        self, name: str, base: BaseTable, peer: HudiSession, folder: Path, *, mode: str, bases: Path = BASES
    ) -> None:
        self.name, self.folder = name, folder
        self._peer = peer
        self._kind = "COPY_ON_WRITE" if mode == COPY_ON_WRITE else "MERGE_ON_READ"
        base_folder = self._copy_base(base, bases)
        # Files that Hudi changes in place are copied. Other files get a hard link.
        shutil.copytree(base_folder, folder, copy_function=_link_or_copy_file)

    def _copy_base(self, base: BaseTable, bases: Path) -> Path:
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

    def delete_old_files(self) -> None:
        """Delete all but the latest base file of each file group, as Hudi's cleaner does. This time is not measured.

        Only copy-on-write tables have several base files in a file group, because each batch writes new base files.
        """
        if self._kind == "COPY_ON_WRITE":
            groups: dict[str, list[Path]] = {}
            for path in self.folder.glob("*.parquet"):  # <file group>_<write token>_<instant>.parquet
                groups.setdefault(path.name.partition("_")[0], []).append(path)
            for group in groups.values():
                for path in sorted(group, key=lambda path: path.stem.rpartition("_")[2])[:-1]:
                    path.unlink()


def _link_or_copy_file(source: str, target: str) -> None:
    """Make a hard link to a Parquet file, which Hudi never changes in place, or copy another file."""
    if source.endswith(".parquet"):
        with suppress(OSError):  # The target is on another file system.
            os.link(source, target)
            return
    shutil.copy2(source, target)
