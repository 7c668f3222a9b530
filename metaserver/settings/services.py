"""Settings of table services, and `setting`, which declares a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from seamark.formats.services.service import TableService
from seamark.formats.services.services import SERVICES

LAUNCHERS = ("worker", "local", "cluster")
"""The launchers that can run jobs (`services/launching/`)."""
_Class = TypeVar("_Class")


def setting(
    default: Any,
    description: str,
    *,
    secret: bool = False,
    choices: tuple[str, ...] = (),
    schemes: Collection[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    pattern: str = "",
) -> Any:
    """Return a field with a default, a description, and its valid values.

    The valid values are one of `choices`, a URL of one of `schemes` (or empty), a text that the regular expression
    `pattern` matches (or empty), or a number from `minimum` to `maximum`, both included. A secret is not in the repr of
    the settings.
    """
    metadata = {
        "description": description,
        "secret": secret,
        "choices": choices,
        "schemes": schemes,
        "pattern": pattern,
    }
    return dataclasses.field(
        default=default, repr=not secret, metadata={**metadata, "minimum": minimum, "maximum": maximum}
    )


def _add_switches(settings: type[_Class]) -> type[_Class]:
    """Add the settings that enable table services to a class, after its own settings, for `dataclass` to read."""
    for service in SERVICES.values():
        if service.setting is not None:
            settings.__annotations__[service.setting] = bool
            setattr(settings, service.setting, setting(service.enabled_by_default, service.setting_help))
    return settings


@dataclass(frozen=True, kw_only=True)
@_add_switches
class _SwitchSettings:
    services_workers: int = setting(
        1,
        "Worker processes that maintain tables: indexes and, where a policy enables it, data files. 0: none, for a "
        "server beside which `seamark indexer` runs.",
        minimum=0,
        maximum=64,
    )

    def runs_by_default(self, service: TableService) -> bool:
        """Return whether a table service works on tables that do not have the property to enable or disable it."""
        return service.setting is None or bool(getattr(self, service.setting))


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(_SwitchSettings):
    services_url: str = setting(
        "",
        "URL at which worker processes reach this server. With https, the server's certificate must contain the host "
        "of the URL. If it is empty, workers use the bound address and accept the certificate of `tls_cert` without "
        "checking its names.",
        schemes=("http", "https"),
    )
    services_memory_bytes: int = setting(
        4 << 30, "Memory limit of a worker process; a job that needs more fails. 0 means no limit.", minimum=0
    )
    services_queue_jobs: int = setting(
        20_000, "Jobs of table services that can wait. A tenant can use four fifths of it.", minimum=10
    )
    services_launchers: tuple[str, ...] = setting(
        ("worker",),
        "Where jobs may run, separated by commas: worker, which all jobs need; local, PySpark on this machine; "
        "cluster, the Spark cluster of services_spark_master. The property seamark.services.launcher of a table "
        "chooses among them.",
        choices=LAUNCHERS,
    )
    services_spark_bytes: int = setting(
        16 << 30,
        "A compaction or clustering of more bytes runs on Spark, if services_launchers has cluster or local. 0: only "
        "for tables with the property seamark.services.launcher.",
        minimum=0,
    )
    services_local_memory_bytes: int = setting(
        8 << 30,
        "Memory limit of a job on PySpark on this machine, divided among the JVM, the driver and the tasks; at least "
        "3 GiB. 0 means no limit.",
        minimum=0,
    )
    services_spark_master: str = setting(
        "", "Spark master of a cluster for the launcher cluster: spark://host:7077, yarn or k8s://…."
    )
    services_spark_options: str = setting(
        "", "Further options of spark-submit for these jobs, such as --executor-memory 4g --conf key=value."
    )
    parquet_key_file: str = setting(
        "",
        "File with the master keys of encrypted Parquet files, for jobs: a JSON object of keys, name: base64; of "
        "namespaces, name: list of the namespaces for whose tables jobs use this key, none by default; and of "
        "replaced, old name: new name. With parquet_kms it has no keys. Commands and Spark read the same variable.",
    )
    parquet_kms: str = setting(
        "",
        "Client of a key management service for encrypted Parquet files, for jobs: module:name of a class with "
        "wrap_key and unwrap_key, such as a subclass of pyarrow.parquet.encryption.KmsClient. The file of "
        "parquet_key_file names the namespaces of its master keys. Commands and Spark read the same variable.",
    )
