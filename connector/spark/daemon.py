"""Runs the process from which Spark forks its Python workers, with Seamark's modules and their dependencies loaded.

    spark.python.daemon.module = seamark.connector.spark.daemon

Without this setting, each worker loads the modules itself. An executor starts as many workers at the same time as it
has cores. It starts them again after Spark has ended workers that were idle for a minute. `session.session_conf` sets
it. On a cluster, this package must be installed in the executors' Python. If Spark distributes the package instead, no
Python worker starts. Workers for planning are always forked from Spark's own daemon (`PythonPlannerRunner`).

Invariant: loading the modules creates no state that a fork does not preserve. It opens no connection and
starts no thread, and Arrow's pools and filesystems are initialised at their first use. The loaded objects are
frozen for the garbage collector, so the collections after each task do not copy the shared memory.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

from pyspark import daemon

MODULES = ("seamark.connector.spark.source.source", "seamark.connector.spark.source.sink")


def main() -> None:
    """Load the modules, and run PySpark's daemon, which forks a process for each worker."""
    # If this variable is not set, Arrow starts a thread when it is imported, and a fork copies only the calling thread.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    for name in MODULES:
        import_module(name)
    # The workers are forks. Without this, their garbage collector would write to the shared pages and so copy them.
    gc.collect()
    gc.freeze()
    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
