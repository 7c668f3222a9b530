"""The routes and processes that `seamark serve` adds to the server, because they import the connector."""

from __future__ import annotations

from seamark.commands.programs import JOB_WORKER, SPARK_DRIVER, STATEMENT_WORKER
from seamark.commands.serving import explain_query
from seamark.metaserver.runtime.extensions import Extensions

EXTENSIONS = Extensions(
    routes=(explain_query,),
    job_worker=JOB_WORKER,
    spark_driver=SPARK_DRIVER,
    row_files="seamark.connector.streams.row_files",
    statement_worker=STATEMENT_WORKER,
)
