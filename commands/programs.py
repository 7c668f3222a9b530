"""The modules that run as separate processes. The server gets their names and does not import them."""

from __future__ import annotations

JOB_WORKER = "seamark.commands.job_worker"
SPARK_DRIVER = "seamark.commands.spark_driver"
STATEMENT_WORKER = "seamark.commands.sql.worker"
