"""Opening of the table services in one worker of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.access.worker_tokens import ServiceTokens
from seamark.metaserver.objects.storage import ServerStorage
from seamark.metaserver.objects.storages import list_storages, make_job_keys
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.runtime.extensions import Extensions
from seamark.metaserver.services.job import JOB_S_MAX, Job, Launcher
from seamark.metaserver.services.launching.access_probe import make_access_probe
from seamark.metaserver.services.launching.dimension_reads import DimensionReads
from seamark.metaserver.services.launching.launchers import (
    CLUSTER,
    LOCAL,
    WORKER,
    JobLogin,
    LauncherChoice,
    has_local_spark,
)
from seamark.metaserver.services.launching.spark_submit import SparkSubmit, compute_local_limits
from seamark.metaserver.services.launching.worker_process import WorkerProcess, list_job_variables
from seamark.metaserver.services.proposers import make_proposers
from seamark.metaserver.services.running import JobSlots, ServicesStatus
from seamark.metaserver.services.runs import RunLog
from seamark.metaserver.services.scheduler import JobObserver, Scheduler
from seamark.metaserver.services.watch import Load, TableWatch
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.lease import SERVICES, Lease
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import Timeline

LEASE_S = 15.0
"""The duration of the lease of the table services. The leader renews it three times in this time."""


@asynccontextmanager
async def open_scheduler(
    settings: Settings,
    store: PointerStore,
    timeline: Timeline,
    load: Load,
    tokens: ServiceTokens,
    clock: Clock,
    authorizer: Authorizer,
    *,
    holder: str,
    url: str,
    certificate: Certificate | None,
    observer: JobObserver,
    status: ServicesStatus,
    extensions: Extensions,
    base_path: str = "",
    slots: JobSlots | None = None,
) -> AsyncIterator[Scheduler | None]:
    """Open the scheduler, which the caller runs. The result is None if the settings permit no jobs.

    Args:
        settings: The settings of the server or of a further warehouse.
        store: The pointer store, with the lease of the table services.
        timeline: The timeline, which the scheduler follows, and on which it records runs.
        load: A function that reads a metadata file.
        tokens: The issuer of the tokens of jobs.
        clock: The clock.
        authorizer: The authorizer, which decides whether the principals that set policies still have their rights.
        holder: A name that identifies this worker among all workers on the store.
        url: The URL of this server.
        certificate: The certificate that this server presents.
        observer: The receiver of the metrics of jobs.
        status: The object that receives the reason why no jobs run.
        extensions: The modules of the processes that run jobs.
        base_path: The path of the warehouse in the URL of the server.
        slots: The slots for jobs that this warehouse shares with others, or None.

    Raises:
        ConfigError: A launcher that the settings permit is not installed.
    """
    if settings.services_workers == 0:
        yield None
        return
    if LOCAL in settings.services_launchers and not has_local_spark():
        raise ConfigError(
            "services_launchers has local, but PySpark or Java is not installed: install seamark[spark] and Java, or "
            "remove local"
        )
    storages = list_storages(settings)
    environment = _make_environment(settings, storages, is_further=bool(base_path))
    rights = StandingRights(store, clock, settings, authorizer)
    reads = DimensionReads(store, load, rights)
    login = _make_login(settings, storages, tokens, reads, url, certificate, base_path)
    launchers = [_make_launcher(settings, login, environment, extensions) for _ in range(settings.services_workers)]
    watch = TableWatch(store, timeline, load, clock)
    lease = Lease(store, clock, SERVICES, holder, lasts_s=LEASE_S)
    yield Scheduler(
        make_proposers(settings, clock),
        launchers,
        watch,
        timeline,
        RunLog(store, timeline, clock),
        lease,
        clock,
        observer,
        queue_limit=settings.services_queue_jobs,
        probe=partial(make_access_probe, settings, clock),
        status=status,
        rights=rights,
        slots=slots,
    )


def _make_launcher(
    settings: Settings, login: JobLogin, environment: Mapping[str, str], extensions: Extensions
) -> LauncherChoice:
    """Make the launchers of one slot, which runs a single job at a time."""
    memory_bytes = settings.services_memory_bytes
    worker = WorkerProcess(login, extensions.job_worker, memory_bytes=memory_bytes, environment=environment)
    launchers: dict[str, Launcher] = {WORKER: worker}
    options = settings.services_spark_options
    if LOCAL in settings.services_launchers:
        limits = compute_local_limits(settings.services_local_memory_bytes)
        launchers[LOCAL] = SparkSubmit(
            limits.master, options, login, environment, extensions.spark_driver, process_bytes=limits.process_bytes
        )
    if CLUSTER in settings.services_launchers:
        launchers[CLUSTER] = SparkSubmit(
            settings.services_spark_master, options, login, environment, extensions.spark_driver
        )
    return LauncherChoice(launchers, spark_bytes=settings.services_spark_bytes)


def _make_environment(settings: Settings, storages: Sequence[ServerStorage], *, is_further: bool) -> dict[str, str]:
    """Return the environment variables of jobs.

    Jobs of a further warehouse (`is_further`) get no keys of encrypted Parquet files: they do not receive the
    server's variables for these keys, and the settings of such a warehouse have neither a key file nor a KMS.
    """
    variables = list_job_variables(storages, settings if is_further else None)
    if is_further:
        variables = {name: value for name, value in variables.items() if not name.startswith("SEAMARK_PARQUET_")}
    return {
        **variables,
        "SEAMARK_LOG_LEVEL": settings.log_level,
        "SEAMARK_LOG_FORMAT": settings.log_format,
        "OMP_NUM_THREADS": "1",  # Otherwise numeric libraries would start a thread for each CPU in each process.
        "SEAMARK_PARQUET_KEY_FILE": settings.parquet_key_file,
        "SEAMARK_PARQUET_KMS": settings.parquet_kms,
    }


def _make_login(
    settings: Settings,
    storages: Sequence[ServerStorage],
    tokens: ServiceTokens,
    reads: DimensionReads,
    url: str,
    certificate: Certificate | None,
    base_path: str,
) -> JobLogin:
    """Return the login with which jobs reach this server and the storages.

    Args:
        settings: The settings of the warehouse.
        storages: The storages of the tables.
        tokens: The issuer of the tokens of jobs.
        reads: Lists the tables that a job reads in addition to its own table.
        url: The URL of this server, which the setting `services_url` replaces.
        certificate: The certificate of this server, or None without TLS.
        base_path: The path of the warehouse in URLs. It is empty for the server's own warehouse.
    """

    async def issue(job: Job) -> str:
        return tokens.issue(job.namespace, JOB_S_MAX, await reads.list_tables(job))

    return JobLogin(
        (settings.services_url or url).rstrip("/") + base_path,
        None if settings.auth == "none" else issue,
        Warehouse(settings.make_warehouse_uri(), settings.allowed_locations).local_folders,
        int(settings.warehouse_umask or "022", 8),  # By default, only the owner may write the files.
        keys=make_job_keys(settings, storages),
        # The certificate need not name the bound address, but it must name the address in services_url.
        certificates=None if certificate is None or settings.services_url else certificate.leaves,
    )
