"""The process that Spark forks its Python workers from, with our modules and what they need loaded before the fork.

    spark.python.daemon.module = seamark.connector.spark.daemon

Without it each worker loads them itself: as many at once as an executor has cores, and again whenever Spark has ended
workers that were idle for a minute. `session.session_conf` sets it. The executors of a cluster need this package in
their Python, not only among the files that Spark brings, or none of their Python workers starts. Workers for planning
are forked from Spark's own daemon, whatever is set (`PythonPlannerRunner`).

The rule it keeps: nothing begins here that a fork does not carry over. What is loaded opens no connection, starts no
thread, and leaves Arrow's pools and filesystems to their first use. Nor does a worker's collection of garbage look at
it, after each piece of work, so that workers go on sharing its memory.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

from pyspark import daemon

MODULES = ("seamark.connector.spark.source.source", "seamark.connector.spark.source.sink")


def main() -> None:
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # Arrow would start jemalloc's at once
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()
    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
