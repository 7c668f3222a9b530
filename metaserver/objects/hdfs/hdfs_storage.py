"""HDFS as a storage of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.storage.locations import Location
from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.objects.hdfs.hdfs_objects import HdfsObjects, open_client
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.storage import ServerStorage
from seamark.metaserver.settings.settings import Settings


class HdfsStorage(ServerStorage):
    """HDFS, which engines open with their own configuration of Hadoop.

    The server cannot issue credentials that are limited to one table.
    """

    rules = STORAGES["hdfs"]
    variable_prefixes = ("HADOOP_", "KRB5")

    @asynccontextmanager
    async def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
        for root in roots:
            self.prepare_root(root, settings)
        objects = HdfsObjects(roots, settings, clock)
        try:
            yield objects
        finally:
            objects.close()

    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        return (
            "Check that this machine reaches the NameNode and the DataNodes, and that the user of the server "
            "(HADOOP_USER_NAME, or the Kerberos ticket) may write the folder"
        )

    def prepare_root(self, root: Location, settings: Settings) -> None:
        try:
            open_client(root.bucket, settings)
        except ImportError:
            raise ConfigError("The server lacks the library hdfs-native: install seamark[hdfs]") from None
        except (OSError, RuntimeError, ValueError):
            raise ConfigError(
                f"No configuration file names the NameNodes of {root.bucket!r}: set hdfs_config_folder, or write "
                f"hdfs://namenode:8020/{root.path}"
            ) from None

    def make_job_keys(self, settings: Settings) -> Callable[[], dict[str, str]] | None:
        folder = settings.hdfs_config_folder
        return (lambda: {"hdfs.config-folder": folder}) if folder else None

    def make_access_check_arguments(self, root: Location, settings: Settings, name: str) -> dict[str, Any]:
        return {"location": f"{root}/{name}", "storage": {}}
