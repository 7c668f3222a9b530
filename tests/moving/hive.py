"""A Hive metastore with a database in memory. `make hive` downloads its jars (130 MB) on demand."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hive_metastore import ThriftHiveMetastore
from hive_metastore.ttypes import GetTableRequest, LockRequest, LockResponse, LockState, Table, UnlockRequest

from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE, REPO, ManagedProcess, choose_free_port

_MAIN_CLASS = "org.apache.hadoop.hive.metastore.HiveMetaStore"


class Hive4Client(ThriftHiveMetastore.Client):
    """A client of a metastore. It replaces calls that PyIceberg 0.12 uses, but that Hive 4 no longer has.

    The metastore has no tables for locks, so the client does not lock.
    """

    def get_table(self, dbname: str, tbl_name: str) -> Table:
        return self.get_table_req(GetTableRequest(dbName=dbname, tblName=tbl_name)).table

    def lock(self, rqst: LockRequest) -> LockResponse:
        return LockResponse(1, LockState.ACQUIRED)

    def unlock(self, rqst: UnlockRequest) -> None: ...


@contextmanager
def run_hive_metastore(folder: Path, warehouse: str) -> Iterator[str]:
    """Run a Hive metastore with an empty database in memory, and yield its address.

    Args:
        folder: The folder of its configuration and its output.
        warehouse: The location of the databases.
    """
    subprocess.run(["make", "-s", "hive"], cwd=REPO, check=True)
    port = choose_free_port()
    settings = {
        "javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
        "javax.jdo.option.ConnectionDriverName": "org.apache.derby.jdbc.EmbeddedDriver",
        "datanucleus.schema.autoCreateAll": "true",
        "metastore.schema.verification": "false",
        "metastore.thrift.bind.host": "127.0.0.1",
        "metastore.warehouse.dir": warehouse,
        "metastore.task.threads.always": "org.apache.hadoop.hive.metastore.events.EventCleanerTask",
        "metastore.expression.proxy": "org.apache.hadoop.hive.metastore.DefaultPartitionExpressionProxy",
    }
    properties_xml = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metastore-site.xml").write_text(f"<configuration>{''.join(properties_xml)}</configuration>")
    classpath = f"{folder}:{CACHE / 'hive'}/*"
    log_option = f"-Dderby.stream.error.file={folder / 'derby.log'}"
    argv = [find_java_17(), "-Xmx512m", *SHORT_LIVED, log_option, "-cp", classpath, _MAIN_CLASS, "-p", str(port)]
    process = ManagedProcess(argv, log=folder / "metastore.log")
    with process:
        process.start(lambda: _accepts_connections(port), timeout_s=180)
        yield f"thrift://127.0.0.1:{port}"


def _accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
