"""Hudi 1.2 with its bucket index, on PySpark 3.5 in `local[2]`, driven from here (`hudi_peer.py`; `make hudi`).

Its tables are made by bulk insert of a base's own data files, once, and kept beside the bases; a run has a copy, which
shares the data files, as Hudi writes none of them anew in place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.index.hudi import HUDI
from bench.writing.tables import BASES, Base, Batch
from bench.writing.writers import COPY_ON_WRITE, DDL
from tests.services.java import java_17
from tests.services.process import REPO, ServiceFailed

FORMAT = 1


class Peer:
    """A running session. What it is asked it answers before anything else happens."""

    def __init__(self, child: subprocess.Popen[str], log: Path) -> None:
        self._child, self._log = child, log

    def ask(self, do: str, location: Path, **more: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, "location": location.as_uri(), **more}) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            raise ServiceFailed(f"Hudi's session ended with {code}\n{self._log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def is_there() -> bool:
    return (HUDI / "venv" / "bin" / "python").exists() and bool(_jars())


def _jars() -> list[Path]:
    return sorted((HUDI / "jars").glob("hudi-spark3.5-bundle_*.jar"))


@contextmanager
def session(folder: Path) -> Iterator[Peer]:
    """Ends with the block."""
    if not is_there():
        raise ServiceFailed("no Hudi below .cache/hudi: run `make hudi`")
    python, log = HUDI / "venv" / "bin" / "python", folder / "hudi.log"
    folder.mkdir(exist_ok=True)
    home = str(Path(java_17()).resolve().parents[1])
    env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    env |= {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "JAVA_HOME": home}
    env["PYTHONPATH"] = str(REPO)
    argv = [str(python), "-m", "bench.writing.hudi_peer", str(_jars()[-1]), str(folder)]
    with log.open("wb") as errors:
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=folder
        )
    try:
        yield Peer(child, log)
    finally:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()  # it ends by itself, and its JVM with it
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


class HudiWriter:
    """Of one table; `mode` as ours are called."""

    def __init__(self, name: str, made: Base, peer: Peer, folder: Path, *, mode: str, bases: Path = BASES) -> None:
        self.name, self.folder = name, folder
        self._peer = peer
        self._kind = "COPY_ON_WRITE" if mode == COPY_ON_WRITE else "MERGE_ON_READ"
        kept = self._base(made, bases)
        # what is written in place is its own, what is not has one more name
        shutil.copytree(kept, folder, copy_function=_linked)

    def _base(self, made: Base, bases: Path) -> Path:
        kept = bases / f"{made.rows}-hudi-{self._kind.lower()}"
        marker = kept.with_suffix(".json")
        wanted = json.dumps({"format": FORMAT, "of": made.metadata["table-uuid"]})
        if not (marker.exists() and marker.read_text() == wanted):
            shutil.rmtree(kept, ignore_errors=True)
            files = [str(one) for one in (bases / f"{made.rows}-{made.layout}").rglob("*.parquet")]
            self._peer.ask("make", kept, kind=self._kind, files=files)
            marker.write_text(wanted)
        return kept

    def upsert(self, batch: Batch) -> float:
        asked = {"kind": self._kind, "path": str(batch.path), "schema": DDL}
        return float(self._peer.ask("upsert", self.folder, **asked)["seconds"])

    def versions(self) -> dict[int, int]:
        found = self._peer.ask("versions", self.folder)["versions"]
        return {int(version): rows for version, rows in found.items()}

    def tidy(self) -> None:
        """Of each file group only the latest base file stays: what its cleaner does, which here costs no batch."""
        if self._kind == "COPY_ON_WRITE":
            groups: dict[str, list[Path]] = {}
            for path in self.folder.glob("*.parquet"):  # <file group>_<write token>_<instant>.parquet
                groups.setdefault(path.name.partition("_")[0], []).append(path)
            for found in groups.values():
                for path in sorted(found, key=lambda one: one.stem.rpartition("_")[2])[:-1]:
                    path.unlink()


def _linked(source: str, target: str) -> None:
    if source.endswith(".parquet"):
        with suppress(OSError):  # another file system
            os.link(source, target)
            return
    shutil.copy2(source, target)
