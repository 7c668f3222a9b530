"""A small HDFS cluster: a NameNode and a DataNode of Hadoop in one process, from `make hdfs`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE, ManagedProcess, ServiceFailed, choose_free_port

_JARS = CACHE / "hadoop"
_PROGRAM = Path(__file__).with_name("MiniHdfs.java")


@dataclass
class HdfsCluster:
    """A running cluster. `root` is the location of its root folder."""

    root: str
    process: ManagedProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def create_folder_name(self) -> str:
        """Return the location of a folder that does not exist yet."""
        return f"{self.root}/seamark-{next(self._numbers)}"


@contextmanager
def run_hdfs(folder: Path) -> Iterator[HdfsCluster]:
    """Start a cluster of HDFS, and yield it.

    Raises:
        ServiceFailed: HDFS is not installed.
    """
    if not any(_JARS.glob("hadoop-client-minicluster-*.jar")):
        raise ServiceFailed("HDFS is not installed; run `make hdfs`")
    port, log = choose_free_port(), folder / "hdfs.log"
    java = find_java_17()
    argv = [str(java), "-Xmx384m", *SHORT_LIVED, "-cp", f"{_JARS}/*", str(_PROGRAM), str(port), str(folder / "data")]
    with ManagedProcess(argv, log=log, cwd=folder) as process:
        process.start(lambda: "HDFS is active" in log.read_text(errors="replace"), timeout_s=180)
        yield HdfsCluster(f"hdfs://127.0.0.1:{port}", process)
