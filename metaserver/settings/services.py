"""The settings of table services, and the function `setting`, which declares a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from seamark.formats.services.service import TableService
from seamark.formats.services.services import SERVICES

LAUNCHERS = ("worker", "local", "cluster")
"""The launchers that can run jobs (see `services/launching/`)."""
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
    """Declare a setting: a dataclass field with a default, a description and the valid values.

    Args:
        default: The value if no source sets the setting.
        description: The text on the settings page and in `seamark serve --help`.
        secret: True to leave the value out of the repr of the settings.
        choices: The valid texts.
        schemes: The schemes of valid URLs. An empty text is valid too.
        minimum: The smallest valid number.
        maximum: The largest valid number.
        pattern: A regular expression that a valid text matches completely. An empty text is valid too.
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
    """Add a setting to a class for each switch that enables a table service, after the settings of the class itself.

    An annotation and a class attribute declare each setting, so the decorator `dataclass` makes a field of it.
    """
    for service in SERVICES.values():
        if service.setting is not None:
            settings.__annotations__[service.setting] = bool
            setattr(settings, service.setting, setting(service.enabled_by_default, service.setting_help))
    return settings


@dataclass(frozen=True, kw_only=True)
@_add_switches
class _SwitchSettings:
    """The settings that enable table services, and the number of their workers."""

    services_workers: int = setting(
        1,
        "Number of worker processes that maintain tables. They maintain indexes, and data files if a policy enables "
        "it. Use 0 on a server whose tables `seamark indexer` maintains.",
        minimum=0,
        maximum=64,
    )

    def runs_by_default(self, service: TableService) -> bool:
        """Return whether a table service works on tables without the property that enables or disables it."""
        return service.setting is None or bool(getattr(self, service.setting))


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(_SwitchSettings):
    """The settings of table services."""

    services_url: str = setting(
        "",
        "URL at which worker processes reach this server. With https, the server's certificate must contain the host "
        "of the URL. If it is empty, workers use the address that the server listens on, and accept the certificate "
        "of `tls_cert` without checking its names.",
        schemes=("http", "https"),
    )
    services_memory_bytes: int = setting(
        4 << 30,
        "Memory limit of a worker process in bytes. A job that needs more fails. With 0, there is no limit.",
        minimum=0,
    )
    services_queue_jobs: int = setting(
        20_000,
        "Maximum number of table service jobs that wait to run. One tenant can use four fifths of it.",
        minimum=10,
    )
    services_launchers: tuple[str, ...] = setting(
        ("worker",),
        "Launchers that can run jobs, separated by commas: worker, which is required; local, PySpark on this machine; "
        "cluster, the Spark cluster of services_spark_master. The table property seamark.services.launcher chooses "
        "one of them.",
        choices=LAUNCHERS,
    )
    services_spark_bytes: int = setting(
        16 << 30,
        "Size in bytes above which a compaction or clustering runs on Spark, if services_launchers contains cluster "
        "or local. With 0, only tables with the property seamark.services.launcher use Spark.",
        minimum=0,
    )
    services_local_memory_bytes: int = setting(
        8 << 30,
        "Memory limit in bytes of a job on PySpark on this machine, divided among the JVM, the driver and the tasks. "
        "It must be at least 3 GiB. With 0, there is no limit.",
        minimum=0,
    )
    services_spark_master: str = setting(
        "", "Spark master of the cluster on which the launcher cluster runs jobs: spark://host:7077, yarn or k8s://…."
    )
    services_spark_options: str = setting(
        "", "Further options of spark-submit for jobs on Spark, such as --executor-memory 4g --conf key=value."
    )
    parquet_key_file: str = setting(
        "",
        "JSON file with the master keys with which jobs read and write encrypted Parquet files. `keys` maps a key's "
        "name to its base64 text. `namespaces` maps a key's name to the list of namespaces for whose tables jobs use "
        "the key; a key that it does not name is not used. `replaced` maps the name of an old key to the name of its "
        "replacement. With parquet_kms, the file has no `keys`. Seamark's commands and Spark connector read the same "
        "environment variable.",
    )
    parquet_kms: str = setting(
        "",
        "Client of a key management service with which jobs read and write encrypted Parquet files: module:name of a "
        "class with wrap_key and unwrap_key, such as a subclass of pyarrow.parquet.encryption.KmsClient. The file of "
        "parquet_key_file names the namespaces of each master key. Seamark's commands and Spark connector read the "
        "same environment variable.",
    )
