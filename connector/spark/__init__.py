"""Seamark from PySpark: sessions, readers, writers and jobs. `seamark.spark` is its interface."""

from seamark.connector.spark.archives import install_archive_finders

install_archive_finders()  # a Python worker of Spark imports this package before other modules of Seamark
