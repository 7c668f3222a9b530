"""A job that checks whether the jobs of this server can reach the server and the storage of the warehouse.

The probe runs like other jobs: in a worker process, with the same variables, login and keys. So it fails for the same
reasons: missing or wrong keys, or an address or a certificate that the process cannot use.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from seamark.formats.protocol.wire import ACCESS_CHECK
from seamark.formats.runtime.clock import Clock
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.storages import SERVER_STORAGES, find_storage
from seamark.metaserver.services.job import Job, JobFailed
from seamark.metaserver.services.launching.launchers import JobLogin
from seamark.metaserver.services.launching.worker_process import WorkerProcess, list_job_variables
from seamark.metaserver.settings.settings import Settings

PROBE_S = 60.0
NO_ANSWER = f"a worker process did not reach the server and the storage within {PROBE_S:g} s"
_NAMESPACE = ("seamark:access-check",)
"""The namespace of the job's token. It has no tables."""


def make_access_probe(settings: Settings, clock: Clock) -> Job:
    """Return a job that checks whether jobs can reach the server and the storage."""
    return Job(ACCESS_CHECK, _NAMESPACE, "", str(clock.uuid4()), arguments=make_access_check_arguments(settings, clock))


def make_access_check_arguments(settings: Settings, clock: Clock) -> dict[str, Any]:
    """Return the arguments of the job that checks the access to the server and the storage.

    They contain the object that the job writes, reads and deletes. If the storage needs no object for the check, they
    contain the address to which the job connects.
    """
    root = parse_location(settings.make_warehouse_uri())
    return SERVER_STORAGES[root.scheme].make_access_check_arguments(
        root, settings, f"seamark-access-check-{clock.uuid4()}"
    )


async def find_storage_problem(settings: Settings, clock: Clock, job_worker: str) -> str:
    """Return the reason why a worker process with these settings cannot use the storage. It is empty if it can.

    Args:
        settings: The settings of the server.
        clock: The clock that gives the unique names of the job and of the object that it writes.
        job_worker: The module of the worker process.
    """
    storage = find_storage(settings.make_warehouse_uri())
    # The server need not run yet, because the argument `reaches_server` keeps the job from sending requests to it. The
    # umask of the job is 0o022.
    login = JobLogin("http://127.0.0.1", None, None, 0o022, keys=storage.make_job_keys(settings))
    probe = make_access_probe(settings, clock)
    arguments = {**probe.arguments, "reaches_server": False}
    environment = list_job_variables([storage])
    worker = WorkerProcess(login, job_worker, memory_bytes=settings.services_memory_bytes, environment=environment)
    try:
        async with asyncio.timeout(PROBE_S):
            await worker.run(msgspec.structs.replace(probe, arguments=arguments), lambda _: None)
    except JobFailed as error:
        return str(error)
    except TimeoutError:
        return NO_ANSWER
    finally:
        await worker.close()
    return ""
