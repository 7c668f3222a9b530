"""The names of the modules that run as separate processes.

The server receives these names, so that it does not import the modules.
"""

from __future__ import annotations

JOB_WORKER = "seamark.commands.job_worker"
SPARK_DRIVER = "seamark.commands.spark_driver"
STATEMENT_WORKER = "seamark.commands.sql.worker"
